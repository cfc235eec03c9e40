"""To who chooses backends: by table, by size, by mode, measured, or from a file, all ranks choose the same.

The backends of these tests record the calls and forward them to `mpi`.
"""

from __future__ import annotations

import dataclasses
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.outcomes import refusal
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.backends.base import Operation
from torchmpi.backends.selection_table import keys
from torchmpi.collectives.tuning import measuring
from torchmpi.session import runtime

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2), pytest.mark.usefixtures("world")]
SIZE = MPI.COMM_WORLD.size
ALLREDUCE = ("allreduce", "cpu", "host", "sync")


class Recording:
    """The mpi backend under another name, with a list of its calls; every call takes `seconds` longer."""

    def __init__(self, name, inner, ran, *, seconds=0.0):
        self.name, self.inner, self.ran, self.seconds = name, inner, ran, seconds

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def why_not(self, collective, device_type, group=None):
        if group is not None and group.size == 1 and self.name == "lonely":
            return "it needs company"
        return self.inner.why_not(collective, device_type, group)

    def bind(self, group, collective, dtype, op):
        operation = self.inner.bind(group, collective, dtype, op).run

        def run(source, destination, root):
            self.ran.append((self.name, collective))
            time.sleep(self.seconds)
            return operation(source, destination, root)

        return Operation(run)


@pytest.fixture
def ran():
    """The calls of the backends `small` and `large`, which exist during the test."""
    selector = runtime.current().selector
    seen: list[tuple[str, str]] = []
    for name in ("small", "large", "lonely"):
        selector.backends[name] = Recording(name, selector.backends["mpi"], seen)
    selector.backends["slow"] = Recording("slow", selector.backends["mpi"], seen, seconds=0.03)
    yield seen
    mpi.set_communicator(0)
    mpi.set_collective_span(0, 0)
    selector.reset()
    for name in ("small", "large", "lonely", "slow"):
        del selector.backends[name]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """`slow` is slower by more than the noise of a busy machine, so these tests take some seconds."""
    monkeypatch.setattr(measuring, "_MOST_ROUNDS", 8)


@pytest.fixture
def on_one_host():
    if mpi.num_nodes_in_communicator() > 1:
        pytest.skip("the test is about ranks of one host")


def test_the_size_selects_the_backend(agree, on_one_host, ran):
    for collective in ("allreduce", "reduce", "broadcast", "reduce_scatter"):
        for mode in ("sync", "async"):
            mpi.collective_selector[collective, "cpu", "host", mode] = [(64, "small"), (None, "large")]
    for dtype, limit in ((torch.float32, 16), (torch.bfloat16, 32), (torch.int8, 64)):
        for numel in (0, 1, limit, limit + 1, 10 * limit):
            expected = "small" if numel <= limit else "large"
            for collective in ("allreduce", "reduce", "broadcast", "reduce_scatter"):
                ran.clear()
                tensor = torch.ones(numel, dtype=dtype)
                for _ in range(2):  # the second time there is a plan
                    getattr(mpi, collective)(tensor.clone())
                getattr(mpi, f"{collective}_async")(tensor.clone()).wait()
                agree.equal(ran, [(expected, collective)] * 3, f"{collective} of {numel} {dtype}")


@pytest.mark.parametrize("layout", ("out", "strided"))
def test_the_size_selects_the_backend_of_copied_tensors(agree, on_one_host, ran, layout):
    mpi.collective_selector[ALLREDUCE] = [(64, "small"), (None, "large")]
    for numel, expected in ((16, "small"), (17, "large")):
        tensor = torch.ones(numel) if layout == "out" else torch.ones(numel, 2)[:, 0]
        out = torch.empty(numel) if layout == "out" else None
        result = mpi.allreduce(tensor, out)
        agree.equal(ran.pop(), (expected, "allreduce"))
        agree.equal(result.contiguous(), torch.full((numel,), float(mpi.size())))


def test_collectives_without_a_common_size_use_one_backend(agree, on_one_host, ran):
    verbs = {
        "allgather": torch.ones(mpi.rank() + 1),
        "gather": torch.ones(mpi.rank() + 1),
        "scatter": torch.ones(5) if mpi.rank() == 0 else None,
        "alltoall": torch.ones(mpi.rank() + 3),
    }
    for collective, tensor in verbs.items():
        mpi.collective_selector.set(collective, "large")
        getattr(mpi, collective)(tensor)
        getattr(mpi, f"{collective}_async")(tensor).wait()
        agree.equal(ran, [("large", collective)] * 2)
        ran.clear()
    mpi.collective_selector.set("barrier", "small")
    mpi.barrier()
    agree.equal(ran, [("small", "barrier")])


def test_a_change_applies_to_existing_plans(agree, on_one_host, ran):
    tensor = torch.ones(3)
    names = ["small", "large", "small", "mpi"]
    for name in names:
        mpi.collective_selector.set("allreduce", name)
        mpi.allreduce(tensor)
        mpi.allreduce_async(tensor).wait()
    agree.equal([name for name, _ in ran], ["small", "small", "large", "large", "small", "small"])


def test_modes_are_separate_and_the_backend_of_a_call_takes_precedence(agree, on_one_host, ran):
    mpi.collective_selector.set("allreduce", "small", mode="sync")
    mpi.collective_selector.set("allreduce", "large", mode="async")
    tensor = torch.ones(3)
    mpi.allreduce(tensor)
    mpi.allreduce_async(tensor).wait()
    mpi.allreduce_many([tensor, tensor.clone()])
    mpi.allreduce(tensor, backend="large")
    mpi.allreduce(tensor, backend="mpi")
    agree.equal([name for name, _ in ran], ["small", "large", "large", "large"])


def test_each_step_of_a_span_selects_a_backend(agree, on_one_host, ran):
    level = mpi.push_communicator(mpi.rank() // 2)
    mpi.set_communicator(0)
    mpi.set_collective_span(0, level)
    for collective in ("allreduce", "reduce", "broadcast"):
        mpi.collective_selector[collective, "cpu", "host", "sync"] = [(64, "small"), (None, "large")]
    for numel, expected in ((4, "small"), (400, "large")):
        ran.clear()
        result = mpi.allreduce(torch.ones(numel))
        agree.equal(result, torch.full((numel,), float(mpi.size())))
        agree({name for name, _ in ran} == ({expected} if mpi.size() > 1 else set()), f"{numel}: {ran}")
    ran.clear()
    mpi.allreduce(torch.ones(4), backend="mpi")
    agree.equal(ran, [], "backend= holds for every step")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("is_span", (False, True), ids=("one level", "span"))
def test_queued_calls_keep_their_backend(agree, on_one_host, ran, is_span):
    """Regression: a step of a span selected its backend when it ran, which was after the change on some ranks."""
    level = mpi.push_communicator(mpi.rank() // 2)
    mpi.set_communicator(0)
    mpi.set_collective_span(0, level if is_span else 0)
    verbs = ("allreduce", "reduce", "broadcast")
    for collective in verbs:
        mpi.collective_selector.set(collective, "slow")
    handles = [mpi.allreduce_async(torch.ones(1)) for _ in range(3)]
    for collective in verbs:
        mpi.collective_selector.set(collective, "small")
    if not is_span:
        handles.append(mpi.allreduce_async(torch.ones(1)))
    for handle in handles:
        agree.equal(handle.wait(), torch.full((1,), float(mpi.size())))
    if is_span:
        agree({name for name, _ in ran} == ({"slow"} if mpi.size() > 1 else set()), str(ran))
    else:
        agree.equal([name for name, _ in ran], ["slow"] * 3 + ["small"])


# --- measuring


def test_autotune_replaces_slow_backends_on_all_ranks(agree, on_one_host, ran):
    mpi.collective_selector.set("allreduce", "slow")
    mpi.collective_selector.set("reduce", "slow")
    table = mpi.autotune("allreduce", sizes=[65536], seconds=60, save=False)
    tables = mpi.allgather_object(dict(table))
    agree(all(other == tables[0] for other in tables), "the ranks have different tables")
    agree.equal(dict(table), dict(mpi.collective_selector))
    for mode in ("sync", "async"):
        rule = table["allreduce", "cpu", "host", mode]
        agree("slow" not in [name for _, name in rule], str(rule))
        agree.equal(table["reduce", "cpu", "host", mode], ((None, "slow"),), "reduce was not measured")
    ran.clear()
    mpi.allreduce(torch.ones(4))
    agree(("slow", "allreduce") not in ran, str(ran))


def test_autotune_measures_every_collective(agree, on_one_host, ran):
    selector = runtime.current().selector
    others = {name: selector.backends.pop(name) for name in list(selector.backends) if name not in ("mpi", "small")}
    selector.reset()
    mpi.autotune(sizes=[100], seconds=60, save=False)
    selector.backends.update(others)
    measured = {(collective, name) for name, collective in ran}
    agree(measured >= {(key.collective, "small") for key in keys(device="cpu", span="host")}, str(measured))
    agree.equal({key.collective for key in selector.tuned}, {key.collective for key in keys()})


def test_autotune_selects_gloo_where_it_is_faster(agree, on_one_host, ran, monkeypatch):
    selector = runtime.current().selector
    monkeypatch.setattr(selector, "may_choose", lambda name: name in ("slow", "gloo"))
    table = mpi.autotune("allreduce", sizes=[65536], seconds=60, save=False)
    agree.equal(table["allreduce", "cpu", "host", "sync"], ((None, "gloo"),))
    ran.clear()
    agree.equal(mpi.allreduce(torch.ones(4)), torch.full((4,), float(mpi.size())))
    agree.equal(ran, [], "another backend ran")


def test_autotune_respects_the_time_limit(agree, on_one_host, ran):
    before = dict(mpi.collective_selector)
    table = mpi.autotune(("gather", "scatter"), seconds=1e-6, save=False)
    agree.equal(dict(table), before)
    agree(len(ran) < 20, f"{len(ran)} calls")


def test_wrong_arguments_of_autotune_are_refused_on_all_ranks(agree):
    level = mpi.push_communicator(0)
    mpi.set_communicator(0)
    for reason, arguments in {
        "collective 'sing' is unknown": {"verbs": ["sing"]},
        "sizes": {"sizes": [0]},
        "at least one": {"sizes": []},
        "seconds": {"seconds": 0},
    }.items():
        error = refusal(partial(mpi.autotune, **arguments))
        agree(error.startswith("ArgumentError: ") and reason in error, f"{reason}: {error}")
    mpi.set_collective_span(0, level)
    error = refusal(mpi.autotune)
    agree("set_collective_span" in error, error)
    mpi.set_collective_span(0, 0)


@pytest.fixture
def restart(tmp_path):
    """Stops torchmpi, and starts it with settings and one tuning file for all ranks; restores the previous start."""
    path = mpi.broadcast_object(str(tmp_path / "tuning.json"))

    def again(**settings: object) -> Path:
        mpi.stop()
        mpi.start(config=dataclasses.replace(mpi.Config.from_environment(), **{"tuning_file": path, **settings}))
        return Path(path)

    yield again
    mpi.stop()
    mpi.start()


def tune():
    """A rule that autotune() certainly finds, without backends that do not exist at the next start."""
    selector = runtime.current().selector
    others = {name: selector.backends.pop(name) for name in list(selector.backends) if name != "mpi"}
    selector.backends["slow"] = Recording("slow", selector.backends["mpi"], [], seconds=0.03)
    selector.reset()
    mpi.collective_selector.set("allreduce", "slow")
    mpi.autotune("allreduce", sizes=[64], seconds=60)
    del selector.backends["slow"]
    selector.backends.update(others)
    selector.reset()


TUNED = {("allreduce", "cpu", "host", mode): ((None, "mpi"),) for mode in ("sync", "async")}


def test_measured_rules_are_loaded_at_the_next_start(agree, on_one_host, restart, capsys):
    path = restart(verbose=True)
    capsys.readouterr()
    tune()
    logged = capsys.readouterr().err
    restart(verbose=True)
    line = capsys.readouterr().err
    agree.equal(dict(runtime.current().selector.tuned), TUNED)
    agree.equal({key: mpi.collective_selector[key] for key in TUNED}, TUNED)
    if mpi.rank() == 0:
        agree(path.exists() and f"saved in {path}" in logged, logged)
        agree("allreduce cpu host: mpi (was slow)" in logged, logged)
        agree(line.strip().endswith(", tuned"), line)
        agree("not used" not in line, line)
    else:
        agree.equal(logged + line, "")
    mpi.collective_selector.reset()
    agree.equal(dict(runtime.current().selector.tuned), {})
    restart(verbose=False, backend="mpi")
    agree.equal(dict(runtime.current().selector.tuned), {}, "a setting overrides measured rules")
    error = refusal(mpi.autotune)
    agree("backend='mpi'" in error, error)


def test_a_file_that_cannot_be_used_is_ignored_with_one_line(agree, on_one_host, restart, capsys):
    path = restart(verbose=False)
    tune()
    default = dict(mpi.collective_selector)
    intact = path.read_text() if mpi.rank() == 0 else ""
    for reason, damaged in {
        "cannot be read": intact[:50],
        "was measured with torch 0.": intact.replace('"torch": "', '"torch": "0.'),
        "no table for a job of this shape": intact.replace('"cores_per_rank"', '"cores"'),
        "it takes nccl for allreduce": re.sub(r'"\w+"(\n\s*\])', r'"nccl"\1', intact),
    }.items():
        mpi.barrier()
        if mpi.rank() == 0:
            path.write_text(damaged)
            agree(damaged != intact, f"{reason}: the file is intact")
        mpi.barrier()
        capsys.readouterr()
        restart(verbose=True)
        logged = capsys.readouterr().err.splitlines()
        agree.equal(dict(runtime.current().selector.tuned), {}, reason)
        agree.equal(dict(mpi.collective_selector), default, reason)
        agree.equal(mpi.allreduce(1), mpi.size(), reason)
        if mpi.rank() == 0:
            agree(len(logged) == 2 and reason in logged[0] and str(path) in logged[0], str(logged))
            agree("tuned" not in logged[1], logged[1])


def test_a_folder_without_write_access_is_no_error(agree, on_one_host, restart, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    restart(verbose=True, tuning_file=str(blocked / "tuning.json"))
    capsys.readouterr()
    tune()
    if mpi.rank() == 0:
        agree("could not be saved" in capsys.readouterr().err)


# --- several hosts, by name


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("placement", sorted({hosts[:SIZE] for hosts in ("aabb", "abab", "aaab")}))
def test_over_several_hosts_each_group_has_rules_of_its_own(agree, restart, placement):
    rank, size, hosts = mpi.rank(), mpi.size(), placement
    restart(verbose=False, host_name=hosts[rank])
    selector = runtime.current().selector
    inner = mpi.push_communicator(hosts[rank])
    mpi.set_communicator(0)
    num_hosts = len(set(hosts))
    span = "host" if num_hosts == 1 else "across" if num_hosts == size else "hosts"
    is_grid = len({hosts.count(host) for host in hosts}) == 1
    has_no_single_rank = min(hosts.count(host) for host in hosts) > 1
    agree(span in selector.spans and ("hosts" in selector.spans) == (span == "hosts"), str(selector.spans))
    if num_hosts > 1:
        for call in (
            lambda: mpi.allreduce(1, backend="shm"),
            lambda: mpi.collective_selector.set("allreduce", "shm", span=span),
        ):
            agree("its ranks are on several hosts" in refusal(call), refusal(call))
    default = dict(mpi.collective_selector)
    ran: list[tuple[str, str]] = []
    for name in [name for name in selector.backends if name != "mpi"]:
        del selector.backends[name]
    selector.reset()
    selector.backends["slow"] = Recording("slow", selector.backends["mpi"], ran, seconds=0.03)
    selector.backends["small"] = Recording("small", selector.backends["mpi"], ran)
    for part in selector.spans:
        mpi.collective_selector.set("allreduce", "slow", span=part)
    mpi.autotune("allreduce", sizes=[64], seconds=60, save=False)
    tuned = {key.span for key in selector.tuned}
    ran.clear()
    world_total, inner_total = mpi.allreduce(torch.ones(3)), mpi.allreduce(torch.ones(3), comm=inner)
    expected = {span}
    if span == "hosts":
        expected |= {"across"} if is_grid else set()
        expected |= {"host"} if has_no_single_rank else set()
    agree.equal(tuned, expected)
    agree.equal((int(world_total[0]), int(inner_total[0])), (size, hosts.count(hosts[rank])))
    slow_inside = span != "host" and "host" not in expected
    agree.equal([name for name, _ in ran].count("slow"), int(slow_inside), str(ran))
    agree(all(default[key] != ((None, "shm"),) for key in default if key.span != "host"), "shm between hosts")
