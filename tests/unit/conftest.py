"""Settings of Hypothesis, of the threads of torch, and of the garbage collector."""

from __future__ import annotations

import gc

import hypothesis
import pytest
import torch
from helpers.checks import pytest_runtest_call  # noqa: F401, a hook

# Without a deadline, which an example could exceed on a busy machine.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
# A second thread does not help these small tensors, and waits for a core that another suite may have.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Exempt the objects of imported modules from collection; gc.collect() in a test then takes milliseconds."""
    gc.collect()
    gc.freeze()
