"""Run in place of Python by a launcher: request a rank from the server, and end with the status of that rank.

    python -I -S rank.py SOCKET script.py ...

The rank has the same file descriptors; signals are forwarded to it. What the server cannot do, options of Python and
variables that differ from its own and are read at import, is left to Python itself.

There are thousands of ranks: signal and socket would take twice as long to import as Python to start.
"""

import _signal
import _socket
import marshal
import os
import sys

FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT", "SIGABRT")
OF_TORCHMPI = ("TORCHMPI_AS_", "TORCHMPI_KERNEL_", "TORCHMPI_LOG", "TORCH_DEVICE_BACKEND_AUTOLOAD")
AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", *OF_TORCHMPI, "LD_PRELOAD")
# The server applies the first two; torchrun sets the last one, for NCCL.
APPLIED = ("PYTHONFAULTHANDLER", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
ONLY_TORCH = ".torch"


def read_at_import() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ if name.startswith(AT_IMPORT) and name not in APPLIED}


def main() -> None:
    address, *arguments = sys.argv[1:]
    with open(f"{address}.variables", "rb") as file:
        of_server, own = marshal.load(file), read_at_import()
    different = {name for name, _ in of_server.items() ^ own.items()}
    if not is_known(arguments) or not all(name.startswith(OF_TORCHMPI) for name in different):
        os.execv(sys.executable, [sys.executable, *arguments])
    if different:
        address += ONLY_TORCH
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    server.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 1 << 20)
    server.connect(address)
    rank: list[int] = []
    early: list[int] = []

    def forward(number: int, frame: object) -> None:
        if rank:
            send(rank[0], number)
        else:
            early.append(number)

    for name in FORWARDED:
        _signal.signal(getattr(_signal, name), forward)
    numbers = map(int, os.listdir("/proc/self/fd"))
    files = [number for number in numbers if number != server.fileno() and is_open(number)]
    place = os.getcwd(), os.umask(0o22), sorted(os.sched_getaffinity(0))
    message = marshal.dumps((arguments, dict(os.environb), os.getpid(), place, files))
    numbers_of_files = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    server.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers_of_files)])
    rank.append(int(server.recv(100)))
    for number in early:
        send(rank[0], number)
    status = int(server.recv(100) or 256)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _signal.signal(number, _signal.SIG_DFL) if number != _signal.SIGKILL else None
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def is_known(arguments: list[str]) -> bool:
    return bool(arguments) and (not arguments[0].startswith("-") or arguments[0] in ("-c", "-m", "-u"))


def send(process: int, number: int) -> None:
    """Send a signal to the rank, unless it has ended, which the server reports."""
    try:  # noqa: SIM105 contextlib takes half as long to import as Python to start
        os.kill(process, number)
    except ProcessLookupError:
        pass


def is_open(number: int) -> bool:
    """Return whether a descriptor is open; that of the listed folder is not."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
