"""The command line: ``run``, ``info``, ``doctor``, ``bench``, ``timeline``, ``top``, ``dump`` and ``analyze``."""

from .command_line import main

__all__ = ["main"]
