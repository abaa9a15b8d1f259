"""Comparisons of what ranks hold, read and issue, on a mesh of two data ranks by two tensor-parallel ranks."""

from integration_tests import mesh_jobs
from integration_tests.mesh_jobs import Job


def test_a_healthy_mesh_is_silent_and_its_faults_are_named(run_ranks):
    """Tensor-parallel peers read the same data, and each of two faults is named with its ranks."""
    jobs = [Job(), Job("fsdp"), Job(fault="frozen"), Job(batches=52, fault="collective")]
    results = run_ranks(mesh_jobs.train, 4, jobs, deadline_seconds=240)
    *healthy, model, collective = results[0].value
    assert healthy == [{}, {}]
    sentence = "before the first batch, parameter 4 of 4 needs no gradient on rank 3, and needs one on rank 1."
    assert model == {"ModelMismatch": sentence}
    assert collective.keys() == {"CollectivesDiffer"}
    assert "rank 3 issued 1 collective more than ranks 0–2" in collective["CollectivesDiffer"], collective
