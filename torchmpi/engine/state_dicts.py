"""The state dicts in a checkpoint: names that do not depend on compilation, and complete tensors of sharded layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..nn import MPLinear
from ..nn.tensor_parallel import divided_part
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
    shards = dict(_shards(state))

    def gathered(tensor: Tensor, name: str) -> Tensor:
        shard = shards.get(_owner(name))
        return tensor if shard is None or tensor.shape != shard.tensor.shape else shard.gather(tensor)

    return map_tensors(gathered, trees) if shards else trees


def load_trees(state: State, trees: dict[str, Any], metadata: dict[str, Any]) -> Tree | None:
    """Load the result of :func:`whole`, saved with that of :func:`versions`; return the weights of the best epoch."""
    assert state.optimizer is not None
    shards = dict(_shards(state))

    def part(tensor: Tensor, name: str) -> Tensor:
        shard = shards.get(_owner(name))
        return tensor if shard is None or tensor.shape != shard.whole_shape else shard.select(tensor)

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


class _Shard(NamedTuple):
    """A parameter of which the ranks have parts, and functions for it and for tensors of its shape."""

    tensor: Tensor
    whole_shape: torch.Size
    gather: Callable[[Tensor], Tensor]
    select: Callable[[Tensor], Tensor]


def _shards_of(module: nn.Module) -> Iterator[_Shard]:
    """Yield the parameters of a layer that are divided."""
    if isinstance(module, MPLinear):
        shape = torch.Size((module.out_features, module.in_features))
        yield _Shard(module.weight, shape, module.gather_columns, module.select_columns)
    elif (part := divided_part(module)) is not None:
        for name, cut in part.cuts.items():
            tensor = module.get_parameter(name)
            functions = partial(part.gather_everywhere, name=name), partial(part.select, name=name)
            yield _Shard(tensor, torch.Size(cut.whole_shape(tensor)), *functions)


def _shards(state: State) -> Iterator[tuple[str, _Shard]]:
    """Yield the parameters that are divided, with the names of their values and optimizer state in a checkpoint."""
    assert state.optimizer is not None
    found: dict[int, _Shard] = {}
    for tree, root in (("network", state.network), ("best", state.network), ("criterion", state.criterion)):
        if isinstance(root, nn.Module):
            found |= {id(shard.tensor): shard for module in root.modules() for shard in _shards_of(module)}
            for name, parameter in root.named_parameters(prefix=tree, remove_duplicate=False):
                if id(parameter) in found:
                    yield plain_name(name), found[id(parameter)]
    parameters = (parameter for group in state.optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(parameters):
        if id(parameter) in found:
            yield f"optimizer.state.{index}", found[id(parameter)]


def _owner(name: str) -> str:
    """Return the key of :func:`_shards` for a tensor.

    >>> _owner("optimizer.state.0.exp_avg"), _owner("network.0.weight")
    ('optimizer.state.0', 'network.0.weight')
    """
    return ".".join(name.split(".")[:3]) if name.startswith("optimizer.state.") else name
