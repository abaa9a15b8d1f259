"""Learning-rate schedules as people get them wrong, and as they are right, in every framework, on real ranks.

A wrong one is named with the step, the rate and the cause, before a tenth of the run where that can be known by then.
Of a right one countoff says nothing. Every job trains to the same bits with countoff and without.
"""

import re
from importlib.util import find_spec

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from integration_tests import horizon_jobs
from integration_tests.composer_jobs import needs_composer
from integration_tests.zoo.runner import without_metrics

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ONE_EPOCH = "20 is the number of optimizer steps of one epoch."
THE_RUN = "{} is the number of optimizer steps of the run."
BATCHES = "60 is the number of batches of the run: optimizer steps × 4, the gradient accumulation."
ALONE = "120 is the number of optimizer steps that one process alone would need: those of the run × 2."
PREPARED = "accelerator.prepare() makes each scheduler.step() step the scheduler once per process."
EPOCHS = "The run has {} epochs: the schedule seems to count these."

WRONG: dict[str, dict[str, tuple[str, str]]] = {
    "PyTorch": {
        "one epoch of three": ("reaches 0 at step 20 of 60: LambdaLR was made for 20 steps.", ONE_EPOCH),
        "one epoch of three, the run's length unknown": (
            "train epoch 1 begins with a learning rate of 0, which it has had since step 20: LambdaLR was made for 20 "
            "steps.",
            "",
        ),
        "one cycle of one epoch": (
            "OneCycleLR has no learning rate after step 20 of 60, and raises an error there: OneCycleLR was made for "
            "20 steps.",
            ONE_EPOCH,
        ),
        "per batch, made for optimizer steps": (
            "reaches 0 at step 4 of 15 and then rises again: LambdaLR was made for 15 steps, and is stepped 4 times "
            "per optimizer step (once per batch); its warm-up of 2 steps ends at step 1.",
            THE_RUN.format(15),
        ),
        "per step, made for batches": (
            "would reach its end at step 60, and the run ends at 15: LambdaLR was made for 60 steps.",
            BATCHES,
        ),
        "divided by the accumulation twice": (
            "reaches 0 at step 15 of 60: LambdaLR was made for 15 steps.",
            "",
        ),
        "steps of one process alone": (
            "would reach its end at step 120, and the run ends at 60: LambdaLR was made for 120 steps.",
            ALONE,
        ),
        "steps divided by the processes": ("reaches 0 at step 30 of 60: LambdaLR was made for 30 steps.", ""),
        "per epoch, made for steps": (
            "would reach its end at step 300, and the run ends at 60: CosineAnnealingLR was made for 60 calls of its "
            "step(), and is stepped once per epoch.",
            THE_RUN.format(60),
        ),
        "per step, made for epochs": (
            "reaches its lowest value, 0.001, at step 9 of 240: MultiStepLR was made for 9 steps.",
            EPOCHS.format(12),
        ),
        "warm-up subtracted twice": (
            "reaches 0 at step 108 of 120: LambdaLR was made for 108 steps.",
            "",
        ),
        "a warm-up longer than the run": (
            "the warm-up of the learning rate would end at step 600, and the run ends at 60: that of LambdaLR takes "
            "600 steps.",
            "",
        ),
        "a cosine that rises again": (
            "reaches 0 at step 20 of 60 and then rises again: CosineAnnealingLR was made for 20 steps.",
            ONE_EPOCH,
        ),
        "a rate that vanishes": (
            "falls below a millionth of its highest value at step 20 of 60: ExponentialLR is stepped once per "
            "optimizer step.",
            "",
        ),
        "resumed at twice the position": (
            "reaches 0 at step 40 of 60: LambdaLR was made for 60 steps.",
            "The schedule has made 45 steps after 25 optimizer steps of the run.",
        ),
    },
    "DeepSpeed": {
        "one epoch of three": ("reaches 0 at step 20 of 60: WarmupDecayLR was made for 20 steps.", ONE_EPOCH),
        "the steps of one process alone": (
            "would reach its end at step 120, and the run ends at 60: WarmupDecayLR was made for 120 steps.",
            ALONE,
        ),
        "made for batches": (
            "would reach its end at step 60, and the run ends at 15: WarmupDecayLR was made for 60 steps.",
            BATCHES,
        ),
        "a cosine of twice the run": (
            "would reach its end at step 120, and the run ends at 60: WarmupCosineLR was made for 120 steps.",
            ALONE,
        ),
        "a warm-up longer than the run": (
            "the warm-up of the learning rate would end at step 600, and the run ends at 60: that of WarmupLR takes "
            "600 steps.",
            "",
        ),
    },
    "Accelerate": {
        "made for the steps": (
            "reaches 0 at step 30 of 60: LambdaLR was made for 60 steps, and is stepped twice per optimizer step (once "
            "per process); its warm-up of 6 steps ends at step 3.",
            f"{THE_RUN.format(60)} {PREPARED}",
        ),
        "made for the steps, accumulation": (
            "reaches 0 at step 15 of 30: LambdaLR was made for 30 steps, and is stepped twice per optimizer step (once "
            "per process).",
            f"{THE_RUN.format(30)} {PREPARED}",
        ),
        "times the accumulation, as in diffusers": (
            "would reach its end at step 30, and the run ends at 15: LambdaLR was made for 60 steps, and is stepped "
            "twice per optimizer step (once per process).",
            f"{BATCHES} {PREPARED}",
        ),
        "split batches, times the processes": (
            "would reach its end at step 120, and the run ends at 60: LambdaLR was made for 120 steps.",
            ALONE,
        ),
        "stepped by the loop, times the processes": (
            "would reach its end at step 120, and the run ends at 60: LambdaLR was made for 120 steps.",
            ALONE,
        ),
        "per epoch, made for epochs": (
            "reaches 0 at step 30 of 60 and then rises again: CosineAnnealingLR was made for 3 calls of its step(), "
            "and is stepped twice per epoch (once per process).",
            f"3 is the number of epochs of the run. {PREPARED}",
        ),
        "a limit of steps": (
            "reaches 0 at step 5,000 of 10,000 and then rises again: LambdaLR was made for 10,000 steps, and is "
            "stepped twice per optimizer step (once per process); its warm-up of 500 steps ends at step 250.",
            f"{THE_RUN.format('10,000')} {PREPARED}",
        ),
    },
    "Accelerate on more processes": {
        "10,000 steps": (
            "reaches 0 at step 2,500 of 10,000 and then rises again: LambdaLR was made for 10,000 steps, and is "
            "stepped 4 times per optimizer step (once per process).",
            f"{THE_RUN.format('10,000')} {PREPARED}",
        ),
    },
    "Lightning": {
        "one cycle of batches, accumulation": (
            "would reach its end at step 60, and the run ends at 15: OneCycleLR was made for 60 steps.",
            BATCHES,
        ),
        "one cycle of all ranks' batches": (
            "would reach its end at step 120, and the run ends at 60: OneCycleLR was made for 120 steps.",
            ALONE,
        ),
        "one cycle of one epoch": (
            "OneCycleLR has no learning rate after step 20 of 60, and raises an error there: OneCycleLR was made for "
            "20 steps.",
            ONE_EPOCH,
        ),
        "the interval left at epoch": (
            "would reach its end at step 1,200, and the run ends at 60: OneCycleLR was made for 60 calls of its "
            "step(), and is stepped once per epoch.",
            THE_RUN.format(60),
        ),
        "every second step": (
            "would reach its end at step 120, and the run ends at 60: OneCycleLR was made for 60 calls of its step(), "
            "and is stepped 10 times per epoch.",
            THE_RUN.format(60),
        ),
        "a cosine of epochs, per step": (
            "reaches 0 at step 3 of 60 and then rises again: CosineAnnealingLR was made for 3 steps.",
            "3 is the number of epochs of the run.",
        ),
        "a cosine of epochs, in a run of one": (
            "would reach its end at step 60, and the run ends at 20: CosineAnnealingLR was made for 3 calls of its "
            "step(), and is stepped once per epoch.",
            "",
        ),
    },
    "Fabric": {
        "one epoch of three": ("reaches 0 at step 20 of 60: LambdaLR was made for 20 steps.", ONE_EPOCH),
        "made for batches": (
            "would reach its end at step 60, and the run ends at 15: LambdaLR was made for 60 steps.",
            BATCHES,
        ),
        "made for another number of steps": ("reaches 0 at step 40 of 60: LambdaLR was made for 40 steps.", ""),
    },
    "transformers": {
        "one epoch of three": (
            "reaches 0 at step 20 of 60 and then rises again: LambdaLR was made for 20 steps.",
            ONE_EPOCH,
        ),
        "made for batches": (
            "would reach its end at step 60, and the run ends at 15: LambdaLR was made for 60 steps.",
            BATCHES,
        ),
        "times the processes": (
            "would reach its end at step 120, and the run ends at 60: LambdaLR was made for 120 steps.",
            ALONE,
        ),
    },
    "Composer": {
        "a cosine of half the run": (
            "reaches 0 at step 30 of 60: CosineAnnealingScheduler was made for 30 steps.",
            "",
        ),
        "a cosine of twice the run": (
            "would reach its end at step 120, and the run ends at 60: CosineAnnealingScheduler was made for 120 steps.",
            ALONE,
        ),
        "linear, one epoch of three": ("reaches 0 at step 20 of 60: LinearScheduler was made for 20 steps.", ONE_EPOCH),
        "torch's, made for batches, per epoch": (
            "would reach its end at step 1,200, and the run ends at 60: CosineAnnealingLR was made for 60 calls of "
            "its step(), and is stepped once per epoch.",
            THE_RUN.format(60),
        ),
        "torch's, one epoch of three, per batch": (
            "reaches 0 at step 20 of 60: LambdaLR was made for 20 steps.",
            ONE_EPOCH,
        ),
        "torch's, made for epochs, per batch": (
            "reaches 0 at step 3 of 60 and then rises again: CosineAnnealingLR was made for 3 steps.",
            "3 is the number of epochs of the run.",
        ),
    },
}
"""The sentence about each schedule that is wrong, and the cause."""
OTHERS = {
    "a warm-up of one epoch of all ranks": "a warm-up of '1ep' takes 2 epochs;",
    "a cosine of all ranks' batches": "is laid out for 120 batches and ends at 60 of them.",
}
"""What another warning says, where not the schedule is wrong but the length of the loader."""
AFTER_AN_EPOCH = (
    "one epoch of three, the run's length unknown",
    "per epoch, made for epochs",
    "torch's, made for batches, per epoch",
)
"""Where the pace of the scheduler, or the length of the run, shows only when the first epoch has ended."""
AFTER_A_RESUME = ("resumed at twice the position",)


def of_horizons(output: str) -> list[str]:
    """The lines of rank 0 about schedules, each with its why."""
    lines = [line.removeprefix("[rank 0] ") for line in output.splitlines() if line.startswith("[rank 0] ")]
    found = list[str]()
    for place, line in enumerate(lines):
        if line.startswith("countoff: WrongHorizon: "):
            found.append(line)
            found += [after for after in lines[place + 1 : place + 3] if after.startswith("  why: ")]
    return found


def assert_came_true(sentence: str, outcome: horizon_jobs.Outcome) -> None:
    """The rates of the run are what the sentence has foretold, as far as the run went."""
    rates, highest = outcome.rates, max(outcome.rates)
    where = re.search(r"reaches 0 at step ([\d,]+)|since step ([\d,]+)|no learning rate after step ([\d,]+)", sentence)
    if where is None:
        if "would reach its end" in sentence or "would end" in sentence:
            assert not outcome.error
            assert rates[-1] > 0.01 * highest or rates[-1] == highest
        return
    step = int(next(each for each in where.groups() if each).replace(",", ""))
    if step > len(rates):
        return  # the job was cut short
    if outcome.error:
        assert len(rates) == step + 1  # the error came after it, from the scheduler
        return
    # Composer's own schedules are one batch behind; one that is stepped several times at once may step over its lowest.
    lowest = 0.3 * highest if "rises again" in sentence else 1e-6 * highest
    assert min(rates[step : step + 2]) == pytest.approx(0.0, abs=lowest)
    top = next(place for place, rate in enumerate(rates) if rate >= 0.9 * highest)
    assert min(rates[top : step - 1], default=highest) > 1e-6 * highest


@pytest.mark.parametrize(
    ("framework", "processes"),
    [
        ("PyTorch", 2),
        pytest.param("DeepSpeed", 2, marks=needs_deepspeed),
        ("Fabric", 2),
        pytest.param("Accelerate", 2, marks=pytest.mark.nightly),
        pytest.param("Accelerate on more processes", 4, marks=pytest.mark.nightly),
        pytest.param("Lightning", 2, marks=pytest.mark.nightly),
        pytest.param("transformers", 2, marks=pytest.mark.nightly),
        pytest.param("Composer", 2, marks=[needs_composer, pytest.mark.nightly]),
    ],
)
def test_a_wrong_schedule_is_named_and_a_right_one_is_not(run_ranks, framework, processes):
    """Each wrong schedule gets one warning in time, with a cause that comes true; a right one gets none."""
    results = run_ranks(horizon_jobs.run_all, processes, framework, deadline_seconds=240)
    said = {part.partition("\n")[0]: part.partition("\n")[2] for part in results[0].output.split("--- job ")[1:]}
    wrong = WRONG[framework]
    assert wrong.keys() <= said.keys()
    for name, (without, watched) in results[0].value.items():
        assert (without.weights, without.rates, without.error) == (watched.weights, watched.rates, watched.error), name
        lines = of_horizons(said[name])
        if name not in wrong:
            assert lines == [], name
            assert OTHERS.get(name, "") in said[name], name
            if name not in OTHERS:
                assert "countoff" not in without_metrics(said[name]), said[name]
            continue
        sentence, why = wrong[name]
        assert lines[0].endswith(sentence), (name, lines)
        assert lines[1:] == ([f"  why: {why}"] if why else []), (name, lines)
        assert_came_true(lines[0], watched)
        if name not in (*AFTER_AN_EPOCH, *AFTER_A_RESUME):
            assert len(watched.warned_at) == 1 or watched.error, name
            assert watched.warned_at[0] <= max(3, length_of_run(lines[0]) // 10), name
    for result in results[1:]:
        assert "WrongHorizon" not in result.output


def length_of_run(sentence: str) -> int:
    """The optimizer steps of the run, as a sentence says them."""
    found = re.search(r"step [\d,]+ of ([\d,]+)|the run ends at ([\d,]+)", sentence)
    assert found is not None, sentence
    return int(next(each for each in found.groups() if each).replace(",", ""))
