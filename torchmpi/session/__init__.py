"""``start()`` and ``stop()``: the owner of all resources, which makes the parts of a job and ends them in order."""
