"""Run a program that imports ``horovod.torch``, unchanged.

mpirun -n 4 python -m torchmpi.horovod train.py [arguments]
mpirun -n 4 python -m torchmpi.horovod -m package.module [arguments]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .aliases import install


def main(arguments: list[str]) -> None:
    """Run a script, or with ``-m`` a module, with Horovod's modules."""
    if not arguments or arguments[0] in ("-h", "--help") or (arguments[0] == "-m" and len(arguments) == 1):
        print(__doc__.strip(), file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as `python train.py` does
        runpy.run_path(arguments[0], run_name="__main__")


main(sys.argv[1:])
