"""Modules with the names of Horovod's, for programs that are not changed.

No package called ``horovod`` is installed. :func:`install` puts modules of these names into ``sys.modules``, which
``import horovod.torch as hvd`` then finds.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from .. import horovod as hvd
from . import basics, common_util, compressors, elastic, exceptions, mpi_ops, process_sets
from .distributed_optimizer import SynchronizingOptimizer

VERSION = "0.28.1"
"""The version of Horovod with this interface."""


def _names(*names: str) -> dict[str, Any]:
    """Return public names of :mod:`torchmpi.horovod`."""
    return {name: getattr(hvd, name) for name in names}


_EXCEPTIONS = {
    name: getattr(exceptions, name)
    for name in ("HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError")
}
_PROCESS_SETS = _names("ProcessSet", "add_process_set", "global_process_set", "remove_process_set")
_FUNCTIONS = _names("allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters")
_BUILT = _names("ccl_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built")
_STATE = {
    "StateHandler": elastic.StateHandler,
    "ModelStateHandler": elastic.ModelStateHandler,
    "OptimizerStateHandler": elastic.OptimizerStateHandler,
    "SamplerStateHandler": elastic.SamplerStateHandler,
    "TorchState": elastic.TorchState,
    "get_handler_registry": elastic.get_handler_registry,
    "set_handler_registry": elastic.set_handler_registry,
}
_BASICS = SimpleNamespace(**_names(*basics.__all__), _get_process_set_ids_and_ranks=process_sets.ids_and_ranks)
_UTIL = {
    "_cache": common_util.cache,
    "check_extension": common_util.check_extension,
    "env": common_util.env,
    "extension_available": common_util.extension_available,
    "gpu_available": common_util.gpu_available,
    "is_iterable": common_util.is_iterable,
    "num_rank_is_power_2": common_util.num_rank_is_power_2,
    "split_list": common_util.split_list,
}
_PUBLIC = _names(*hvd.__all__)

MODULES: dict[str, dict[str, Any]] = {
    "horovod": {"__version__": VERSION, "run": common_util.run},
    "horovod.common": {},
    "horovod.common.basics": {"HorovodBasics": lambda *_: _BASICS},
    "horovod.common.elastic": {
        "ObjectState": elastic.ObjectState,
        "State": elastic.ElasticState,
        "run_fn": elastic.run_fn,
    },
    "horovod.common.exceptions": _EXCEPTIONS,
    "horovod.common.process_sets": _PROCESS_SETS,
    "horovod.common.util": _BUILT | _UTIL,
    "horovod.runner": {"run": common_util.run},
    "horovod.torch": _PUBLIC,
    "horovod.torch.compression": {
        "Compression": compressors.Compression,
        "Compressor": compressors.Compressor,
        "FP16Compressor": compressors.FP16Compressor,
        "NoneCompressor": compressors.NoneCompressor,
    },
    "horovod.torch.elastic": {
        "ElasticSampler": elastic.ElasticSampler,
        "TorchState": elastic.TorchState,
        "run": elastic.run,
    },
    "horovod.torch.elastic.sampler": {"ElasticSampler": elastic.ElasticSampler},
    "horovod.torch.elastic.state": _STATE,
    "horovod.torch.functions": _FUNCTIONS,
    "horovod.torch.mpi_ops": _PUBLIC
    | {"_basics": _BASICS, "handle_average_backwards_compatibility": mpi_ops.chosen_op},
    "horovod.torch.optimizer": _names("DistributedOptimizer") | {"_DistributedOptimizer": SynchronizingOptimizer},
    "horovod.torch.sync_batch_norm": _names("SyncBatchNorm"),
}
"""The names in each module, in an order in which packages come before what they contain."""


def install() -> None:
    """Make ``import horovod.torch`` find :mod:`torchmpi.horovod`, in this process.

    Example:
        from torchmpi.horovod.aliases import install

        install()
        import horovod.torch as hvd
    """
    packages = {name.rpartition(".")[0] for name in MODULES}
    for name, names in MODULES.items():
        module = ModuleType(name, f"Horovod's module of this name, made by torchmpi {__name__.rpartition('.')[0]}.")
        vars(module).update(names)
        if name in packages:
            module.__path__ = []
        sys.modules[name] = module
        package, _, attribute = name.rpartition(".")
        if package:
            setattr(sys.modules[package], attribute, module)
