"""The cell magic ``%%mpirun``: runs a cell of a notebook as a program on several ranks of this machine.

    %load_ext mpirun_magic

    %%mpirun -n 4
    import torchmpi as mpi
    mpi.start()
    print(mpi.rank())

The rest of the first line are options of ``torchmpi run``. The cell is a program of its own: it has no variables of the
notebook, and passes results back through files.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def mpirun(line: str, cell: str) -> None:
    """Run a cell under ``torchmpi run``, and print its output as it appears.

    Raises:
        RuntimeError: If the job fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "cell.py"
        program.write_text(cell)
        command = [sys.executable, "-m", "torchmpi", "run", *shlex.split(line), str(program)]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert job.stdout is not None
        try:
            for text in job.stdout:
                print(text, end="", flush=True)
        except KeyboardInterrupt:  # the stop button
            job.terminate()
            raise
        if job.wait() != 0:
            raise RuntimeError(f"the job ended with status {job.returncode}")


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic."""
    ipython.register_magic_function(mpirun, magic_kind="cell")
