"""Flight records in the format of torch's flight recorder, for its reader ``torchfrtrace``."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import files
from ..communicators.call_codes import call_names
from ..communicators.flight_record import GroupCalls, LoggedCall, RankCalls, is_step

_VERSION = "2.9"
_BACKEND = "gloo"
"""The reader knows only a few names of backends."""
# Names of the reader. It compares the sizes of source and result of others, which a signature does not have.
_NAMES = {
    "allreduce": "all_reduce", "allreduce_many": "allreduce_coalesced", "reduce": "reduce", "broadcast": "broadcast",
    "allgather": "all_gather_v", "reduce_scatter": "reduce_scatter_v", "gather": "gather", "scatter": "scatter",
    "alltoall": "all_to_all", "alltoall_splits": "all_to_all",
}  # fmt: skip


def write(records: Sequence[RankCalls], folder: Path) -> None:
    """Write a file ``rank_N`` for each rank, from the first call of each group that is in the records of all ranks.

    Steps of hierarchical calls are left out. Calls that the reader has no name for are barriers.
    """
    first: dict[int, int] = {}
    for record in records:
        for group in record.groups:
            if group.calls:
                first[group.key] = max(first.get(group.key, 0), group.calls[0].seq)
    for record in records:
        groups = [group for group in record.groups if not is_step(group.name)]
        calls = [(call, group) for group in groups for call in group.calls if call.seq >= first[group.key]]
        calls.sort(key=lambda item: item[0].begin)
        content = {
            "version": _VERSION,
            "entries": [_entry(number, call, group, record.wall_ns) for number, (call, group) in enumerate(calls)],
            "pg_config": {
                str(group.key): {"name": str(group.key), "desc": group.name, "ranks": str(list(group.ranks))}
                for group in groups
            },
        }
        files.write(folder / f"rank_{record.rank}", pickle.dumps(content), make_folder=True)


def _entry(number: int, call: LoggedCall, group: GroupCalls, wall_ns: int) -> dict[str, Any]:
    try:
        collective, _, dtype, _ = call_names(call.code)
    except (IndexError, ValueError):  # a damaged file, or a later version
        collective = dtype = ""
    sizes, dtypes = [list(call.shape)], [dtype]
    has_ended = bool(call.end) and not call.has_failed
    ended = int(call.end) + wall_ns if has_ended else None
    return {
        "record_id": number,
        "process_group": (str(group.key), group.name),
        "collective_seq_id": call.seq,
        "p2p_seq_id": 0,
        "op_id": call.seq,
        "profiling_name": f"{_BACKEND}:{_NAMES.get(collective, 'barrier')}",
        "time_created_ns": int(call.begin) + wall_ns,
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "completed" if has_ended else "started",
        "time_discovered_started_ns": int(call.begin) + wall_ns,
        "time_discovered_completed_ns": ended,
        "retired": has_ended,
        "is_p2p": False,
        "frames": [],
    }
