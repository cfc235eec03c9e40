"""The peer of ``torchmpi bench ps``: a server with ``torch.distributed.rpc``, in a process beside each rank."""

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

from ...errors import JobError
from ...session import affinity, runtime
from .jobs import PACKAGE_PARENT
from .ps_patience import Patient

FORMS = ("rpc", "rpc script", "rpc one call")
"""Ways to add and receive; ps_rpc_forms.py says which."""
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from torchmpi.cli.benching import ps_rpc_child; ps_rpc_child.main(int(sys.argv[2]))"
)
_LEAVE_SECONDS = 20.0


class RPC:
    """The processes of all ranks, stopped while something else is measured. Every method but `run` is collective."""

    def __init__(self, comm: Patient, resources: ExitStack) -> None:
        self._comm, self._resources = comm, resources
        self._is_awake = True
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(PACKAGE_PARENT), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        resources.callback(self._end)
        self.why_not: dict[str, str] = self._start()
        """Of the forms that cannot be had."""
        self.forms = tuple(form for form in FORMS if form not in self.why_not)
        if self.forms:
            resources.callback(self._leave)

    def _start(self) -> dict[str, str]:
        reason: str | None = self._ask("hello")["why_not"]
        forms: dict[str, str] = {}
        if not any(self._comm.allgather(reason)):
            here = runtime.current().host_name
            masks = [mask for host, mask in self._comm.allgather((here, affinity.current())) if host == here]
            answer = self._asked(
                "start", rank=self._comm.rank, size=self._comm.size, address=self._address(),
                cores=sorted(set().union(*masks)), threads=torch.get_num_threads(),
            )  # fmt: skip
            reason, forms = answer.get("error"), answer.get("why_not", {})
        reasons = [text for text in self._comm.allgather(reason) if text]
        return dict.fromkeys(FORMS, reasons[0]) if reasons else forms

    def _address(self) -> str:
        """Where the processes find each other: a file, or between hosts a port."""
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

    def make(self, numel: int) -> None:
        """Values on the server, zero, and a gradient for each client."""
        self.wake()
        if self._comm.rank == 0:
            self._ask("make", numel=numel)
        self._comm.Barrier()
        self._ask("find", numel=numel)
        self._comm.Barrier()

    def touch(self, value: float = 0.0) -> None:
        """Write the gradients."""
        self.wake()
        self._ask("touch", value=value)

    def run(self, form: str, calls: int) -> float:
        """Add and receive on this rank; the seconds that took."""
        return float(self._ask("run", form=form, calls=calls)["seconds"])

    def check(self, form: str, before: float) -> tuple[float, str | None]:
        """Every client adds its rank + 1 once. The values after it, and what is wrong with them."""
        self.touch(self._comm.rank + 1)
        self._comm.Barrier()
        self.run(form, 1)
        self._comm.Barrier()
        found = self._ask("look")
        right = before + self._comm.size * (self._comm.size + 1) / 2
        is_right = all(self._comm.allgather(found["low"] == found["high"] == right))
        return right, None if is_right else f"wrong result: {found['low']:g} to {found['high']:g}, not {right:g}"

    def idle(self, seconds: float) -> float:
        """The share of a core that this rank's process takes while it has nothing to do."""
        self.wake()
        self._comm.Barrier()
        return float(self._ask("idle", seconds=seconds)["share"])

    def rest(self) -> None:
        """Stop the processes, once all have done what they were asked for."""
        if self._is_awake:
            self._comm.Barrier()
            self._process.send_signal(signal.SIGSTOP)
            self._is_awake = False

    def wake(self) -> None:
        """Let them go on."""
        if not self._is_awake:
            self._process.send_signal(signal.SIGCONT)
            self._is_awake = True

    def _ask(self, command: str, **values: Any) -> dict[str, Any]:
        answer = self._asked(command, **values)
        if "error" in answer:
            raise JobError(f"rank {self._comm.rank}: torch.distributed.rpc: {answer['error']}")
        return answer

    def _asked(self, command: str, **values: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps({"do": command, **values}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise JobError(f"rank {self._comm.rank}: the process with torch.distributed.rpc ended early.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _leave(self) -> None:
        self.wake()
        self._ask("drop")
        self._comm.Barrier()
        self._ask("leave")
        self._comm.Barrier()  # the file by which they met is there until all have left

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
