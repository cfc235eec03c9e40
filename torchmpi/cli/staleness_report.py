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
    written = []  # before the text, which a reader such as `head` may cut
    if options.csv is not None:
        files.write(options.csv, record.csv())
        written.append(f"\nAll events: {options.csv}")
    if options.plot is not None:
        if find_spec("matplotlib") is None:
            raise ArgumentError("--plot needs matplotlib: pip install matplotlib")
        record.plot(options.plot)
        written.append(f"\nStaleness and times: {options.plot}")
    print(record.text(), *written, sep="\n")
    return 0
