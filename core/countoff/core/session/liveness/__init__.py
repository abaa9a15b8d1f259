"""Which ranks and hosts are alive, and where a rank's main thread is."""
