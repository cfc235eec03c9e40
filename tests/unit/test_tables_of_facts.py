"""To who adds a row to a table of facts: types name their rows, and the rows agree with each other."""

from __future__ import annotations

import dataclasses
import importlib
from typing import get_args

import pytest
import torch

from torchmpi import config
from torchmpi.backend_specs import BACKENDS, GPU_BACKENDS, HIERARCHICAL
from torchmpi.backends.base import collectives_of
from torchmpi.backends.gloo import GlooReduction
from torchmpi.backends.gloo_backend import GlooBackend
from torchmpi.backends.hierarchical.hierarchical_backend import HierarchicalBackend
from torchmpi.backends.ipc.ipc_backend import IpcBackend
from torchmpi.backends.ipc.staged_group import IpcCollectives
from torchmpi.backends.nccl.nccl_backend import NcclBackend
from torchmpi.backends.nccl.nccl_group import NcclReduction
from torchmpi.backends.p2p import P2PMovement, P2PReduction
from torchmpi.backends.p2p_backend import P2PBackend
from torchmpi.backends.torch_groups import RowMovement
from torchmpi.collective_specs import CODES, COLLECTIVES, IN_PLACE, SAME_SHAPE, SPECS, spec_of
from torchmpi.tensors.operation_specs import OPERATIONS


def test_types_name_the_collectives():
    assert get_args(config.CollectiveName) == COLLECTIVES


def test_types_name_the_backends():
    assert set(get_args(config.BackendName)) == set(BACKENDS)


@pytest.mark.parametrize("row", BACKENDS.values(), ids=lambda row: row.class_name)
def test_backends_are_what_their_rows_state(row):
    backend = getattr(importlib.import_module(f"torchmpi.backends.{row.module}"), row.class_name)
    assert backend.name == row.name and callable(backend.make)
    assert backend.device_types == (("cuda",) if row.on_device else ("cpu", "cuda"))


def test_facts_of_the_backends():
    """Their order is that of their preference."""
    known = ("nccl", "ipc", "hierarchical", "shm", "mpi", "p2p", "gloo")
    rows = [row for row in BACKENDS.values() if row.name in known]
    assert tuple(row.name for row in rows) == known and HIERARCHICAL == "hierarchical"
    assert [row.name for row in rows if row.on_device] == ["nccl", "ipc"] and {"nccl", "ipc"} <= set(GPU_BACKENDS)
    assert [row.name for row in rows if row.is_library] == ["nccl", "mpi", "gloo"]
    assert [row.name for row in rows if row.reach == "one host"] == ["shm"]
    assert [row.name for row in rows if row.reach == "several hosts"] == ["hierarchical"]


def test_facts_of_the_settings():
    fields = dataclasses.fields(config.Config)

    def having(fact: str) -> set[str]:
        found = {each.name: each.metadata.get(fact) for each in fields}
        return {name for name, value in found.items() if value is not None and value is not False}

    assert having("shared") >= {
        "check", "message_bytes", "pipeline_bytes", "bucket_bytes", "gpu_bucket_bytes", "slot_bytes", "staging_bytes",
        "gpu_backends", "backend", "hierarchical", "heartbeat_seconds", "on_lost_rank", "timeline", "summary",
        "server_copies",
    }  # fmt: skip
    numbers = {each.name for each in fields if type(each.default) in (int, float)}
    assert having("least") | having("above") == numbers and not having("least") & having("above")
    assert having("above") >= {
        "watchdog_period_seconds", "message_bytes", "pipeline_bytes", "bucket_bytes", "gpu_bucket_bytes",
        "metrics_seconds",
    }  # fmt: skip
    assert set(config._choices()) >= {"bind", "check", "hierarchical", "on_lost_rank", "backend"}


def test_types_name_the_operations():
    assert set(get_args(config.Operation)) == set(OPERATIONS)
    assert set(get_args(config.NoAverage)) == {name for name, spec in OPERATIONS.items() if "integer" in spec.kinds}


def test_codes_of_recorded_calls_stay_what_they_are():
    """Flight records, and ranks of another version, name calls by these numbers, so that rows are added at the end."""
    known = (
        "barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
        "stop", "split", "allreduce_many", "server_init", "server_free", "server_save", "server_load", "group", "free",
        "alltoall_splits", "sendreceive",
    )  # fmt: skip
    assert CODES[: len(known)] == known


@pytest.mark.parametrize("spec", OPERATIONS.values(), ids=lambda spec: spec.name)
def test_operations_have_operations_of_partial_results(spec):
    partial = OPERATIONS[spec.partial]
    assert (partial.prepare, partial.combine, partial.finish) == (spec.prepare, spec.combine, "")
    assert set(spec.kinds) <= set(partial.kinds)


def test_facts_of_the_operations_of_mpi():
    known = dict(list(OPERATIONS.items())[:10])

    def having(kind: str) -> list[str]:
        return [name for name, spec in known.items() if kind in spec.kinds]

    assert having("float") == ["sum", "avg", "prod", "min", "max"]
    assert having("complex") == ["sum", "avg", "prod"]
    assert having("integer") == ["sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor"]
    assert having("bool") == ["min", "max", "band", "bor", "bxor", "land", "lor"]
    assert [name for name, spec in known.items() if spec.prepare] == ["land", "lor"]
    assert [name for name, spec in known.items() if spec.finish] == ["avg"]
    assert [name for name, spec in known.items() if not spec.is_exact] == ["sum", "avg", "prod"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_rows_make_sense(spec):
    assert spec.tensors or not (spec.reduces or spec.divides or spec.gathers)
    assert bool(spec.form_of) == (spec.kind in ("form", "exchange"))
    if spec.form_of:
        same = {"name": spec.name, "kind": spec.kind, "form_of": spec.form_of, "torch_name": ""}
        assert dataclasses.replace(SPECS[spec.form_of], **same) == spec
    assert not (spec.changes(is_root=True) or spec.changes(is_root=False)) or spec.in_place
    assert spec.compared != "rows" or not spec.in_place
    assert spec.only_root_passes != spec.passes(is_root=False) or not spec.tensors


def test_facts_of_the_collectives_of_mpi():
    known = CODES[:9]

    def having(fact: str) -> list[str]:
        return [name for name in known if getattr(SPECS[name], fact)]

    assert set(IN_PLACE) <= set(SAME_SHAPE)
    assert having("is_rooted") == ["reduce", "broadcast", "gather", "scatter"]
    assert having("reduces") == ["allreduce", "reduce", "reduce_scatter"]
    assert having("divides") == ["reduce_scatter", "scatter", "alltoall"]
    assert having("gathers") == ["allgather", "gather", "alltoall"]
    assert having("reduces_to_all") == ["allreduce"] and having("reduces_to_root") == ["reduce"]
    assert having("only_root_passes") == ["scatter"]
    assert having("in_place") == ["allreduce", "reduce", "broadcast"]
    assert [name for name in known if not SPECS[name].has_async] == ["barrier"]
    assert [name for name in known if not SPECS[name].receives(is_root=False)] == ["reduce", "gather"]
    assert [name for name in known if name in SAME_SHAPE] == ["allreduce", "reduce", "broadcast", "reduce_scatter"]
    assert [name for name in known if SPECS[name].compared == "nothing"] == ["barrier", "scatter"]
    assert [name for name in known if not SPECS[name].tensors] == ["barrier"]
    assert [name for name in CODES[:20] if SPECS[name].flow == "none"] == ["stop", "free"]
    assert [spec.name for spec in SPECS.values() if spec.kind == "message"] == ["sendreceive", "send", "recv"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("allreduce", (0, 1, 2)),
        ("broadcast", (2,)),
        ("scatter", (2,)),
        ("reduce", ()),
        ("gather", ()),
        ("sendreceive", (0,)),
        ("send", ()),
        ("recv", ()),
    ],
)
def test_whose_data_a_rank_receives(name, expected):
    assert tuple(SPECS[name].sources(1, 2, (0, 1, 2))) == expected
    if SPECS[name].is_rooted:
        assert tuple(SPECS[name].sources(2, 2, (0, 1, 2))) == (expected or (0, 1, 2))


def test_other_libraries_have_the_names():
    from mpi4py import MPI

    for name in (*COLLECTIVES, "sendreceive"):
        assert hasattr(MPI.Intracomm, SPECS[name].name_in_mpi), name
    assert SPECS["reduce_scatter"].name_in_mpi == "Reduce_scatter_block"  # the other one takes counts
    for name in CODES[:9]:
        assert hasattr(torch.distributed, SPECS[name].torch_name or name), name


def test_names_of_records_that_are_no_rows_have_tensors_of_no_kind():
    spec = spec_of("a call of a later version")
    assert not spec.tensors and spec.form_of == "" and spec not in SPECS.values()


def test_backends_have_what_they_state():
    """Where a class states names, since it is imported before the classes that have the methods."""
    of_torch = collectives_of(RowMovement)
    assert set(IpcBackend.collectives) == collectives_of(IpcCollectives)
    assert set(NcclBackend.collectives) == of_torch | collectives_of(NcclReduction)
    assert set(GlooBackend.collectives) == of_torch | {"barrier"} | collectives_of(GlooReduction)
    assert set(P2PBackend.collectives) == collectives_of(P2PMovement, P2PReduction)
    for backend in (IpcBackend, NcclBackend, GlooBackend, P2PBackend, HierarchicalBackend):
        assert set(backend.collectives) <= set(SPECS)
