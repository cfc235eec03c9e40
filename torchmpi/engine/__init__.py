"""Training loops with hooks, meters, prefetching and checkpoints."""

from typing import TYPE_CHECKING

from ..other_names import missing_attribute
from .allreduce_engine import AllReduceSGDEngine
from .early_stop import EarlyStop
from .fit import FitResult, fit
from .hooks import HOOK_NAMES, HookName, Hooks
from .meters import AverageValueMeter, ClassErrorMeter
from .metrics import SummedMetric
from .sgd_engine import SGDEngine
from .state import Sample, State
from .tensorboard import TensorBoard
from .test_result import TestResult

__all__ = [
    "HOOK_NAMES",
    "AllReduceSGDEngine",
    "AverageValueMeter",
    "ClassErrorMeter",
    "EarlyStop",
    "FitResult",
    "HookName",
    "Hooks",
    "SGDEngine",
    "Sample",
    "State",
    "SummedMetric",
    "TensorBoard",
    "TestResult",
    "fit",
]


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = missing_attribute(__name__, __all__)
