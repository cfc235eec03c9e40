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

from ._version import __version__

if TYPE_CHECKING:  # loaded at first use, see __getattr__: torch imports this package whenever it is imported itself
    from . import distributed, engine, errors, horovod, nn, parameterserver, timeline
    from .collectives import (
        allgather,
        allgather_async,
        allgather_object,
        allreduce,
        allreduce_async,
        allreduce_many,
        allreduce_many_async,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_async,
        broadcast_object,
        gather,
        gather_async,
        recv,
        recv_async,
        reduce,
        reduce_async,
        reduce_scatter,
        reduce_scatter_async,
        scatter,
        scatter_async,
        send,
        send_async,
        sendreceive,
        sendreceive_async,
    )  # fmt: skip
    from .collectives.tuning import autotune
    from .communicators.communicator import Communicator, NullCommunicator
    from .communicators.handle import Handle
    from .config import Config
    from .errors import RankLostError, TorchMPIError
    from .session.api import (
        collective_availability,
        collective_selector,
        collective_selector_to_string,
        communicator,
        communicator_names,
        device,
        empty_shared,
        group,
        has_cuda,
        has_gloo,
        has_nccl,
        host_name,
        is_cartesian_communicator,
        is_started,
        local_rank,
        local_size,
        num_nodes_in_communicator,
        push_communicator,
        rank,
        set_collective_span,
        set_communicator,
        size,
        start,
        started,
        stop,
        use,
    )  # fmt: skip
    from .session.call_metrics import metrics
    from .session.recovery import recover


_MODULE_OF = {
    "collectives": (
        "allgather allgather_async allgather_object allreduce allreduce_async allreduce_many "
        "allreduce_many_async alltoall alltoall_async barrier broadcast broadcast_async broadcast_object "
        "gather gather_async recv recv_async reduce reduce_async reduce_scatter reduce_scatter_async scatter "
        "scatter_async send send_async sendreceive sendreceive_async"
    ),
    "collectives.tuning": "autotune",
    "communicators.communicator": "Communicator NullCommunicator",
    "communicators.handle": "Handle",
    "config": "Config",
    "errors": "RankLostError TorchMPIError",
    "session.api": (
        "collective_availability collective_selector collective_selector_to_string communicator "
        "communicator_names device empty_shared group has_cuda has_gloo has_nccl host_name "
        "is_cartesian_communicator is_started local_rank local_size num_nodes_in_communicator push_communicator rank "
        "set_collective_span set_communicator size start started stop use"
    ),
    "session.call_metrics": "metrics",
    "session.recovery": "recover",
}
"""The module that defines each public name."""
_SUBMODULES = ("distributed", "engine", "errors", "horovod", "nn", "parameterserver", "timeline")


if not TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name: str) -> Any:
        import gc
        import importlib

        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        for module, names in _MODULE_OF.items():
            if name in names.split():
                # A collection during the import would look at all objects of torch: half of the time of start().
                was_enabled = gc.isenabled()
                gc.disable()
                try:
                    found = importlib.import_module(f".{module}", __name__)
                finally:
                    if was_enabled:
                        gc.enable()
                globals().update({each: getattr(found, each) for each in names.split()})
                return globals()[name]
        if name.startswith("__"):  # asked by the import system
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .other_names import attribute_message

        raise AttributeError(attribute_message(name, __all__))


def __dir__() -> list[str]:
    return list(__all__)


__all__ = [
    "Communicator", "Config", "Handle", "NullCommunicator", "RankLostError", "TorchMPIError", "__version__",
    "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_async", "allreduce_many",
    "allreduce_many_async", "alltoall", "alltoall_async", "autotune", "barrier", "broadcast", "broadcast_async",
    "broadcast_object", "collective_availability", "collective_selector", "collective_selector_to_string",
    "communicator", "communicator_names", "device", "distributed", "empty_shared", "engine", "errors", "gather",
    "gather_async", "group", "has_cuda", "has_gloo", "has_nccl", "horovod", "host_name",
    "is_cartesian_communicator", "is_started", "local_rank", "local_size", "metrics", "nn", "num_nodes_in_communicator",
    "parameterserver", "push_communicator", "rank", "recover", "recv", "recv_async", "reduce", "reduce_async",
    "reduce_scatter", "reduce_scatter_async", "scatter", "scatter_async", "send", "send_async", "sendreceive",
    "sendreceive_async", "set_collective_span", "set_communicator", "size", "start", "started", "stop", "timeline",
    "use",
]  # fmt: skip
