"""Plans of tensor parallelism: which layers are divided, how, and which part belongs to which rank. Pure arithmetic."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, kind_of, rank_prefix
from ..tensors.partition import part_of

Kind = Literal["columns", "rows", "head", "embedding", "added"]
PlanName = Literal["auto", "bert", "gpt2", "llama"]
_MOST_LISTED = 6


@dataclass(frozen=True)
class TensorSplit:
    """How :func:`~torchmpi.nn.tensor_parallel` divides the layers that match a pattern of a plan.

    Args:
        kind: ``"columns"``: each rank computes some of the output features, which stay divided. ``"rows"``: the input
            features are those that columns have computed, and the outputs of all ranks are added. ``"head"``: as
            columns, but every rank gets all output features. ``"embedding"``: each rank has some of the entries of an
            ``nn.Embedding``, and the outputs are added. ``"added"``: the layer is replicated, but used on divided
            features, such as a norm of each head, so that the gradients of the ranks are added.
        units: Number of equal parts of the divided features that must stay whole, such as the heads of keys and values:
            a number, or the name of an attribute of ``model.config``. None: each feature is a part.
        stacked: Number of matrices in the weight, one after the other, such as 3 for one layer that computes queries,
            keys and values.
        attributes: Attributes of the module that contains the layer, numbers of features or heads, which become
            those of the rank.

    Example:
        plan = {
            "attention.[qkv]": mpinn.TensorSplit("columns", units=8),
            "attention.o": mpinn.TensorSplit("rows", units=8),
        }
    """

    kind: Kind
    units: int | str | None = None
    stacked: int = 1
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(Kind)):
            raise ArgumentError(f"{rank_prefix()}TensorSplit(kind={self.kind!r}): pass one of {', '.join(kinds)}.")


Plan = Mapping[str, TensorSplit]
"""Patterns of the last components of the names of layers; the first one that matches counts."""

_GPT2, _LLAMA, _BERT = "num_attention_heads", "num_key_value_heads", "num_attention_heads"
PLANS: Mapping[str, Plan] = {
    "gpt2": {
        "wte": TensorSplit("embedding"),
        "attn.c_attn": TensorSplit("columns", _GPT2, stacked=3, attributes=("split_size", "num_heads")),
        "attn.c_proj": TensorSplit("rows", _GPT2),
        "mlp.c_fc": TensorSplit("columns"),
        "mlp.c_proj": TensorSplit("rows"),
        "lm_head": TensorSplit("head"),
    },
    "llama": {
        "embed_tokens": TensorSplit("embedding"),
        "self_attn.[qkv]_proj": TensorSplit("columns", _LLAMA),
        "self_attn.[qk]_norm": TensorSplit("added"),
        "self_attn.o_proj": TensorSplit("rows", _LLAMA),
        "mlp.gate_proj": TensorSplit("columns"),
        "mlp.up_proj": TensorSplit("columns"),
        "mlp.down_proj": TensorSplit("rows"),
        "lm_head": TensorSplit("head"),
    },
    "bert": {
        "embeddings.word_embeddings": TensorSplit("embedding"),
        "attention.self.query": TensorSplit("columns", _BERT, attributes=("num_attention_heads", "all_head_size")),
        "attention.self.key": TensorSplit("columns", _BERT),
        "attention.self.value": TensorSplit("columns", _BERT),
        "attention.output.dense": TensorSplit("rows", _BERT),
        "intermediate.dense": TensorSplit("columns"),
        "output.dense": TensorSplit("rows"),
        "predictions.decoder": TensorSplit("head"),
    },
}
"""The plans with names, for models of Transformers of these shapes. Their patterns need not all occur."""


@dataclass(frozen=True)
class Cut:
    """How one dimension of a tensor is divided over the ranks.

    >>> cut = Cut(dim=0, stacked=2, bounds=(0, 2, 3))
    >>> cut.ranges(0), cut.ranges(1)
    ([(0, 2), (3, 2)], [(2, 1), (5, 1)])
    """

    dim: int
    stacked: int
    bounds: tuple[int, ...]
    """In each of the stacked matrices, the first feature of each rank, and the number of features."""

    def width(self, rank: int) -> int:
        """Return the number of features of a rank in each of the stacked matrices."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return begin and length of each range of the dimension that belongs to a rank."""
        begin, length = self.bounds[rank], self.width(rank)
        return [(index * self.bounds[-1] + begin, length) for index in range(self.stacked)]

    def select(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of a rank, as a new contiguous tensor."""
        return torch.cat([whole.narrow(self.dim, *part) for part in self.ranges(rank)], self.dim)

    def whole_shape(self, part: Tensor) -> list[int]:
        """Return the shape of the complete tensor."""
        shape = list(part.shape)
        shape[self.dim] = self.stacked * self.bounds[-1]
        return shape

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the complete tensor of the parts of all ranks."""
        matrices = [part.chunk(self.stacked, self.dim) for part in parts]
        return torch.cat([matrix[index] for index in range(self.stacked) for matrix in matrices], self.dim)


class Division(NamedTuple):
    """How one layer is divided."""

    split: TensorSplit
    cuts: dict[str, Cut]
    """Of the parameters of the layer that are divided, by name."""
    num_parts: int
    """The most ranks over which the layer can be divided."""


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the layer is a linear one whose weight has shape (in, out): ``Conv1D`` of Transformers."""
    return type(layer).__name__.endswith("Conv1D") and hasattr(layer, "nf")


def division_of_model(model: nn.Module, plan: PlanName | Plan, num_ranks: int) -> dict[str, Division]:
    """Return how each layer of `model` that matches the plan is divided over some ranks, by name.

    Args:
        model: The complete model; only its shapes are used.
        plan: A plan, the name of one, or ``"auto"``.
        num_ranks: Number of ranks.

    Raises:
        ArgumentError: The plan does not fit the model, or the model cannot be divided over that many ranks.
    """
    chosen, must_match = _find(model, plan)
    layers = dict(model.named_modules())
    found: dict[str, Division] = {}
    unmatched = dict.fromkeys(chosen)
    too_few: list[tuple[int, str]] = []
    for name, layer in layers.items():
        pattern = next((each for each in chosen if _matches(name, each)), None)
        if pattern is None:
            continue
        unmatched.pop(pattern, None)
        found[name] = _divide(model, name, layer, chosen[pattern], num_ranks)
        if found[name].num_parts < num_ranks:
            too_few.append((found[name].num_parts, name))
    if unmatched and must_match:
        raise ArgumentError(_unmatched(next(iter(unmatched)), layers))
    if too_few:
        most, name = min(too_few, key=lambda each: each[0])
        units = found[name].split.units
        what = f"{most} part{'s' * (most > 1)}" + (f" ({units})" if isinstance(units, str) else "")
        raise ArgumentError(
            f"{num_ranks} ranks cannot divide {name!r}, which has {what}: each rank needs at least one. Divide the "
            f"model over {'1 rank' if most == 1 else f'1 to {most} ranks'}: start fewer, or pass groups of ranks as "
            "comm=."
        )
    _check_pairs(found)
    _check_tied(model, found)
    return found


def _find(model: nn.Module, plan: PlanName | Plan) -> tuple[Plan, bool]:
    """Return the plan, and whether all its patterns must occur."""
    if not isinstance(plan, str):
        return plan, True
    names = [name for name, _ in model.named_modules()]
    counts = {name: sum(_is_pair(name, each, names) for each in PLANS[name]) for name in PLANS}
    best = max(counts, key=lambda name: counts[name]) if plan == "auto" else plan
    if best not in PLANS:
        raise ArgumentError(
            f"unknown plan {plan!r}. Pass 'auto', {', '.join(map(repr, PLANS))}, or a plan of your own."
        )
    if not counts[best]:
        raise ArgumentError(
            f"plan={plan!r}: no layer of {type(model).__name__} has a name of "
            f"{'a known plan' if plan == 'auto' else 'that plan'}. Pass a plan of patterns, for instance "
            '{"attention.[qkv]": mpinn.TensorSplit("columns", units=8), '
            '"attention.o": mpinn.TensorSplit("rows", units=8)}; its layers are '
            f"{', '.join(_linear_names(model))}."
        )
    return PLANS[best], False


def _is_pair(plan: str, pattern: str, names: Sequence[str]) -> bool:
    is_counted = PLANS[plan][pattern].kind in ("columns", "rows")
    return is_counted and any(_matches(name, pattern) for name in names)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _linear_names(model: nn.Module) -> list[str]:
    """List the names of the layers that can be divided, without numbers of blocks."""
    names = {
        ".".join("*" if part.isdigit() else part for part in name.split(".")): None
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding) or is_transposed(layer)
    }
    return [*list(names)[: 2 * _MOST_LISTED], *(["..."] if len(names) > 2 * _MOST_LISTED else [])]


def _unmatched(pattern: str, layers: Mapping[str, nn.Module]) -> str:
    last = {".".join(name.split(".")[-(pattern.count(".") + 1) :]): None for name in layers if name}
    near = difflib.get_close_matches(pattern, list(last), n=_MOST_LISTED, cutoff=0.3)
    hint = f" Names like it: {', '.join(near)}." if near else ""
    return f"no layer matches the pattern {pattern!r} of the plan.{hint}"


# --- one layer ----------------------------------------------------------------------------------------------


def _divide(model: nn.Module, name: str, layer: nn.Module, split: TensorSplit, num_ranks: int) -> Division:
    if split.kind == "added":
        own = [parameter for parameter, _ in layer.named_parameters(recurse=False)]
        if inner := [parameter for parameter, _ in layer.named_parameters() if parameter not in own]:
            raise ArgumentError(
                f"{name!r}, which the plan marks as 'added', contains the layer of {inner[0]!r}, whose gradients would "
                f'not be added. Give its layers in the plan instead, such as "{name}.{inner[0].rpartition(".")[0]}".'
            )
        return Division(split, {}, num_ranks)
    transposed = is_transposed(layer)
    wanted = nn.Embedding if split.kind == "embedding" else nn.Linear
    if type(layer) is not wanted and not (transposed and split.kind != "embedding"):
        raise ArgumentError(
            f"{name!r}, which the plan divides as {split.kind!r}, is {kind_of(layer)}; it must be an "
            f"nn.{wanted.__name__}{'' if split.kind == 'embedding' else ' or a Conv1D of Transformers'}."
        )
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq):
        raise ArgumentError(
            f"{name!r}: an embedding with sparse=True, max_norm or scale_grad_by_freq cannot be divided. Leave these "
            "out, or leave the layer out of the plan."
        )
    if split.kind in ("head", "embedding") and split.stacked != 1:
        raise ArgumentError(
            f"{name!r}: stacked={split.stacked} is not for {split.kind!r}, of which each rank has one range of "
            f"{_features(split)}. Leave it out."
        )
    parent = model.get_submodule(name.rpartition(".")[0])
    for attribute in split.attributes:
        if not isinstance(getattr(parent, attribute, None), int):
            raise ArgumentError(
                f"the plan changes {attribute!r} beside {name!r}, but {kind_of(parent)} has no such number. "
                "Pass a plan with the attributes= that its forward pass uses."
            )
    weight = layer.get_parameter("weight")
    dim = int((split.kind == "rows") != transposed)
    numel = weight.shape[dim]
    if numel % split.stacked:
        raise ArgumentError(
            f"{name!r} has {numel} {_features(split)}, which are not {split.stacked} stacked matrices of equal size."
        )
    length = numel // split.stacked
    units = _units(model, name, split, length)
    bounds = (*(part_of(units, num_ranks, rank)[0] * (length // units) for rank in range(num_ranks)), length)
    cuts = {"weight": Cut(dim, split.stacked, bounds)}
    if split.kind in ("columns", "head") and layer.bias is not None:
        cuts["bias"] = Cut(0, split.stacked, bounds)
    return Division(split, cuts, units)


def _features(split: TensorSplit) -> str:
    return {"rows": "input features", "embedding": "entries"}.get(split.kind, "output features")


def _units(model: nn.Module, name: str, split: TensorSplit, length: int) -> int:
    units = split.units
    if isinstance(units, str):
        config = getattr(model, "config", None)
        found = getattr(config, units, None)
        if not isinstance(found, int):
            raise ArgumentError(
                f"the plan divides {name!r} by {units!r}, which is no number in model.config. Pass a plan with a "
                "number as units=."
            )
        units = found
    if units is None:
        return length
    if units < 1 or length % units:
        raise ArgumentError(
            f"{name!r} has {length} {_features(split)}{' in each matrix' if split.stacked > 1 else ''}, no multiple of "
            f"the {units} units of the plan; {_divisors_near(length, units)} would fit."
        )
    return units


def _divisors_near(length: int, units: int) -> str:
    """List the divisors of `length` next to `units`.

    >>> _divisors_near(96, 5)
    '4 or 6'
    """
    divisors = [number for number in range(1, length + 1) if length % number == 0]
    below = [number for number in divisors if number < units][-1:]
    above = [number for number in divisors if number > units][:1]
    return " or ".join(map(str, below + above))


# --- layers together ----------------------------------------------------------------------------------------


def _check_pairs(found: Mapping[str, Division]) -> None:
    """Raise unless the input features of each layer of rows are what columns beside it have computed."""
    columns = {name: each for name, each in found.items() if each.split.kind == "columns"}
    used: set[str] = set()
    for name, division in found.items():
        if division.split.kind != "rows":
            continue
        near = next((group for group in _neighbors(name, columns) if group), [])
        bounds = division.cuts["weight"].bounds
        if not any(columns[other].cuts["weight"].bounds == bounds for other in near):
            raise ArgumentError(
                f"the plan divides the {bounds[-1]} input features of {name!r} in {division.num_parts} units, but no "
                f"layer of columns beside it in the same way ({', '.join(near) or 'there is none'}). Give both the "
                "same units=."
            )
        used.update(near)
    if left := [name for name in columns if name not in used]:
        raise ArgumentError(
            f"the plan divides the output features of {left[0]!r}, but no layer of rows beside it takes them. Add the "
            'layer that does with TensorSplit("rows"), or use "head".'
        )


def _neighbors(name: str, columns: Mapping[str, Division]) -> Iterator[list[str]]:
    """Yield the layers of columns inside of each module that contains a layer, the smallest first."""
    parts = name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        prefix = ".".join([*parts[:count], ""])
        yield [other for other in columns if other.startswith(prefix)]


def _check_tied(model: nn.Module, found: Mapping[str, Division]) -> None:
    """Raise unless layers with one parameter divide it in the same way."""
    first: dict[int, tuple[str, Cut | None]] = {}
    for name, layer in model.named_modules():
        is_leaf = next(layer.children(), None) is None
        for short, parameter in layer.named_parameters(recurse=False):
            cut = found[name].cuts.get(short) if name in found else None
            if cut is None and not is_leaf:
                continue  # a name for the parameter of a layer, such as that of the bias of BERT's head
            other, expected = first.setdefault(id(parameter), (f"{name}.{short}", cut))
            if cut != expected:
                raise ArgumentError(
                    f"{f'{name}.{short}'!r} is the same parameter as {other!r}, but the plan divides them differently. "
                    "Divide both over the same features, or none."
                )
