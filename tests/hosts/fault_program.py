"""A rank that calls collectives until a fault ends it: ``fault_program.py FOLDER [fault of the last rank]``.

The fault `deadlock` is one of the ranks 1 and 2, which use two groups in different orders.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torchmpi as mpi

folder, fault = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]
if "TORCHELASTIC_RUN_ID" in os.environ:
    dist.init_process_group("torchmpi")
else:
    mpi.start()
tensor, short, rows = torch.ones(100_000), torch.ones(256), torch.ones(mpi.size(), 256)
groups = [mpi.group([1, 2]), mpi.group([2, 1])] if fault == "deadlock" else []
number = 0
while True:
    mpi.allreduce(tensor, op="avg")
    # In the messages of the comparison, from the second time on by the fast path.
    mpi.allgather(short, rows.view(-1))
    mpi.reduce_scatter(rows, out=short.view(1, 256))
    mpi.scatter(rows if mpi.rank() == 0 else None, out=short.view(1, 256))
    mpi.broadcast(short)
    number += 1
    if number == 5:
        partial = folder / f"partial.{mpi.rank()}"
        partial.write_text(str(os.getpid()))
        partial.rename(folder / f"ready.{mpi.rank()}")
    if number == 30 and fault == "deadlock":
        if mpi.rank() in (1, 2):
            first, second = groups if mpi.rank() == 1 else groups[::-1]
            mpi.allreduce(torch.ones(3), comm=first)
            mpi.allreduce(torch.ones(3), comm=second)
        time.sleep(3600)
    if number == 30 and mpi.rank() == mpi.size() - 1:
        if fault == "exit":
            ctypes.CDLL(None)._exit(0)  # torchmpi replaces os._exit
        if fault == "raise":
            raise ValueError("bad sample 17")
        if fault == "sleep":
            time.sleep(3600)
    time.sleep(0.02)
