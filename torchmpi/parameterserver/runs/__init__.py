"""Records of runs with parameter servers: who sent what when, staleness, waits; and the order of calls."""

from . import run_record
from .run_record import *

_MODULES = (run_record,)
"""Modules whose ``__all__`` is public."""
