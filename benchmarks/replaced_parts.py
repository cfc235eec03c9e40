"""Print lines, dependencies, import time and wheel size of a checkout, for the parts that libraries have replaced.

    python benchmarks/replaced_parts.py [CHECKOUT]

Run it on two checkouts to compare them.
"""

from __future__ import annotations

import argparse
import configparser
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Files before the replacement and after it, relative to the package.
PARTS = {
    "messages without a launcher": ("sockets/*.py", "launch/launcherless/*.py"),
    "NCCL": ("backends/nccl*.py", "backends/nccl/*.py"),
    "CUDA IPC, reductions on GPUs": ("backends/ipc*.py", "kernels/cuda_*.py", "backends/ipc/*.py"),
    "rules of the parameter server": (
        "kernels/rule*.py",
        "parameterserver/rules.py",
        "shared_memory/kernels/server_rule*.py",
    ),
    "engine checkpoints": ("engine/checkpoint.py",),
    "progress bar": ("engine/progressbar.py",),
    "gloo": ("backends/gloo*.py", "backends/torch_groups.py"),
}
_IMPORT = "import time, torch; begin = time.process_time(); {}; print(time.process_time() - begin)"
_NUM_IMPORTS = 7


def num_lines(package: Path, patterns: tuple[str, ...]) -> int:
    """Return the number of lines of some files."""
    return sum(path.read_text().count("\n") for pattern in patterns for path in package.glob(pattern))


def import_ms(checkout: Path, statement: str) -> float:
    """Return the processor time of an import after torch, in a new process: the median of several."""
    command = [sys.executable, "-c", _IMPORT.format(statement)]
    # Without the entry point: torch would import the package. With files of byte code, which the first run writes.
    with tempfile.TemporaryDirectory() as folder:
        more = {"PYTHONPATH": str(checkout), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPYCACHEPREFIX": folder}
        environment = {**os.environ, **more, "PYTHONDONTWRITEBYTECODE": ""}
        runs = [
            subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
            for _ in range(1 + _NUM_IMPORTS)
        ]
    return statistics.median(float(run.stdout) for run in runs[1:]) * 1000


def wheel_bytes(checkout: Path) -> int:
    """Return the size of the wheel, built from a copy of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        copy, ignored = Path(folder) / "copy", shutil.ignore_patterns(".*", "build", "tests", "__pycache__")
        shutil.copytree(checkout, copy, ignore=ignored)
        command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, str(copy)]
        subprocess.run([sys.executable, *command], check=True)
        return next(Path(folder).glob("*.whl")).stat().st_size


def main() -> None:
    """Print one line for each measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    checkout = parser.parse_args().checkout.resolve()
    package, setup = checkout / "torchmpi", configparser.ConfigParser()
    setup.read(checkout / "setup.cfg")
    rows = {f"lines: {part}": str(num_lines(package, patterns)) for part, patterns in PARTS.items()}
    rows["lines: package"] = str(num_lines(package, ("**/*.py",)))
    rows["lines: tests"] = str(num_lines(checkout / "tests", ("**/*.py",)))
    rows["required packages"] = ", ".join(setup["options"]["install_requires"].split("\n")[1:])
    rows["import torchmpi, ms"] = f"{import_ms(checkout, 'import torchmpi'):.1f}"
    rows["and torchmpi.start, ms"] = f"{import_ms(checkout, 'import torchmpi; torchmpi.start'):.0f}"
    rows["wheel, KB"] = f"{wheel_bytes(checkout) / 1000:.0f}"
    for name, value in rows.items():
        print(f"{name:36} {value}")


if __name__ == "__main__":
    main()
