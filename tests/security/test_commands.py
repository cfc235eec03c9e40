"""To a user of commands: what others put into names of hosts and the current folder is neither run nor printed raw."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchmpi.cli import hosts
from torchmpi.cli.job import Job
from torchmpi.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
HAS_MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.mark.parametrize("name", ["-Fpath", "-oProxyCommand=touch", "--", "a;touch", "$(touch)", "a`touch`", "a/b"])
def test_a_host_is_no_option_and_no_command(tmp_path: Path, name: str) -> None:
    """Regression: ssh took the host `-Fpath` for the option with its configuration."""
    (tmp_path / "hosts").write_text(f"node1\n{name}\n")
    for read in (lambda: hosts.parse_list(f"node1,{name}"), lambda: hosts.read_file(tmp_path / "hosts")):
        with pytest.raises(ArgumentError, match="not begin with '-'"):
            read()


def test_names_and_addresses_of_hosts_are_accepted() -> None:
    text = "node-1.example.org:2,10.0.0.7:2,_login_:1,rack2-n0:3"
    assert [host.name for host in hosts.parse_list(text)] == [word.partition(":")[0] for word in text.split(",")]


@pytest.mark.skipif(HAS_MPIRUN is None, reason="no mpirun")
@pytest.mark.parametrize(("rsh", "agent"), [(None, "ssh -- node1"), ("rsh -4", "rsh -4 node1")])
def test_ssh_gets_the_host_after_the_end_of_its_options(rsh: str | None, agent: str) -> None:
    options = argparse.Namespace(hosts="node1", hostfile=None, ranks=None, rsh=rsh, spares=0, on_lost_rank=None)
    assert Job(options).agent("node1") == agent.split()


@pytest.mark.skipif(HAS_MPIRUN is None, reason="no mpirun")
@pytest.mark.parametrize("command", ["doctor --timeout 100", "bench -n 1 --sizes 4 --seconds 0.1"])
def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path, command: str) -> None:
    """Regression: the processes that both start had the current folder first on their path."""
    folder, start = tmp_path / "downloads", tmp_path / "bin" / "torchmpi"
    folder.mkdir()
    start.parent.mkdir()
    start.write_text("import sys\nfrom torchmpi.cli import main\nsys.exit(main())\n")
    for name in ("json", "numpy", "torch", "mpi4py", "psutil"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('{name}\\n')\n")
    done = subprocess.run(
        ["timeout", "-k", "5", "250", sys.executable, str(start), *command.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert not (folder / "imported").exists(), (folder / "imported").read_text()
    assert done.returncode == 0 or "self test" in done.stdout, done.stdout + done.stderr
