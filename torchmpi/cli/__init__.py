"""The command line: ``torchmpi info`` and ``torchmpi doctor``, also as ``python -m torchmpi``."""

from .command import main

__all__ = ["main"]
