"""One run of an experiment: on the ranks of this job, or on simulated workers."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torchmpi as mpi
import torchmpi.parameterserver as ps

from .experiment import Run
from .task import Dataset, Split, batches, load, test_loss


class Snapshot(NamedTuple):
    """The state of a run after some steps of rank 0, which is tested afterwards."""

    num_steps: int
    seconds: float
    megabytes: float
    values: Tensor


class Outcome(NamedTuple):
    """What a worker returns."""

    snapshots: list[Snapshot]
    seconds: float
    staleness: float
    distance: float


def split_of(data: Dataset, how: str) -> Split:
    """Return the images of this worker."""
    train = data.train
    if how == "classes":
        order = train.target.argsort(stable=True)
        train = Split(train.input[order], train.target[order])
    return train if how == "all" else train.part(mpi.rank(), mpi.size())


def common_values(update: Any, network: nn.Module) -> Tensor:
    """Return what is tested, the values of the servers if there are any, and leave the update as it was."""
    own = [parameter.detach().clone() for parameter in network.parameters()]
    base = getattr(update, "base", None)
    if hasattr(update, "pull"):
        update.pull()
        update.base = base
    values = parameters_to_vector(network.parameters()).detach().clone()
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), own, strict=True):
            parameter.copy_(value)
    return values


def train(run: Run, data: Dataset) -> Outcome:
    """Train on one worker; the function is the same on ranks and on simulated workers."""
    settings, rank = run.settings, mpi.rank()
    network = make_network(data.num_inputs, settings["hidden"], settings["seed"])
    optimizer = run.make_optimizer(network)
    update = run.make_update(network, optimizer)
    has_servers, steps_on_servers = isinstance(update, ps.Update), isinstance(update, ps.ASGDUpdate)
    source = batches(split_of(data, settings["split"]), settings["batch"], 1000 * settings["seed"] + rank)
    random = np.random.default_rng([settings["seed"], rank])
    interval = max(1, run.num_steps // settings["points"])
    snapshots: list[Snapshot] = []
    if has_servers:
        update.start()
    mpi.barrier()
    begin = time.perf_counter()

    def note(step: int) -> None:
        seconds = time.perf_counter() - begin
        snapshots.append(Snapshot(step, seconds, update.bytes_sent / 1e6, common_values(update, network)))

    for step in range(run.num_steps):
        if rank == 0 and step and step % interval == 0:
            note(step)
        images, labels = next(source)
        optimizer.zero_grad()
        cross_entropy(network(images), labels).backward()
        if settings["ranks"] and (seconds := compute_time(run, rank, random)):
            time.sleep(seconds)
        if has_servers:
            update.update()
        if not steps_on_servers:
            optimizer.step()
        if not has_servers:
            update.update()
    update.finish()
    seconds = time.perf_counter() - begin
    mpi.barrier()
    own = parameters_to_vector(network.parameters()).detach()
    note(run.num_steps)
    values = snapshots[-1].values
    staleness = update.staleness.mean if has_servers and update.num_sends else 0.0
    distance = float((own - values).norm() / values.norm())
    means = [mpi.allreduce(value, op="avg") for value in (seconds, staleness, distance)]
    if has_servers:
        update.free()
    return Outcome(snapshots, *means)


def make_network(num_inputs: int, hidden: int, seed: int) -> nn.Sequential:
    """The same weights on every worker, and for every algorithm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def compute_time(run: Run, worker: int, random: np.random.Generator) -> float:
    """Draw the seconds of a step."""
    settings = run.settings
    drawn = settings["compute"] * math.exp(settings["spread"] * random.standard_normal())
    return drawn * (settings["slow"] if 0 < worker == run.size - 1 else 1.0)


def execute(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Run it, and return the points of its curve by the names of the columns; on rank 0 if this is a job."""
    settings = run.settings
    data = load(settings["data"] or None)
    if settings["workers"]:
        compute: Any = lambda worker, step, random: compute_time(run, worker, random)  # noqa: E731
        if isinstance(settings["compute"], str):
            compute = ps.read_run(folder / settings["compute"])
        network = ps.SimulatedNetwork(latency=settings["latency"], bandwidth=settings["bandwidth"])
        simulated = ps.simulate(
            lambda: train(run, data), run.size, compute=compute, network=network, seed=settings["seed"]
        )
        outcome = simulated.results[0]
        columns = simulated.record.columns
        ends = [columns["end"][(columns["kind"] == 3) & (columns["rank"] == rank)] for rank in range(run.size)]
        seconds = [float(ends[0][shot.num_steps - 1]) for shot in outcome.snapshots[:-1]]
        seconds.append(float(np.mean([own[-1] for own in ends])))
    else:
        outcome = train(run, data)
        seconds = [*(shot.seconds for shot in outcome.snapshots[:-1]), outcome.seconds]
    tested = make_network(data.num_inputs, settings["hidden"], 0)
    points: list[dict[str, Any]] = []
    for shot, time_of in zip(outcome.snapshots, seconds, strict=True):
        vector_to_parameters(shot.values, tested.parameters())
        loss, error = test_loss(tested, data.test)
        samples, megabytes = float(shot.num_steps * run.size * settings["batch"]), shot.megabytes
        points.append({"samples": samples, "seconds": time_of, "megabytes": megabytes, "loss": loss, "error": error})
    reached = next((point["seconds"] for point in points if point["error"] <= settings["target"]), math.nan)
    means = {"mean_staleness": outcome.staleness, "distance": outcome.distance, "reached": reached}
    return [point | means for point in points]
