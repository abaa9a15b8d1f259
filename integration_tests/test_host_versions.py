"""Hosts that do not run the same, on namespaces of this machine: what is said, and what hosts may have of their own."""

from pathlib import Path

import pytest

from integration_tests.host_jobs import Case, train_each
from integration_tests.output import verdict_lines

OWN = (
    ("NCCL_SOCKET_IFNAME", "eth{}"),
    ("NCCL_IB_HCA", "mlx5_{}"),
    ("NCCL_DEBUG", "INFO"),
    ("NCCL_DEBUG_FILE", "/tmp/nccl.{}"),
    ("NCCL_NET_PLUGIN", "/opt/{}/libnccl-net.so"),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/tmp/dump.{}"),
    ("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor{}"),
    ("TORCHELASTIC_ERROR_FILE", "/tmp/error{}"),
    ("CUDA_VISIBLE_DEVICES", "{}"),
)
"""What each rank or host has of its own, by rank."""
HEALTHY = Case(common=OWN, variables=(("NCCL_IB_DISABLE", "0"), ("NCCL_DEBUG", "TRACE")))
VARIABLE = Case(common=(*OWN, ("NCCL_ALGO", "Tree")), variables=(("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL")))


def test_a_host_that_runs_something_else_is_named(run_hosts):
    """Of three hosts of two ranks."""
    cases = [HEALTHY, VARIABLE, Case(variables=(("NCCL_ALGO", "Ring"),), off=True), Case(plugin="own")]
    results = run_hosts(train_each, cases, hosts=3, per_host=2)
    values = (
        'NCCL_ALGO is "Ring" on node-2, and is "Tree" on the other hosts. '
        'NCCL_PROTO is "LL" on node-2, and is not set on the other hosts.'
    )
    plugin = "node-2 loads the NCCL net plugin libnccl-net-case3-own.so, the other hosts libnccl-net-case3-usual.so."
    assert results[0].value == [{}, {"VersionMismatch": values}, {}, {"VersionMismatch": plugin}]
    assert sum("VersionMismatch:" in line for line in verdict_lines(results[0])) == 2


def test_it_is_the_same_under_a_framework(run_hosts):
    """No adapter has a line for it."""
    odd = Case(common=OWN, variables=(("NCCL_ALGO", "Ring"),))
    results = run_hosts(train_each, [HEALTHY, odd, HEALTHY], "accelerate", hosts=2, per_host=1)
    sentence = 'NCCL_ALGO is not set on node-0, and is "Ring" on node-1.'
    assert results[0].value == [{}, {"VersionMismatch": sentence}, {}]
    assert [line for line in verdict_lines(results[0]) if line.startswith("countoff:")] == [
        f"countoff: VersionMismatch: {sentence}"
    ]


def test_ranks_of_one_host_are_named_by_number(run_ranks):
    results = run_ranks(train_each, 3, [Case(variables=(("NCCL_ALGO", "Ring"),))], env={"LOCAL_WORLD_SIZE": "1"})
    sentence = 'NCCL_ALGO is "Ring" on rank 2, and is not set on the other ranks.'
    assert results[0].value == [{"VersionMismatch": sentence}]


TRAIN = """
import os, socket
if socket.gethostname() == "node-2":
    os.environ["NCCL_ALGO"] = "Ring"
from integration_tests import devices, loops
from integration_tests.digits import share_loader
from countoff.torch import Countoff

devices.join()
model, optimizer = loops.model_and_optimizer()
loader = share_loader(3)
countoff = Countoff(optimizer=optimizer)
for batch in countoff.train(loader):
    loops.train_on(model, optimizer, batch)
"""


@pytest.mark.nightly
def test_another_variable_on_one_host_is_named(run_torchrun_on_hosts):
    """The whole message, as docs/verdicts.md shows it."""
    runs = run_torchrun_on_hosts(TRAIN, hosts=3, per_host=1)
    assert [run.exit_code for run in runs] == [0, 0, 0], runs
    page = (Path(__file__).parents[1] / "docs" / "verdicts.md").read_text()
    shown = page[page.index("countoff: VersionMismatch: NCCL_ALGO") :].partition("```")[0]
    printed = "\n".join(run.output for run in runs)
    assert all(f"[rank 0] {line}" in printed for line in shown.splitlines()), printed
