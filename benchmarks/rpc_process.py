"""The process that runs ``torch.distributed.rpc`` for a rank, which sends it commands as lines of JSON.

It is a separate process because an idle RPC agent keeps a core busy: the rank can stop the process while it measures
other contestants. The process does not use MPI. Process 0 is the server; all processes are clients.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

_PR_SET_PDEATHSIG = 1
_TIMEOUT_SECONDS = 600.0
Answer = dict[str, Any]


class Commands:
    """The commands by name. Each takes the fields of the request, and returns those of the answer."""

    def __init__(self) -> None:
        self._forms: Any = None
        self._gradient = torch.empty(0)

    def hello(self) -> Answer:
        """Return whether RPC is available."""
        is_there = torch.distributed.is_available() and torch.distributed.rpc.is_available()
        return {"why_not": None if is_there else "this torch was built without torch.distributed.rpc"}

    def start(self, *, rank: int, size: int, address: str, cores: list[int], threads: int) -> Answer:
        """Initialize RPC with the other processes."""
        from rpc_functions import Forms
        from torch.distributed import rpc

        # All cores of the host: on those of the rank alone it might share a single core with its busy agent.
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        self._forms = Forms()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=1, init_method=address, rpc_timeout=_TIMEOUT_SECONDS
        )
        rpc.init_rpc(str(rank), rank=rank, world_size=size, rpc_backend_options=options)
        return {"forms": list(self._forms.calls), "why_not": self._forms.why_not}

    def make(self, *, shape: list[int]) -> Answer:
        """Make the values, on the server."""
        self._forms.make(shape)
        return {}

    def find(self, *, shape: list[int], index: list[int]) -> Answer:
        """Get a reference to the values, and make a gradient of some rows, on every client; without any: of all."""
        self._forms.find(index)
        self._gradient = torch.zeros([len(index) or shape[0], shape[1]])
        return {}

    def touch(self, *, value: float) -> Answer:
        """Write the gradient."""
        self._gradient.fill_(value)
        return {}

    def run(self, *, form: str, calls: int) -> Answer:
        """Add and receive a number of times, and return the duration in seconds."""
        call, gradient = self._forms.calls[form], self._gradient
        begin = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            call(gradient)
        return {"seconds": time.perf_counter() - begin}

    def look(self) -> Answer:
        """Return the smallest and the largest of the values on the server."""
        low, high = torch.aminmax(self._forms.get())
        return {"low": low.item(), "high": high.item()}

    def idle(self, *, seconds: float) -> Answer:
        """Sleep, and return the share of a core that the process used meanwhile."""
        begin, begin_cpu = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return {"share": (time.process_time() - begin_cpu) / (time.monotonic() - begin)}

    def drop(self) -> Answer:
        """Release the values, on all processes before any of them leaves."""
        self._forms.drop()
        return {}

    def leave(self) -> Answer:
        """Shut RPC down. Collective."""
        torch.distributed.rpc.shutdown()
        return {}


def main(parent: int) -> None:
    """Answer requests until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is stopped
    if os.getppid() != parent:
        return
    warnings.simplefilter("ignore")  # deprecation of TorchScript and RPC
    commands = Commands()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the answers
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        method: Callable[..., Answer] = getattr(commands, command.pop("do"))
        try:
            answer = method(**command)
        except Exception as error:  # the rank handles the error
            answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
