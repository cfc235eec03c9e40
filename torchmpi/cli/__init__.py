"""The command line: ``torchmpi info``, ``doctor`` and ``bench``, also as ``python -m torchmpi``."""

from .command_line import main

__all__ = ["main"]
