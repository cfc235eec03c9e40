"""Settings of Hypothesis and of the garbage collector."""

from __future__ import annotations

import gc

import hypothesis

# Without a deadline, which an example could exceed on a busy machine.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")


def pytest_collection_finish() -> None:
    """Exempt the objects of imported modules from collection; gc.collect() in a test then takes milliseconds."""
    gc.collect()
    gc.freeze()
