"""Parameter servers: tensors spread over the ranks, to which any rank may send and from which it may receive.

Nobody has to enter a matching call::

    import torchmpi.parameterserver as ps

    server = ps.init(weights)                       # collective
    ps.send(server, -0.1 * gradient, "add").wait()  # whenever this rank is ready
    weights = ps.receive(server).wait()
"""

from .rules import Rule, adagrad, adam, axpby, register_rule, scaled_add, sgd
from .saving import load, save
from .servers import Server, free, free_all, init, receive, send
from .staleness import Clock, StalenessMeter
from .tensors import free_tensors, init_tensors, integrate_tensors, prefetch_tensors, send_tensors, sync_handles
from .updates.diloco import DiLoCoUpdate
from .updates.downpour import DownpourUpdate
from .updates.easgd import EAMSGDUpdate, EASGDUpdate
from .updates.localsgd import LocalSGDUpdate
from .updates.update import Update

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
