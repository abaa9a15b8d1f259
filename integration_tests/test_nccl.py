"""Jobs on a GPU for each rank, with NCCL: healthy ones, and ones with ranks that are uneven, killed or never join."""

import random
import re
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from countoff.torch import Countoff
from integration_tests import devices
from integration_tests.digits import own_rank, share_loader
from integration_tests.faults.cases import CANNOT, CASES
from integration_tests.faults.matrix import run_cell
from integration_tests.loops import model_and_optimizer, train_on
from integration_tests.output import assert_named, printed_lines
from integration_tests.soak import KINDS

ADAPTERS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed here"))
    for name in CANNOT
]

pytestmark = [pytest.mark.gpu(nccl=True), pytest.mark.ranks(2, 4, 8)]


def fit_without_and_with(adapter, job):
    """What a job ends with on this rank, its weights included: without countoff, and with it."""
    fit = KINDS[adapter][1]
    return [fit(replace(job, options=None)), fit(job)]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_healthy_job_says_nothing_and_trains_to_the_same_bits(run_ranks, ranks, adapter):
    """Weights are the same on all ranks, without countoff and with it, and no rank prints anything."""
    job = KINDS[adapter][0](random.Random(0), ranks)
    one_order = {"NCCL_NVLS_ENABLE": "0"}  # sums that switches compute have no order that two runs share
    results = run_ranks(fit_without_and_with, ranks, adapter, job, device="cuda", env=one_order, deadline_seconds=240)
    ends = [end for result in results for end in result.value]
    assert all(end == ends[0] for end in ends), ends
    assert [printed_lines(result) for result in results] == [[]] * ranks


@pytest.mark.parametrize("fault", ["F1", "F2", "F5"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_uneven_or_killed_rank_is_named_and_every_process_ends(tmp_path, ranks, adapter, fault):
    """Every rank gives the verdict that is due, leaves it for torchrun, and exits; a killed one is named by the others.

    Composer ends its own epochs at the shortest rank, and reports that; its evaluations are uneven.
    """
    row = run_cell(CASES[fault], adapter, ranks, tmp_path, "cuda")
    assert not row.wrong, f"{'; '.join(row.wrong)}\n{row.output}"


def wait_in_a_kernel():
    """The last rank never joins a sum, for which the others wait in a CUDA kernel."""
    device = devices.join()
    model, optimizer = model_and_optimizer()
    last = own_rank() == dist.get_world_size() - 1
    loader = share_loader(4 - last)
    countoff = Countoff(optimizer=optimizer)
    try:
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            total.item()
        if last:
            for _ in countoff.train(loader):  # it runs Python code, and raises at its next call into countoff
                time.sleep(1)
    except Exception as error:
        print(f"except {type(error).__name__}", flush=True)
        raise
    finally:
        print("finally", flush=True)


def test_ranks_that_wait_in_a_kernel_end_with_the_verdict(run_ranks, ranks):
    """Each raises or exits with 87. The verdict comes before NCCL's watchdog says a word. Who raises runs handlers."""
    results = run_ranks(wait_in_a_kernel, ranks, device="cuda", expect=None, deadline_seconds=120)
    assert_named(results, "UnevenBatches", [ranks - 1])
    for result in results:
        assert result.exit_code in (1, 87), result
        assert "atchdog" not in result.output.partition("countoff: UnevenBatches: ")[0], result
        if result.exit_code == 1:
            assert re.search(r"^except \w+$", result.output, re.MULTILINE), result
            assert re.search(r"^finally$", result.output, re.MULTILINE), result
    assert "except UnevenBatches" in results[-1].output, results[-1]
