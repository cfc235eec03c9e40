"""Run every check on the two ranks of this job and save the results: ``driver.py BACKEND FOLDER [PATTERN]``.

The ranks exchange the results through a file in the folder, which must be empty, so that the exchange does not depend
on the checked functions. With a pattern only the checks run whose `section: name` matches, and errors are printed with
their traceback.
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
    r"\[(rank\d+\]:\[)?[^]]*[\w.]+:\d+\]:? *",  # position in PyTorch's source, and time
    r"(RuntimeError: )?Got the following error when running the callback: ",
)
NO_CLASS = ("Wrong", "AssertionError")


def main() -> None:
    backend, folder, pattern = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import calls  # noqa: F401, these modules register their checks
    import groups  # noqa: F401
    import sharding  # noqa: F401
    import training  # noqa: F401
    import versions  # noqa: F401
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
            # Checks without an outcome in the file have ended the process.
            (folder / "rows.json").write_text(json.dumps(rows))
            print(f"{time.monotonic() - begin:6.2f} s  {feature.name}: {rows[number][2] or 'yes'}", flush=True)
        if (feature.renews or rows[number][2]) and feature.turn == 0:
            renew(backend)
    dist.destroy_process_group()


def outcome_of(check: Any, *, show: bool) -> str:
    """Return the reason why a check fails; empty if it succeeds."""
    try:
        check()
    except Exception as error:
        if show:
            traceback.print_exc()
        return reason_of(error)
    return ""


def reason_of(error: Exception) -> str:
    """Return the beginning of a message, without the variable parts."""
    text = " ".join(str(error).split())
    for meaningless in MEANINGLESS:
        text = re.sub(meaningless, "", text)
    text = re.split(r"(?<=[a-z)]{3})\. ?(?=[A-Z])|; | At: |(?<=wrong result): ", text)[0].rstrip(".: ")
    if len(text) > REASON_CHARACTERS:
        text = text[:REASON_CHARACTERS].rsplit(" ", 1)[0] + " ..."
    kind = type(error).__name__
    return text if text and kind in NO_CLASS else f"{kind}: {text}".rstrip(": ")


def renew(backend: str) -> None:
    """Replace the default group, which may be unusable after a failure."""
    from features import without_addresses

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, timeout=TIMEOUT, **without_addresses(backend))
    dist.barrier()  # gloo fails on a rank that is still connecting while another destroys the group


if __name__ == "__main__":
    main()
