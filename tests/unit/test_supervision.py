"""To a user of torchmpi run: exit statuses, restarts and lost hosts. Launchers and ranks are shells here."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Mapping, Sequence

import pytest

from torchmpi.cli import separate_ranks, supervision
from torchmpi.cli.hosts import Host
from torchmpi.cli.job import Job
from torchmpi.cli.separate_ranks import SeparateRanks
from torchmpi.cli.supervision import Limits, Supervisor
from torchmpi.launch import fault_tolerance


class Shells:
    """A job whose launcher is a shell that runs one script after the other, with hosts of which some do not answer."""

    continues = False

    def __init__(self, *scripts: str, hosts: Sequence[str] = (), silent: Sequence[str] = ()) -> None:
        self.hosts = [Host(name, 1) for name in hosts]
        self.starts: list[tuple[tuple[str, ...], str | None]] = []
        """For each start, the hosts that were left out and the number of restarts that the ranks are told."""
        self._scripts, self._silent = list(scripts), silent

    def agent(self, host: str) -> list[str]:
        return ["sh", "-c", f"exit {int(host in self._silent)}"]

    def ranks_without(self, lost: Sequence[str]) -> int:
        return max(1, len(self.hosts)) - len(lost)

    def command(self, lost: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        self.starts.append((tuple(lost), variables.get(supervision.RESTARTS)))
        return ["sh", "-c", self._scripts[len(self.starts) - 1]]


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Supervision handles signals until the process ends."""
    numbers = (*supervision.ENDING, *supervision._USER)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def supervise(job: Shells, restarts: int = 0, min_ranks: int = 1) -> int:
    return Supervisor(job, Limits(restarts, min_ranks, None)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137), ("kill -SEGV $$", 139), ("kill -ALRM $$", 142)],
)
def test_the_status_of_the_launcher_or_128_and_its_signal(script, status):
    assert supervise(Shells(script)) == status


def test_without_a_lost_host_there_are_fewer_spare_ranks():
    """Regression: there were as many, and fewer others than --min-ranks."""
    job = Job.__new__(Job)  # without an MPI library
    job.continues, job._options = True, argparse.Namespace(ranks=4, spares=2, on_lost_rank="continue")
    found = [job._variables_of_losses(number).get(fault_tolerance.SPARES_VARIABLE) for number in (6, 5, 4, 3)]
    assert found == ["2", "1", None, None]


def test_a_launcher_that_was_killed_is_started_again():
    job = Shells("kill -KILL $$", "exit 5", "exit 0", "exit 1")
    assert supervise(job, restarts=3) == 0
    assert job.starts == [((), None), ((), "1"), ((), "2")]


def test_a_lost_host_is_a_failure_although_the_launcher_returns_0():
    """Open MPI's mpirun returns 0 then."""
    job = Shells("exit 0", "exit 0", hosts=("198.51.100.1", "198.51.100.2"), silent=("198.51.100.2",))
    assert supervise(job, restarts=1) == 0
    assert job.starts == [((), None), (("198.51.100.2",), "1")]


def test_a_lost_host_without_a_restart_left_is_no_success():
    job = Shells("exit 0", hosts=("198.51.100.1", "198.51.100.2"), silent=("198.51.100.2",))
    assert supervise(job) == 1
    assert job.starts == [((), None)]


def test_too_few_hosts_are_no_success(monkeypatch):
    monkeypatch.setattr(supervision, "_RETURN_SECONDS", 0.0)
    job = Shells("exit 0", hosts=("198.51.100.1", "198.51.100.2"), silent=("198.51.100.2",))
    assert supervise(job, restarts=1, min_ranks=2) == 1
    assert job.starts == [((), None)]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("kill -KILL $$", 137),
        ('if [ "$RANK" = 1 ]; then kill -KILL $$; fi', 0),  # the others have continued to the end
        ('if [ "$RANK" = 1 ]; then exit 7; fi; exec sleep 300', 7),
        ('if [ "$RANK" = 0 ]; then kill -KILL $$; fi; exit 4', 4),
    ],
)
def test_the_status_of_ranks_without_mpi(monkeypatch, script, status):
    """A job in which every rank was killed has failed, and its status tells of a signal."""
    monkeypatch.setattr(separate_ranks, "_GRACE_SECONDS", 0.1)
    assert SeparateRanks(["sh", "-c", script], 2).run() == status
