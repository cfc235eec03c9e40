"""Start the program of one rank: set the variables of torch.distributed, choose cores and a GPU, redirect the output.

``torchmpi run`` and ``scripts/wrap.sh`` start this file between mpirun and the program, which then replaces it. It
imports the standard library and two modules without imports of torchmpi, since it delays the start of each rank.
"""

import argparse
import fcntl
import importlib.util
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NoReturn

OF_MPICH = ("UCX_NET_DEVICES", "FI_TCP_IFACE")
"""The variables by which libraries of MPICH choose a network interface."""
_SIOCGIFADDR = 0x8915  # of netdevice(7)


def main(arguments: list[str]) -> None:
    """Replace this process by the program, with the variables of its rank."""
    parser = argparse.ArgumentParser(prog="torchmpi run", usage="[OPTION...] PROGRAM [ARGUMENT...]", allow_abbrev=False)
    parser.add_argument("--master")
    parser.add_argument("--network")
    parser.add_argument("--log-dir")
    parser.add_argument("--bind", action=argparse.BooleanOptionalAction)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        parser.error("no command to run")
    launcher = _module("launch/launcher.py")
    found = launcher.detect()
    if options.master is not None:
        if found.rank is None:
            sys.exit("torchmpi run: mpirun has not set the variables that tell a rank its number. Start mpirun itself.")
        _set_variables(launcher.torch_variables(), options.master)
    if options.network is not None:
        os.environ.update(dict.fromkeys(OF_MPICH, _interface_in(options.network)))
    if found.local_size and found.local_size <= len(os.sched_getaffinity(os.getppid())):
        _begin_session()  # ranks that share cores yield them to each other, which works within a session only
    if options.bind:
        _bind(found.local_rank, found.local_size)
    if options.gpu:
        _choose_gpu(0 if found.name is None else found.local_rank)
    if options.log_dir is not None:
        rank = found.rank or 0
        _redirect(options.log_dir, f"rank{rank}.log", is_shown=rank == 0)
    try:
        execute(program)
    except OSError as error:
        sys.exit(f"torchmpi run: {program[0]} cannot be started: {error.strerror}")


def execute(program: list[str]) -> NoReturn:
    """Replace this process by a program, which does not inherit that Python ignores signals."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(program[0], program)


def _module(name: str) -> Any:
    """Return a module of torchmpi, given its file; importing the package would import torch."""
    path = Path(__file__).parents[1] / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _set_variables(variables: dict[str, str], master: str) -> None:
    """Set the variables of torch.distributed. MASTER_ADDR and MASTER_PORT are kept if they are set."""
    os.environ.update(variables)
    address, _, port = master.rpartition(":")
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", port)
    # It distinguishes the rank from its child processes, which inherit the other variables.
    os.environ["TORCHMPI_RUN_PID"] = str(os.getpid())


def _interface_in(wanted: str) -> str:
    """Return the name of the first interface of this host with an address in a network."""
    network = ip_network(wanted, strict=False)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                request = struct.pack("256s", name.encode())
                if ip_address(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24]) in network:
                    return name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if ip_address(bytes.fromhex(address)) in network:
                return name
    sys.exit(
        f"torchmpi run: --interface {wanted}: no interface of {socket.gethostname()} has an address in this network."
    )


def _begin_session() -> None:
    """Make this process the leader of a session, as MPICH and torchrun do: Linux may divide the cores between sessions.

    The ranks of Open MPI then together get the share of one (`sched_autogroup_enabled`). The process group keeps its
    number, which is that of this process, and to which Open MPI sends signals.
    """
    with suppress(OSError):  # it is the leader already; its group has other processes
        if os.getpgid(0) == os.getpid():
            os.setpgid(0, os.getpgid(os.getppid()))  # the leader of a group cannot begin a session
        os.setsid()


def _bind(local_rank: int | None, local_size: int | None) -> None:
    """Bind this process to its share of the cores, unless the launcher has done so or ranks outnumber cores."""
    cores = os.sched_getaffinity(0)
    if local_rank is None or not local_size or local_size > len(cores) or cores != os.sched_getaffinity(os.getppid()):
        return
    ordered = sorted(cores, key=_position)
    begin, end = (number * len(ordered) // local_size for number in (local_rank, local_rank + 1))
    os.sched_setaffinity(0, ordered[begin:end])


def _position(core: int) -> tuple[int, int, int]:
    """Return package, core and hardware thread: neighbors in this order belong together."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    with suppress(OSError, ValueError):
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
    return 0, core, core


def _choose_gpu(local_rank: int | None) -> None:
    """Make only one of the visible GPUs visible to this rank."""
    if local_rank is None:
        sys.exit("torchmpi run: --gpu: the launcher does not tell the rank within the host")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        with suppress(OSError):
            visible = ",".join(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())
    if visible:
        numbers = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = numbers[local_rank % len(numbers)]
    elif local_rank == 0:
        print("torchmpi run: --gpu: no GPU can be seen here", file=sys.stderr)


def _redirect(folder: str, name: str, is_shown: bool) -> None:
    """Append the output to a file, and show it in the terminal too if `is_shown`."""
    path = os.path.join(folder, name)
    try:
        file = _module("files.py").append(path, mode=0o644)
    except OSError as error:
        sys.exit(f"torchmpi run: --log-dir: {path} cannot be written: {error.strerror}")
    for stream in (1, 2):
        if is_shown:  # a process of its own for each stream, since both keep their target in the terminal
            command = ["tee", "-a", f"/proc/self/fd/{file}"]  # the file that was checked, not what has its name now
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": stream, "pass_fds": (file,)}
            process = subprocess.Popen(command, **pipes, start_new_session=True)
            assert process.stdin is not None
            os.dup2(process.stdin.fileno(), stream)
            process.stdin.close()
        else:
            os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    main(sys.argv[1:])
