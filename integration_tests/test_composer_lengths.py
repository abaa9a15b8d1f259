"""Composer, a loader whose length is that of all ranks: reported before the first batch, and set right on request."""

from dataclasses import replace
from typing import Any

import pytest

from integration_tests.composer_jobs import Job, fit_and_record_all, needs_composer, said
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.output import verdict_lines

pytestmark = needs_composer

SEEN = ("console", "bars", "rates", "weights")


def seen(value: dict[str, Any]) -> dict[str, Any]:
    """What the user sees of a run, and what it came to."""
    return {name: value[name] for name in SEEN}


@pytest.mark.ranks(2, nightly=(4,))
@pytest.mark.usefixtures("one_streaming_job")
def test_fixed_totals_are_those_of_the_right_loader(run_ranks, ranks):
    """A wrong length is reported before the first batch; `totals='fix'` gives what the right loader gives."""
    sampler, shards = Job(even=64, mistaken=True), Job(streams=[64], mistaken=True)
    jobs = [
        replace(sampler, mistaken=False),
        replace(sampler, options={"totals": "fix"}),
        replace(shards, mistaken=False),
        replace(shards, options={"totals": "fix"}),
        sampler,
        replace(sampler, options=None),
        replace(sampler, options={"totals": "off"}),
    ]
    results = run_ranks(fit_and_record_all, ranks, jobs, deadline_seconds=120)
    for result in results:
        right, fixed, right_shards, fixed_shards, shown, plain, off = map(seen, result.value)
        assert fixed == right
        assert fixed_shards == right_shards
        assert (shown["rates"], shown["weights"]) == (plain["rates"], plain["weights"])
        assert (shown["console"], off) == (right["console"], plain)
    true, words = 16 // ranks, said(results[0])
    assert results[0].value[1]["console"][-1] == f"[epoch=2][batch={true}/{true}]"
    assert str(true) in results[0].value[1]["bars"]
    assert max(results[0].value[1]["rates"]) == 0.1
    assert results[0].value[4]["console"][-1] == f"[epoch=2][batch={true}/{true}]"
    assert results[0].value[5]["console"][-1] == f"[epoch=2][batch={true}/16]"
    assert str(true) in results[0].value[4]["bars"]
    for text in (words[1], words[3], words[4]):
        assert f"countoff: WrongLength: Composer counts on 16 batches per epoch and rank; there are {true}." in text
        assert f"The console shows batch=i/16, the epoch ends at {true}; " in text
        assert f"a warm-up of '1ep' takes {ranks} epochs" in text
        assert f"a decay over the 2 epochs is laid out for 32 batches and ends at {2 * true} of them" in text
        assert f"16 is the size of the dataset over all {ranks} data ranks (`size`), not one rank's `length`" in text
    assert f"countoff has set the length to {true}, before the first batch" in words[1]
    assert "countoff has set" not in words[4]
    assert [words[0], words[2], words[5]] == ["", "", ""]
    assert words[6] == words[4]
    assert [line for result in results[1:] for line in verdict_lines(result)] == []


@pytest.mark.usefixtures("one_streaming_job")
def test_the_first_epoch_shows_the_length_of_an_iterable(run_ranks):
    """Nothing proves it before that; the remedy that is named is right from the first batch."""
    wrong = Job(train=[8, 8], reported=[16, 16])
    jobs = [
        wrong,
        replace(wrong, trainer={"train_subset_num_batches": 8}),
        Job(train=[8, 8], reported=[8, 8]),
        Job(streams=[70], options={"TICK_BATCHES": 3}),
    ]
    results = run_ranks(fit_and_record_all, 2, jobs, deadline_seconds=120)
    first, remedied, right, shards = results[0].value
    words = said(results[0])
    assert first["console"][6] == "[epoch=1][batch=7/16]"
    assert first["console"][-1] == "[epoch=2][batch=8/8]"
    assert words[0].count("WrongLength: Composer counts on 16 batches per epoch and rank; there are 8.") == 1
    assert "countoff has set" not in words[0]
    assert "Trainer(train_subset_num_batches=N)" in words[0]
    assert first["logged"]["countoff/dataloader_len"] == 8
    assert seen(remedied) == seen(right)
    assert words[1:] == ["", "", ""]
    expected = {
        "countoff/dataloader_len": 9,
        "countoff/steps_per_epoch": 9,
        "countoff/total_steps": 18,
        "countoff/global_train_batch_size": 8,
        "countoff/samples_repeated": 0,
        "countoff/samples_dropped": 0,
    }
    assert shards["logged"] == expected


def test_totals_of_an_iterable_are_fixed_after_an_epoch(run_ranks):
    """The length of a plain iterable is set from the second epoch on, and only where all ranks agree."""
    fixed = Job(train=[8, 8], reported=[16, 16], options={"totals": "fix"}, trainer={"max_duration": "3ep"})
    jobs = [
        fixed,
        replace(fixed, reported=[8, 8]),
        replace(fixed, train=[9, 8]),  # rank 0 must not go by what it alone has seen
        replace(fixed, train=[7, 7]),  # not the length of all ranks, so the next epoch may be another
    ]
    results = run_ranks(fit_and_record_all, 2, jobs, deadline_seconds=120)
    first, right, uneven, other = results[0].value
    words = said(results[0])
    assert first["console"][7] == "[epoch=1][batch=8/16]"
    assert first["console"][8:] == right["console"][8:]
    assert first["console"][-1] == "[epoch=3][batch=8/8]"
    assert first["rates"][9:] == right["rates"][9:]  # a learning rate is set when the batch before it ends
    assert first["rates"][8] != right["rates"][8]
    assert first["logged"]["countoff/total_steps"] == 24
    assert uneven["console"][8:] == right["console"][8:]
    assert other["console"][-1] == "[epoch=3][batch=7/7]"
    assert "countoff has set the length to 8, from the next epoch on." in words[0]
    assert "countoff has set the length to 8, from the next epoch on." in words[2]
    assert "train epoch 0 ended on every rank after 8 batches, where rank 1 ran out of data" in words[2]
    assert "countoff has set" not in words[1] + words[3]
    assert "WrongLength: Composer counts on 16 batches per epoch and rank; there are 7." in words[3]
    for mine, theirs in zip(results[0].value, results[1].value, strict=True):
        assert mine["rates"] == theirs["rates"]
        assert mine["weights"] == theirs["weights"]


def test_the_console_has_one_line_of_the_totals(run_ranks):
    """It comes with the first line of the fit, and none comes with an evaluation; loggers get each number once."""
    jobs = [Job(even=66, evals=[12, 12]), Job(even=66, evals=[12, 12], options={"totals": "off"})]
    results = run_ranks(fit_and_record_all, 2, jobs, deadline_seconds=120)
    shown, off = results[0].value
    assert shown["told"] == [
        'Train countoff/totals: "An epoch has 9 batches on each rank and 9 optimizer steps; the run has 18 steps. '
        'A step has 8 samples over all ranks. In an epoch, 0 samples are read again, and 0 samples are not read."'
    ]
    assert (off["told"], off["logged"]) == ([], {})
    assert seen(off) == seen(shown)
    assert shown["console"][-1] == "[Eval batch=12/12] Eval on digits0 data"


def go_on(job: Job) -> list[int]:
    """Composer's length at the end of each of several fits of one Trainer, with a restart in the middle of an epoch."""
    trainer, lengths = job.make_trainer(max_duration="1ep"), []
    for duration in (None, "1ep", "3ba", "1ep"):
        trainer.fit() if duration is None else trainer.fit(duration=duration)
        lengths.append(int(trainer.state.dataloader_len))
    trainer.close()
    return lengths


def test_a_length_that_is_set_stays_set_in_later_fits(run_ranks):
    """A length that countoff has set holds in later fits of the Trainer, after one warning."""
    job = Job(train=[8, 8], reported=[16, 16], evals=[2, 2], options={"totals": "fix"})
    results = run_ranks(go_on, 2, job, deadline_seconds=120)
    assert [result.value for result in results] == [[8, 8, 8, 8]] * 2
    assert sum("countoff: WrongLength: " in line for line in verdict_lines(results[0])) == 1


def lengths_in_evaluation(options: dict[str, Any]) -> list[int]:
    """Composer's length of an evaluator over a streaming data set with the mistake, in the fit and outside of it.

    Last comes an evaluation of one batch, which is as long as the user asks for.
    """
    from composer.core import Callback, Evaluator

    from integration_tests.composer_parts import start, streaming_loader

    lengths = []

    class Record(Callback):
        def eval_batch_start(self, state: Any, logger: Any) -> None:
            lengths.append(int(state.dataloader_len))

    start()
    evaluator = Evaluator(label="shards", dataloader=streaming_loader([32], True, 0, {}))
    trainer = Job(even=16, options=options).make_trainer(eval_dataloader=evaluator, callbacks=[Record()])
    trainer.fit()
    trainer.eval()
    trainer.eval(subset_num_batches=1)
    trainer.close()
    return lengths


@pytest.mark.usefixtures("one_streaming_job")
def test_wrong_lengths_of_evaluators_are_reported_and_fixed(run_ranks):
    """The wrong length of an evaluator is reported, and set on request, inside a fit and outside."""
    lengths = {"show": 8, "fix": 4}
    jobs = {totals: (lengths_in_evaluation, {"totals": totals}) for totals in lengths}
    results = run_ranks(in_turn, 2, jobs, deadline_seconds=120)
    for result in results:
        assert result.value == {totals: [*[length] * 4 * 3, 1] for totals, length in lengths.items()}
    for totals, lines in said_in_turn(results[0]).items():
        warnings = [line for line in lines if "countoff: WrongLength: " in line]
        assert len(warnings) == 2, totals  # in the fit, and outside of it
        told = "evaluator 'shards' counts on 8 batches per epoch and rank; there are 4."
        assert all(told in line for line in warnings), totals


def fit_unsized(options: dict[str, Any]) -> Any:
    """An epoch of a loader that knows no length: only AFTER_LOAD comes before Composer asks for it."""
    from integration_tests.composer_parts import Digits, StreamingDataLoader, start, streaming_loader

    class Unsized(Digits):
        def __len__(self) -> int:
            raise TypeError("no length")

    start()
    streaming_loader([64], False, 0, {})
    loader = StreamingDataLoader(Unsized(local="stream0", batch_size=4), batch_size=4)
    trainer = Job(options=options).make_trainer(train_dataloader=loader, max_duration="1ep")
    try:
        trainer.fit()
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return int(trainer.state.timestamp.batch)


@pytest.mark.usefixtures("one_streaming_job")
def test_an_unsized_loader_of_proven_length_trains_by_epochs(run_ranks):
    """`totals='fix'` lets Composer train an unsized streaming loader by epochs."""
    jobs = {"fixed": (fit_unsized, {"totals": "fix"}), "as it is": (fit_unsized, {})}
    for result in run_ranks(in_turn, 2, jobs, deadline_seconds=120):
        assert result.value["fixed"] == 8
        assert "max_duration cannot be specified in epochs" in result.value["as it is"]
