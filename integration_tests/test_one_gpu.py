"""What one GPU shows: nothing of countoff waits for it, its batches are compared, and ranks can share it.

The jobs also run on CPUs, so that they are known to work where there is no GPU: under the watch at each merge, the
others nightly.
"""

import importlib.util

import pytest

from integration_tests import gpu_jobs, loops, weight_jobs
from integration_tests.composer_jobs import needs_composer
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.output import assert_named, verdict_lines
from integration_tests.sync_watch import watched

SAMPLES = 48


NEEDS = {
    "composer": [needs_composer],
    **{
        name: [pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")]
        for name in ("accelerate", "transformers")
    },
}
DEVICES = [pytest.param("cpu", marks=pytest.mark.nightly), pytest.param("shared", marks=pytest.mark.gpu)]
ADAPTERS = [pytest.param(name, marks=NEEDS.get(name, [])) for name in gpu_jobs.ADAPTERS]


def assert_silent(results):
    assert [line for result in results for line in verdict_lines(result)] == [], "\n".join(map(str, results))


@pytest.mark.gpu(nccl=True)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_no_adapter_waits_for_the_gpu(run_ranks, ranks, adapter):
    """Under NCCL, no code of countoff on the training thread waits for the GPU, and a healthy job prints nothing."""
    results = run_ranks(watched, ranks, gpu_jobs.ADAPTERS[adapter], SAMPLES, device="cuda")
    assert_silent(results)
    assert all(result.value[1] > SAMPLES // 8 for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("loop", ["plain", "even"])
def test_no_plain_loop_waits_for_a_shared_gpu(run_ranks, loop):
    """Two ranks on one GPU: here fingerprints are taken and learning rates compared, which one rank alone does not."""
    results = run_ranks(watched, 2, gpu_jobs.ADAPTERS[loop], SAMPLES, device="shared")
    assert_silent(results)
    assert all(result.value[1] > SAMPLES // 8 for result in results)


@pytest.mark.parametrize("device", DEVICES)
def test_fingerprints_are_taken_under_the_watch(run_ranks, device):
    """One that waited for the GPU would raise under the watch, and the batch would have none: nothing were found."""
    results = run_ranks(watched, 2, gpu_jobs.plain, SAMPLES, True, device=device)
    assert results[0].value[0]["warned"] == ["DuplicateData"], results


@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_compared_under_the_watch(run_ranks, device):
    """A hash that waited for the GPU would raise under the watch; a changed weight is named all the same."""
    training = weight_jobs.Training(changed="0.weight", options={"weights_every": 1})
    results = run_ranks(watched, 2, weight_jobs.train, training, device=device)
    assert list(results[0].value[0]["warned"]) == ["WeightsDiffer"], results


@pytest.mark.gpu
def test_a_weight_on_the_gpu_has_the_hash_of_the_cpu(run_ranks):
    """Whatever its type and strides, and without waiting for the GPU."""
    (result,) = run_ranks(gpu_jobs.weight_hashes, 1, device="cuda")
    assert len(result.value) > 8
    assert all(one == two for one, two in result.value)


def test_the_watch_changes_no_job(run_ranks):
    """The same jobs, watched on CPUs: they print nothing, and countoff's code is seen to run for every batch."""
    here = [name for name in gpu_jobs.ADAPTERS if name not in NEEDS or importlib.util.find_spec(name)]
    jobs = {name: (watched, gpu_jobs.ADAPTERS[name], SAMPLES) for name in here}
    for result in run_ranks(in_turn, 2, jobs, deadline_seconds=180):
        assert said_in_turn(result) == {name: [] for name in here}, result
        assert min(entered for _, entered in result.value.values()) > SAMPLES // 8, result.value


@pytest.mark.gpu
def test_code_of_countoff_that_reads_a_tensor_is_found(run_ranks):
    """The watch can fail: it finds what waits for the GPU in code of countoff, and allows it in any other."""
    (result,) = run_ranks(gpu_jobs.reads_tensors, 1, device="cuda")
    for expression, (own, other) in result.value.items():
        assert "called a synchronizing CUDA operation" in own, expression
        assert other == "", expression


@pytest.mark.gpu
def test_a_batch_on_the_gpu_has_the_fingerprint_of_the_cpu(run_ranks):
    """Whatever its strides and types, also if training changes it at once, and without waiting for the GPU."""
    (result,) = run_ranks(gpu_jobs.fingerprints, 1, device="cuda")
    assert len(result.value) > 8
    for name, (expected, found) in result.value.items():
        assert expected is not None, name
        assert found == expected, name


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_data_on_the_gpu_is_found(run_ranks, ranks, device):
    """Ranks whose loaders hand out the same batches on the GPU are named, though each batch is changed in place."""
    results = run_ranks(gpu_jobs.plain, ranks, SAMPLES, True, device=device)
    assert results[0].value["warned"] == ["DuplicateData"], results  # another rank may leave before it is told
    assert "read identical data in train epoch 0: their batches 1 to 2 are equal" in results[0].output


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_read_shares_print_nothing(run_ranks, ranks, device):
    """Ranks that share a GPU, with gloo over its tensors, print nothing, and end with the same weights."""
    results = run_ranks(gpu_jobs.plain, ranks, SAMPLES, device=device)
    assert_silent(results)
    assert len({result.value["weights"] for result in results}) == 1


@pytest.mark.gpu
@pytest.mark.ranks(2, 4)
def test_healthy_ranks_that_share_a_gpu_train_to_the_same_bits(run_ranks, ranks):
    """The weights are those of the same loop without countoff, on every rank."""
    results = run_ranks(loops.healthy_without_and_with, ranks, device="shared")
    assert_silent(results)
    for result in results:
        plain, counted = result.value
        assert counted["weights"] == plain["weights"] == results[0].value[0]["weights"]


@pytest.mark.gpu
@pytest.mark.ranks(2, 4)
def test_a_short_rank_on_a_shared_gpu_is_named(run_ranks, ranks):
    """Every rank ends with the verdict that names the short rank."""
    results = run_ranks(loops.uneven, ranks, [5] * (ranks - 1) + [4], device="shared", expect=None)
    assert_named(results, "UnevenBatches", [ranks - 1], f"rank {ranks - 1} ran out of data after 4 batches")


@pytest.mark.gpu
def test_the_communicators_of_one_rank_are_aborted(run_ranks):
    """A collective after that raises, and the process lives. The flight recorder knows what is not completed."""
    recorder = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}
    (result,) = run_ranks(gpu_jobs.abort_of_one_rank, 1, device="cuda", env=recorder)
    assert result.value == {"before": False, "behind": True, "aborted": True}
