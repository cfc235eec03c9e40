"""The process that runs ``torch.distributed.rpc`` for a rank, which tells it by lines of JSON what to do.

It is a process of its own because an RPC agent keeps a core busy while nothing is to be done: the rank can stop it, and
measure something else. There is no MPI in it. Process 0 is the server; every process, that one too, is a client.
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


class Child:
    """The commands, by name: each takes what the line says, and returns what is answered."""

    def __init__(self) -> None:
        self._forms: Any = None
        self._gradient = torch.empty(0)

    def hello(self) -> Answer:
        """Whether RPC is there at all."""
        is_there = torch.distributed.is_available() and torch.distributed.rpc.is_available()
        return {"why_not": None if is_there else "this torch was built without torch.distributed.rpc"}

    def start(self, *, rank: int, size: int, address: str, cores: list[int], threads: int) -> Answer:
        """Join the others."""
        from torch.distributed import rpc

        from .ps_rpc_forms import Forms

        # It does not have to share one core with its busy agent, as it would with the rank's.
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        self._forms = Forms()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=1, init_method=address, rpc_timeout=_TIMEOUT_SECONDS
        )
        rpc.init_rpc(str(rank), rank=rank, world_size=size, rpc_backend_options=options)
        return {"forms": list(self._forms.calls), "why_not": self._forms.why_not}

    def make(self, *, numel: int) -> Answer:
        """On the server: values."""
        self._forms.make(numel)
        return {}

    def find(self, *, numel: int) -> Answer:
        """On every client, then: the way to them, and a gradient."""
        self._forms.find()
        self._gradient = torch.zeros(numel)
        return {}

    def touch(self, *, value: float) -> Answer:
        """Write the gradient."""
        self._gradient.fill_(value)
        return {}

    def run(self, *, form: str, calls: int) -> Answer:
        """Add and receive so many times; the seconds that took."""
        call, gradient = self._forms.calls[form], self._gradient
        begin = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            call(gradient)
        return {"seconds": time.perf_counter() - begin}

    def look(self) -> Answer:
        """The smallest and the largest of the server's values."""
        from .ps_rpc_forms import SERVER, get

        low, high = torch.aminmax(torch.distributed.rpc.rpc_sync(SERVER, get))
        return {"low": low.item(), "high": high.item()}

    def idle(self, *, seconds: float) -> Answer:
        """Do nothing for some time; the share of a core that this takes."""
        begin, begin_cpu = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return {"share": (time.process_time() - begin_cpu) / (time.monotonic() - begin)}

    def drop(self) -> Answer:
        """Give the values back, on all processes before anyone leaves."""
        self._forms.drop()
        return {}

    def leave(self) -> Answer:
        """Together with the others."""
        torch.distributed.rpc.shutdown()
        return {}


def main(parent: int) -> None:
    """Serve until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is stopped
    if os.getppid() != parent:
        return
    warnings.simplefilter("ignore")  # TorchScript and RPC announce their age
    child = Child()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not come between the answers
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        method: Callable[..., Answer] = getattr(child, command.pop("do"))
        try:
            answer = method(**command)
        except Exception as error:  # the rank decides what it means
            answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
