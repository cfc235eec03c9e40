"""The page of ``torchmpi top --web``: on the loopback interface, at an address that only its user knows."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from ...errors import ArgumentError
from .job_view import page_of
from .watched_job import LookClock, WatchedJob

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_IDLE_SECONDS = 15.0
"""Without a request for so long nobody looks, and the ranks are not asked."""
_LOOPBACK = "127.0.0.1"


def page(jobs: Sequence[dict[str, Any]] | None) -> str:
    """Return the page: with data, or one that fetches them from the server."""
    text = resources.files(__package__ or "").joinpath("page.html").read_text()
    data = json.dumps(jobs, separators=(",", ":"), allow_nan=False)
    # The end of a script inside a text would end the element.
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    before, mark, after = text.partition('id="data">null<')
    return before + mark.replace("null", "", 1)[:-1] + safe + "<" + after


class PageServer(ThreadingHTTPServer):
    """Serves the page and its data below a random address.

    Args:
        port: The port; 0 for any that is free.
        read: Returns the data, as JSON.
    """

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, port: int, read: Callable[[], bytes]) -> None:
        self.token = secrets.token_urlsafe(24)
        self.read = read
        self.last_request = time.monotonic()
        super().__init__((_LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{_LOOPBACK}:{self.server_address[1]}/{self.token}/"

    def answer(self, path: str, host: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, type and content of the answer to a request."""
        token, slash, name = path.removeprefix("/").partition("/")
        # A name of another site may lead here (DNS rebinding); its pages must not read the answer.
        is_here = host in (f"{_LOOPBACK}:{self.server_address[1]}", f"localhost:{self.server_address[1]}")
        if not (is_here and slash and hmac.compare_digest(token.encode(), self.token.encode())):
            return HTTPStatus.NOT_FOUND, "text/plain", b"Use the whole address that torchmpi top has printed.\n"
        self.last_request = time.monotonic()
        if name == "":
            return HTTPStatus.OK, "text/html; charset=utf-8", page(None).encode()
        if name == "data":
            return HTTPStatus.OK, "application/json", self.read()
        return HTTPStatus.NOT_FOUND, "text/plain", b"There is the page, and data.\n"


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0
    server_version, sys_version = "torchmpi", ""
    server: PageServer

    def do_GET(self) -> None:
        """Answer."""
        status, kind, body = self.server.answer(self.path, self.headers.get("Host", ""))
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing: a line would have the token."""


def serve(jobs: list[WatchedJob], port: int | None, seconds: float | None) -> int:
    """Serve the page until Ctrl-C or the end of the jobs; return the exit status."""
    lock, current, clock = threading.Lock(), [list(jobs)], LookClock(seconds)
    seen: list[bytes] = []  # at the last look, made for the first who asks

    def read() -> bytes:
        with lock:
            if not seen:
                seen.append(json.dumps([page_of(job) for job in current[0]], allow_nan=False).encode())
            return seen[0]

    try:
        server = PageServer(port or 0, read)
    except (OSError, OverflowError) as error:
        raise ArgumentError(f"--port {port}: {error}. Name another one, or leave it out.") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"{server.address}\nOnly this host reaches it. From elsewhere: ssh -L {server.server_address[1]}:{_LOOPBACK}:"
          f"{server.server_address[1]} HOST, and the same address there. Ctrl-C ends it.", flush=True)  # fmt: skip
    try:
        while current[0]:
            if time.monotonic() - server.last_request < _IDLE_SECONDS:
                with lock:
                    current[0] = [job for job in current[0] if job.read()]
                    seen.clear()
            time.sleep(clock.pause())
        time.sleep(2.0)  # so that the page is told of the end
        print("The job has ended.")
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()
    return 0
