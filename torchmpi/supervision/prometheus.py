"""Metrics in the text format of Prometheus: in a file that is rewritten, or by HTTP."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from typing_extensions import Self

from .. import files
from ..launch import network
from ..launch.conversations import Conversation, Conversations
from ..log import logger
from ..timeline.observer import JobObserver

FILE_NAME = "torchmpi_rank{}.prom"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PORT = re.compile(r"(?:(.+):)?(\d+)")
_CLIENT_SECONDS = 5.0  # for the whole request and its answer
_MOST_CLIENTS, _MOST_REQUEST_BYTES = 64, 8 << 10
_TURN_SECONDS = 60.0
_END_OF_HEAD = b"\r\n\r\n"
_END_SECONDS = 2.0
"""How long stop() waits for a file system or client that does not answer."""

Read = Callable[[], Mapping[str, Any]]
_Samples = Iterable[tuple[Mapping[str, object], float]]

_CALLS = (
    ("calls", "calls", "torchmpi_calls_total", "Calls that have ended without an error."),
    ("calls", "bytes", "torchmpi_bytes_total", "Bytes of the tensors that the rank has passed to calls."),
    ("calls", "seconds", "torchmpi_seconds_total", "Seconds in calls, with the wait for other ranks."),
    ("calls", "waited", "torchmpi_waited_seconds_total", "Seconds of waiting for other ranks, as far as known."),
    ("calls", "moved", "torchmpi_moved_seconds_total", "The other seconds of the calls whose waits are known."),
    ("calls", "stalls", "torchmpi_call_stalls_total", "Calls that have waited longer than stall_warning_seconds."),
    ("steps", "calls", "torchmpi_step_calls_total", "Steps of hierarchical calls."),
    ("steps", "bytes", "torchmpi_step_bytes_total", "Bytes of the tensors of steps."),
    ("steps", "seconds", "torchmpi_step_seconds_total", "Seconds in steps, included in those of their calls."),
    ("steps", "waited", "torchmpi_step_waited_seconds_total", "Seconds of waiting in steps, as far as known."),
    ("steps", "moved", "torchmpi_step_moved_seconds_total", "The other seconds of the steps whose waits are known."),
    ("messages", "calls", "torchmpi_messages_total", "Messages that have ended without an error."),
    ("messages", "bytes", "torchmpi_message_bytes_total", "Bytes of the tensors of messages."),
    ("messages", "seconds", "torchmpi_message_seconds_total", "Seconds in messages, with the wait for the other rank."),
    ("messages", "waited", "torchmpi_message_waited_seconds_total", "Seconds of waiting for the sender."),
    ("messages", "moved", "torchmpi_message_moved_seconds_total", "The other seconds of messages received."),
    ("messages", "stalls", "torchmpi_message_stalls_total", "Messages that have waited that long."),
)
_UPDATES = (
    ("bytes_sent", "torchmpi_update_sent_bytes_total", "counter", "Bytes sent to parameter servers."),
    ("bytes_received", "torchmpi_update_received_bytes_total", "counter", "Bytes received from parameter servers."),
    ("staleness_last", "torchmpi_update_staleness_last", "gauge", "Staleness of the last send."),
    ("staleness_mean", "torchmpi_update_staleness_mean", "gauge", "Mean staleness of the sends."),
    ("staleness_max", "torchmpi_update_staleness_max", "gauge", "Largest staleness of a send."),
)


def text_of(metrics: Mapping[str, Any]) -> str:
    r"""Return metrics in the text format.

    >>> nothing = dict.fromkeys(("calls", "steps", "messages", "in_flight", "updates"), {})
    >>> text_of({"rank": 1, "host": "a", "stalls": 2, **nothing}).splitlines()[2]
    'torchmpi_stalls_total{rank="1",host="a"} 2'
    """
    of_rank = {"rank": metrics["rank"], "host": metrics["host"]}
    lines: list[str] = []

    def add(name: str, kind: str, about: str, samples: _Samples) -> None:
        found = [f"{name}{_labels({**of_rank, **labels})} {_number(value)}" for labels, value in samples]
        if found:
            lines.extend([f"# HELP {name} {about}", f"# TYPE {name} {kind}", *found])

    for kind, field, name, about in _CALLS:
        add(name, "counter", about, (
            ({"communicator": communicator, "collective": collective}, numbers[field])
            for communicator, collectives in metrics[kind].items()
            for collective, numbers in collectives.items()
        ))  # fmt: skip
    in_flight = (({"communicator": name}, number) for name, number in metrics["in_flight"].items())
    add("torchmpi_calls_in_flight", "gauge", "Calls that have begun or are queued, and have not ended.", in_flight)
    about = "Calls that have waited longer than stall_warning_seconds."
    add("torchmpi_stalls_total", "counter", about, [({}, metrics["stalls"])])
    for field, name, kind, about in _UPDATES:
        updates = metrics["updates"].items()
        add(name, kind, about, (({"update": update}, found[field]) for update, found in updates))
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, object]) -> str:
    escaped = {
        name: str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return str(value) if math.isfinite(value) else f"{'+' if value > 0 else '-'}Inf"


def exporter(target: str, seconds: float, local_rank: int, rank: int, read: Read) -> Exporter:
    """Return the export to a folder, or the server at ``PORT`` or ``ADDRESS:PORT``, to which the local rank is added.

    Raises:
        OSError: The folder cannot be made, or the port is in use.
        OverflowError: The port is greater than 65535.
    """
    port = _PORT.fullmatch(target)
    if port is not None:
        address = port[1] or network.loopback()
        return ServerExporter(rank, read, address.strip("[]"), int(port[2]) + local_rank)
    return FileExporter(rank, read, Path(target).absolute() / FILE_NAME.format(rank), seconds)  # for os.chdir()


class Exporter(JobObserver):
    """A thread that exports metrics. Errors are logged once, and change nothing else."""

    def __init__(self, rank: int, read: Read) -> None:
        self._rank, self._read = rank, read
        self._has_warned = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmpi metrics", daemon=True)

    @abstractmethod
    def _run(self) -> None: ...

    @abstractmethod
    def _wake(self) -> None:
        """End the wait of the thread."""

    def attach(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return super().attach()

    def _end(self) -> None:
        """End the thread, but do not wait for a client or file system that does not answer."""
        self._stopped.set()
        self._wake()
        self._thread.join(_END_SECONDS)

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned and not self._stopped.is_set():
            self._has_warned = True
            logger.warning(
                f"rank {self._rank}: metrics could not be exported (later failures are not reported): {error}"
            )


class FileExporter(Exporter):
    """Rewrites a file; a reader sees the old or the new text."""

    def __init__(self, rank: int, read: Read, path: Path, seconds: float) -> None:
        super().__init__(rank, read)
        self._path, self._seconds = path, seconds
        files.make_folder(path.parent)
        files.remove_unfinished(path.parent, path.name)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                files.write(self._path, text_of(self._read()))
            except Exception as error:
                self._warn(error)
            self._stopped.wait(self._seconds)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _wake(self) -> None:
        pass  # waits for `_stopped`


class ServerExporter(Exporter):
    """Serves ``/metrics`` to many clients at once; one that sends nothing, or slowly, delays no other."""

    def __init__(self, rank: int, read: Read, address: str, port: int) -> None:
        super().__init__(rank, read)
        family = network.family(address)
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((address, port), family=family, backlog=128, dualstack_ipv6=is_dual)

    def _run(self) -> None:
        serving = Conversations[None](
            {self._listener: lambda sock: self._answer()}, limit_seconds=_CLIENT_SECONDS, most=_MOST_CLIENTS
        )
        with self._listener, serving as conversations:
            while not self._stopped.is_set():
                for ended in conversations.turn(_TURN_SECONDS):
                    ended.sock.close()

    def _answer(self) -> Conversation[None]:
        request = b""
        while b"\n\r\n" not in request and b"\n\n" not in request:
            if len(request) > _MOST_REQUEST_BYTES:
                yield _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return
            request += yield _MOST_REQUEST_BYTES
        method, target, *_ = [*request.split(b"\r\n")[0].split(b" "), b"", b""]
        if method not in (b"GET", b"HEAD"):
            yield _response(HTTPStatus.NOT_IMPLEMENTED)
        elif target.partition(b"?")[0] != b"/metrics":
            yield _response(HTTPStatus.NOT_FOUND, b"Use /metrics\n")
        else:
            try:
                response = _response(HTTPStatus.OK, text_of(self._read()).encode())
            except Exception as error:
                self._warn(error)
                response = _response(HTTPStatus.INTERNAL_SERVER_ERROR)
            yield response if method == b"GET" else response.partition(_END_OF_HEAD)[0] + _END_OF_HEAD

    def _wake(self) -> None:
        # Also if a forked process still has the socket, nothing listens any more, and the port can be bound again.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)


def _response(status: HTTPStatus, body: bytes = b"") -> bytes:
    fields = (f"Content-Type: {CONTENT_TYPE}", f"Content-Length: {len(body)}", "Connection: close")
    head = "\r\n".join((f"HTTP/1.1 {status.value} {status.phrase}", *fields))
    return head.encode() + _END_OF_HEAD + body
