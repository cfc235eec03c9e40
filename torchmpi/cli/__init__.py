"""The command line: ``torchmpi run``, ``info``, ``doctor`` and ``bench``, also as ``python -m torchmpi``."""

from .command_line import main

__all__ = ["main"]
