"""Training loops with hooks, meters, prefetching and checkpoints."""

from .allreduce import AllReduceSGDEngine
from .evaluate import TestResult
from .hooks import HOOK_NAMES, Hooks
from .meters import AverageValueMeter, ClassErrorMeter
from .sgd import SGDEngine
from .state import Sample, State

__all__ = [
    "HOOK_NAMES",
    "AllReduceSGDEngine",
    "AverageValueMeter",
    "ClassErrorMeter",
    "Hooks",
    "SGDEngine",
    "Sample",
    "State",
    "TestResult",
]
