"""The state of one call of ``train()``, and its conversion to and from a checkpoint."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from ..errors import CheckpointError
from . import rng
from .checkpoint import Saved, Stateful, Tree
from .data_loading import DeviceCopy, Epoch, iterator_state, load_iterator_state, num_batches
from .progressbar import ProgressBar
from .state import State


class TrainingRun:
    """One call of ``train()``: the state that hooks receive, and the internal state of the loop."""

    def __init__(self, state: State, device_copy: DeviceCopy, bar: ProgressBar | None) -> None:
        self.state, self.device_copy, self._bar = state, device_copy, bar
        self.phase: Literal["between epochs", "between updates", "update", "epoch end"] = "between epochs"
        self._epoch: Epoch | None = None

    def begin_epoch(self, depth: int, position: dict[str, Any] | None) -> Epoch:
        """Start a pass over the data, or continue one at a saved position."""
        state = self.state
        state.batch = 0 if position is None else position["batch"]
        self._epoch = Epoch(state.iterator, self.device_copy, depth, position)
        if self._bar is not None:
            self._bar.begin(f"epoch {state.epoch + 1}/{state.max_epochs}", num_batches(state.iterator))
        return self._epoch

    def show_progress(self) -> None:
        """Update the progress bar."""
        if self._bar is not None:
            self._bar.update(self.state.batch, self.state.loss)

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def save(self, kept: dict[str, Stateful]) -> Saved:
        """Return the contents of a checkpoint of this run and of `kept`, the objects of ``keep()``."""
        state, in_epoch = self.state, self.phase == "between updates"
        own: dict[str, Any] = {
            "batch": state.batch,
            "rng": rng.capture(self.device_copy.device),
            "kept": {name: value.state_dict() for name, value in kept.items()},
        }
        if in_epoch and self._epoch is not None:
            own.update(self._epoch.position())
        else:
            own.update(generators=rng.capture_generators(state.iterator), iterator=iterator_state(state.iterator))
        epoch = state.epoch + (self.phase == "epoch end")
        return Saved({"epoch": epoch, "t": state.t, "in_epoch": in_epoch}, own, _trees(state))

    def restore(self, saved: Saved, kept: dict[str, Stateful]) -> dict[str, Any] | None:
        """Load a checkpoint; return the position for `begin_epoch`, or None if it was saved between two epochs."""
        state, own = self.state, saved.own
        if own["kept"].keys() != kept.keys():
            raise CheckpointError(
                f"the checkpoint has the state of {sorted(own['kept'])}, but this engine keeps {sorted(kept)}: "
                "give keep() and step_scheduler() the same objects as in the run that is resumed"
            )
        _load_trees(state, saved.trees)
        for name, value in kept.items():
            value.load_state_dict(own["kept"][name])
        if saved.common["in_epoch"]:
            return own
        rng.restore_generators(state.iterator, own["generators"])
        load_iterator_state(state.iterator, own["iterator"])
        rng.restore(own["rng"], self.device_copy.device)
        return None


def _trees(state: State) -> dict[str, Tree]:
    assert state.optimizer is not None
    optimizer = state.optimizer.state_dict()
    flat: Tree = {("state", index): value for index, value in optimizer.pop("state").items()}
    flat.update(optimizer)
    # The state dict itself rather than a copy of its items: it carries the version of each module's format.
    trees: dict[str, Any] = {"network": state.network.state_dict(), "optimizer": flat}
    if isinstance(state.criterion, nn.Module):
        trees["criterion"] = state.criterion.state_dict()
    return trees


def _load_trees(state: State, trees: dict[str, Tree]) -> None:
    assert state.optimizer is not None
    optimizer: dict[str, Any] = {"state": {}}
    for key, value in trees["optimizer"].items():
        if isinstance(key, tuple):
            optimizer["state"][key[1]] = value
        else:
            optimizer[str(key)] = value
    part = "network"
    try:
        state.network.load_state_dict(trees["network"])
        part = "criterion"
        if isinstance(state.criterion, nn.Module):
            state.criterion.load_state_dict(trees.get("criterion", {}))
        part = "optimizer"
        state.optimizer.load_state_dict(optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this {part}: {error}") from error
