"""The state of one call of ``train()``, and its conversion to and from a checkpoint."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import log
from ..errors import ArgumentError, CheckpointError
from ..nn import MPLinear
from . import rng
from .checkpoint import Content, Saved, Saver, Stateful, digest
from .coordination import Coordinator
from .data_loading import DeviceCopy, Epoch, Source, iterator_state, load_iterator_state, make, map_tensors, num_batches
from .early_stop import BestEpoch, EarlyStop
from .meters import Meter
from .metrics import Metric
from .progressbar import ProgressBar
from .scheduling import Schedule
from .state import State
from .updates import UpdateOptions


class Validation:
    """The validation after each epoch of a run."""

    def __init__(self, source: Source, metrics: dict[str, Metric], stop_early: EarlyStop | None) -> None:
        self.source, self.batches, self.metrics = source, make(source), metrics
        self.best = BestEpoch(stop_early)
        self.metric = "loss" if stop_early is None else stop_early.metric
        """Name of the metric that decides about the best epoch, and that a ReduceLROnPlateau gets."""
        names = ["loss", "error", *metrics]
        if self.metric not in names:
            raise ArgumentError(f"stop_early: no metric {self.metric!r}; there are {', '.join(names)}")
        self.keeps_best = stop_early is not None and stop_early.keep_best
        self.best_weights: OrderedDict[str, Any] | None = None

    def add(self, value: float, state: State) -> None:
        """Count an epoch with this value of the metric, and keep its weights if it is the best and they are wanted."""
        if self.best.add(value, state.epoch) and self.keeps_best:
            self.best_weights = copy.deepcopy(_module_tree(state.network))

    def restore_best(self, network: nn.Module) -> None:
        """Load the weights of the best epoch, if they are kept."""
        if self.best_weights is not None:
            _load_module(network, self.best_weights)


class TrainingRun:
    """One call of ``train()``: the state that hooks receive, and the internal state of the loop."""

    def __init__(
        self,
        state: State,
        source: Source,
        options: UpdateOptions,
        schedule: Schedule,
        scaler: torch.amp.GradScaler | None,
        validation: Validation | None,
        device_copy: DeviceCopy,
        bar: ProgressBar | None,
        coordinator: Coordinator,
    ) -> None:
        self.state, self.options, self.schedule, self.scaler = state, options, schedule, scaler
        self._source = source
        self.validation, self.device_copy = validation, device_copy
        arguments: dict[str, Stateful | None] = {
            "scheduler=": schedule.scheduler,
            "scaler=": scaler,
            "validate=": None if validation is None else validation.best,
        }
        self.kept = {name: value for name, value in arguments.items() if value is not None}
        """Arguments of ``train()`` whose state belongs into checkpoints."""
        self._bar, self._coordinator = bar, coordinator
        self.saver = Saver(coordinator)
        self.phase: Literal["between epochs", "between updates", "update", "epoch end"] = "between epochs"
        self._epoch: Epoch | None = None

    def begin_epoch(self, depth: int, position: dict[str, Any] | None) -> Epoch:
        """Start a pass over the data, or continue one at a saved position."""
        state = self.state
        state.batch = 0 if position is None else position["batch"]
        self._epoch = Epoch(state.iterator, self.device_copy, depth, position)
        if self._bar is not None:
            self._bar.begin(f"epoch {state.epoch + 1}/{state.max_epochs}", num_batches(state.iterator), state.batch)
        return self._epoch

    def divide_anew(self) -> None:
        """Make the iterators over the data again, as the number of ranks has changed."""
        self.phase, self._epoch = "between epochs", None
        self.state.iterator = make(self._source)
        if self.validation is not None:
            self.validation.batches = make(self.validation.source)

    def show_progress(self) -> None:
        """Update the progress bar."""
        if self._bar is not None:
            self._bar.update(self.state.batch, self.state.loss)

    def close(self) -> None:
        """Close the progress bar, and end the thread that saves."""
        self.saver.close()
        if self._bar is not None:
            self._bar.close()

    def save(self, path: Path, kept: dict[str, Stateful], asynchronous: bool) -> None:
        """Save a checkpoint of this run and of `kept`, the objects of ``keep()``."""
        self.saver.save(path, self.content(kept), asynchronous)

    def content(self, kept: dict[str, Stateful]) -> Content:
        """Return the present state of this run and of `kept`. The tensors are not copied."""
        state, in_epoch = self.state, self.phase == "between updates"
        own: dict[str, Any] = {
            "batch": state.batch,
            "num_batches": num_batches(state.iterator),
            "rng": rng.capture(self.device_copy.device),
            "kept": {name: value.state_dict() for name, value in kept.items()},
        }
        if in_epoch and self._epoch is not None:
            own.update(self._epoch.position())
        else:
            own.update(generators=rng.capture_generators(state.iterator), iterator=iterator_state(state.iterator))
        epoch = state.epoch + (self.phase == "epoch end")
        trees = _trees(state, self.validation)
        metadata = {name: _versions(tree) for name, tree in trees.items()}
        common = {"epoch": epoch, "t": state.t, "in_epoch": in_epoch, "metadata": metadata}
        return Content(common, own, _whole(state, trees))

    def restore(self, saved: Saved, kept: dict[str, Stateful]) -> dict[str, Any] | None:
        """Load a checkpoint; return the position for `begin_epoch`, or None if it was saved between two epochs."""
        state, names = self.state, saved.ranks[0]["kept"].keys()
        if names != kept.keys():
            raise CheckpointError(
                f"the checkpoint has the state of {sorted(names)}, but this engine keeps {sorted(kept)}: "
                "give train(), keep() and step_scheduler() the same objects as in the run that is resumed"
            )
        _load_trees(state, self.validation, saved)
        own = self._own_state(saved, kept)
        for name, value in kept.items():
            value.load_state_dict(own["kept"][name])
        if saved.common["in_epoch"]:
            return own
        rng.restore_generators(state.iterator, own["generators"])
        load_iterator_state(state.iterator, own["iterator"])
        rng.restore(own["rng"], self.device_copy.device)
        return None

    def _own_state(self, saved: Saved, kept: dict[str, Stateful]) -> dict[str, Any]:
        """Return the saved state of this rank; if the number of ranks has changed, a part of the state of all ranks."""
        rank, size, length = self._coordinator.rank, self._coordinator.size, num_batches(self.state.iterator)
        if len(saved.ranks) == size:
            return saved.ranks[rank]
        own = dict(saved.ranks[rank % len(saved.ranks)])
        own["kept"] = {name: _kept_state(name, value, saved, rank) for name, value in kept.items()}
        if rank >= len(saved.ranks):  # with the random numbers of another rank, both would have the same dropout
            own["rng"] = own["begin"] = rng.capture(self.device_copy.device)
        if saved.common["in_epoch"]:
            own["iterator"] = None  # the position of a rank that had another part of the data
            own["batch"] = redivided_batch(saved.ranks, size, length)
        if rank == 0:
            begin = f" after batch {own['batch']} of rank 0" if saved.common["in_epoch"] else ""
            log.logger.info(
                f"resuming on {size} rank(s) a run of {len(saved.ranks)}, from epoch {saved.common['epoch'] + 1}{begin}"
            )
        return own


def redivided_batch(ranks: list[dict[str, Any]], size: int, length: int | None) -> int:
    """Return how many of `length` batches each of `size` ranks skips.

    A remainder of fewer than `size` batches is processed again.

    >>> redivided_batch([{"batch": 5, "num_batches": 10}, {"batch": 5, "num_batches": 10}], 4, 5)
    2
    """
    num_done: int = sum(rank["batch"] for rank in ranks)
    lengths = [rank["num_batches"] for rank in ranks]
    if length is None or None in lengths:
        return num_done // size
    total: int = sum(lengths)
    return length * num_done // max(1, total)


def _kept_state(name: str, value: Stateful, saved: Saved, rank: int) -> dict[str, Any]:
    states: list[dict[str, Any]] = [theirs["kept"][name] for theirs in saved.ranks]
    if isinstance(value, Meter):
        return value.divided(states, rank)
    if rank == 0 and len({digest(state) for state in states}) > 1:
        log.logger.warning(
            f"the state of {name!r} differs between the {len(states)} ranks that saved it; rank r now takes the state "
            f"of rank r modulo {len(states)}"
        )
    return states[rank % len(states)]


# --- state dicts -------------------------------------------------------------------------------------------


def _trees(state: State, validation: Validation | None) -> dict[str, Any]:
    assert state.optimizer is not None
    trees = {"network": _module_tree(state.network), "optimizer": state.optimizer.state_dict()}
    if isinstance(state.criterion, nn.Module):
        trees["criterion"] = _module_tree(state.criterion)
    if validation is not None and validation.best_weights is not None:
        trees["best"] = validation.best_weights
    return trees


def _whole(state: State, trees: dict[str, Any]) -> dict[str, Any]:
    """Return `trees` with complete tensors of sharded layers."""
    layers = dict(_sharded_layers(state))

    def whole(tensor: Tensor, name: str) -> Tensor:
        layer = layers.get(_owner(name))
        return tensor if layer is None or tensor.shape != layer.weight.shape else layer.gather_columns(tensor)

    return map_tensors(whole, trees) if layers else trees


def _load_trees(state: State, validation: Validation | None, saved: Saved) -> None:
    assert state.optimizer is not None
    layers = dict(_sharded_layers(state))

    def part(tensor: Tensor, name: str) -> Tensor:
        layer = layers.get(_owner(name))
        shape = None if layer is None else (layer.out_features, layer.in_features)
        return tensor if layer is None or tensor.shape != shape else layer.select_columns(tensor)

    trees, metadata = map_tensors(part, saved.trees), saved.common["metadata"]
    if validation is not None and validation.keeps_best and "best" in trees:
        validation.best_weights = _state_dict(trees["best"], metadata["best"])
    tree = "network"
    try:
        _load_module(state.network, _state_dict(trees["network"], metadata["network"]))
        tree = "criterion"
        if isinstance(state.criterion, nn.Module):
            _load_module(state.criterion, _state_dict(trees.get("criterion", {}), metadata.get("criterion", {})))
        tree = "optimizer"
        state.optimizer.load_state_dict(trees["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this {tree}: {error}") from error


def plain_name(name: str) -> str:
    """Return the name of a tensor in a module that is not compiled; ``torch.compile`` inserts a component.

    >>> plain_name("0._orig_mod.weight")
    '0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _state_dict(values: dict[str, Any], metadata: dict[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict with the versions of its modules, by which some of them decide how to load it."""
    result = OrderedDict(values)
    result._metadata = metadata  # type: ignore[attr-defined]  # as torch does
    return result


def _versions(state: Mapping[str, Any]) -> dict[str, Any]:
    return getattr(state, "_metadata", {})


def _module_tree(module: nn.Module) -> OrderedDict[str, Any]:
    """Return the state dict of `module`, with the names that it has if nothing is compiled."""
    state = module.state_dict()
    values, metadata = ({plain_name(name): each for name, each in d.items()} for d in (state, _versions(state)))
    return _state_dict(values, metadata)


def _load_module(module: nn.Module, tree: OrderedDict[str, Any]) -> None:
    """Load the result of :func:`_module_tree`."""
    state, saved = module.state_dict(), _versions(tree)
    names = {plain_name(name): name for name in state}
    values = {names.get(name, name): value for name, value in tree.items()}
    metadata = {name: saved.get(plain_name(name), own) for name, own in _versions(state).items()}
    module.load_state_dict(_state_dict(values, metadata))


def _sharded_layers(state: State) -> Iterator[tuple[str, MPLinear]]:
    """Yield the sharded layers, with the names of weights and optimizer state in a checkpoint."""
    assert state.optimizer is not None
    layers: dict[int, MPLinear] = {}
    for tree, root in (("network", state.network), ("best", state.network), ("criterion", state.criterion)):
        for name, module in root.named_modules(prefix=tree) if isinstance(root, nn.Module) else ():
            if isinstance(module, MPLinear):
                layers[id(module.weight)] = module
                yield f"{plain_name(name)}.weight", module
    parameters = (parameter for group in state.optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(parameters):
        if id(parameter) in layers:
            yield f"optimizer.state.{index}", layers[id(parameter)]


def _owner(name: str) -> str:
    """Return the key of :func:`_sharded_layers` for a tensor.

    >>> _owner("optimizer.state.0.exp_avg"), _owner("network.0.weight")
    ('optimizer.state.0', 'network.0.weight')
    """
    return ".".join(name.split(".")[:3]) if name.startswith("optimizer.state.") else name
