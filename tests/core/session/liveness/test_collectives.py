"""What ranks have issued, from dumps of flight recorders that stand in for torch's, beside a real group of gloo."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from countoff.core.session.liveness import collectives as module
from countoff.core.session.liveness.collectives import issued, numbers, unfinished

pytestmark = pytest.mark.usefixtures("real_group")


def entry(name: str, *, is_p2p: bool = False) -> dict[str, Any]:
    return {"process_group": ["0", "default_pg"], "profiling_name": name, "input_sizes": [[650]], "is_p2p": is_p2p}


def record(monkeypatch: pytest.MonkeyPatch, **dumps: Any) -> None:
    """Torch's recorders hold that, by the name of the function that dumps each."""

    def dump(held: Any) -> Any:
        return lambda includeCollectives: json.dumps(held).encode()  # noqa: N803  (torch's name)

    monkeypatch.setattr(module, "dumping", SimpleNamespace(**{name: dump(held) for name, held in dumps.items()}))


def test_the_last_collective_is_that_of_nccl_where_a_group_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = [entry("gloo:barrier")], [entry("nccl:broadcast"), entry("nccl:all_reduce")]
    record(monkeypatch, _dump_fr_trace_json={"entries": gloo}, _dump_nccl_trace_json={"entries": nccl})
    assert issued() == {"0": (0, "all_reduce of [650]")}


def test_what_is_sent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that receives it has another name for it, and both are healthy."""
    entries = [entry("nccl:all_reduce"), entry("nccl:send 0->1", is_p2p=True)]
    record(monkeypatch, _dump_nccl_trace_json={"entries": entries})
    assert issued() == {"0": (0, "all_reduce of [650]")}


@pytest.mark.parametrize("held", [{"entries": [{}]}, {}, []])
def test_a_dump_of_another_form_leaves_the_numbers(monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    record(monkeypatch, _dump_nccl_trace_json=held)
    assert issued() == {"0": (0, "")}
    assert unfinished() == frozenset()


def status(completed: int, queued: int) -> dict[str, str]:
    return {"last_completed_collective": str(completed), "last_enqueued_collective": str(queued)}


def test_what_nccl_has_not_completed_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not gloo's, which completes on the CPU, and not where nobody looks at what is completed."""
    groups = {"0": status(9, 9), "1": status(3, 5), "2": status(-1, 4)}
    record(monkeypatch, _dump_fr_trace_json={"pg_status": {"0": status(1, 2)}})
    assert unfinished() == frozenset()
    record(monkeypatch, _dump_nccl_trace_json={"pg_status": groups})
    assert unfinished() == {("1", 3, 5)}


def test_numbers_are_those_of_the_groups_that_there_are_now() -> None:
    group = dist.new_group([0])
    name = next(name for each, name in module.process_groups().items() if each is group)
    before = numbers()
    dist.barrier(group=group)
    assert (before[name], numbers()[name]) == (0, 1)
    dist.destroy_process_group(group)
    assert name not in numbers()
