"""The true totals in Lightning's bars and loggers, and that nothing else is changed by them."""

from functools import partial
from typing import Any

import yaml

from integration_tests.lightning_totals_jobs import Case, TooLong, all_fitted, logged_by, stream, two_loaders, whole
from integration_tests.output import verdict_lines

SHOW, OFF = {"totals": "show"}, {"totals": "off"}
BARS = {
    "stream": Case(partial(stream, 8), [partial(stream, 3), partial(stream, 2)], tests=1),
    "rich": Case(partial(stream, 8), [partial(stream, 3)], bar="rich"),
    "older package": Case(partial(stream, 8), [partial(stream, 3)], package="pytorch_lightning"),
    "older package, rich": Case(partial(stream, 8), package="pytorch_lightning", bar="rich"),
    "wrong": Case(partial(stream, 8, reported=16), [partial(stream, 2, reported=4)], {"val_check_interval": 4}),
    "proven": Case(partial(whole, 64, TooLong), [partial(whole, 16, TooLong)], {"val_check_interval": 4}),
    "proven, rich": Case(partial(whole, 64, TooLong), bar="rich"),
    "right": Case(partial(whole, 64), [partial(whole, 16)]),
    "varies": Case(partial(stream, 8, 6, 8, 8), [partial(stream, 3, 2, 2)], {"max_epochs": 4}),
    "longer": Case(partial(stream, 5, 8, 8), [partial(stream, 2, 3, 3)]),
    "longer, rich": Case(partial(stream, 5, 8, 8), [partial(stream, 2, 3, 3)], bar="rich"),
    "limited": Case(partial(stream, 8), trainer={"limit_train_batches": 5}),
    "reloaded": Case(partial(stream, 8), trainer={"reload_dataloaders_every_n_epochs": 1}),
    "looks": Case(partial(stream, 8), bar="looks"),
    "counts samples": Case(partial(stream, 8), bar="counts samples"),
    "own total": Case(partial(stream, 8), bar="own total"),
    "every third": Case(partial(stream, 8), bar="every third"),
    "resumed": Case(partial(whole, 64, TooLong), resumes_after=3),
    "resumed, rich": Case(partial(whole, 64, TooLong), resumes_after=3, bar="rich"),
    "resumed stream": Case(partial(stream, 8), resumes_after=3, trainer={"max_epochs": 4}),
    "steps": Case(partial(stream, 8), trainer={"max_epochs": -1, "max_steps": 20}),
}


def test_bars_show_what_is_known(run_ranks: Any) -> None:
    """A bar has the true total at once where that is proven, and from the end of the first epoch on where it was seen.

    What varies, what is another loader's, and a bar that counts by itself, is left as it is. No bar counts beyond its
    total.
    """
    found = run_ranks(all_fitted, 2, {name: (case, [SHOW]) for name, case in BARS.items()}, deadline_seconds=240)
    shown = {name: each for name, (each,) in found[0].value.items()}
    epochs = {name: [each.totals(f"Epoch {epoch}") for epoch in range(4)] for name, each in shown.items()}
    seen = [[None, 8], [8], [8], []]
    assert epochs["stream"] == epochs["looks"] == epochs["older package"] == seen
    assert epochs["rich"][1:] == epochs["older package, rich"][1:] == seen[1:]
    assert epochs["wrong"] == [[16, 8], [8], [8], []]
    assert epochs["proven"] == epochs["proven, rich"] == epochs["right"] == [[8], [8], [8], []]
    assert epochs["varies"] == [[None, 8], [8, 6], [None, 8], [None, 8]]
    assert epochs["longer"] == [[None, 5], [5, None, 8], [None, 8], []]
    assert epochs["longer, rich"][1][:2] == [5, None]
    assert epochs["limited"] == [[5], [5], [5], []]
    assert epochs["reloaded"] == [[None, 8], [None, 8], [None, 8], []]
    assert epochs["counts samples"] == [[None], [None], [None], []]
    assert epochs["own total"] == [[1000], [1000], [1000], []]
    assert epochs["every third"] == [[None], [8], [8], []]  # 6/8 is no end of an epoch
    assert epochs["resumed"][1:] == [[8], [8], []]
    assert epochs["resumed, rich"][1:] == [[8], [8], []]
    assert epochs["resumed stream"][1:] == [[None, 8], [8], [8]]
    assert epochs["steps"][2] == [4]  # Lightning's own, by the steps that are left
    validations = {name: each.totals("Validation") for name, each in shown.items()}
    assert validations["stream"] == validations["rich"] == validations["older package"] == [None, 3]
    assert shown["stream"].totals("Validation 1") == [None, 2]
    assert validations["wrong"] == [4, 2]
    assert validations["proven"] == validations["right"] == [2]
    assert validations["varies"] == [None, 3, None]
    assert validations["longer"][1:3] == validations["longer, rich"][1:3] == [2, None]
    beyond = [(name, drawn) for name, each in shown.items() for drawn in each.drawn if drawn[2] and drawn[1] > drawn[2]]
    assert beyond == []


RUNS = {
    "validates in mid-epoch": Case(partial(stream, 8, reported=16), [partial(stream, 2)], {"val_check_interval": 0.25}),
    "validates by batches": Case(partial(stream, 8), [partial(stream, 2)], {"val_check_interval": 3}),
    "across epochs": Case(
        partial(stream, 8), [partial(stream, 2)], {"val_check_interval": 5, "check_val_every_n_epoch": None}
    ),
    "limits": Case(
        partial(whole, 64, TooLong), [partial(whole, 16)], {"limit_train_batches": 0.5, "limit_val_batches": 0.5}
    ),
    "overfits": Case(partial(whole, 64), [partial(whole, 16)], {"overfit_batches": 2}),
    "stops early": Case(partial(stream, 8), [partial(stream, 2)], {"max_epochs": 6}, stops=True),
    "resumes": Case(partial(stream, 8), resumes_after=3),
    "accumulates": Case(partial(stream, 8, reported=16), trainer={"accumulate_grad_batches": 3}),
    "no bar": Case(partial(stream, 8), bar=""),
    "several loaders": Case(two_loaders, [partial(whole, 16), partial(stream, 2)]),
}


def test_nothing_that_trains_is_changed(run_ranks: Any) -> None:
    """With totals="show" a job trains to the bits that it has without it, and evaluates at the same steps."""
    cases = {name: (case, [SHOW, OFF]) for name, case in RUNS.items()}
    for result in run_ranks(all_fitted, 2, cases, deadline_seconds=240):
        for name, (show, off) in result.value.items():
            assert (show.weights, show.steps, show.validated) == (off.weights, off.steps, off.validated), name


def test_loggers_get_a_short_list(run_ranks: Any) -> None:
    """A CSVLogger gets no column more, and the totals among its hyperparameters; with totals="off" nothing at all.

    A logger whose methods are a user's own gets nothing.
    """
    results = run_ranks(logged_by, 2, [None, SHOW, OFF], deadline_seconds=90)
    plain, named, show, shown_by_name, off, _ = results[0].value
    assert show[0] == shown_by_name[0] == plain[0] == named[0] == off[0]
    assert shown_by_name[1] == show[1]
    assert yaml.safe_load(show[1]) == {
        "countoff/num_training_batches": 11,
        "countoff/steps_per_epoch": 6,
        "countoff/estimated_stepping_batches": 18,
        "countoff/global_batch_size": 16,
        "countoff/samples_repeated": 1,
        "countoff/samples_dropped": 0,
        "countoff/eval_samples": 20,
        "countoff/eval_samples_repeated": 0,
        "countoff/eval_samples_dropped": 0,
    }
    assert off[1] == plain[1]
    assert [line for result in results for line in verdict_lines(result)] == []
