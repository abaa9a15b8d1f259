"""Epochs with more optimizer steps than their gradient accumulation makes; on real ranks."""

from integration_tests import step_jobs
from integration_tests.step_jobs import Loop
from integration_tests.test_weights import found_in


def too_many(steps: int, given: str, most: int) -> dict[str, str]:
    made = f"gradient_accumulation_steps=4 makes at most {most}"
    return {"WrongTotal": f"train epoch 0 had {steps} optimizer steps in {given}: {made}."}


CASES = {
    "as said": (Loop(), 6, {}),
    "after each batch": (Loop(every=1), 24, too_many(24, "24 batches", 6)),
    "after each batch, and left early": (Loop(every=1, stops=True), 12, {}),
    "after each batch, as said": (Loop(every=1, accumulation=1), 24, {}),
    "Fabric, as said": (Loop("fabric"), 6, {}),
    "Fabric, after every second batch": (Loop("fabric", every=2), 12, too_many(12, "24 batches", 6)),
    "Fabric, parts of each batch": (Loop("fabric", every=1, parts=4), 24, {}),
    "Accelerate, as said": (Loop("accelerate", every=0), 6, {}),
    "Accelerate, without accumulate()": (Loop("accelerate", every=1), 24, too_many(24, "24 batches", 6)),
    "Accelerate, by hand": (Loop("accelerate", every=4), 6, {}),
    "Accelerate, parts of each batch": (
        Loop("accelerate", every=0, parts=4),
        27,
        too_many(27, "96 micro-batches", 24),
    ),
    "Accelerate, as the remedy says": (Loop("accelerate", every=0, parts=4, sync_with_dataloader=False), 24, {}),
}


def test_more_steps_than_the_accumulation_makes_are_named(run_ranks):
    """Once, in the first epoch that shows it, and not in an epoch that the loop leaves early."""
    jobs = [loop for loop, _, _ in CASES.values()]
    results = run_ranks(step_jobs.train_each, 2, jobs, deadline_seconds=180)
    assert dict(zip(CASES, found_in(results), strict=True)) == {name: due for name, (_, _, due) in CASES.items()}
    for result in results:
        assert [each["steps"] for each in result.value] == [steps for _, steps, _ in CASES.values()]
