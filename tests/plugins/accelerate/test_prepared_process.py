"""A process that Accelerate takes for the only one, though a launcher has started several."""

from types import SimpleNamespace

import pytest

from countoff._accelerate import process as prepared_process

ALONE = SimpleNamespace(num_processes=1)
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_process, "warned", set())
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


def test_only_the_first_fit_of_a_process_is_warned_of() -> None:
    assert prepared_process.not_distributed(ALONE) is not None
    assert prepared_process.not_distributed(ALONE) is None


@pytest.mark.parametrize("name", RANKS)
def test_only_the_launchers_rank_0_warns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun, the rank is where mpirun or srun tells it."""
    monkeypatch.setenv(name, "1")
    assert prepared_process.not_distributed(ALONE) is None
    monkeypatch.setenv(name, "0")
    assert prepared_process.not_distributed(ALONE) is not None


def test_a_process_that_is_one_of_the_job_is_right() -> None:
    assert prepared_process.not_distributed(SimpleNamespace(num_processes=2)) is None
