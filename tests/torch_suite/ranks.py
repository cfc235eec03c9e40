"""One rank of PyTorch's distributed test suite: the processes of the tests are the ranks started by mpirun.

PyTorch starts new processes for each test, which would take hours. Here one process group lives through all tests, as
it did for PyTorch's own backend "mpi". After each test the ranks exchange the outcome; after a failure the job ends,
because the state of the group is unknown, and driver.py starts another one after that test.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import sys
import time
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import opening
import torch
import torch.distributed as dist
from channel import Channel
from mpi4py import MPI
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.common_utils import TestCase

import torchmpi.distributed

GROUP_TIMEOUT = timedelta(seconds=60)  # the timeout of PyTorch for the group of these tests
LEAST_LIMIT_BETWEEN = 60  # seconds for the work between tests
PATIENCE = 15  # seconds that a rank waits for the others after its own failure
# In these tests calls fail on purpose, on some of the ranks: the group is not used again.
SPOILING = ("test_barrier_timeout", "test_monitored_barrier")


class Outcome(NamedTuple):
    """The outcome of a test on one rank, the reason, and whether the process group is still the previous one."""

    status: str
    reason: str
    group_is_alive: bool


def main() -> None:
    options = parse()
    channel = Channel(options.logs)
    folder = options.logs / "scratch"  # files of the tests remain with the logs
    if channel.rank == 0:
        folder.mkdir()
    channel.barrier()
    Session(options, channel, folder).run()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--logs", type=Path, required=True, help="folder for events and stacks")
    parser.add_argument("--limit", type=int, required=True, help="seconds for one test")
    parser.add_argument("--after", default="", help="only tests after this one in alphabetical order")
    parser.add_argument("-k", dest="patterns", action="append", default=[], help="part of a name, or a pattern with *")
    parser.add_argument("--without", action="append", default=[], help="the same of tests to leave out")
    return parser.parse_args()


class Session:
    """The tests that one job runs, and the process group that they run on."""

    def __init__(self, options: argparse.Namespace, channel: Channel, folder: Path) -> None:
        self._options, self._channel, self._folder = options, channel, folder
        self._num_groups = 0
        self._world: Any = None
        self._suite = self._load()
        self._environment = dict(os.environ)
        self._events = (options.logs / "events.jsonl").open("w") if channel.rank == 0 else None

    def _load(self) -> ModuleType:
        # These are read when the suite is imported.
        os.environ |= {
            "BACKEND": self._options.backend,
            "INIT_METHOD": f"file://{self._folder}/init",
            "TEMP_DIR": str(self._folder),
            "WORLD_SIZE": str(self._channel.size),
        }
        if self._options.backend == "torchmpi":
            # Where torchmpi is on the path without being installed, there is no entry point that does this.
            torchmpi.distributed.register()
            # torch's own function accepts only the backend named gloo.
            dist.monitored_barrier = torchmpi.distributed.monitored_barrier
        suite = opening.load(self._options.backend)
        suite._rank_temp_file = lambda: file_of_all_ranks(self._folder / "test_dir")
        return suite

    def run(self) -> None:
        case_class = make_case_class(self._suite, self._channel)
        names = list(self._chosen(case_class))
        mpi = " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))])
        self._tell(ranks=self._channel.size, mpi=mpi, torch=torch.__version__, tests=names)
        self._limit_between_tests()
        self._renew_group()
        for name in names:
            self._run_test(case_class(name), name)
        self._limit_between_tests()
        self._drop_group()
        self._channel.lift_limit()
        self._tell(complete=True)

    def _limit_between_tests(self) -> None:
        self._channel.limit_seconds(max(self._options.limit, LEAST_LIMIT_BETWEEN))

    def _chosen(self, case_class: type[unittest.TestCase]) -> Iterator[str]:
        wanted, unwanted = self._options.patterns or ["*"], self._options.without
        for name in unittest.TestLoader().getTestCaseNames(case_class):
            if name > self._options.after and fits(name, wanted) and not fits(name, unwanted):
                yield name

    def _run_test(self, case: unittest.TestCase, name: str) -> None:
        begin = time.monotonic()
        self._tell(begun=name)
        self._channel.limit_seconds(self._options.limit)
        (self._folder / "test_dir").mkdir(exist_ok=True)
        outcome = self._outcome(case)
        if outcome.status == "failed":
            # The other ranks may not receive the outcome.
            (self._options.logs / f"failure-rank{self._channel.rank}.txt").write_text(outcome.reason)
        outcomes = self._channel.exchange(outcome, PATIENCE if outcome.status == "failed" else None)
        status, reason = summary(outcomes)
        self._tell(ended=name, status=status, reason=reason, seconds=time.monotonic() - begin)
        if status == "failed":
            self._channel.abort()
        self._limit_between_tests()
        self._clean_up()
        if name.startswith(SPOILING) or not all(each.group_is_alive for each in outcomes):
            self._renew_group()
        self._channel.lift_limit()

    def _outcome(self, case: unittest.TestCase) -> Outcome:
        result = Result()
        case.run(result)
        alive = dist.is_initialized() and dist.group.WORLD is self._world
        problems = [text for _, text in result.errors + result.failures]
        if problems:
            return Outcome("failed", "\n".join(problems), alive)
        if result.skipped:
            return Outcome("skipped", result.skipped[0][1], alive)
        return Outcome("passed", "", alive)

    def _clean_up(self) -> None:
        """Remove groups, files and variables, which end with the process where each test has its own."""
        self._channel.barrier()
        if self._channel.rank == 0:
            shutil.rmtree(self._folder / "test_dir", ignore_errors=True)
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        os.environ.clear()
        os.environ.update(self._environment)
        dist.set_debug_level_from_env()
        self._channel.barrier()

    def _renew_group(self) -> None:
        self._drop_group()
        self._num_groups += 1
        options: dict[str, Any] = {}
        if self._options.backend == "gloo":
            store = f"file://{self._folder}/group{self._num_groups}"
            options = {"init_method": store, "rank": self._channel.rank, "world_size": self._channel.size}
        dist.init_process_group(self._options.backend, timeout=GROUP_TIMEOUT, **options)
        self._world = dist.group.WORLD

    def _drop_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._world = None
        self._channel.barrier()

    def _tell(self, **event: object) -> None:
        if self._events is not None:
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()


def fits(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern if "*" in pattern else f"*{pattern}*") for pattern in patterns)


@contextlib.contextmanager
def file_of_all_ranks(folder: Path) -> Iterator[str]:
    """In the place of PyTorch's, whose file rank 0 removes while other ranks may still have to read it."""
    yield str(folder / "file-of-all-ranks")


def make_case_class(suite: ModuleType, channel: Channel) -> type[unittest.TestCase]:
    """PyTorch's tests on running ranks."""

    class TorchSuite(TestCase, suite.DistributedTest._DistTestBase):
        rank = channel.rank
        world_size = str(channel.size)  # a string in the original, too
        init_method = os.environ["INIT_METHOD"]

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            channel.barrier_of_test(timeout + 50)  # the original does not share the cores

        def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
            # It selects the backends for CPU tensors by name.
            with mock.patch.object(suite, "BACKEND", "mpi"):
                super()._test_accumulate_gradients_no_sync(*args, **kwargs)

    return TorchSuite


class Result(unittest.TestResult):
    """PyTorch's way of skipping a test within a test is to leave the process with an exit code of its own."""

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        messages = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if isinstance(err[1], SystemExit) and err[1].code in messages:
            self.addSkip(test, messages[err[1].code])
        else:
            super().addError(test, err)


def summary(outcomes: list[Outcome]) -> tuple[str, str]:
    """One status and reason for all ranks: a failure anywhere is a failure."""
    failures = [f"rank {rank}:\n{each.reason}" for rank, each in enumerate(outcomes) if each.status == "failed"]
    if failures:
        return "failed", "\n".join(failures)
    statuses = {each.status for each in outcomes}
    if len(statuses) > 1:
        return "failed", f"passed on some ranks and skipped on others: {[each.status for each in outcomes]}"
    return outcomes[0].status, outcomes[0].reason


if __name__ == "__main__":
    main()
    sys.stdout.flush()
