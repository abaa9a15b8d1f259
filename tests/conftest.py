"""What all unit tests need: hypothesis without a clock, and bounded name look-ups of torch's store."""

import os

import hypothesis

# A busy machine makes an example slow, and that proves nothing.
hypothesis.settings.register_profile("countoff", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("countoff")

# torch's TCPStore makes a reverse DNS look-up of its peer at each connection. A lost answer would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
