"""A parameter server with ``torch.distributed.rpc``, in a process beside each rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from sleeping_comm import SleepingComm

from torchmpi.errors import JobError
from torchmpi.launch import affinity
from torchmpi.session import runtime

FORMS = ("rpc", "rpc script", "rpc one call")
"""The forms of calls that add and receive; see rpc_functions.py."""
# For ``python -c``: imported by name, not run as a script, so that RPC finds its functions in all processes.
_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); import rpc_process; rpc_process.main(int(sys.argv[2]))"
_LEAVE_SECONDS = 20.0


class RPCPeer:
    """The RPC processes of all ranks, stopped while others are timed. All methods but `run` are collective."""

    def __init__(self, comm: SleepingComm, resources: ExitStack) -> None:
        self._comm, self._resources = comm, resources
        self._is_running = True
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(Path(__file__).parent), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        resources.callback(self._end)
        self.why_not: dict[str, str] = self._start()
        """The reasons why some forms are not available."""
        self.forms = tuple(form for form in FORMS if form not in self.why_not)
        if self.forms:
            resources.callback(self._leave)

    def _start(self) -> dict[str, str]:
        reason: str | None = self._request("hello")["why_not"]
        forms: dict[str, str] = {}
        if not any(self._comm.allgather(reason)):
            here = runtime.current().host_name
            masks = [mask for host, mask in self._comm.allgather((here, affinity.current())) if host == here]
            answer = self._exchange(
                "start", rank=self._comm.rank, size=self._comm.size, address=self._address(),
                cores=sorted(set().union(*masks)), threads=torch.get_num_threads(),
            )  # fmt: skip
            reason, forms = answer.get("error"), answer.get("why_not", {})
        reasons = [text for text in self._comm.allgather(reason) if text]
        return dict.fromkeys(FORMS, reasons[0]) if reasons else forms

    def _address(self) -> str:
        """Return the address for the rendezvous of the processes: a file, or between hosts a port."""
        found = ""
        if runtime.current().num_hosts == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            if self._comm.rank == 0:
                folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="torchmpi-bench-"))
                found = (Path(folder) / "rpc").as_uri()
        elif self._comm.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                found = f"tcp://{socket.gethostname()}:{probe.getsockname()[1]}"
        return str(self._comm.allgather(found)[0])

    def make(self, shape: tuple[int, int], index: list[int]) -> None:
        """Make values, all zero, on the server, and a gradient of some rows for each client; without any: of all."""
        self.wake()
        if self._comm.rank == 0:
            self._request("make", shape=shape)
        self._comm.Barrier()
        self._request("find", shape=shape, index=index)
        self._comm.Barrier()

    def touch(self, value: float = 0.0) -> None:
        """Write the gradients."""
        self.wake()
        self._request("touch", value=value)

    def run(self, form: str, calls: int) -> float:
        """Add and receive on this rank, and return the duration in seconds."""
        return float(self._request("run", form=form, calls=calls)["seconds"])

    def check(self, form: str, before: float) -> tuple[float, str | None]:
        """Let every client add its rank + 1 once. Return the expected values, and what is wrong with them."""
        self.touch(self._comm.rank + 1)
        self._comm.Barrier()
        self.run(form, 1)
        self._comm.Barrier()
        found = self._request("look")
        right = before + self._comm.size * (self._comm.size + 1) / 2
        is_right = all(self._comm.allgather(found["low"] == found["high"] == right))
        return right, None if is_right else f"wrong result: {found['low']:g} to {found['high']:g}, not {right:g}"

    def idle(self, seconds: float) -> float:
        """Return the share of a core that the process of this rank uses while idle."""
        self.wake()
        self._comm.Barrier()
        return float(self._request("idle", seconds=seconds)["share"])

    def rest(self) -> None:
        """Stop the processes after all requests are done."""
        if self._is_running:
            self._comm.Barrier()
            self._process.send_signal(signal.SIGSTOP)
            self._is_running = False

    def wake(self) -> None:
        """Continue the processes."""
        if not self._is_running:
            self._process.send_signal(signal.SIGCONT)
            self._is_running = True

    def _request(self, command: str, **values: Any) -> dict[str, Any]:
        answer = self._exchange(command, **values)
        if "error" in answer:
            raise JobError(f"rank {self._comm.rank}: torch.distributed.rpc: {answer['error']}")
        return answer

    def _exchange(self, command: str, **values: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # readline() then returns nothing
            self._process.stdin.write(json.dumps({"do": command, **values}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise JobError(f"rank {self._comm.rank}: the process with torch.distributed.rpc ended early.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _leave(self) -> None:
        self.wake()
        self._request("drop")
        self._comm.Barrier()
        self._request("leave")
        self._comm.Barrier()  # the rendezvous file must exist until all processes have left

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
