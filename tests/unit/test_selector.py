"""To who chooses backends: rules, the default table, and the choice, with backends that only report availability."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmpi import errors
from torchmpi.backend_specs import HIERARCHICAL
from torchmpi.backends import selection_table
from torchmpi.backends.base import Backend
from torchmpi.backends.mpi import MPIBackend
from torchmpi.backends.selection_table import (
    Key,
    Table,
    at,
    checked,
    default_transport,
    format_rule,
    keys,
    with_limit,
)
from torchmpi.backends.selector import Selector
from torchmpi.collective_specs import COLLECTIVES, SPECS
from torchmpi.config import Config

ALLREDUCE = Key("allreduce", "cpu", "host", "sync")
limits = st.lists(st.integers(1, 1 << 40), unique=True, max_size=5).map(sorted)
names = st.sampled_from(["mpi", "shm", "p2p"])


@st.composite
def entries(draw):
    sizes = [*draw(limits), None]
    return [(size, draw(names)) for size in sizes]


# --- rules


@given(entries(), st.integers(0, 1 << 41))
def test_checking_merges_equal_neighbors(given_entries, num_bytes):
    rule = checked(ALLREDUCE, given_entries)
    expected = next(name for limit, name in given_entries if limit is None or num_bytes <= limit)
    assert at(rule, num_bytes) == expected
    assert all(one != other for (_, one), (_, other) in itertools.pairwise(rule))
    assert checked(ALLREDUCE, rule) == rule
    assert format_rule(rule).count(",") == len(rule) - 1


@given(entries(), st.integers(1, 1 << 41), names, st.integers(0, 1 << 42))
def test_a_limit_changes_only_smaller_sizes(given_entries, up_to_bytes, name, num_bytes):
    before = checked(ALLREDUCE, given_entries)
    after = with_limit(ALLREDUCE, before, up_to_bytes, name)
    assert at(after, num_bytes) == (name if num_bytes <= up_to_bytes else at(before, num_bytes))


@pytest.mark.parametrize(
    ("collective", "wrong", "reason"),
    [
        ("allreduce", [], "must end with"),
        ("allreduce", [(64, "mpi")], "must end with"),
        ("allreduce", [(0, "mpi"), (None, "shm")], "above 0"),
        ("allreduce", [(True, "mpi"), (None, "shm")], "above 0"),
        ("allreduce", [(None, "mpi"), (None, "shm")], "above 0"),
        ("allreduce", [(64.0, "mpi"), (None, "shm")], "above 0"),
        ("allreduce", [(64, "mpi"), (64, "p2p"), (None, "shm")], "increase"),
        ("allgather", [(64, "mpi"), (None, "shm")], "differ in length"),
        ("allreduce", [(64, "mpi"), (None, HIERARCHICAL)], "bits of a sum"),
    ],
)
def test_wrong_rules_are_refused_with_the_reason(collective, wrong, reason):
    with pytest.raises(errors.ArgumentError, match=reason):
        checked(Key(collective, "cpu", "hosts", "sync"), wrong)


def test_movements_may_become_hierarchical_at_a_size():
    rule = checked(Key("broadcast", "cpu", "hosts", "sync"), [(64, "mpi"), (None, HIERARCHICAL)])
    assert at(rule, 65) == HIERARCHICAL


def test_there_is_a_key_for_every_combination_but_an_asynchronous_barrier():
    num_cuda = sum(SPECS[name].is_everywhere for name in COLLECTIVES)
    everything = list(keys())
    assert len(set(everything)) == len(everything) == (len(COLLECTIVES) + num_cuda) * 3 * 2 - 3
    assert Key("barrier", "cpu", "host", "async") not in everything
    with pytest.raises(errors.ArgumentError, match=r"span='rack' is unknown. Use one of: host, across, hosts"):
        list(keys(span="rack"))


def test_format_of_sizes():
    assert [selection_table.format_bytes(n) for n in (1, 1023, 1024, 3 << 20, 5 << 40)] == [
        "1 B", "1023 B", "1 KiB", "3 MiB", "5120 GiB",
    ]  # fmt: skip


def test_the_table_has_one_line_per_collective_and_span():
    table = Table({key: ((None, "mpi"),) for key in keys()})
    assert len(str(table).splitlines()) == 3 * len(COLLECTIVES)
    table[Key("allreduce", "cpu", "host", "async")] = ((4096, "mpi"), (None, "shm"))
    line = next(line for line in str(table).splitlines() if line.split()[:2] == ["allreduce", "host"])
    assert line.split(maxsplit=2)[2] == "cpu sync: mpi; cpu async: up to 4 KiB mpi, above shm; cuda: mpi"


# --- the default


@pytest.mark.parametrize(
    ("span", "able", "options", "expected"),
    [
        ("host", {"mpi", "shm", "p2p"}, {}, "shm"),
        ("host", {"mpi", "p2p"}, {}, "mpi"),
        ("across", {"mpi", "p2p"}, {}, "mpi"),
        ("hosts", {"mpi", HIERARCHICAL}, {}, HIERARCHICAL),
        ("hosts", {"mpi", HIERARCHICAL}, {"hierarchical": "on"}, HIERARCHICAL),
        ("hosts", {"mpi", HIERARCHICAL}, {"hierarchical": "off"}, "mpi"),
        ("hosts", {"mpi"}, {"hierarchical": "on"}, "mpi"),
        ("hosts", {"mpi", "p2p", HIERARCHICAL}, {"forced": "p2p"}, "p2p"),
        ("hosts", {"mpi"}, {"forced": "shm"}, "mpi"),
        ("host", {"mpi", "shm"}, {"forced": "mpi"}, "mpi"),
    ],
)
def test_the_default(span, able, options, expected):
    assert default_transport(Key("allreduce", "cpu", span, "sync"), able.__contains__, **options) == expected


EVERYTHING = {"mpi", "shm", "p2p", HIERARCHICAL}


@pytest.mark.parametrize(
    ("collective", "span", "able", "options", "expected"),
    [
        ("allreduce", "host", {"nccl", "ipc"}, {}, "nccl"),
        ("allreduce", "host", {"ipc"}, {"aware": True}, "ipc"),
        ("allreduce", "host", {"nccl", "ipc"}, {"gpu_backends": ("ipc",)}, "ipc"),
        ("allreduce", "host", {"nccl", "ipc"}, {"gpu_backends": ()}, "shm"),
        ("allreduce", "host", {"ipc"}, {"gpu_backends": ("nccl",), "aware": True}, "mpi"),
        ("allreduce", "host", {"ipc"}, {"gpu_backends": ("nccl",), "forced": "ipc"}, "ipc"),
        ("allreduce", "hosts", set(), {"aware": True}, "mpi"),
        ("allreduce", "host", set(), {}, "shm"),
        ("allreduce", "hosts", set(), {}, HIERARCHICAL),
        ("allreduce", "across", set(), {}, "mpi"),
        ("allreduce", "host", {"nccl"}, {"forced": "shm"}, "shm"),
        ("allreduce", "host", {"ipc"}, {"forced": "nccl"}, "ipc"),
    ],
)
def test_the_default_for_tensors_on_a_gpu(collective, span, able, options, expected):
    key, can = Key(collective, "cuda", span, "sync"), (EVERYTHING | able).__contains__
    assert default_transport(key, can, **options) == expected


def test_the_setting_that_names_a_backend_names_it_for_tensors_on_a_gpu_too():
    key, can = Key("allreduce", "cuda", "host", "sync"), (EVERYTHING | {"nccl", "ipc"}).__contains__
    assert selection_table.device_transport(key, can, forced="ipc") == "ipc"
    assert selection_table.device_transport(key, {"nccl"}.__contains__, forced="ipc") == "nccl"


def test_staged_reductions_between_hosts_use_p2p_on_tcp():
    key = Key("allreduce", "cuda", "across", "sync")
    assert selection_table.default_rule(key, {"mpi", "p2p"}.__contains__) == ((None, "p2p"),)
    by_size = ((65536, "mpi"), (None, "p2p"))
    scattering = key._replace(collective="reduce_scatter")
    assert selection_table.default_rule(scattering, {"mpi", "p2p"}.__contains__, compared=False) == by_size
    alone = selection_table.default_rule(scattering, {"mpi", "p2p"}.__contains__, is_tcp=False, compared=False)
    assert alone == ((None, "mpi"),)
    short = ((65536, "p2p"), (None, "mpi"))
    for each in (key, scattering):
        assert selection_table.default_rule(each, {"mpi", "p2p"}.__contains__, is_tcp=False) == short
    assert selection_table.default_rule(key, {"mpi", "p2p", "nccl"}.__contains__) == ((None, "nccl"),)
    assert selection_table.default_rule(key, {"mpi", "p2p"}.__contains__, aware=True) == ((None, "mpi"),)


# --- the selector


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """The backends of these tests know themselves which devices there are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


class Able(Backend):
    """Reports the availability of a backend that supports these spans."""

    device_types, collectives = ("cpu", "cuda"), COLLECTIVES

    def __init__(self, name, *, spans=selection_table.SPANS, verbs=COLLECTIVES, devices=("cpu",)):
        self.name, self.spans, self.collectives, self.devices = name, spans, verbs, devices

    def takes(self, device_type, collective):
        return device_type == "cpu"

    def why_not(self, collective, device_type, group=None):
        if device_type not in self.devices:
            return f"no {device_type} here"
        span = None if group is None else selection_table.span_of(group)
        return None if span is None or span in self.spans else "its ranks are on several hosts"


def job(*hosts, backends=None, **settings):
    """A selector for ranks on these hosts, its world, and another group of the job."""
    context = SimpleNamespace(hosts=hosts, groups=[], sends_whole=False, finish_collectives=lambda: None)
    backends = backends or [Able("mpi"), Able("shm", spans=("host",)), Able("p2p", verbs=("allreduce", "broadcast"))]

    def group(*ranks):
        found = sorted({hosts[rank] for rank in ranks})
        made = SimpleNamespace(
            rank=0, size=len(ranks), where="rank 0", name="g", hosts=found, world_ranks=ranks, context=context,
            plans={}, is_strict=len(found) > 1,
        )  # fmt: skip
        made.forget_plans = made.plans.clear
        context.groups.append(made)
        return made

    world = group(*range(len(hosts)))
    selector = Selector({backend.name: backend for backend in backends}, world, Config(**settings))
    return selector, world, group


def chosen(selector, collective, group, **options):
    return [(limit, backend.name) for limit, backend in selector.select(collective, "cpu", group, **options)]


def test_each_group_gets_a_backend_that_supports_it():
    selector, world, group = job(0, 0, 1, 1)
    assert chosen(selector, "allreduce", world) == [(None, "mpi")]
    assert chosen(selector, "allreduce", group(0, 1)) == [(None, "shm")]
    assert chosen(selector, "allreduce", group(0, 2)) == [(None, "p2p")]
    assert chosen(selector, "reduce", group(0, 2)) == [(None, "mpi")]
    uncompared = group(0, 2)
    uncompared.is_strict = False
    assert chosen(selector, "allreduce", uncompared) == [(1 << 16, "mpi"), (None, "p2p")]
    selector.set("allreduce", "p2p", span="across")
    assert chosen(selector, "allreduce", uncompared) == [(None, "p2p")]


def test_a_forced_backend_runs_the_calls_it_supports():
    selector, world, group = job(0, 0, 1, 1, backend="p2p")
    assert chosen(selector, "allreduce", world) == chosen(selector, "allreduce", group(0, 1)) == [(None, "p2p")]
    assert chosen(selector, "allgather", world) == [(None, "mpi")]
    assert chosen(selector, "allgather", group(2, 3)) == [(None, "shm")]


def test_the_backend_of_a_call_overrides_the_table_or_is_refused():
    selector, world, _ = job(0, 0, 1)
    assert chosen(selector, "allreduce", world, wanted="p2p") == [(None, "p2p")]
    with pytest.raises(
        errors.BackendUnavailableError, match=r"rank 0: .*its ranks are on several hosts.*one of: mpi, p2p"
    ):
        selector.select("allreduce", "cpu", world, wanted="shm")
    with pytest.raises(errors.BackendUnavailableError, match=r"it has no gather"):
        selector.select("gather", "cpu", world, wanted="p2p")
    with pytest.raises(errors.BackendUnavailableError, match=r"no cuda here. No other backend can"):
        selector.select("gather", "cuda", world)


def test_set_by_size_and_mode_and_reset():
    selector, world, _ = job(0, 0)
    world.plans["an", "old", "plan"] = object()
    selector.set("allreduce", "mpi", up_to_bytes=4096)
    assert not world.plans
    assert chosen(selector, "allreduce", world) == [(4096, "mpi"), (None, "shm")]
    selector.set("allreduce", "p2p", mode="async")
    assert chosen(selector, "allreduce", world) == [(4096, "mpi"), (None, "shm")]
    assert chosen(selector, "allreduce", world, mode="async") == [(None, "p2p")]
    selector.assign(("allreduce", "cpu", "host", "async"), [(64, "shm"), (None, "mpi")])
    assert selector.rule(("allreduce", "cpu", "host", "async")) == ((64, "shm"), (None, "mpi"))
    selector.reset()
    assert chosen(selector, "allreduce", world, mode="async") == [(None, "shm")]


def test_the_text_of_a_part_of_the_table():
    selector, _, _ = job(0, 0, 1)
    selector.set("allreduce", "p2p", span="hosts", mode="async")
    assert selector.text("allreduce", "cpu", "hosts") == "allreduce      hosts   cpu sync: mpi; cpu async: p2p"
    assert selector.text("allreduce", mode="sync", span="host") == "allreduce      host    shm"
    across, hosts = selector.text(backend="p2p").splitlines()
    assert across == "allreduce      across  p2p"
    assert hosts.startswith("allreduce      hosts   cpu sync: mpi; cpu async: p2p")
    assert selector.text(device="cuda") == ""
    assert len(selector.text(span="across").splitlines()) == len(COLLECTIVES) < len(selector.text().splitlines())
    for filters, reason in (
        ({"mode": "lazy"}, "mode='lazy' is unknown"),
        ({"collective": "sendreceive"}, "collective='sendreceive' is unknown"),
        ({"backend": "tcp"}, "backend='tcp' is unknown"),
    ):
        with pytest.raises(errors.ArgumentError, match=rf"rank 0: collective_selector: {reason}"):
            selector.text(**filters)


def test_without_a_span_a_backend_is_set_for_all_spans_it_supports():
    selector, world, group = job(0, 0, 1, 1, backend="mpi")
    inside = group(0, 1)
    selector.set("reduce", "shm")
    assert chosen(selector, "reduce", inside) == [(None, "shm")]
    assert chosen(selector, "reduce", world) == [(None, "mpi")]


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (("allreduce", "shm"), {"span": "hosts"}, "its ranks are on several hosts"),
        (("allreduce", "tcp"), {}, "unknown"),
        (("gather", "p2p"), {}, "it has no gather"),
        (("allreduce", "mpi"), {"device": "cuda"}, "no cuda here"),
        (("allreduce", "mpi"), {"mode": "lazy"}, "mode='lazy' is unknown"),
        (("sendreceive", "mpi"), {}, "collective='sendreceive' is unknown"),
        (("barrier", "mpi"), {"mode": "async"}, "'sync' only"),
        (("scatter", "mpi"), {"device": "cuda"}, "the rules of device 'cpu'"),
        (("gather", "mpi"), {"up_to_bytes": 64}, "differ in length"),
        (("allreduce", "mpi"), {"up_to_bytes": -1}, "above 0"),
    ],
)
def test_invalid_assignments_are_refused_and_change_nothing(arguments, options, reason):
    selector, _, _ = job(0, 0, 1)
    before = dict(selector.table)
    with pytest.raises(errors.ArgumentError, match=rf"rank 0: collective_selector.*{reason}"):
        selector.set(*arguments, **options)
    assert selector.table == before


@pytest.mark.parametrize("parts", ["allreduce", ("allreduce",), ("allreduce", "cpu", "host")])
def test_a_key_has_four_strings(parts):
    selector, _, _ = job(0)
    with pytest.raises(errors.ArgumentError, match=r"four strings"):
        selector.key(parts)


def test_a_group_that_cannot_use_the_table_gets_the_default():
    steps = Able(HIERARCHICAL, spans=("hosts",))
    selector, world, group = job(0, 0, 1, 1, backends=[Able("mpi"), Able("p2p"), steps])
    assert chosen(selector, "allreduce", world) == [(None, HIERARCHICAL)]
    crowded = group(0, 1, 2)
    steps.why_not = lambda collective, device, asked=None: "no room" if asked is crowded else None
    assert chosen(selector, "allreduce", crowded) == [(None, "mpi")]
    selector.set("allreduce", "p2p", span="across")
    assert chosen(selector, "allreduce", group(0, 2)) == [(None, "p2p")]


class OnDevice(Able):
    """Takes CUDA tensors of some ranks, but not every operation."""

    def __init__(self, name, *, ranks, ops=("sum",), tested=None):
        super().__init__(name, devices=("cuda",))
        self.ranks, self.ops, self.tested = ranks, ops, ranks if tested is None else tested

    def takes(self, device_type, collective):
        return device_type == "cuda"

    def why_not(self, collective, device_type, group=None):
        reason = super().why_not(collective, device_type)
        is_apart = group is not None and not set(group.world_ranks) <= set(self.ranks)
        return reason or ("ranks share a GPU" if is_apart else None)

    def is_tested(self, group):
        return set(group.world_ranks) <= set(self.tested)

    def lacks(self, collective, dtype, op):
        return None if op is None or op in self.ops else f"it has no {op}"


def with_gpus(gpu_backends="nccl,ipc", **settings):
    """Ranks 0 and 1 have a GPU each; 2 and 3 share one, on the same host."""
    host = [Able(name, devices=("cpu", "cuda")) for name in ("mpi", "shm", "p2p")]
    nccl, ipc = OnDevice("nccl", ranks=(0, 1, 2)), OnDevice("ipc", ranks=(2, 3), ops=("sum", "bor"))
    return job(0, 0, 0, 0, backends=[*host, nccl, ipc], gpu_backends=gpu_backends, **settings)


def on_gpu(selector, group, op="sum", **options):
    choices = selector.select("allreduce", "cuda", group, dtype=torch.int32, op=op, **options)
    return [(limit, backend.name) for limit, backend in choices]


def test_each_group_of_gpus_gets_a_backend_that_supports_it():
    selector, world, group = with_gpus()
    assert on_gpu(selector, world) == [(None, "shm")]
    assert on_gpu(selector, group(0, 1)) == [(None, "nccl")]
    assert on_gpu(selector, group(2, 3)) == [(None, "ipc")]
    assert chosen(selector, "allreduce", world) == [(None, "shm")]


@pytest.mark.parametrize(
    ("gpu_backends", "apart", "shared", "near"),
    [
        ("auto", "nccl", "ipc", "shm"),
        ("nccl", "nccl", "shm", "shm"),
        ("ipc", "shm", "ipc", "ipc"),
        ("none", "shm", "shm", "shm"),
    ],
)
def test_gpu_backends_are_chosen_where_they_are_tested_or_if_the_setting_names_them(gpu_backends, apart, shared, near):
    selector, world, group = with_gpus(gpu_backends)
    assert on_gpu(selector, group(0, 1)) == [(None, apart)]
    assert on_gpu(selector, group(2, 3)) == [(None, shared)]
    table = selector.availability()
    allreduce = ("allreduce", "cuda", "sync")
    if gpu_backends == "none":
        with pytest.raises(errors.BackendUnavailableError, match="TORCHMPI_GPU_BACKENDS=none"):
            on_gpu(selector, group(2, 3), wanted="ipc")
        assert table[("nccl", *allreduce)] == "unavailable: it is switched off (TORCHMPI_GPU_BACKENDS=none)"
        return
    assert on_gpu(selector, group(2, 3), wanted="ipc") == [(None, "ipc")]
    measured = Table({Key("allreduce", "cuda", "host", "sync"): ((None, "ipc"),)})
    selector.backends["ipc"] = OnDevice("ipc", ranks=range(4), tested=(2, 3))
    assert on_gpu(selector, world) == [(None, near)]
    assert selector.availability()[("ipc", *allreduce)] == "available (experimental)"
    assert ("not chosen here" in selector.refusal(measured)) == (gpu_backends in ("auto", "nccl"))


def test_a_cuda_aware_mpi_moves_device_memory_and_computes_nothing_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    aware = MPIBackend(Config(), is_cuda_aware=True)
    selector, world, _ = job(0, 0, backends=[aware, Able("shm", spans=("host",), devices=("cpu", "cuda"))])
    ways = {verb: selector.select(verb, "cuda", world)[0].backend.name for verb in ("allreduce", "allgather")}
    assert ways == {"allreduce": "shm", "allgather": "mpi"}
    assert not aware.takes("cuda", "reduce_scatter") and aware.takes("cuda", "sendreceive")


def test_a_rank_without_a_tensor_to_scatter_uses_the_backend_of_the_root():
    selector, _, group = with_gpus()
    pair = group(0, 1)
    for changed in ("mpi", "p2p"):
        selector.set("scatter", changed)
        ways = [selector.select("scatter", device, pair)[0].backend.name for device in ("cpu", "cuda")]
        assert ways == [changed, changed]


def test_an_unsupported_operation_uses_the_next_backend():
    selector, _, group = with_gpus()
    assert on_gpu(selector, group(0, 1), op="bor") == [(None, "shm")]
    assert on_gpu(selector, group(2, 3), op="bor") == [(None, "ipc")]
    with pytest.raises(errors.BackendUnavailableError, match=r"it has no bor. .*use one of: mpi, shm, p2p"):
        on_gpu(selector, group(0, 1), op="bor", wanted="nccl")
    selector.set("allreduce", "nccl", device="cuda")
    assert on_gpu(selector, group(0, 1), op="bor") == [(None, "shm")]


def test_staged_tensors_use_the_rules_for_the_cpu():
    selector, world, group = with_gpus()
    selector.set("allreduce", "p2p", up_to_bytes=4096)
    assert on_gpu(selector, world) == [(4096, "p2p"), (None, "shm")]
    assert on_gpu(selector, group(0, 1)) == [(None, "nccl")]
    selector.set("allreduce", "mpi", device="cuda")  # rules for GPUs take precedence
    assert on_gpu(selector, world) == on_gpu(selector, group(0, 1)) == [(None, "mpi")]
    selector.reset()
    assert on_gpu(selector, group(0, 1)) == [(None, "nccl")]


def test_availability_by_span():
    selector, _, _ = job(0, 0, 1)
    table = selector.availability()
    assert table["mpi", "allreduce", "cpu", "async"] == "available"
    assert (
        table["shm", "allreduce", "cpu", "sync"]
        == "available within a host (between hosts: its ranks are on several hosts)"
    )
    assert table["p2p", "gather", "cpu", "sync"] == "unavailable: it has no gather, only allreduce, broadcast"
    alone, _, _ = job(0)
    assert alone.availability()["shm", "allreduce", "cpu", "sync"] == "available"


def test_a_table_of_another_machine_is_refused_with_the_reason():
    selector, _, _ = job(0, 0, 1)
    assert selector.refusal(Table({Key("allreduce", "cpu", "hosts", "sync"): ((None, "p2p"),)})) == ""
    unfit = Table({Key("allreduce", "cpu", "hosts", "sync"): ((64, "mpi"), (None, "shm"))})
    assert "shm for allreduce, cpu, hosts, sync: its ranks are on several hosts" in selector.refusal(unfit)
    assert "it is unknown" in selector.refusal(Table({Key("allreduce", "cpu", "host", "sync"): ((None, "gloo"),)}))
