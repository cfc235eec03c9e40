"""Simulated workers: the updates and rules of a program on many workers in one process, in simulated time."""

from . import simulated_network, simulated_run
from .simulated_network import *
from .simulated_run import *

_MODULES = (simulated_network, simulated_run)
"""Modules whose ``__all__`` is public."""
