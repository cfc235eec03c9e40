"""torchmpi: MPI-first training for PyTorch.

    import torchmpi as mpi
    import torchmpi.nn as mpinn

    mpi.start()
    model = Net().to(mpi.device())
    mpinn.synchronize_parameters(model)
    for x, y in full_dataset[mpi.rank() :: mpi.size()]:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        mpinn.synchronize_gradients(model)
        optimizer.step()
    mpi.stop()

Importing this package does not start MPI.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:  # loaded at first use, see __getattr__: torch imports this package whenever it is imported itself
    from . import distributed as distributed
    from . import engine as engine
    from . import errors as errors
    from . import horovod as horovod
    from . import nn as nn
    from . import parameterserver as parameterserver
    from . import timeline as timeline
    from .collectives.movements import *
    from .collectives.objects import *
    from .collectives.point_to_point import *
    from .collectives.reductions import *
    from .collectives.tensor_lists import *
    from .collectives.tuning import *
    from .communicators.communicator import Communicator as Communicator
    from .communicators.communicator import NullCommunicator as NullCommunicator
    from .communicators.handle import Handle as Handle
    from .config import Config as Config
    from .continuing.elastic_job import *
    from .datasets.shared_dataset import *
    from .errors import MismatchError as MismatchError
    from .errors import RankLostError as RankLostError
    from .errors import StallError as StallError
    from .errors import TorchMPIError as TorchMPIError
    from .session.api import *
    from .session.call_metrics import *
    from .session.recovery import *
    from .session.reported_progress import *

_SUBMODULES = ("distributed", "engine", "errors", "horovod", "nn", "parameterserver", "timeline")
_CLASSES = {
    "Communicator": "communicators.communicator",
    "Config": "config",
    "Handle": "communicators.handle",
    "MismatchError": "errors",
    "NullCommunicator": "communicators.communicator",
    "RankLostError": "errors",
    "StallError": "errors",
    "TorchMPIError": "errors",
}
"""Public classes, and the modules that define them."""
_MODULES_OF_FUNCTIONS = (
    "session.api",
    "session.call_metrics",
    "session.recovery",
    "session.reported_progress",
    "collectives.movements",
    "collectives.objects",
    "collectives.point_to_point",
    "collectives.reductions",
    "collectives.tensor_lists",
    "collectives.tuning",
    "continuing.elastic_job",
    "datasets.shared_dataset",
)
"""Modules whose ``__all__`` is public here, in the order of the search: the first one loads what every start needs."""


if not TYPE_CHECKING:  # otherwise type checkers would accept every name, and read no computed list

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return _load(name)
        if name == "__all__":
            functions = [each for module in _MODULES_OF_FUNCTIONS for each in _load(module).__all__]
            found = sorted([*_SUBMODULES, *_CLASSES, *functions, "__version__"])
        elif name.startswith("__") or _is_module(name):  # asked by the import system
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        elif name in _CLASSES:
            found = getattr(_load(_CLASSES[name]), name)
        else:
            modules = map(_load, _MODULES_OF_FUNCTIONS)
            module = next((module for module in modules if name in module.__all__), None)
            if module is None:
                from .other_names import attribute_message

                raise AttributeError(attribute_message(name, __dir__()))
            found = getattr(module, name)
        globals()[name] = found
        return found

    def _load(module: str) -> Any:
        import gc
        import importlib

        # A collection during the import would look at all objects of torch: half of the time of start().
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return importlib.import_module(f".{module}", __name__)
        finally:
            if was_enabled:
                gc.enable()

    def _is_module(name: str) -> bool:
        """Return whether the package has such a module: `from .. import name` asks for an attribute first."""
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(f"{__name__}.{name}", __path__) is not None  # noqa: F405

    def __dir__() -> list[str]:
        return __getattr__("__all__")
