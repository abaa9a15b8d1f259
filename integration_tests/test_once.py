"""Each sample once in an epoch, and one order across a resume: what real loaders issue on real ranks."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data.distributed import DistributedSampler

from countoff.report.facts.reads import Measured, measured_of
from countoff.report.reader import read
from integration_tests import once_jobs
from integration_tests.once_jobs import Epochs, Resume
from integration_tests.once_resumes import Case, main, wrong_in
from integration_tests.output import verdict_lines

FOUND = re.compile(
    r"in (train epoch \d+), (\d+) of (\d+) samples were read by no rank "
    r"\(rows [\d, …]+\), and (\d+) more than once \(rows [\d, …]+, by ranks 0, 1(?:; (\d) as planned)?\)"
    r"(?:: rank (\d) kept the order of the train epoch before, and rank \d did not)?\."
)
PART = re.compile(
    r"in the part of train epoch 1 that this run has read, (\d+) of (\d+) samples were read more than once "
    r"\(rows [\d, …]+, by ranks 0, 1(?:; 1 of all as planned)?\)"
    r"(?:: rank (?:0|1) kept the order of the train epoch before, and rank \d did not)?\."
)
HEALTHY = {
    "every rank sets the epoch": Epochs(),
    "nobody does, and all have one order": Epochs(sets_epoch=()),
    "with workers": Epochs(workers=2),
    "with padding": Epochs(rows=81),
    "more rows than a record has bits for": Epochs(rows=4501, batch_size=64),
    "a dataset of one's own": Epochs(rows=81, own=True),
    "a break on every rank": Epochs(stops=3),
    "a loader that saves its state": Epochs(stateful=True),
    "the same, with workers": Epochs(rows=81, stateful=True, workers=2),
    "one that is restored": Epochs(rows=81, stateful=True, restored=2),
    "one that is restored, with workers": Epochs(stateful=True, restored=3, workers=2),
    "fewer rows than ranks": Epochs(rows=1),
}
FAULTY = {
    "rank 0 alone sets the epoch": Epochs(sets_epoch=(0,)),
    "with workers": Epochs(sets_epoch=(1,), workers=2),
    "with padding": Epochs(rows=81, sets_epoch=(0,)),
    "more rows than a record has bits for": Epochs(rows=4502, batch_size=64, sets_epoch=(0,)),
    "the same with padding": Epochs(rows=4501, batch_size=64, sets_epoch=(0,)),
    "in the last epoch": Epochs(sets_epoch=(0,), epochs=2),
    "a loader that saves its state": Epochs(sets_epoch=(1,), stateful=True),
    "one that is restored": Epochs(rows=161, sets_epoch=(0,), stateful=True, restored=2),
    "one that is restored, with workers": Epochs(rows=160, sets_epoch=(1,), stateful=True, restored=3, workers=2),
    "a break on every rank": Epochs(sets_epoch=(0,), stops=3),
    "a break, with workers": Epochs(sets_epoch=(0,), stops=4, workers=2),
    "a dataset of one's own": Epochs(sets_epoch=(0,), own=True),
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_orders_that_differ_by_rank_are_found_at_the_end_of_their_epoch(run_ranks, tmp_path, workers):
    """The first such epoch is named once, with how many rows were read twice and never; right epochs are silent.

    The trace has the right ones that were read as a whole.
    """
    healthy, faulty = (
        {name: run for name, run in runs.items() if run.workers == workers} for runs in (HEALTHY, FAULTY)
    )
    runs = [*healthy.values(), *faulty.values()]
    bare = [replace(each, counted=False) for each in runs]
    results = run_ranks(once_jobs.plain, 2, [*runs, *bare], str(tmp_path), deadline_seconds=240)
    said = [each["said"] for each in results[0].value]
    assert said[: len(healthy)] == [[]] * len(healthy)
    for (name, run), sentences in zip(faulty.items(), said[len(healthy) : len(runs)], strict=True):
        assert len(sentences) == 1, name
        if run.stops or run.stateful:
            found = PART.fullmatch(sentences[0])
            assert found is not None, sentences
            assert tuple(map(int, found.groups())) == (_counted(run)[1], run.rows), name
            continue
        found = FOUND.fullmatch(sentences[0])
        assert found is not None, sentences
        epoch, unread, rows, twice, planned, kept = found.groups()
        assert kept == str(1 - run.sets_epoch[0]), sentences
        assert (epoch, int(rows), int(planned or 0)) == ("train epoch 1", run.rows, run.rows % 2), sentences
        assert (int(unread), int(twice)) == _counted(run), sentences
    weights = [each["weights"] for each in results[0].value]
    assert weights[: len(runs)] == weights[len(runs) :]
    assert not [line for line in verdict_lines(results[1]) if "NotReadOnce" in line]
    measured = [measured_of(read([str(tmp_path / str(number))]).runs[0]) for number in range(len(runs))]
    assert measured == [_whole(run, right=number < len(healthy)) for number, run in enumerate(runs)]


def _whole(run: Epochs, *, right: bool) -> list[Measured]:
    """The epochs that are measured: of wrong ones, only the first."""
    if run.stops or run.stateful:
        return []
    names = tuple(f"train epoch {epoch}" for epoch in range(run.epochs if right else 1))
    return [Measured(run.rows, run.rows % 2, 0, names, run.epochs)]


def _counted(run: Epochs) -> tuple[int, int]:
    """How many rows no rank reads in epoch 1, and how many are read more than once."""
    rows: Any = range(run.rows)
    samplers = [DistributedSampler(rows, 2, rank) for rank in range(2)]
    for rank in run.sets_epoch:
        samplers[rank].set_epoch(1)
    part = slice(run.restored * run.batch_size, run.stops * run.batch_size or None)
    read = Counter(itertools.chain(*(list(each)[part] for each in samplers)))
    return run.rows - len(read), sum(times > 1 for times in read.values())


ANOTHER_ORDER = (
    "ResumeMismatch: train epoch 1 goes on after 4 batches in another order than it had before the checkpoint: the "
    "sampler issues other rows there, and the dataset has as many rows as before."
)
RESUMES = {
    "right": (Resume(), []),
    "right, with workers": (Resume(workers=2), []),
    "the sampler's epoch is not set": (Resume(sets_epoch=False), [ANOTHER_ORDER]),
    "another order by a random state": (Resume(seedable=False), [ANOTHER_ORDER]),
    "another seed, with workers": (Resume(seedable=True, seed=5, workers=2), [ANOTHER_ORDER]),
    "right, the loop passes over batches": (Resume(passes_over=True), []),
    "the same, with workers": (Resume(passes_over=True, workers=2), []),
    "the same, and another order by a random state": (Resume(passes_over=True, seedable=False), [ANOTHER_ORDER]),
    "batches are skipped in each epoch": (
        Resume(skips_again=True),
        [
            "NotReadOnce: train epoch 2 has skipped its first 4 batches on each rank, like the epoch in which the "
            "run resumed.",
        ],
    ),
}


def test_a_resume_in_another_order_is_found_at_its_first_batch(run_ranks, tmp_path):
    """What Accelerate's sampler issues behind the checkpoint is compared with what it had fetched ahead before it."""
    runs = [run for run, _ in RESUMES.values()]
    run_ranks(once_jobs.accelerated, 2, runs, str(tmp_path), False, deadline_seconds=120)
    results = run_ranks(once_jobs.accelerated, 2, runs, str(tmp_path), True, deadline_seconds=120)
    assert dict(zip(RESUMES, results[0].value, strict=True)) == {name: due for name, (_, due) in RESUMES.items()}


LIGHTNING = {
    once_jobs.LightningFit(workers=workers, wrong=wrong, reloads=reloads): epoch
    for workers in (0, 2)
    for reloads in (False, True)
    for wrong, epoch in (("", None), ("later", 1), ("first", 0))
    if (wrong, workers) != ("first", 0)  # the sampler is asked after Lightning has set its epoch
}
"""Fits, and the first epoch that is not read once."""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_lightning(run_ranks, workers):
    """A sampler of the module's own whose epoch differs by rank is found, in the first epoch of a fit too."""
    fits = {run: epoch for run, epoch in LIGHTNING.items() if run.workers == workers}
    results = run_ranks(once_jobs.lightning_fits, 2, list(fits), deadline_seconds=180)[0].value
    for (run, epoch), said in zip(fits.items(), results, strict=True):
        assert len(said) == (epoch is not None), (run, said)
        if epoch is not None:
            assert FOUND.fullmatch(said[0].removeprefix("NotReadOnce: ")), (run, said)
            assert f"train epoch {epoch}" in said[0], (run, said)


def test_workers_that_read_the_same_are_found(run_ranks):
    """A divided stream is right, and so is one that is read by no or one worker; else each yields all samples."""
    found = "DuplicateData: the {} workers of rank {}'s loader read the same samples in train epoch 0: its batches {}"
    cases = {
        (True, False, 2): 0,
        (False, False, 1): 0,
        (False, False, 0): 0,
        (False, False, 2): 2,
        (False, False, 3): 3,
    }
    said = run_ranks(once_jobs.streams, 2, list(cases), deadline_seconds=120)[0].value
    for sentences, workers in zip(said, cases.values(), strict=True):
        which = {2: "1 to 2 are equal, and so are 3 to 4.", 3: "1 to 3 are equal, and so are 4 to 6."}.get(workers, "")
        due = [found.format(workers, rank, which) for rank in (0, 1)]
        assert (len(sentences), set(sentences) <= set(due)) == (workers > 0, True), sentences


def test_a_resume_is_judged_by_what_was_read():
    """Of a right one, nothing may be said; of a wrong one, something with the right numbers, if that is promised."""
    right, wrong = Case.of(0), next(case for case in map(Case.of, range(1, 99, 2)) if case.fault == "another seed")
    once = "NotReadOnce: in train epoch 1, {} of 9 samples were read by no rank (…), and 2 more than once (…)."
    read = [{1: [0, 1, 2, 3]}, {1: [1, 2, 4]}]
    wrong = replace(wrong, rows=9)
    assert wrong_in(right, 1, [], read) == wrong_in(wrong, wrong.wrong, [once.format(4)], read) == ""
    assert wrong_in(right, 1, ["SameOrder: …"], read)
    assert wrong_in(wrong, wrong.wrong, [], read)
    assert wrong_in(wrong, wrong.wrong, [once.format(5)], read)


@pytest.mark.nightly
def test_seeded_resumes(capsys):
    code = main([])
    assert code == 0, capsys.readouterr().out
