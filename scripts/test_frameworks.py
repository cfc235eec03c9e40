"""Run programs of other libraries, unchanged, over torchmpi and over gloo, and print lines of the tables.

    python scripts/test_frameworks.py [-n 2,4] [--only PATTERN] [--launchers LIST] [--rounds 3] [--write]
    python scripts/test_frameworks.py --transformers CHECKOUT [-n 2,4] [--write]
    python scripts/test_frameworks.py --generation [-n 2,4] [--write]

The programs are in tests/jobs/frameworks and examples/llm; they name gloo, or no backend, and compare their parameters
or logits with those of one process themselves. Each runs with the mpirun of the environment, with torchrun and, if its
library has one, with the launcher of the library, all with TORCHMPI_AS_GLOO=1 or TORCHMPI_AS_MPI=1; and with torchrun
alone, which is gloo. The launchers alternate, and each time is divided by that of gloo in the same round; a cell has
the median of the rounds. --write replaces these lines in results/frameworks.md, in alphabetical order; launchers that
do not run keep their cells. Needs the extra "frameworks".
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import place_table

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "results" / "frameworks.md"
PACKAGES = ("torch", "accelerate", "transformers", "lightning", "pytorch-ignite", "deepspeed")
MPIRUN, TORCHRUN, ACCELERATE, GLOO = "mpirun", "torchrun", "accelerate", "gloo"
LAUNCHERS = (MPIRUN, TORCHRUN, ACCELERATE, GLOO)
AS_GLOO = {"TORCHMPI_AS_GLOO": "1"}
AS_MPI = {"TORCHMPI_AS_MPI": "1", "TORCHMPI_AS_TORCHRUN": "1"}
TIME = re.compile(r"rank \d+: .* like one process, ([\d.]+) s|the logits of one process\s+([\d.]+) tokens per second")
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Program:
    """A program, the backend that it asks for, and the variables by which it gets torchmpi."""

    title: str
    backend: str
    arguments: tuple[str, ...]
    folder: str = "tests/jobs/frameworks"
    launchers: tuple[str, ...] = (MPIRUN, TORCHRUN, GLOO)
    variables: Mapping[str, str] = field(default_factory=lambda: AS_GLOO)
    module: str = ""
    """The module to run instead of a file."""
    is_test: bool = False
    """Whether it is a test of the library, which prints no time, so that the time of the whole job counts."""

    def command(self, *more: str) -> list[str]:
        """Return the file and its arguments."""
        if self.module:
            return ["-m", self.module]
        return [str(CHECKOUT / self.folder / self.arguments[0]), *self.arguments[1:], *more]


def tests_of_accelerate(name: str) -> Program:
    """Return a script of tests that is part of Accelerate."""
    variables = AS_GLOO | {"ACCELERATE_USE_CPU": "1"}
    module = f"accelerate.test_utils.scripts.{name}"
    return Program(f"Accelerate's `{name}.py`", "none", (), "", LAUNCHERS, variables, module, is_test=True)


def tests_of_transformers(checkout: Path) -> list[Program]:
    """Return the programs of the distributed tests of the Trainer that need no model of the hub, on CPUs."""
    folder = str(checkout.resolve() / "tests" / "trainer" / "distributed" / "scripts")
    options = ("--use_cpu", "--output_dir=output", "--report_to=none")
    return [
        Program(f"Transformers' `{name}.py`", "none", (f"{name}.py", *options), folder, LAUNCHERS, is_test=True)
        for name in ("eval_ddp", "dispatch_batches", "worker_seed")
    ]


def training(title: str, backend: str, *arguments: str, **options: object) -> Program:
    """Return a program that trains; its first argument is the number of epochs, of four steps each."""
    return Program(title, backend, (f"{arguments[0]}.py", "25", *arguments[1:]), **options)  # type: ignore[arg-type]


BATCH_SIZES = {"8 KB": "4", "64 KB": "32", "256 KB": "128"}
"""Prompts of a batch, by the length of the allreduces for a token of each, with 512 features of 4 bytes."""
EXAMPLES = "examples/llm"
GENERATE = Program("DTensor, `tp_dtensor.py`", "`--backend=gloo`", ("tp_dtensor.py", "--backend=gloo"), EXAMPLES)
TRANSFORMERS = Program('Transformers, `tp_plan="auto"`', "none", ("tp_transformers.py",), EXAMPLES)
PROGRAMS = [
    training("Accelerate", "none", "accelerate_ddp", launchers=LAUNCHERS),
    training("Accelerate, as `mpi`", "none", "accelerate_ddp", launchers=LAUNCHERS, variables=AS_MPI),
    training("Transformers `Trainer`", '`ddp_backend="gloo"`', "trainer", launchers=LAUNCHERS),
    training("Transformers `Trainer`, as `mpi`", "none", "trainer", "none", variables=AS_MPI),
    training("Transformers `Trainer`, `torch_compile`", '`ddp_backend="gloo"`', "trainer", "gloo", "compile"),
    training("Lightning Fabric", "none", "fabric"),
    training("Lightning `Trainer`", "none", "lightning_trainer"),
    training("Ignite", '`Parallel("gloo")`', "ignite_ddp"),
    training("FSDP2 loop", '`init_process_group("gloo")`', "fsdp2_loop"),
    training("DTensor, training", '`init_process_group("gloo")`', "tp_train"),
    *(
        training(f"DeepSpeed, ZeRO stage {stage}", '`init_distributed("gloo")`', "deepspeed_zero", str(stage))
        for stage in (1, 2, 3)
    ),
    GENERATE,
    TRANSFORMERS,
    *map(tests_of_accelerate, ("test_script", "test_sync", "test_ops")),
]


def mpi_of_mpirun() -> str:
    """Return "openmpi" or "mpich", that of the mpirun on PATH."""
    if shutil.which("mpirun") is None:
        sys.exit("mpirun is not on PATH: activate an environment that has one")
    shown = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    return "openmpi" if "Open MPI" in shown else "mpich"


class Runner:
    """Runs programs with the launchers of this environment."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.mpi = folder, mpi_of_mpirun()
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHMPI_AS_")}
        paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment |= {"PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        self._environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def seconds(self, program: Program, launcher: str, num_ranks: int) -> float | str:
        """Run a program; return its time, in seconds or seconds per token, or the reason why it failed."""
        command = [*self._launch(launcher, num_ranks), *program.command()]
        begin = time.perf_counter()
        done = self.run(command, program.variables if launcher != GLOO else without_ours(program.variables))
        times = [time.perf_counter() - begin] if program.is_test else times_of(done)
        is_ours = "): torchmpi, " in done.stderr
        if done.returncode == 0 and len(times) in (1, num_ranks) and is_ours == (launcher != GLOO):
            return max(times)
        print(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}", file=sys.stderr, flush=True)
        errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        return errors[-1][:100] if errors else f"status {done.returncode}"

    def run(self, command: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command with one thread for each rank, unless the variables say otherwise."""
        return subprocess.run(
            ["timeout", "-k", "5", str(TIMEOUT_SECONDS), *command],
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=self._folder,
            env=self._environment | {"OMP_NUM_THREADS": "1"} | dict(variables),
        )  # fmt: skip

    def _launch(self, launcher: str, num_ranks: int) -> list[str]:
        python, ranks = [sys.executable], str(num_ranks)
        if launcher == MPIRUN:
            # By slot: with more ranks than cores, Open MPI otherwise numbers the ranks of a host in another order, and
            # DeepSpeed, which counts them itself, refuses to start.
            options = ["--oversubscribe", "--map-by", "slot"] if self.mpi == "openmpi" else []
            return ["mpirun", *options, "-n", ranks, *python]
        if launcher == ACCELERATE:
            hosts = f"localhost slots={ranks}\n" if self.mpi == "openmpi" else f"localhost:{ranks}\n"
            (self._folder / "hosts").write_text(hosts)
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = f"--main_process_port={free.getsockname()[1]}"
            config = f"--config_file={CHECKOUT / 'tests/jobs/frameworks/accelerate.yaml'}"
            return [*python, "-m", "accelerate.commands.launch", config, f"--num_processes={ranks}", port]
        return [*python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def without_ours(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of torchmpi."""
    return {name: value for name, value in variables.items() if not name.startswith("TORCHMPI_")}


def times_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    """Return the times that the ranks have printed."""
    return [float(seconds) if seconds else 1 / float(speed) for seconds, speed in TIME.findall(done.stdout)]


def alternate(names: tuple[str, ...], num_rounds: int, measure: Callable[[str], float | str]) -> dict[str, list]:
    """Measure each name in each round, in one order and then in the other."""
    found: dict[str, list] = {name: [] for name in names}
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(measure(name))
    return found


def program_line(runner: Runner, program: Program, num_ranks: int, launchers: set[str], num_rounds: int) -> str:
    """Return the line of a program in the table of an MPI library."""
    chosen = tuple(name for name in program.launchers if name in launchers)
    found = alternate(chosen, num_rounds, lambda name: runner.seconds(program, name, num_ranks))
    title = f"{program.title}, {num_ranks} ranks"
    cells, before = [program.backend], cells_on_page(runner.mpi, title)
    for name in LAUNCHERS:
        times = found.get(name, [])
        failures = [each for each in times if isinstance(each, str)]
        if name not in found:
            cells.append(before.get(name, ""))
        elif failures or num_rounds == 1:  # one round is no measurement
            cells.append(f"no: {failures[0]}" if failures else "yes")
        elif name == GLOO:
            cells.append(f"{statistics.median(times):.3g} s")
        else:
            pairs = zip(times, found[GLOO], strict=True)
            ratios = [ours / gloo for ours, gloo in pairs if not isinstance(gloo, str)]
            cells.append(f"yes, {statistics.median(ratios):.2f}" if ratios else "yes")
    return f"| {title} | {' | '.join(cells)} |"


def cells_on_page(section: str, title: str) -> dict[str, str]:
    """Return the cells that an earlier run has written for a program, by launcher."""
    table = PAGE.read_text().partition(f"<!-- end of {section} -->")[0].rpartition("<!-- end of ")[2]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return next((dict(zip(LAUNCHERS, line[2:], strict=True)) for line in lines if line[:1] == [title]), {})


def generation_line(runner: Runner, program: Program, length: str, num_ranks: int, num_rounds: int) -> str:
    """Return the line of a program that generates, with tokens per second."""
    options = ("--rounds=1", "--tokens=16", f"--batch-size={BATCH_SIZES[length]}")
    measured = Program(program.title, program.backend, (*program.arguments, *options), program.folder)

    def speed(name: str) -> float:
        if name in LAUNCHERS:
            seconds = runner.seconds(measured, name, num_ranks)
            return 0.0 if isinstance(seconds, str) else 1 / seconds
        done = runner.run([sys.executable, *measured.command()], {**measured.variables, "OMP_NUM_THREADS": name})
        return max((1 / each for each in times_of(done)), default=0.0)

    found = alternate(("1", str(num_ranks), GLOO, MPIRUN), num_rounds, speed)
    ratio = statistics.median(ours / max(gloo, 1e-9) for ours, gloo in zip(found[MPIRUN], found[GLOO], strict=True))
    speeds = " | ".join(f"{statistics.median(each):.0f}" for each in found.values())
    return f"| {program.title}, {length}, {num_ranks} ranks | {speeds} | {ratio:.2f} |"


def versions() -> str:
    """Return the versions of the packages that are installed."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def lines_of(runner: Runner, options: argparse.Namespace) -> Iterator[str]:
    """Measure, and return the lines one by one."""
    all_programs = [GENERATE, TRANSFORMERS] if options.generation else PROGRAMS
    if options.transformers:
        all_programs = tests_of_transformers(options.transformers)
    programs = [each for each in all_programs if re.search(options.only, each.title)]
    for num_ranks in map(int, options.ranks.split(",")):
        for program in programs:
            if options.generation:
                for length in BATCH_SIZES:
                    yield generation_line(runner, program, length, num_ranks, options.rounds)
            else:
                always = [GLOO] if options.rounds > 1 else []  # what the times are divided by
                launchers = {*options.launchers.split(","), *always}
                yield program_line(runner, program, num_ranks, launchers, options.rounds)


def main() -> int:
    """Run the chosen programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", default="2,4", metavar="LIST", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="programs whose title matches this")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), help="default: %(default)s; with rounds, gloo too")
    parser.add_argument("--rounds", type=int, default=3, help="runs with each launcher (default: %(default)s)")
    parser.add_argument("--transformers", type=Path, metavar="CHECKOUT", help="run tests of the Trainer of a checkout")
    parser.add_argument("--generation", action="store_true", help="measure tokens per second instead")
    parser.add_argument("--write", action="store_true", help="write the lines into results/frameworks.md")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        section = "generation" if options.generation else runner.mpi
        print(versions(), runner.mpi, f"{len(os.sched_getaffinity(0))} cores", sep=", ", flush=True)
        for line in lines_of(runner, options):
            print(line, flush=True)
            failed |= "| no: " in line or "| 0 |" in line
            if options.write:
                place_table.write(section, [line], PAGE, is_sorted=not options.generation)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
