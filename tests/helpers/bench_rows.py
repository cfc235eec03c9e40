"""Rows of benchmark reports, and the cells of the tables made of them."""

from __future__ import annotations

FACTS = {
    "ranks": 2, "hosts": 1, "mpi": "Some MPI 1.0", "cores": ["0", "1"], "ranks_per_core": 1.0, "threads_per_rank": 1,
    "binding": "bound", "processor": "Abacus, 2 CPUs", "versions": {"torch": "2.0"}, "settings": {},
}  # fmt: skip


def row(contestant: str, median: float | None, *, num_bytes: int = 4096, width: float = 0.1, **more):
    head = {
        "ranks": 2, "verb": "allreduce", "dtype": "float32", "mode": "sync", "bytes": num_bytes,
        "payload_bytes": num_bytes, "model_steps": 2, "model_bytes": num_bytes, "contestant": contestant,
    }  # fmt: skip
    return head | figures(median, width) | more


def figures(median: float | None, width: float = 0.1):
    if median is None:
        return {"why_not": "not installed"}
    low, high = median * (1 - width), median * (1 + width)
    return {"median_us": median, "low_us": low, "high_us": high, "num_batches": 9, "calls_per_batch": 3}


def cells_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]
