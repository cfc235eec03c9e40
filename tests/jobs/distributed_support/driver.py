"""Runs every check on the two ranks of this job and writes down what works: ``driver.py BACKEND FOLDER [PATTERN]``.

The ranks tell each other how a check went through a file in the folder, which is empty before, so that this needs
nothing of what is checked. With a pattern only those checks run in whose `section: name` it is found, and errors are
shown whole.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The other rank may have aborted the call that a check waits for: the timeout of the group ends that wait.
TIMEOUT = timedelta(seconds=20)
REASON_CHARACTERS = 90
MEANINGLESS = (
    r"\[(rank\d+\]:\[)?[^]]*[\w.]+:\d+\]:? *",  # where in PyTorch's source, and when
    r"(RuntimeError: )?Got the following error when running the callback: ",
)
NO_CLASS = ("Wrong", "AssertionError")


def main() -> None:
    backend, folder, pattern = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import calls  # noqa: F401, these register what they check
    import groups  # noqa: F401
    import sharding  # noqa: F401
    import training  # noqa: F401
    from features import FEATURES, without_addresses

    chosen = [feature for feature in FEATURES if re.search(pattern or "", f"{feature.section}: {feature.name}")]
    rows: list[list[Any]] = [[feature.section, feature.name, None] for feature in chosen]
    dist.init_process_group(backend, timeout=TIMEOUT, **without_addresses(backend))
    rank, channel = dist.get_rank(), dist.FileStore(str(folder / "store"), 2)
    for number, feature in sorted(enumerate(chosen), key=lambda each: each[1].turn):
        begin = time.monotonic()
        channel.set(f"{number}/{rank}", outcome_of(feature.check, show=pattern is not None))
        outcomes = [channel.get(f"{number}/{each}").decode() for each in range(2)]
        rows[number][2] = next(filter(None, outcomes), "")
        if rank == 0:
            # What has no outcome in the end has ended the process.
            (folder / "rows.json").write_text(json.dumps(rows))
            print(f"{time.monotonic() - begin:6.2f} s  {feature.name}: {rows[number][2] or 'yes'}", flush=True)
        if (feature.renews or rows[number][2]) and feature.turn == 0:
            renew(backend)
    dist.destroy_process_group()


def outcome_of(check: Any, *, show: bool) -> str:
    """Why it does not work; empty if it does."""
    try:
        check()
    except Exception as error:
        if show:
            traceback.print_exc()
        return reason_of(error)
    return ""


def reason_of(error: Exception) -> str:
    """The beginning of a message, without the parts that vary."""
    text = " ".join(str(error).split())
    for meaningless in MEANINGLESS:
        text = re.sub(meaningless, "", text)
    text = re.split(r"(?<=[a-z)]{3})\. ?(?=[A-Z])|; | At: |(?<=wrong result): ", text)[0].rstrip(".: ")
    if len(text) > REASON_CHARACTERS:
        text = text[:REASON_CHARACTERS].rsplit(" ", 1)[0] + " ..."
    kind = type(error).__name__
    return text if text and kind in NO_CLASS else f"{kind}: {text}".rstrip(": ")


def renew(backend: str) -> None:
    """After a failure a group is not what it was."""
    from features import without_addresses

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, timeout=TIMEOUT, **without_addresses(backend))
    dist.barrier()  # gloo fails on a rank that is still connecting while another gives the group up again


if __name__ == "__main__":
    main()
