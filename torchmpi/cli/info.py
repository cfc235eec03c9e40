"""The command ``torchmpi info``: report versions, ranks, devices, backends and settings of this job."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .. import collectives
from ..backends.selection_table import Table
from ..backends.selector import AVAILABLE, Availability
from ..collective_specs import COLLECTIVES
from ..config import PREFIX, Config
from ..errors import LaunchError, MissingMPIError, TorchMPIError
from ..launch import affinity, launcher, mpi_library
from ..session import runtime
from .facts import mpi_facts, nccl, versions
from .formatting import core_list, counted, section, table
from .launching import leave_job


def run(options: argparse.Namespace) -> int:
    """Start torchmpi, report on rank 0, and stop; return 1 if it could not be started."""
    software = {"versions": versions(), "executable": sys.executable}

    def show(report: dict[str, Any]) -> None:
        report = software | report
        print(json.dumps(report, indent=2) if options.json else as_text(report), flush=True)

    try:
        MPI = mpi_library.initialize()
    except (MissingMPIError, LaunchError) as error:
        # The ranks form no job: the first one of the host reports. Another one with status 1 would end the job before.
        if launcher.detect().local_rank not in (None, 0):
            return 0
        show({"error": str(error)})
        return 1
    world = MPI.COMM_WORLD
    try:
        config = runtime.agreed_config(world, None)
        runtime.start(config=dataclasses.replace(config, verbose=False))
    except TorchMPIError as error:  # the same on all ranks
        if world.rank == 0:
            show({"error": str(error)})
        leave_job()
        return 1
    ranks = collectives.allgather_object(_rank())
    if world.rank == 0:
        show(_job(ranks) | {"settings": _settings(config)})
    runtime.stop()
    return 0


# --- gathering ---------------------------------------------------------------------------------------------


def _rank() -> dict[str, Any]:
    here = runtime.current()
    is_gpu = here.device.type == "cuda"
    return {
        "rank": here.world.rank,
        "host": here.host_name,
        "local_rank": here.local_rank,
        "cores": sorted(affinity.current()),
        "threads": torch.get_num_threads(),
        "device": str(here.device),
        "device_name": torch.cuda.get_device_name(here.device) if is_gpu else None,
        "device_uuid": here.devices[here.world.rank].uuid or None,
        "nccl": nccl()["nccl"] if is_gpu else None,
        "binding": here.binding,
    }


def _job(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    here = runtime.current()
    mpi = dataclasses.asdict(mpi_facts())
    return {
        "mpi": {name: mpi[name] for name in ("library", "paths", "thread_level", "is_cuda_aware")},
        "launcher": launcher.detect().name,
        "num_hosts": here.num_hosts,
        "ranks_per_host": dict(Counter(rank["host"] for rank in ranks)),
        "ranks": ranks,
        "backends": backends(here.selector.availability()),
        "transports": transports(here.selector.table, here.selector.spans),
        "tuned": bool(here.selector.tuned),
    }


def _settings(config: Config) -> dict[str, Any]:
    sources = {name: PREFIX + name.upper() for name in dataclasses.asdict(config)}
    return {
        name: {"value": getattr(config, name), "from": source if source in os.environ else "default"}
        for name, source in sources.items()
    }


def backends(availability: Availability) -> list[dict[str, Any]]:
    """Group the table of availability by backend, device and verdict; collectives as users call them.

    >>> backends(Availability({("mpi", "reduce", "cpu", "async"): "available"}))
    [{'backend': 'mpi', 'device': 'cpu', 'verdict': 'available', 'verbs': ['reduce_async']}]
    """
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for (backend, collective, device, mode), verdict in availability.items():
        grouped.setdefault((backend, device, verdict), []).append(
            collective if mode == "sync" else f"{collective}_async"
        )
    return [
        {"backend": backend, "device": device, "verdict": verdict, "verbs": verbs}
        for (backend, device, verdict), verbs in grouped.items()
    ]


def transports(table: Table, spans: Sequence[str]) -> list[dict[str, Any]]:
    """Group the rules of the selector by span and transport.

    >>> from torchmpi.backends.selection_table import keys
    >>> transports(Table({key: ((None, "mpi"),) for key in keys("reduce")}), ["host"])
    [{'span': 'host', 'transport': 'mpi', 'verbs': ['reduce']}]
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    for span in spans:
        for collective in COLLECTIVES:
            if any((key.collective, key.span) == (collective, span) for key in table):
                grouped.setdefault((span, table.variants(collective, span)), []).append(collective)
    return [{"span": span, "transport": text, "verbs": verbs} for (span, text), verbs in grouped.items()]


# --- text --------------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    """Format the report in sections."""
    installed = [(name, version or "not installed") for name, version in report["versions"].items()]
    lines = section("software", [*installed, ("started by", report["executable"])])
    if "error" in report:
        return "\n".join([*lines, "", *section("not started", [("reason", report["error"])])])
    mpi, ranks = report["mpi"], report["ranks"]
    hosts = [f"{counted(number, 'rank')} on {host}" for host, number in report["ranks_per_host"].items()]
    sections = [
        section(
            "MPI",
            [
                ("library", mpi["library"]),
                ("file", ", ".join(mpi["paths"]) or "unknown"),
                ("thread level", mpi["thread_level"]),
                ("CUDA-aware", "yes" if mpi["is_cuda_aware"] else "no"),
            ],
        ),
        section(
            "job",
            [
                ("launcher", report["launcher"] or "none known"),
                ("ranks", str(len(ranks))),
                ("hosts", f"{report['num_hosts']}: {', '.join(hosts)}"),
                ("binding", "; ".join(dict.fromkeys(rank["binding"] for rank in ranks))),
            ],
        ),
        [f"  {line}" for line in _rank_table(ranks)],
        _gpu_section(ranks),
        _backend_section(report["backends"]),
        _transport_section(report["transports"], is_tuned=report["tuned"]),
        section("settings", map(_setting_line, report["settings"].items())),
    ]
    return "\n".join([*lines, *(line for found in filter(None, sections) for line in ("", *found))])


def _setting_line(setting: tuple[str, dict[str, Any]]) -> tuple[str, str]:
    name, entry = setting
    source = "" if entry["from"] == "default" else f"  (from {entry['from']})"
    return name, f"{entry['value']!r}{source}"


def _rank_table(ranks: list[dict[str, Any]]) -> list[str]:
    rows: list[list[object]] = [["rank", "host", "local", "cores", "threads", "device"]]
    for rank in ranks:
        device = " ".join(filter(None, (rank["device"], rank["device_name"])))
        rows.append([rank["rank"], rank["host"], rank["local_rank"], core_list(rank["cores"]), rank["threads"], device])
    return table(rows, right=(0, 2, 4))


def _gpu_section(ranks: list[dict[str, Any]]) -> list[str]:
    on_gpus = [rank for rank in ranks if rank["device_uuid"] is not None]
    by_gpu: dict[str, list[str]] = {}
    for rank in on_gpus:
        by_gpu.setdefault(f"{rank['device_uuid']} on {rank['host']}", []).append(str(rank["rank"]))
    nccl_versions = dict.fromkeys(rank["nccl"] or "none" for rank in on_gpus)
    lines = [(gpu, f"{'ranks' if len(users) > 1 else 'rank'} {', '.join(users)}") for gpu, users in by_gpu.items()]
    return section("GPUs", [("NCCL", ", ".join(nccl_versions)), *lines]) if lines else []


def _backend_section(entries: list[dict[str, Any]]) -> list[str]:
    everything = max(len(entry["verbs"]) for entry in entries)
    lines = []
    for entry in entries:
        text = entry["verdict"]
        if len(entry["verbs"]) < everything:
            text += f": {', '.join(entry['verbs'])}"
        elif text in AVAILABLE:
            text += ": all collectives, sync and async"
        lines.append((f"{entry['backend']} {entry['device']}", text))
    return section("backends", lines)


def _transport_section(entries: list[dict[str, Any]], *, is_tuned: bool) -> list[str]:
    lines = [("table", "measured by autotune()" if is_tuned else "default")]
    for entry in entries:
        verbs = "all collectives" if len(entry["verbs"]) == len(COLLECTIVES) else ", ".join(entry["verbs"])
        lines.append((entry["span"], f"{verbs}: {entry['transport']}"))
    return section("transports", lines)
