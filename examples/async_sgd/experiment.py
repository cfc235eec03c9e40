"""Experiments as files: what a TOML file may contain, its errors with file and line, and the runs that it describes."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps


def whole(least: int) -> Callable[[Any], bool]:
    """Return a check of whole numbers from `least`."""
    return lambda value: type(value) is int and value >= least


SETTINGS: dict[str, tuple[Any, str, Callable[[Any], bool]]] = {
    "workers": (0, "a number of simulated workers", whole(0)),
    "ranks": (0, "a number of ranks", whole(0)),
    "samples": (10_000, "the samples of all workers together", whole(1)),
    "steps": (0, "the steps of each worker, in the place of samples", whole(0)),
    "points": (10, "the number of points of a curve", whole(1)),
    "batch": (16, "images per step and worker", whole(1)),
    "hidden": (32, "the width of the network", whole(1)),
    "lr": (0.1, "a rate of more than 0", lambda value: value > 0),
    "momentum": (0.0, "of the local optimizer, from 0 to below 1", lambda value: 0 <= value < 1),
    "data": ("", "a folder of MNIST files, or '' for scikit-learn's digits", lambda value: isinstance(value, str)),
    "split": ("all", "'all', 'parts' or 'classes'", lambda value: value in ("all", "parts", "classes")),
    "compute": (None, "seconds of a step, or a recorded run", lambda value: isinstance(value, str) or value >= 0),
    "spread": (0.3, "the deviation of the logarithm of a step's seconds", lambda value: value >= 0),
    "slow": (1.0, "how many times as long the last worker computes", lambda value: value >= 1),
    "latency": (1e-4, "seconds", lambda value: value >= 0),
    "bandwidth": (1e9, "bytes per second", lambda value: value > 0),
    "target": (0.1, "an error from 0 to 1", lambda value: 0 <= value <= 1),
}
"""The settings of a run but its algorithm: default, meaning, check. All others, and lr, are options of its class."""
RESULTS = ("samples", "seconds", "megabytes", "loss", "error", "mean_staleness", "distance", "reached")
"""What is measured, by the names of the columns."""
TABLES = {"": {"finding", "seeds"}, "plot": {"x", "y", "logarithmic"}, "settings": None, "grid": None, "series": None}
NO_OPTIONS = {"self", "network", "optimizer", "options", "sharding_communicator", "dataparallel_communicator", "name"}
"""What an experiment can't choose of the parameters of an algorithm."""
_MOST_BYTES = 1 << 20


class ExperimentError(Exception):
    """An experiment file, or one that it names, can't be used; the message has file, line and remedy."""


class AllReduceUpdate(ps.Update):
    """Data-parallel SGD: the average gradient of all workers at each step, and no server."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, update_frequency=1 << 40, init_delay=0)
        self.bytes_per_step = sum(parameter.nbytes for parameter in network.parameters())

    def send(self, integrated: bool) -> None:
        mpinn.synchronize_gradients(self.network)

    def pull(self) -> None:
        """Do nothing: all workers have the same values."""

    @property
    def bytes_sent(self) -> int:
        return self.step * self.bytes_per_step * (self.workers.size > 1)


@cache
def find_algorithm(name: str, folder: Path) -> type | None:
    """Return the class of a name such as ``Downpour``, or of ``FILE.py:CLASS`` in the folder of the experiment."""
    file, _, own = name.rpartition(":")
    if file:
        return runpy.run_path(str(folder / file)).get(own) if (folder / file).is_file() else None
    places = (ps, mpinn)
    found = [getattr(place, f"{name}Update") for place in places if hasattr(place, f"{name}Update")]
    return AllReduceUpdate if name == "AllReduce" else found[0] if found else None


def options_of(algorithm: type) -> set[str]:
    """Return the names of the options of a class, and of its bases as long as it passes ``**options`` on."""
    names: set[str] = set()
    for each in algorithm.__mro__:
        if "__init__" in vars(each):
            parameters = inspect.signature(each.__init__).parameters
            names.update(parameters)
            if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return names - NO_OPTIONS


@dataclass(frozen=True)
class Run:
    """One training: its series, what differs from other runs of the series, and all its settings."""

    label: str
    settings: dict[str, Any]
    algorithm: type
    varied: dict[str, Any]

    @property
    def key(self) -> str:
        """Return what all settings determine, by which a table knows the run."""
        text = json.dumps({name: value for name, value in self.settings.items() if name != "points"}, sort_keys=True)
        return hashlib.sha256(f"{self.label} {text}".encode()).hexdigest()[:12]

    @property
    def size(self) -> int:
        """Return the number of its workers."""
        return self.settings["ranks"] or self.settings["workers"]

    @property
    def num_steps(self) -> int:
        """Return the steps of each worker."""
        return self.settings["steps"] or max(1, self.settings["samples"] // (self.size * self.settings["batch"]))

    @property
    def own_options(self) -> dict[str, Any]:
        """Return the options for its class. A name such as ``"ring_mixing"`` stands for the function of torchmpi."""
        known = options_of(self.algorithm)
        known -= SETTINGS.keys() - {"lr"}
        own = {name: value for name, value in self.settings.items() if name in known}
        own |= {"init_delay": 0} if "init_delay" in known else {}
        return {name: getattr(ps, str(value), value) if name == "mixing" else value for name, value in own.items()}

    def make_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Return the local optimizer of a worker."""
        lr, momentum = self.settings["lr"], self.settings["momentum"]
        return torch.optim.SGD(network.parameters(), lr, momentum, nesterov=momentum > 0)

    def make_update(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Return the update of a worker."""
        needs_optimizer = "optimizer" in inspect.signature(self.algorithm.__init__).parameters
        return self.algorithm(network, *[optimizer] * needs_optimizer, **self.own_options)

    def __str__(self) -> str:
        varied = "".join(f", {name} {value}" for name, value in self.varied.items())
        return f"{self.label}{varied}, seed {self.settings['seed']}"


class Experiment:
    """An experiment file; raises ExperimentError."""

    def __init__(self, path: Path) -> None:
        try:
            import tomllib
        except ImportError:
            raise ExperimentError("experiments are TOML files, which Python reads from 3.11 on. Use it.") from None
        self.path = path
        try:
            with path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise ExperimentError(f"{path}: more than {_MOST_BYTES} bytes: this is no experiment file.")
            self._text = raw.decode()
            content = tomllib.loads(self._text)
        except OSError as error:
            raise ExperimentError(f"{path}: {error.strerror}. Give the path of an experiment file.") from None
        except UnicodeDecodeError:
            raise ExperimentError(f"{path}: no text in UTF-8. Give the path of an experiment file.") from None
        except tomllib.TOMLDecodeError as error:
            raise ExperimentError(f"{path}: no TOML: {error}. Correct this line.") from None
        self._check_names(content)
        self.finding = content["finding"]
        self.seeds = content["seeds"]
        self.plot = {"x": "samples", "logarithmic": [], **content.get("plot", {})}
        self.plot["y"] = [y] if isinstance(y := self.plot.get("y", ["error"]), str) else y
        self._settings, self._grid = content.get("settings", {}), content.get("grid", {})
        self.runs = [
            run for seed in self.seeds for number, series in enumerate(content["series"])
            for run in self._runs_of(number, series, seed)
        ]  # fmt: skip
        self._check_plot()

    def refuse(self, reason: str, table: str = "", key: str = "", number: int = 0) -> ExperimentError:
        """Return an error at the line of a key, or of its table, of which it is the one of this number."""
        line, current, count, found = 0, "", -1, 1
        for line, text in enumerate(self._text.splitlines(), 1):
            if header := re.match(r"\s*\[\[?\s*([\w-]+)", text):
                current, count = header[1], count + 1 if header[1] == current == table else 0
            if current == table and count in (number, -1):
                is_key = re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", text) if key else None
                found = line if is_key or header else found
                if is_key:
                    break
        return ExperimentError(f"{self.path}, line {found}: {reason}")

    def _check_names(self, content: dict[str, Any]) -> None:
        known = TABLES[""] | TABLES.keys() - {""}
        for name, value in content.items():
            table = name if isinstance(value, (dict, list)) else ""
            if name not in known:
                raise self.refuse(f"unknown {name!r}: expected {', '.join(sorted(known))}.", table, name)
            if name == "series":
                is_right = isinstance(value, list) and all(isinstance(each, dict) for each in value)
            else:
                is_right = isinstance(value, dict) == (name in TABLES)
            if not is_right:
                form = "[[series]]" if name == "series" else f"[{name}]" if name in TABLES else f"{name} = ..."
                raise self.refuse(f"{name}: write it as {form}.", table, name)
        seeds = content.get("seeds", [])
        if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
            raise self.refuse("seeds: expected a list of whole numbers, such as seeds = [1, 2, 3].", "", "seeds")
        if not isinstance(content.get("finding"), str):
            raise self.refuse("finding: expected a text, which becomes the title of the plot.", "", "finding")
        if not content.get("series"):
            raise self.refuse("no [[series]]: expected at least one, with label = and algorithm =.")

    def _runs_of(self, number: int, series: dict[str, Any], seed: int) -> Iterator[Run]:
        """The lists of a series go together; those of the grid are combined with each other."""
        refuse = partial(self.refuse, table="series", number=number)
        label, lists = series.get("label"), {name: value for name, value in series.items() if isinstance(value, list)}
        if not isinstance(label, str):
            raise refuse("each series needs a label, a text.", key="label")
        if len({len(value) for value in lists.values()}) > 1:
            reason = f"the lists of a series go together, and have different lengths: {', '.join(lists)}."
            raise refuse(f"{reason} Use [grid] for combinations.", key=next(iter(lists)))
        for name, value in self._grid.items():
            if not (isinstance(value, list) and value):
                raise self.refuse(f"{name}: expected a list of values.", "grid", name)
        together = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)] or [{}]
        for values in product(*self._grid.values()):
            for own in together:
                varied = dict(zip(self._grid, values, strict=True)) | own
                yield self._checked(number, series, self._settings | series | varied, varied, seed)

    def _checked(
        self, number: int, series: dict[str, Any], named: dict[str, Any], varied: dict[str, Any], seed: int
    ) -> Run:
        def refuse(reason: str, key: str) -> ExperimentError:
            places = {"series": series, "grid": self._grid, "settings": self._settings}
            table = next((name for name, has in places.items() if key in has), "series")
            return self.refuse(reason, table, key, number if table == "series" else 0)

        name = str(named.get("algorithm", ""))
        file = self.path.parent / name.rpartition(":")[0]
        if not file.exists():
            raise refuse(f"algorithm={name!r}: there is no file {file}.", "algorithm")
        algorithm = find_algorithm(name, self.path.parent)
        if algorithm is None:
            known = sorted(each[:-6] for each in {*ps.__all__, *mpinn.__all__} if each.endswith("Update") and each[:-6])
            raise refuse(f"algorithm={name!r}: expected FILE.py:CLASS, AllReduce, {', '.join(known)}.", "algorithm")
        for key, value in named.items():
            if key in SETTINGS:
                _, meaning, fits = SETTINGS[key]
                try:
                    is_right = fits(value)
                except TypeError:
                    is_right = False
                if not is_right:
                    raise refuse(f"{key}={value!r}: expected {meaning}.", key)
            elif key not in ("label", "algorithm") and key not in options_of(algorithm):
                expected = ", ".join([*SETTINGS, *sorted(options_of(algorithm) - {"lr"})])
                raise refuse(f"unknown {key!r}: {name} and its runs have {expected}.", key)
        settings = {each: default for each, (default, _, _) in SETTINGS.items()} | named | {"seed": seed}
        if bool(settings["workers"]) == bool(settings["ranks"]):
            raise refuse("expected either workers = N, which are simulated, or ranks = N, of processes.", "workers")
        if not issubclass(algorithm, ps.Update) and settings["workers"]:
            raise refuse(f"{name} is not simulated: its calls are collectives. Use ranks = N.", "algorithm")
        if settings["compute"] is None:
            settings["compute"] = 0.0 if settings["ranks"] else 0.02
        run = Run(series["label"], settings, algorithm, varied)
        try:
            if issubclass(algorithm, ps.Update):  # others can be made in a job only
                run.make_update(network := nn.Linear(1, 1), run.make_optimizer(network))
        except (mpi.TorchMPIError, TypeError, ValueError) as error:
            raise refuse(f"{name}: {error}", "algorithm") from None
        try:
            if isinstance(settings["compute"], str):
                ps.read_run(self.path.parent / settings["compute"])
        except (mpi.TorchMPIError, OSError) as error:
            reason = f"{error.filename}: {error.strerror}." if isinstance(error, OSError) else error
            raise refuse(f"compute: {reason} Give a file of ps.record(path), or seconds.", "compute") from None
        return run

    def _check_plot(self) -> None:
        in_all = set.intersection(*(set(run.varied) for run in self.runs))
        numbers = {name for name in in_all if all(isinstance(run.varied[name], (int, float)) for run in self.runs)}
        known = {*RESULTS, *numbers}
        for key in self.plot:
            if key not in TABLES["plot"]:
                raise self.refuse(f"unknown {key!r}: expected x, y or logarithmic.", "plot", key)
        for key, names in (("x", [self.plot["x"]]), ("y", self.plot["y"]), ("logarithmic", self.plot["logarithmic"])):
            for name in names:
                if name not in known:
                    reason = f"{name!r} is no number that all runs have: expected {', '.join(sorted(known))}."
                    raise self.refuse(f"{key}: {reason}", "plot", key)
