"""Asynchronous training: Downpour, elastic averaging."""

from . import downpour, easgd, update
from .downpour import *
from .easgd import *
from .update import *

_MODULES = (downpour, easgd, update)
"""Modules whose ``__all__`` is public."""
