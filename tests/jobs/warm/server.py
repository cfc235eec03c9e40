"""Load torch and torchmpi once, and fork into the ranks of many jobs: the imports take longer than most tests.

    python server.py SOCKET [MODULE...]

The modules are those that many of the ranks import, if they are installed.
SOCKET.python is a program in place of Python, which the ranks have as sys.executable: what they start is warm too. At
SOCKET.torch there is a process that has only imported torch, for ranks with other variables that torchmpi reads at
import: they load its entry point as ``import torch`` does.

For each connection (see rank.py) the server forks a process with the files, the environment, the folder and the cores
of the client, which then runs the program as Python would. The server ends, with all ranks, at the end of its input.

A rank ends as Python does, except that the destructors of the modules and libraries which the server has loaded do not
run: they write to most of the memory that the rank shares with the server, and take longer than everything else in a
short job. For the same reason the end of the interpreter is left out: it touches two thirds of the pages of a rank that
does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import marshal
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import types
import weakref
from pathlib import Path
from typing import Any, NoReturn

import rank

atexit.register(lambda: leave())  # the last function that a rank calls, after those of the modules below

import numpy.random  # noqa: E402

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_autoload = os.environ.get(_AUTOLOAD)
os.environ[_AUTOLOAD] = "0"
import torch._dynamo  # noqa: E402  # by the first optimizer
import torch.distributed  # noqa: E402

of_server: dict[str, types.ModuleType] = {}
"""The modules that the server has loaded."""
statuses: list[int] = []
"""With which status Python would end, where that is known."""

os.environ.pop(_AUTOLOAD) if _autoload is None else os.environ.update({_AUTOLOAD: _autoload})

# What a rank imports in start() and for training. Neither mpi4py nor numba, whose absence some jobs simulate.
MODULES = (
    "backends.gloo", "backends.hierarchical.host_collectives", "backends.p2p", "distributed", "engine",
    "parameterserver", "session.runtime", "shared_memory.compiler.native_code", "shared_memory.kernels.reduction_ir",
)  # fmt: skip
_HIGH = 500  # greater descriptors are unused
_PR_SET_PDEATHSIG = 1
_MOST_BYTES, _MOST_FILES = 1 << 20, 200


class Server:
    """The connections of clients, and their ranks."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"{address}.new")
        self.listener.listen(100)
        Path(f"{address}.new").rename(address)  # whoever finds it can connect
        self.connections: dict[int, socket.socket] = {}
        self.ranks: dict[int, int] = {}
        """The connection of each process."""
        self.ended, wakeup = os.pipe()
        """Readable when a rank has ended."""
        for file in (self.ended, wakeup):
            os.set_blocking(file, False)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> tuple[Any, list[int]] | None:
        """Serve clients; return the request and its files in each rank, and None in the server at the end."""
        while True:
            watched = select.poll()
            for file in (0, self.ended, self.listener.fileno(), *self.connections):
                watched.register(file, select.POLLIN)
            for file, _ in watched.poll():
                if file == 0:
                    return self.end()
                if file == self.ended:
                    os.read(file, 1000)
                    self.reap()
                if file == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    self.connections[connection.fileno()] = connection
                elif file in self.connections and (request := self.receive(file)) is not None:
                    return request

    def receive(self, file: int) -> tuple[Any, list[int]] | None:
        """Fork a requested rank, or kill the rank of a client that has ended."""
        connection, message = self.connections[file], b""
        with contextlib.suppress(ConnectionError):
            message, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not message:
            for process in [process for process, its in self.ranks.items() if its == file]:
                kill(process)
                self.ranks[process] = -1
            self.connections.pop(file).close()
            return None
        process = os.fork()
        if process == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self.listener, *self.connections.values()):
                each.detach()  # the descriptors will be replaced
            return marshal.loads(message), files
        for each in files:
            os.close(each)
        self.ranks[process] = file
        reply(connection, process)
        return None

    def reap(self) -> None:
        """Send the statuses of ended ranks."""
        while self.ranks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            connection = self.connections.pop(self.ranks.pop(process, -1), None)
            if connection is not None:
                reply(connection, status)
                connection.close()

    def end(self) -> None:
        for process in self.ranks:
            kill(process)


def reply(connection: socket.socket, number: int) -> None:
    """Send a number to a client, unless it has ended; its connection is then readable."""
    with contextlib.suppress(ConnectionError):
        connection.send(str(number).encode())


def kill(process: int) -> None:
    """Kill a rank and its child processes, or only the rank if it has no process group yet."""
    for send, target in ((os.killpg, process), (os.kill, process)):
        try:
            send(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
        return


def take_over(request: Any, files: list[int]) -> list[str]:
    """Adopt environment, folder, cores and files of the client; return the arguments of Python."""
    arguments, environment, client, (folder, umask, cores), numbers = request
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    os.closerange(0, _HIGH)
    for number, file in zip(numbers, high, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environb.clear()
    os.environb.update(environment)
    if environment.get(b"TORCHMPI_RUN_PID") == b"%d" % client:  # the rank of `torchmpi run` is this process
        os.environ["TORCHMPI_RUN_PID"] = str(os.getpid())
    if b"PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    os.chdir(folder)
    os.umask(umask)
    os.sched_setaffinity(0, cores)
    if b"OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment[b"OMP_NUM_THREADS"]))
    torch.seed()  # as after an import, and different on each rank
    numpy.random.seed()
    libc = ctypes.CDLL(None)
    for function in (libc._exit, libc.fcloseall):  # the former gets the status, the latter ignores it; last comes first
        libc.on_exit(function, None)
    return arguments


def keep_modules() -> None:
    """Keep what the server has loaded until the end of each rank: here, as counting references writes to memory."""
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False
    of_server.update((name, sys.modules[name]) for name in sys.modules.keys() - {"builtins", "sys"})
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(of_server))


def leave() -> None:
    """End the process after the destructors of the program; if only Python can do so, let it."""
    MPI = sys.modules.get("mpi4py.MPI")
    is_left = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()  # which mpi4py does in Py_AtExit()
    if is_left or not statuses:
        for name in of_server:
            sys.modules.pop(name, None)
        return
    while len(sys.modules) > len(of_server) + 2:
        sys.modules.popitem()  # the newest
    sys.modules.pop("__main__", None)
    gc.collect()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return  # of which Python says something
    ctypes.PyDLL(None).exit(statuses[0])  # with the functions of libraries that the program has loaded


def run(arguments: list[str]) -> NoReturn:
    """Run a script, ``-c`` or ``-m``, after ``-u`` or not, as Python does."""
    first, *rest = arguments
    if first == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # nobody has replaced them
        arguments = rest
        first, *rest = arguments
    try:
        if first == "-m":
            sys.argv, sys.path[0] = rest, os.getcwd()
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # as Python itself does
        else:
            main = types.ModuleType("__main__")
            if first == "-c":
                code, sys.argv, sys.path[0] = compile(rest[0], "<string>", "exec"), ["-c", *rest[1:]], ""
            else:
                main.__file__ = os.path.abspath(first)
                with open(first, "rb") as script:
                    code = compile(script.read(), main.__file__, "exec")
                sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(first))
            sys.modules["__main__"] = main
            exec(code, main.__dict__)
    except SystemExit as end:
        statuses.append(0 if end.code is None else end.code if isinstance(end.code, int) else 1)
        raise
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # after which Python ends by a signal
            statuses.append(1)
        own = error.__traceback__
        error.with_traceback(own and own.tb_next)  # without the frame of this function
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *details: None
        raise  # Python ends with the status for this error
    statuses.append(0)
    sys.exit(0)


def main() -> None:
    (address, *modules), own = sys.argv[1:], sys.executable
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    has_only_torch = os.fork() != 0
    if has_only_torch:
        address += rank.ONLY_TORCH
    else:
        load_entry_points()
        for name in MODULES:
            importlib.import_module(f"torchmpi.{name}")
        Path(f"{address}.variables").write_bytes(marshal.dumps(rank.read_at_import()))
        python = Path(f"{address}.python")
        python.write_text(f'#!/bin/sh\nexec {shlex.join([own, "-I", "-S", rank.__file__, address])} "$@"\n')
        python.chmod(0o755)
    keep_modules()
    gc.collect()
    gc.freeze()
    request = Server(address).serve()
    if request is None:
        os.wait() if has_only_torch else None
        os._exit(0)  # without the destructors of torch, which take longer than everything else
    sys.executable = f"{sys.argv[1]}.python"
    arguments = take_over(*request)
    if has_only_torch:
        load_entry_points()
    run(arguments)


def load_entry_points() -> None:
    """Do what ``import torch`` does at its end."""
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()


if __name__ == "__main__":
    main()
