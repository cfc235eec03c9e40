"""Asynchronous and low-communication training: Downpour, elastic averaging, local SGD, DiLoCo."""

from .base import Update
from .diloco import DiLoCoUpdate
from .downpour import DownpourUpdate
from .easgd import EAMSGDUpdate, EASGDUpdate
from .localsgd import LocalSGDUpdate

__all__ = ["DiLoCoUpdate", "DownpourUpdate", "EAMSGDUpdate", "EASGDUpdate", "LocalSGDUpdate", "Update"]
