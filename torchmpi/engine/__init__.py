"""Training loops with hooks, meters, prefetching and checkpoints."""

from .allreduce_engine import AllReduceSGDEngine
from .hooks import HOOK_NAMES, HookName, Hooks
from .meters import AverageValueMeter, ClassErrorMeter, TestResult
from .sgd_engine import SGDEngine
from .state import Sample, State

__all__ = [
    "HOOK_NAMES",
    "AllReduceSGDEngine",
    "AverageValueMeter",
    "ClassErrorMeter",
    "HookName",
    "Hooks",
    "SGDEngine",
    "Sample",
    "State",
    "TestResult",
]
