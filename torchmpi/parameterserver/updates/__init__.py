"""Asynchronous and low-communication training: Downpour, elastic averaging, local SGD, DiLoCo."""

from . import diloco, downpour, easgd, localsgd, update
from .diloco import *
from .downpour import *
from .easgd import *
from .localsgd import *
from .update import *

_MODULES = (diloco, downpour, easgd, localsgd, update)
"""Modules whose ``__all__`` is public."""
