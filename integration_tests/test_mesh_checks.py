"""Comparisons of what ranks hold, read and issue, on a mesh of two data ranks by two tensor-parallel ranks."""

from integration_tests import mesh_jobs
from integration_tests.mesh_jobs import Job


def test_a_healthy_mesh_is_silent_and_its_fault_is_named(run_ranks):
    """Tensor-parallel peers read the same data, and a fault is named with its ranks."""
    jobs = [Job(), Job("fsdp"), Job(fault="frozen")]
    results = run_ranks(mesh_jobs.train, 4, jobs, deadline_seconds=240)
    *healthy, model = results[0].value
    assert healthy == [{}, {}]
    sentence = "before the first batch, 4 parameters need a gradient on rank 1, 3 parameters on rank 3."
    assert model == {"PlanMismatch": sentence}
