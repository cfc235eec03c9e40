"""The state dicts in a checkpoint: names that do not depend on compilation, and complete tensors of sharded layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from ..nn import MPLinear
from .data_loading import map_tensors
from .state import State

Tree = OrderedDict[str, Any]
"""The state dict of a module."""


def trees_of(state: State, best: Tree | None) -> dict[str, Any]:
    """Return the state dicts of network, optimizer and criterion, and `best`, the weights of the best epoch, if any."""
    assert state.optimizer is not None
    trees = {"network": module_tree(state.network), "optimizer": state.optimizer.state_dict()}
    if isinstance(state.criterion, nn.Module):
        trees["criterion"] = module_tree(state.criterion)
    if best is not None:
        trees["best"] = best
    return trees


def versions(trees: dict[str, Any]) -> dict[str, Any]:
    """Return the versions of the modules in `trees`, by which some of them decide how to load their state."""
    return {name: _versions(tree) for name, tree in trees.items()}


def whole(state: State, trees: dict[str, Any]) -> dict[str, Any]:
    """Return `trees` with complete tensors of sharded layers."""
    layers = dict(_sharded_layers(state))

    def gathered(tensor: Tensor, name: str) -> Tensor:
        layer = layers.get(_owner(name))
        return tensor if layer is None or tensor.shape != layer.weight.shape else layer.gather_columns(tensor)

    return map_tensors(gathered, trees) if layers else trees


def load_trees(state: State, trees: dict[str, Any], metadata: dict[str, Any]) -> Tree | None:
    """Load the result of :func:`whole`, saved with that of :func:`versions`; return the weights of the best epoch."""
    assert state.optimizer is not None
    layers = dict(_sharded_layers(state))

    def part(tensor: Tensor, name: str) -> Tensor:
        layer = layers.get(_owner(name))
        shape = None if layer is None else (layer.out_features, layer.in_features)
        return tensor if layer is None or tensor.shape != shape else layer.select_columns(tensor)

    trees = map_tensors(part, trees)
    tree = "network"
    try:
        load_module(state.network, _state_dict(trees["network"], metadata["network"]))
        tree = "criterion"
        if isinstance(state.criterion, nn.Module):
            load_module(state.criterion, _state_dict(trees.get("criterion", {}), metadata.get("criterion", {})))
        tree = "optimizer"
        state.optimizer.load_state_dict(trees["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this {tree}: {error}") from error
    return _state_dict(trees["best"], metadata["best"]) if "best" in trees else None


def plain_name(name: str) -> str:
    """Return the name of a tensor in a module that is not compiled; ``torch.compile`` inserts a component.

    >>> plain_name("0._orig_mod.weight")
    '0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _state_dict(values: dict[str, Any], metadata: dict[str, Any]) -> Tree:
    result = OrderedDict(values)
    result._metadata = metadata  # type: ignore[attr-defined]  # as torch does
    return result


def _versions(state: Mapping[str, Any]) -> dict[str, Any]:
    return getattr(state, "_metadata", {})


def module_tree(module: nn.Module) -> Tree:
    """Return the state dict of `module`, with the names that it has if nothing is compiled."""
    state = module.state_dict()
    values, metadata = ({plain_name(name): each for name, each in d.items()} for d in (state, _versions(state)))
    return _state_dict(values, metadata)


def load_module(module: nn.Module, tree: Tree) -> None:
    """Load the result of :func:`module_tree`."""
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
