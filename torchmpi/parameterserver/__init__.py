"""Parameter servers: tensors sharded over the ranks, which any rank may update and read without a matching call.

Example:
    import torchmpi.parameterserver as ps

    server = ps.init(weights)                       # collective
    ps.send(server, -0.1 * gradient, "add").wait()  # at any time, by any rank
    weights = ps.receive(server).wait()
"""

from typing import TYPE_CHECKING

from ..other_names import missing_attribute
from .parameter_lists import free_tensors, init_tensors, integrate_tensors, prefetch_tensors, send_tensors, sync_handles
from .rules import Rule, adagrad, adam, axpby, register_rule, scaled_add, sgd
from .servers import Server, free, free_all, init, receive, send
from .shard_checkpoint import load, save
from .staleness import Clock, StalenessMeter
from .updates import DiLoCoUpdate, DownpourUpdate, EAMSGDUpdate, EASGDUpdate, LocalSGDUpdate, Update

__all__ = [
    "Clock",
    "DiLoCoUpdate",
    "DownpourUpdate",
    "EAMSGDUpdate",
    "EASGDUpdate",
    "LocalSGDUpdate",
    "Rule",
    "Server",
    "StalenessMeter",
    "Update",
    "adagrad",
    "adam",
    "axpby",
    "free",
    "free_all",
    "free_tensors",
    "init",
    "init_tensors",
    "integrate_tensors",
    "load",
    "prefetch_tensors",
    "receive",
    "register_rule",
    "save",
    "scaled_add",
    "send",
    "send_tensors",
    "sgd",
    "sync_handles",
]


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = missing_attribute(__name__, __all__)
