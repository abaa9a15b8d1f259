"""One account of a failure: which ranks raised what, in one sentence that every rank prints."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from countoff.torch import Countoff
from integration_tests.digits import own_rank
from integration_tests.harness import RankResult
from integration_tests.lightning_jobs import Classifier, Job, quiet
from integration_tests.loops import even_loader, model_and_optimizer, train_on
from integration_tests.output import whole_message

_MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'missing.npy'"


def fails(kind: str) -> None:
    """A loop in plain PyTorch, in which ranks raise in their third batch."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    countoff = Countoff(model=model, optimizer=optimizer)
    loader = even_loader()
    batches = slow(loader) if kind == "opens_while_others_load" else loader
    for number, batch in enumerate(countoff.train(batches), start=1):
        if number == 3:
            FAILURES[kind]()
        train_on(model, optimizer, batch)


def slow(loader: Any) -> Iterator[Any]:
    """Delivers the third batch later on each rank."""
    for number, batch in enumerate(loader, start=1):
        time.sleep(0.25 * own_rank() * (number == 3))
        yield batch


def opens() -> None:
    open("missing.npy", "rb").close()


def opens_while_others_load() -> None:
    """Not every rank has come to this batch when the first one raises there."""
    opens()


def opens_later() -> None:
    time.sleep(0.25 * own_rank())
    opens()


def opens_its_own() -> None:
    open(f"shard-{own_rank()}.npy", "rb").close()


def opens_on_two() -> None:
    if own_rank() != 1:
        opens()


def opens_on_one() -> None:
    if own_rank() == 1:
        opens()


def averages() -> None:
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.AVG)
    # The gloo of newer versions of torch averages.
    premul_sum: Any = dist._make_nccl_premul_sum  # pyright: ignore[reportPrivateImportUsage]
    dist.all_reduce(torch.ones(1), op=premul_sum(2.0))


def raises_what_others_do_not() -> None:
    if own_rank() == 1:
        raise KeyError("label")
    time.sleep(0.1)
    opens()


FAILURES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        opens,
        opens_while_others_load,
        opens_later,
        opens_its_own,
        opens_on_two,
        opens_on_one,
        averages,
        raises_what_others_do_not,
    )
}


def told(results: list[RankResult]) -> list[str]:
    """The lines of the one message of all ranks, which is also what torchrun and the exception say."""
    lines = whole_message(results).splitlines()
    for result in results:
        assert json.loads(result.error_file)["message"]["message"] == lines[0].replace("countoff: ", "countoff "), (
            result
        )
        assert result.exit_code == 1, results
    return lines


@pytest.mark.parametrize(
    "kind", ["opens", pytest.param("opens_later", marks=pytest.mark.nightly), "opens_while_others_load"]
)
def test_a_bug_on_every_rank_is_blamed_on_none(run_ranks, kind):
    """All ranks raise the same, at one moment or within half a second."""
    head, *lines = told(run_ranks(fails, 3, kind, expect=None, finalise=True))
    assert head.startswith(f"countoff: LostRank: all 3 ranks raised {_MISSING} at test_failures.py:"), head
    assert head.endswith(" (in batch 3 of train epoch 0)."), head
    assert not any("lost" in line for line in lines if "explain" not in line), lines


def test_what_ranks_raised_at_one_line_is_told_once(run_ranks, tmp_path):
    """Their messages differ, as where each rank opens a file of its own. A scheduler is told the same."""
    file = tmp_path / "verdict.json"
    env = {"COUNTOFF_VERDICT_FILE": str(file)}
    head, *lines = told(run_ranks(fails, 3, "opens_its_own", env=env, expect=None, finalise=True))
    written = json.loads(file.read_text())
    assert (f"countoff: LostRank: {written['sentence']}", written["ranks"]) == (head, [])
    missing = "[Errno 2] No such file or directory: 'shard-…'"
    assert f" all 3 ranks raised FileNotFoundError: {missing} at test_failures.py:" in head, head
    assert not any("lost" in line for line in lines if "explain" not in line), lines


def test_a_bug_on_some_ranks_names_them(run_ranks):
    head, who, *_ = told(run_ranks(fails, 3, "opens_on_two", expect=None, finalise=True))
    assert head.startswith(f"countoff: LostRank: ranks 0, 2 of 3 ranks raised {_MISSING} at test_failures.py:"), head
    assert who == "  lost: ranks 0, 2 of 3 ranks"


def test_one_rank_that_raises_is_named_alone(run_ranks):
    """The others wait for it in a collective, which then fails: that is no failure of theirs."""
    head, who, *lines = told(run_ranks(fails, 3, "opens_on_one", expect=None, finalise=True))
    assert head.startswith(f"countoff: LostRank: rank 1 raised {_MISSING} at test_failures.py:"), head
    assert who == "  lost: rank 1 of 3 ranks"
    assert "  do:  read that rank's own output first: no other rank has told of an error of its own." in lines


def test_a_mistake_in_a_collective_is_the_programs_own(run_ranks):
    """The message has the word gloo, and no rank has lost another one."""
    head, *_ = told(run_ranks(fails, 3, "averages", expect=None, finalise=True))
    assert head.startswith("countoff: LostRank: all 3 ranks raised "), head
    assert "Cannot use ReduceOp." in head, head
    assert " with Gloo at test_failures.py:" in head, head


def test_different_failures_are_told_the_first_one_first(run_ranks):
    head, *_ = told(run_ranks(fails, 3, "raises_what_others_do_not", expect=None, finalise=True))
    assert head.startswith("countoff: LostRank: rank 1 raised KeyError: 'label' at test_failures.py:"), head
    assert f"; ranks 0, 2 raised {_MISSING} at test_failures.py:" in head, head


class Unlabelled(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        images, labels = batch
        return super().training_step({"images": images, "labels": labels}["label"], batch_idx)


def fits() -> None:
    quiet()
    job = Job(train=(4, 4, 4))
    job.make_trainer().fit(Unlabelled(), job.train_loader())


def test_a_training_step_that_fails_on_every_rank_is_told_once(run_ranks):
    head, *lines = told(run_ranks(fits, 3, expect=None, finalise=True))
    assert head.startswith("countoff: LostRank: all 3 ranks raised KeyError: 'label' at test_failures.py:"), head
    assert not any("lost" in line for line in lines if "explain" not in line), lines
