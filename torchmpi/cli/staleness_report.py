"""The command ``torchmpi staleness``: report on the record of a run with parameter servers."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from .. import files
from ..errors import ArgumentError
from ..parameterserver.runs.run_record import read_run


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    record = read_run(options.file)
    print(record.text())
    if options.csv is not None:
        files.write(options.csv, record.csv())
        print(f"\nAll events: {options.csv}")
    if options.plot is not None:
        if find_spec("matplotlib") is None:
            raise ArgumentError("--plot needs matplotlib: pip install matplotlib")
        record.plot(options.plot)
        print(f"\nStaleness and times: {options.plot}")
    return 0
