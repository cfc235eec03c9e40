"""Asynchronous and low-communication training: Downpour, elastic averaging, local SGD, DiLoCo."""

from .diloco import DiLoCoUpdate
from .downpour import DownpourUpdate
from .easgd import EAMSGDUpdate, EASGDUpdate
from .localsgd import LocalSGDUpdate
from .update import Update

__all__ = ["DiLoCoUpdate", "DownpourUpdate", "EAMSGDUpdate", "EASGDUpdate", "LocalSGDUpdate", "Update"]
