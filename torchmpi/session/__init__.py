"""``start()`` and ``stop()``: the owner of all resources, detection of launchers, job termination, stall detection."""
