"""Records of runs with parameter servers: who sent what when, staleness, waits."""

from . import recording, run_record
from .recording import *
from .run_record import *

_MODULES = (recording, run_record)
"""Modules whose ``__all__`` is public."""
