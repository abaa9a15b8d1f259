"""What all unit tests need: hypothesis without a clock, bounded name look-ups of torch's store, a process group."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

# A busy machine makes an example slow, and that proves nothing.
hypothesis.settings.register_profile("countoff", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("countoff")

# torch's TCPStore makes a reverse DNS look-up of its peer at each connection. A lost answer would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def real_group() -> Iterator[None]:
    """A process group of gloo with this process as its only rank."""
    # Not at the top: a unit test that needs no torch must not wait for its import.
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  (documented as public)

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
