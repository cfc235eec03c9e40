"""Tensor parallelism of stock modules: layers divided in place, with one allreduce after each pair of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..session import runtime
from .agreement import check_same_layout
from .functional import linear_map
from .layer_comm import LayerComm
from .replica import Attachment, Replica
from .replica_check import check_with_allreduce, checksum
from .row_product import linear
from .sharding import KeepsShards, set_sharded
from .tensor_plan import Cut, Division, Kind, Plan, PlanName, TensorSplit, division_of_model, is_transposed

_PART = "_torchmpi_part"
_SHORT = 64
"""Tokens of which Python's hash takes less time than a checksum by torch."""


@checks_types
@torch.no_grad()
def tensor_parallel(
    model: nn.Module, plan: PlanName | Mapping[str, TensorSplit] = "auto", *, comm: Comm = None, data_comm: Comm = None
) -> nn.Module:
    """Divide the layers of a transformer over the ranks, in place. Collective.

    Each rank keeps some of the heads and some of the features of the feed-forward network, and computes with those.
    There is one allreduce after the attention and one after the second linear layer, in forward and in backward. The
    outputs are those of the complete model, on every rank, but for the order of additions. All ranks of `comm` pass
    the same batches. Heads and features that the number of ranks does not divide are shared unevenly.

    Parameters stay the same objects, with the shape of the rank's part, and are marked by
    :func:`~torchmpi.nn.set_sharded`. ``state_dict()`` has the parts: save with
    :func:`~torchmpi.nn.full_state_dict`, and load with :func:`~torchmpi.nn.load_full_state_dict`.

    Args:
        model: The complete model, the same on all ranks, or one on the meta device.
        plan: ``"gpt2"``, ``"llama"`` or ``"bert"``: models of Transformers with layers of these names; ``"auto"``: that
            of these whose names occur; or patterns of the last components of names of layers, each with a
            :class:`TensorSplit`, for other models.
        comm: Ranks over which the model is divided; default: the current communicator.
        data_comm: Ranks that hold the same part and are trained on different data; default: as for ``set_sharded``.

    Returns:
        `model`.

    Raises:
        ArgumentError: On all ranks: the plan does not fit the model, the number of ranks is too large, with those that
            would work, or the model is divided already.
        ReplicaError: On all ranks: the ranks have different models.

    Example:
        model = mpinn.tensor_parallel(LlamaForCausalLM.from_pretrained(folder))
        tokens = model.generate(prompt, max_new_tokens=20)
    """
    communicator = runtime.communicator(comm)
    divisions = _agreed_divisions(model, plan, communicator)
    layers = dict(model.named_modules())
    _scale_attributes(layers, divisions, communicator.rank)
    inputs: dict[str, SharedInput] = {}
    is_cut: set[int] = set()
    for name, division in divisions.items():
        layer = layers[name]
        parent = name.rpartition(".")[0]
        shared = inputs.setdefault(parent, SharedInput(communicator))
        shared.num_layers += division.split.kind == "columns"
        for short, cut in division.cuts.items():
            parameter = layer.get_parameter(short)
            if id(parameter) not in is_cut:  # layers may share one
                is_cut.add(id(parameter))
                parameter.data = cut.select(parameter.data, communicator.rank)
                parameter.grad = None
                set_sharded(parameter, comm=communicator, data_comm=data_comm)
        part = DividedPart(communicator, division.cuts, shared if division.split.kind == "columns" else None)
        part.is_transposed = is_transposed(layer)
        layer.__class__ = _divided_class(division.split.kind, type(layer))  # type: ignore[arg-type]  # it is hashable
        setattr(layer, _PART, part)
        if division.cuts:
            _set_sizes(layer)
    if callable(save := getattr(model, "save_pretrained", None)):
        setattr(model, "save_pretrained", functools.partial(_save_complete, save))  # noqa: B010 -- no attribute of Module
    return model


def _save_complete(save: Callable[..., Any], *arguments: Any, state_dict: Any = None, **named: Any) -> Any:
    """Call ``save_pretrained`` of Transformers with a complete state; a file of parts could not be loaded again."""
    if state_dict is None:
        raise ArgumentError(
            f"{rank_prefix()}save_pretrained would save this rank's parts of the weights. On all ranks, make the "
            "complete state with state = mpinn.full_state_dict(model), and pass it on rank 0: save_pretrained(folder, "
            "state_dict=state)."
        )
    return save(*arguments, state_dict=state_dict, **named)


def divided_part(module: nn.Module) -> DividedPart | None:
    """Return how a layer has been divided by :func:`tensor_parallel`, or None."""
    return module.__dict__.get(_PART)


class DividedPart(Attachment):
    """The part of a layer that this rank has. Copies of the layer share it; pickles contain None.

    Attributes:
        comm: The ranks over which the layer is divided.
        cuts: How its parameters are divided, by name.
        shared: Its input, if that is replicated: the layers of columns of a module have one together.
        size: The number of ranks.
        is_transposed: Whether its weight has shape (in, out).
    """

    def __init__(self, comm: Communicator, cuts: Mapping[str, Cut], shared: SharedInput | None) -> None:
        self.comm, self.cuts = comm, cuts
        self._layer_comm = LayerComm(comm, "a layer")
        self.shared = shared or SharedInput(comm, num_layers=1)
        self.size, self.is_transposed = comm.size, False  # the communicator computes its size in every call

    def __deepcopy__(self, memo: dict[int, Any]) -> DividedPart:
        return self

    def check_same_tokens(self, tokens: Tensor) -> None:
        """Raise on all ranks if they have different indices of an embedding, in every call.

        The sum of entries of different texts is the same on all ranks, so that no later comparison would find it: for
        instance of tokens that ranks have drawn with different seeds.
        """
        if self.size == 1:
            return
        values = tuple(tokens.flatten().tolist()) if tokens.numel() <= _SHORT else checksum(tokens)
        mine = hash((tuple(tokens.shape), values))
        both: Tensor = collectives.allreduce(torch.tensor([mine, ~mine], device="cpu"), op="max", comm=self.comm)
        most, least = both.tolist()
        if most != ~least:
            raise ArgumentError(
                f"rank {self.comm.rank}: the ranks of {self.comm!r}, which share a model, passed different tokens "
                "to it. Give the ranks of a model the same batches, and draw tokens with the same seed."
            )

    def add(self, partial: Tensor) -> Tensor:
        """Add the partial outputs of all ranks; the sum is replicated."""
        if self.size == 1:
            return partial
        if partial.requires_grad:
            return linear_map(partial, self._layer_comm.reduce, self._layer_comm.replicate)
        total: Tensor = collectives.allreduce(partial, comm=self.comm)  # in place: nothing else has it
        return total

    def spread(self, parameter: Tensor) -> Tensor:
        """Return a replicated parameter, of which the gradients of all ranks are added in backward."""
        return linear_map(parameter, self._layer_comm.replicate, self._layer_comm.reduce)

    def gather(self, features: Tensor) -> Tensor:
        """Concatenate the output features of all ranks; the result is replicated."""
        if self.size == 1:
            return features
        if not features.requires_grad:
            return self._layer_comm.gather(features)
        begin, length, _ = self.range()
        return linear_map(features, self._layer_comm.gather, lambda whole: whole.narrow(-1, begin, length))

    def range(self) -> tuple[int, int, int]:
        """Return begin and length of this rank's range of the weight, and the length of all."""
        cut = self.cuts["weight"]
        ((begin, length),) = cut.ranges(self.comm.rank)
        return begin, length, cut.bounds[-1]

    def gather_everywhere(self, tensor: Tensor, name: str) -> Tensor:
        """Return the complete tensor of the parts of all ranks, on all of them. Collective.

        Args:
            tensor: This rank's part of a parameter, or a tensor of the same shape, such as its momentum.
            name: The name of the parameter in the layer.
        """
        return self._join(collectives.allgather(self._rows(tensor, name), comm=self.comm), name)

    def gather_on(self, root: int, tensor: Tensor, name: str) -> Tensor | None:
        """Return the complete tensor on one rank, and None on the others. Collective."""
        gathered = collectives.gather(self._rows(tensor, name), root, comm=self.comm)
        return self._join(gathered, name) if isinstance(gathered, Tensor) else None

    def _rows(self, tensor: Tensor, name: str) -> Tensor:
        return tensor.detach().movedim(self.cuts[name].dim, 0).contiguous()

    def _join(self, gathered: Tensor, name: str) -> Tensor:
        cut = self.cuts[name]
        lengths = [cut.stacked * cut.width(rank) for rank in range(self.comm.size)]
        return cut.join([part.movedim(0, cut.dim) for part in gathered.split(lengths)]).contiguous()

    def select(self, whole: Tensor, name: str) -> Tensor:
        """Return this rank's part of a complete tensor, as a new one."""
        return self.cuts[name].select(whole, self.comm.rank)


class SharedInput(Attachment):
    """The input of layers of columns beside each other, whose gradients are added in one call.

    The layers of a module that get the same tensor, such as those of queries, keys and values, use one node of the
    autograd graph, which gets the sum of their gradients.
    """

    def __init__(self, comm: Communicator, num_layers: int = 0) -> None:
        self.num_layers, self._is_alone = num_layers, comm.size == 1
        self._layer_comm = LayerComm(comm, "a layer")
        self.checked = self._layer_comm.checked
        self._input: Tensor | None = None
        self._entered: Tensor | None = None
        self._num_left = 0

    def enter(self, input: Tensor, is_training: bool) -> Tensor:
        """Return a tensor that is used like `input`, with the sum of the gradients of all ranks."""
        if input is not self._input:
            self._forget()
            self._layer_comm.check_same_input(input, is_training)
            if self._is_alone or not (input.requires_grad and torch.is_grad_enabled()):
                return input
            self._input, self._num_left = input, self.num_layers
            self._entered = linear_map(input, self._layer_comm.replicate, self._reduce)
        entered = self._entered
        assert entered is not None
        self._num_left -= 1
        if self._num_left <= 0:
            self._forget()
        return entered

    def _forget(self) -> None:
        """Let the input be freed; the graph has what it needs."""
        self._input = self._entered = None

    def _reduce(self, gradient: Tensor) -> Tensor:
        self._forget()  # fewer layers have taken it, as in cross-attention, where queries have another input
        return self._layer_comm.reduce(gradient)


# --- the layers ---------------------------------------------------------------------------------------------


class _Layer(Protocol):
    weight: Tensor
    bias: Tensor | None
    training: bool
    padding_idx: int | None
    _torchmpi_part: DividedPart


class _Columns:
    def forward(self: _Layer, input: Tensor) -> Tensor:
        part = self._torchmpi_part
        if input.requires_grad or self.training not in part.shared.checked:
            input = part.shared.enter(input, self.training)
        if part.is_transposed:
            output: Tensor = super().forward(input)  # type: ignore[misc]  # of the class of the layer
            return output
        return linear(input, self.weight, self.bias)


class _Head(_Columns):
    def forward(self: _Layer, input: Tensor) -> Tensor:
        features: Tensor = super().forward(input)  # type: ignore[misc]
        return self._torchmpi_part.gather(features)


class _Rows:
    def forward(self: _Layer, input: Tensor) -> Tensor:
        part = self._torchmpi_part
        weight = self.weight.t() if part.is_transposed else self.weight
        if input.shape[-1] != weight.shape[1]:
            raise ArgumentError(
                f"{rank_prefix()}a layer that is divided in rows has {weight.shape[1]} input features on this rank, "
                f"but got {input.shape[-1]}. The plan must divide the layer that computes its input in columns."
            )
        output = part.add(linear(input, weight))
        return output if self.bias is None else output + self.bias.to(output.dtype)  # autocast does not cast sums


class _Entries:
    def forward(self: _Layer, input: Tensor) -> Tensor:
        part = self._torchmpi_part
        part.check_same_tokens(input)
        begin, length, total = part.range()
        if input.numel() and bool(((input < 0) | (input >= total)).any()):
            raise ArgumentError(
                f"rank {part.comm.rank}: an embedding of {total} entries got indices from {int(input.min())} to "
                f"{int(input.max())}."
            )
        local = input - begin
        is_elsewhere = (local < 0) | (local >= length)
        padding = None if self.padding_idx is None else self.padding_idx - begin
        if padding is not None and not 0 <= padding < length:
            padding = None
        entries = functional.embedding(local.masked_fill(is_elsewhere, 0), self.weight, padding)
        return part.add(entries.masked_fill(is_elsewhere.unsqueeze(-1), 0))


class _Added:
    def forward(self: _Layer, input: Tensor) -> Tensor:
        parameters = self.__dict__["_parameters"]
        spread = self._torchmpi_part.spread
        if torch.is_grad_enabled() and self._torchmpi_part.size > 1:
            self.__dict__["_parameters"] = {
                name: None if each is None else spread(each) for name, each in parameters.items()
            }
        try:
            output: Tensor = super().forward(input)  # type: ignore[misc]
        finally:
            self.__dict__["_parameters"] = parameters
        return output


_CLASSES: dict[Kind, type] = {
    "columns": _Columns, "head": _Head, "rows": _Rows, "embedding": _Entries, "added": _Added,
}  # fmt: skip


@functools.cache
def _divided_class(kind: Kind, own: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a divided layer, which stays one of its own class."""
    forward = _CLASSES[kind]
    return type(f"{forward.__name__.strip('_')}Of{own.__name__}", (forward, KeepsShards, own), {"__module__": __name__})


def _set_sizes(layer: Any) -> None:
    """Let the attributes of a layer with numbers of features describe this rank's weight."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.Embedding):
        layer.num_embeddings = layer.weight.shape[0]
    else:
        layer.nx, layer.nf = layer.weight.shape


# --- agreement ----------------------------------------------------------------------------------------------


def _agreed_divisions(model: nn.Module, plan: PlanName | Plan, comm: Communicator) -> dict[str, Division]:
    """Return the division of the model; raise on all ranks if it cannot be made, or is not the same everywhere."""
    replica = Replica(model)
    tensors = replica.parameters + replica.buffers
    check_same_layout(replica, tensors, comm)
    if not any(tensor.is_meta for tensor in tensors):
        check_with_allreduce(model, comm=comm)
    problem, divisions = "", {}
    try:
        if any(divided_part(module) for module in model.modules()):
            raise ArgumentError("the model is divided already. Make it anew, or load the complete weights.")
        divisions = division_of_model(model, plan, comm.size)
    except ArgumentError as error:
        problem = str(error)
    found = collectives.allgather_object((problem, repr(divisions)), comm=comm)
    for rank, (text, other) in enumerate(found):
        if text:
            raise ArgumentError(f"rank {rank}: tensor_parallel: {text}")
        if other != found[0][1]:
            raise ArgumentError(
                f"rank {rank} divides the model in another way than rank 0. Pass the same plan and a model of the same "
                "config on every rank."
            )
    return divisions


def _scale_attributes(layers: Mapping[str, nn.Module], divisions: Mapping[str, Division], rank: int) -> None:
    for name, (split, cuts, _) in divisions.items():
        parent = layers[name.rpartition(".")[0]]
        for attribute in split.attributes:
            bounds = cuts["weight"].bounds
            setattr(parent, attribute, getattr(parent, attribute) * (bounds[rank + 1] - bounds[rank]) // bounds[-1])
