"""Epochs with Accelerate of which each batch, or each part of one, has had an optimizer step; on real ranks."""

from integration_tests import step_jobs
from integration_tests.step_jobs import Loop
from integration_tests.test_weights import found_in


def too_many(steps: int, given: str, most: int) -> dict[str, str]:
    made = f"gradient_accumulation_steps=4 makes at most {most}"
    return {"WrongTotal": f"train epoch 0 had {steps} optimizer steps in {given}: {made}."}


CASES = {
    "as said": (Loop(), 6, {}),
    "without accumulate()": (Loop(every=1), 24, too_many(24, "24 batches", 6)),
    "without accumulate(), and left early": (Loop(every=1, stops=True), 12, {}),
    "without accumulate(), as said": (Loop(every=1, accumulation=1), 24, {}),
    "after every second batch": (Loop(every=2), 12, {}),
    "by hand": (Loop(every=4), 6, {}),
    "one step for the parts of each batch": (Loop(every=1, parts=4), 24, {}),
    "a step for each part of the last batch": (Loop(parts=4), 27, too_many(27, "96 micro-batches", 24)),
    "as the remedy says": (Loop(parts=4, sync_with_dataloader=False), 24, {}),
    "another optimizer for a while": (Loop(every=1, warms_up=True), 24, {}),
    "a loader that ends four times in an epoch": (Loop(chained=4, accumulation=7), 16, {}),
}


def test_more_steps_than_the_accumulation_makes_are_named(run_ranks):
    """Once, in the first epoch that shows it, and not in an epoch that the loop leaves early."""
    jobs = [loop for loop, _, _ in CASES.values()]
    results = run_ranks(step_jobs.train_each, 2, jobs, deadline_seconds=180)
    assert dict(zip(CASES, found_in(results), strict=True)) == {name: due for name, (_, _, due) in CASES.items()}
    for result in results:
        assert [each["steps"] for each in result.value] == [steps for _, steps, _ in CASES.values()]
