"""Run a fixed set of checks with two ranks in this environment and print its line of results/places.md.

    python scripts/check_place.py --place "wheels" [--launch "mpirun --oversubscribe"] [--only start,kill]

The set: start (both interfaces, without a warning), the contract tests of the collectives and random calls, DDP, the
parameter server, and the end of the job after SIGKILL of one rank. With --refused, the only check is that the start
fails with that text. torchmpi is the installed one: the tests are copied to a folder without the package. The status is
0 only if everything passed. Logs: --logs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
TESTS = {
    "contract tests": ("test_collectives.py", "test_fuzz.py"),
    "DDP": ("test_distributed_ddp.py",),
    "parameter server": ("test_nn_sync.py", "test_parameterserver.py"),
}
CHECKS = ("start", *TESTS, "kill")
VERSIONS = """
import json, platform, mpi4py, torch
from importlib.metadata import version
mpi4py.rc.initialize = False
from mpi4py import MPI
names = ("numpy", "numba", "llvmlite", "mpi4py")
found = {"Python": platform.python_version(), "torch": torch.__version__, **{name: version(name) for name in names}}
library = MPI.Get_library_version().strip("\\0").split("\\n")[0]
print(json.dumps(found | {"library": library}))
"""
START = """
import sys
import torch, torch.distributed as dist, torchmpi as mpi
from torchmpi.session import runtime
mpi.start()
value = mpi.allreduce(torch.ones(3)).tolist()
assert value == [mpi.size()] * 3 and mpi.size() == 2, (value, mpi.size())
assert runtime.current().num_hosts == int(sys.argv[1]), runtime.current().num_hosts
try:
    dist.init_process_group("torchmpi")
except mpi.errors.LaunchError as error:
    print("refused", error, flush=True)
else:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert value == tensor.tolist(), tensor
    dist.destroy_process_group()
if mpi.rank() == 0:
    print("right", flush=True)
mpi.stop()
"""
KILL = """
import os, signal, torch, torchmpi as mpi
mpi.start()
mpi.allreduce(torch.ones(3))
if mpi.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
mpi.barrier()
print("went on", flush=True)
"""


class Place:
    """Runs the checks of one place."""

    def __init__(self, launch: list[str], rank_command: list[str], num_hosts: int, logs: Path) -> None:
        self._launch, self._rank_command, self._num_hosts, self._logs = launch, rank_command, num_hosts, logs
        self._refused: dict[str, str] = {}
        """Results of checks that this torch is too old for, which "start" finds."""
        # Left in the logs: the checkout holds the package too, and Python would import it from there.
        self._tests = Path(tempfile.mkdtemp(prefix="tests-", dir=logs))
        for folder in ("mpi", "unit"):  # the latter for what both use
            shutil.copytree(CHECKOUT / "tests" / folder, self._tests / "tests" / folder)
        shutil.copy(CHECKOUT / "setup.cfg", self._tests)

    def check(self, name: str) -> str:
        """Run one check; return its result, which begins with "ok" if it passed."""
        if name == "start":
            status, output = self._start()
            if status or "right" not in output:
                return self._failed(status, output)
            refused = re.search(r"refused (.*)", output)
            self._refused = {"DDP": f"ok (refused: {refused[1].split(':')[0]})"} if refused else {}
            return "ok"
        if name in self._refused:
            return self._refused[name]
        if name == "kill":
            status, output = self._run(name, "-c", KILL)
            ended = status not in (0, 124) and "went on" not in output
            return "ok" if ended else self._failed(status, output)
        pytest = ("-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--color=no", "-q")
        status, output = self._run(name, *pytest, *(f"tests/mpi/{file}" for file in TESTS[name]))
        passed = re.findall(r"(\d+) passed", output)
        return f"ok ({passed[0]})" if status == 0 and passed else self._failed(status, output)

    def check_refused(self, text: str) -> str:
        """Check that the start fails with this text; return the result, with the line that has the text."""
        status, output = self._start()
        line = next((line for line in output.splitlines() if text in line), None)
        return f"ok ({line})" if status and line else self._failed(status, output)

    def _start(self) -> tuple[int, str]:
        # The warning about versions without tests begins like this.
        return self._run("start", "-W", "error:torchmpi's", "-c", START, str(self._num_hosts))

    def _run(self, name: str, *arguments: str) -> tuple[int, str]:
        ranks = ["-n", "2", *self._rank_command, sys.executable, *arguments]
        command = ["timeout", "-k", "5", "240", *self._launch, *ranks]
        log = self._logs / f"{name.replace(' ', '-')}.log"
        with open(log, "w") as file:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=self._tests
            ).returncode
        return status, log.read_text(errors="replace")

    @staticmethod
    def _failed(status: int, output: str) -> str:
        lines = re.findall(r"^(?:FAILED|ERROR|E  |[\w.]*(?:Error|Warning)\b).*", output, re.MULTILINE)
        return f"FAILED, status {status}: {(lines or output.splitlines() or [''])[0][:200]}"


def default_launch() -> list[str]:
    """Return the mpirun of this environment, or of PATH, with options that allow more ranks than cores."""
    found = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        sys.exit("check_place.py: there is no mpirun beside this Python or on PATH")
    text = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    is_open_mpi = any(word in text for word in ("Open MPI", "OpenRTE", "PRRTE"))
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"] if is_open_mpi else []
    return [found, *options]


def versions() -> list[str]:
    """Return the MPI library and the packages of this Python; nothing if they cannot be loaded."""
    found = subprocess.run([sys.executable, "-c", VERSIONS], capture_output=True, text=True)
    if found.returncode:
        return []
    numbers: dict[str, str] = json.loads(found.stdout)
    return [short(numbers.pop("library")), *(f"{name} {number}" for name, number in numbers.items())]


def short(library: str) -> str:
    """Return the name and number of an MPI library from its version string."""
    match = re.search(r"(Open MPI|MPICH)\D*(\d[\w.]*)", library)
    return f"{match[1]} {match[2]}" if match else library[:30]


def main() -> int:
    """Run the checks and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", required=True, help="the first column of the line")
    parser.add_argument("--command", default="scripts/check_place.py", help="the last column of the line")
    parser.add_argument("--launch", type=shlex.split, help="the launch command, without the number of ranks")
    parser.add_argument("--rank-command", type=shlex.split, default=[], help="starts the Python of each rank")
    parser.add_argument("--num-hosts", type=int, default=1, help="for how many hosts the ranks take this place")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"checks, from {', '.join(CHECKS)}")
    parser.add_argument("--refused", metavar="TEXT", help="check that the start fails with this text, and nothing else")
    parser.add_argument("--logs", type=Path, default=CHECKOUT / "build" / "places", help="folder of the logs")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    place = Place(options.launch or default_launch(), options.rank_command, options.num_hosts, options.logs)
    if options.refused:
        results = {"refused": place.check_refused(options.refused)}
    else:
        results = {name: place.check(name) for name in options.only.split(",")}
    summary = ", ".join(f"{name} {result}" for name, result in results.items())
    good = all(result.startswith("ok") for result in results.values())
    columns = (options.place, ", ".join(versions()), summary, "passed" if good else "FAILED", f"`{options.command}`")
    print(f"| {' | '.join(columns)} |")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
