"""Where a run is, and how that goes into a checkpoint and back."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from torchmpi.errors import CheckpointError

from . import rng
from .checkpoint import Saved, Stateful, Tree
from .epoch import Epoch, iterator_state, load_iterator_state, num_batches
from .progressbar import ProgressBar
from .state import State
from .transfer import Transfer


class Run:
    """One call of ``train()``: the state that hooks see, and what they need not see.

    `place` is "between" epochs, in an "epoch" between two updates, in a "step", or at an "epoch end".

        run = Run(state, Transfer(device), bar=None)
    """

    def __init__(self, state: State, transfer: Transfer, bar: ProgressBar | None) -> None:
        self.state, self.transfer, self._bar = state, transfer, bar
        self.place: Literal["between", "epoch", "step", "epoch end"] = "between"
        self.epoch: Epoch | None = None

    def begin_epoch(self, depth: int, saved: dict[str, Any] | None) -> Epoch:
        """Start walking over the data, or take the walk up again where `saved` left it."""
        state = self.state
        state.batch = 0 if saved is None else saved["batch"]
        self.epoch = Epoch(state.iterator, self.transfer, depth, saved)
        if self._bar is not None:
            self._bar.begin(f"epoch {state.epoch + 1}/{state.max_epochs}", num_batches(state.iterator))
        return self.epoch

    def show_progress(self) -> None:
        """Draw the bar, if it is time."""
        if self._bar is not None:
            self._bar.update(self.state.batch, self.state.loss)

    def close(self) -> None:
        """Leave the bar in order."""
        if self._bar is not None:
            self._bar.close()


def pack(run: Run, kept: dict[str, Stateful]) -> Saved:
    """All that is needed to continue from here.

    checkpoint.write(path, pack(run, {"loss": meter}), OneRank())
    """
    state, in_epoch = run.state, run.place == "epoch"
    own: dict[str, Any] = {
        "batch": state.batch,
        "rng": rng.capture(run.transfer.device),
        "kept": {name: value.state_dict() for name, value in kept.items()},
    }
    if in_epoch and run.epoch is not None:
        own.update(run.epoch.place())
    else:
        own.update(generators=rng.capture_generators(state.iterator), iterator=iterator_state(state.iterator))
    epoch = state.epoch + (run.place == "epoch end")
    return Saved({"epoch": epoch, "t": state.t, "in_epoch": in_epoch}, own, _trees(state))


def unpack(saved: Saved, run: Run, kept: dict[str, Stateful]) -> dict[str, Any] | None:
    """Bring everything back; gives what ``Run.begin_epoch`` needs to continue within an epoch, or None
    between two.

    run.begin_epoch(depth=1, saved=unpack(checkpoint.read(path, OneRank()), run, {"loss": meter}))
    """
    state, own = run.state, saved.own
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
    rng.restore(own["rng"], run.transfer.device)
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
        state.network.load_state_dict(trees["network"])  # type: ignore[arg-type]
        part = "criterion"
        if isinstance(state.criterion, nn.Module):
            state.criterion.load_state_dict(trees.get("criterion", {}))  # type: ignore[arg-type]
        part = "optimizer"
        state.optimizer.load_state_dict(optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this {part}: {error}") from error
