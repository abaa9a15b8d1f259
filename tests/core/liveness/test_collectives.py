"""What ranks have issued, from dumps of flight recorders that stand in for torch's, beside a real group of gloo."""

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from countoff.core.checks.collectives import Recorded
from countoff.core.liveness import collectives as module
from countoff.core.liveness.collectives import GroupCounts, issued, unfinished

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


def test_a_process_group_is_read_once_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer than it is there. A group of one rank is not compared, so this one has another rank too."""
    counts = GroupCounts((0, 1))
    group = dist.new_group([0])
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda of: [0, 1] if of is group else [0])
    assert counts.read()() == {}
    counts.find()
    before = counts.read()
    dist.barrier(group=group)
    assert [[each.number for each in read().values()] for read in (before, counts.read())] == [[0], [1]]
    dist.destroy_process_group(group)
    counts.find()
    assert counts.read()() == {}


def numbered(name: str, number: int, *, group: str = "0", is_p2p: bool = False) -> dict[str, Any]:
    """The number of messages between ranks, 10 here, is a part of the first number alone."""
    frames = [{"filename": "/x/torch/c10d.py", "line": 1}, {"filename": "/home/me/train.py", "line": number}]
    said = {**entry(name, is_p2p=is_p2p), "process_group": (group, ""), "frames": frames}
    return {**said, "op_id": number, "collective_seq_id": number - 10}


def recorded_since(monkeypatch: pytest.MonkeyPatch, begin: int, entries: Any) -> Recorded | None:
    """What is read where torch's recorder holds that; without a second rank, the group's key is empty."""
    held = pickle.dumps({"entries": entries})
    monkeypatch.setattr(module, "dumping", SimpleNamespace(_dump_fr_trace=lambda: held))
    counts = GroupCounts((0,))
    counts()
    return counts.recorded("", begin)


def test_recorded_are_collectives_of_the_group_with_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        numbered("gloo:barrier", 63),
        numbered("gloo:all_reduce", 64),
        numbered("gloo:send", 65, is_p2p=True),
        numbered("gloo:broadcast", 66, group="1"),
        numbered("gloo:barrier", 67),
    ]
    names = ("all_reduce of [650] at train.py:64", "barrier at train.py:67")
    assert recorded_since(monkeypatch, 63, entries) == Recorded(54, names)


def test_nothing_is_read_of_a_recorder_that_has_dropped_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [numbered("gloo:all_reduce", number) for number in (65, 66)]
    assert recorded_since(monkeypatch, 63, entries) is None
    assert recorded_since(monkeypatch, 66, entries) is None
    assert recorded_since(monkeypatch, 65, entries) is not None
    assert recorded_since(monkeypatch, 65, [{}]) is None
    assert recorded_since(monkeypatch, 65, None) is None


def test_nothing_is_read_where_torch_has_no_such_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dumping", SimpleNamespace())
    counts = GroupCounts((0,))
    counts()
    assert counts.recorded("", 0) is None
