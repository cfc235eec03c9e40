"""Complete state dicts of models of which ranks have parts, and files of them, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..files import MOST_JSON_BYTES, parse_json, read
from ..session import runtime
from .sharding import mark, sharding_of
from .tensor_parallel import DividedPart, divided_part

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_NAMED = 6


@checks_types
@torch.no_grad()
def full_state_dict(model: nn.Module, *, root: int | None = 0, comm: Comm = None) -> dict[str, Tensor]:
    """Return the state dict of the complete model, of which the ranks have parts. Collective.

    The tensors are gathered one after the other, so that a rank other than the root needs the memory of one of them.
    Parameters that layers share are one tensor in the result too.

    Args:
        model: A model that :func:`~torchmpi.nn.tensor_parallel` has divided.
        root: The rank that gets the result; None for all.
        comm: Ranks over which the model is divided; default: the current communicator.

    Returns:
        The state dict, with tensors that the model does not use. Empty on ranks other than the root.

    Raises:
        ArgumentError: The model is divided over other ranks than those of `comm`, or has other shards, such as those of
            :class:`MPLinear` and :class:`MixtureOfExperts`.

    Example:
        state = mpinn.full_state_dict(model)
        if mpi.rank() == 0:
            names = {id(tensor): name for name, tensor in state.items()}  # files have one name of a tensor
            safetensors.torch.save_file({name: state[name] for name in names.values()}, "model.safetensors")
    """
    communicator = runtime.communicator(comm)
    is_kept = root is None or communicator.rank == root
    gathered: dict[int, Tensor | None] = {}
    found: dict[str, Tensor] = {}
    for name, (tensor, short, part) in _entries(model, communicator).items():
        if id(tensor) not in gathered:
            if part is None:
                gathered[id(tensor)] = tensor.detach().clone() if is_kept else None
            elif root is None:
                gathered[id(tensor)] = part.gather_everywhere(tensor, short)
            else:
                gathered[id(tensor)] = part.gather_on(root, tensor, short)
        if (whole := gathered[id(tensor)]) is not None:
            found[name] = whole
    return found


@checks_types
@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Tensor], *, strict: bool = True, comm: Comm = None
) -> None:
    """Load the state of the complete model into a model of which the ranks have parts. Collective.

    Of a file of safetensors, each rank reads its parts only. Parameters on the meta device get memory, on the device of
    torch's factory functions, so that no rank ever needs that of the complete model: make the model on the meta
    device, divide it, and load.

    Args:
        model: A model that :func:`~torchmpi.nn.tensor_parallel` has divided.
        source: A file of safetensors; a folder with one, or with the files of an index, as Transformers write them;
            or a state dict. The same on all ranks.
        strict: Refuse names that only the model or only the source has.
        comm: Ranks over which the model is divided; default: the current communicator.

    Raises:
        ArgumentError: On all ranks: a rank cannot read the source, names or shapes differ, or a tensor stays without
            memory.

    Example:
        with torch.device("meta"):
            model = make_model()
        mpinn.tensor_parallel(model)
        mpinn.load_full_state_dict(model, "model.safetensors")
    """
    communicator = runtime.communicator(comm)
    problem = ""
    try:
        with ExitStack() as files:
            _load(model, _readers(source, files), strict, communicator)
    except Exception as error:  # whatever a file does to its readers, the other ranks must not wait
        problem = str(error) if isinstance(error, ArgumentError | OSError) else f"{type(error).__name__}: {error}"
    problems = collectives.allgather_object(problem, comm=communicator)
    for rank, text in enumerate(problems):
        if text:
            raise ArgumentError(f"rank {rank}: load_full_state_dict: {text}")


class _Entry(NamedTuple):
    """A tensor of the state dict of a model."""

    tensor: Tensor
    short: str
    """Its name in the layer that is divided."""
    part: DividedPart | None


def _entries(model: nn.Module, comm: Communicator) -> dict[str, _Entry]:
    """Return the tensors of the state dict, by name; those that are divided know how."""
    divided: dict[int, tuple[str, DividedPart]] = {}
    for module in model.modules():
        if (part := divided_part(module)) is not None:
            if part.comm.intra.world_ranks != comm.intra.world_ranks:
                raise ArgumentError(
                    f"rank {comm.rank}: the model is divided over the world ranks {list(part.comm.intra.world_ranks)}, "
                    f"but this call is for {list(comm.intra.world_ranks)}. Pass the communicator of tensor_parallel as "
                    "comm=."
                )
            divided |= {id(module.get_parameter(short)): (short, part) for short in part.cuts}
    entries: dict[str, _Entry] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            sharding = None if id(tensor) in divided else sharding_of(tensor)
            if sharding is not None and (sharding.comm is None or sharding.comm.size > 1):
                raise ArgumentError(
                    f"{rank_prefix()}{name!r} is a shard of a layer that tensor_parallel has not divided, so the parts "
                    "of other ranks are not known here. Save a model with MPLinear by full_weight() of that layer, and "
                    "one with MixtureOfExperts by joining the state_dict() of all ranks."
                )
            entries[name] = _Entry(tensor, *divided.get(id(tensor), ("", None)))
    return entries


# --- loading ------------------------------------------------------------------------------------------------


class _Reader(NamedTuple):
    """A complete tensor that need not be in memory."""

    shape: list[int]
    read: Callable[[DividedPart | None, str], Tensor]
    """Returns this rank's part, or the complete tensor without one."""


def _load(model: nn.Module, readers: Mapping[str, _Reader], strict: bool, comm: Communicator) -> None:
    entries = _entries(model, comm)
    shared: dict[int, list[str]] = {}
    for name, entry in entries.items():
        shared.setdefault(id(entry.tensor), []).append(name)
    # A file has one of the names of a parameter that layers share.
    missing = [names[0] for names in shared.values() if not any(name in readers for name in names)]
    unexpected = [name for name in readers if name not in entries]
    if strict and (missing or unexpected):
        raise ArgumentError(
            f"the source does not fit the model.{_listed('Only the model has', missing)}"
            f"{_listed('Only the source has', unexpected)} Pass the state of the same model, or strict=False."
        )
    for name, reader in readers.items():
        if name in entries:
            part, tensor = entries[name].part, entries[name].tensor
            expected = part.cuts[entries[name].short].whole_shape(tensor) if part else list(tensor.shape)
            if reader.shape != expected:
                raise ArgumentError(f"{name!r} has shape {reader.shape} in the source, and {expected} in the model.")
    filled: dict[int, Tensor] = {}
    for names in shared.values():
        for name in [name for name in names if name in readers][:1]:
            tensor, short, part = entries[name]
            values = readers[name].read(part, short)
            if tensor.is_meta:
                filled[id(tensor)] = _with_memory(tensor, values)
            else:
                tensor.copy_(values)
    _replace(model, filled)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise ArgumentError(
            f"{', '.join(left[:_MOST_NAMED])}: on the meta device, and not in the source. Give these tensors memory "
            "and values before the call; buffers that are not saved are computed by the constructor of their layer."
        )


def _with_memory(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with `values` in place of one on the meta device, which cannot get memory."""
    values = values.to(device=torch.get_default_device(), dtype=tensor.dtype, copy=True)
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, tensor.requires_grad)
    if (sharding := sharding_of(tensor)) is not None:
        mark(parameter, sharding)
    return parameter


def _replace(model: nn.Module, tensors: Mapping[int, Tensor]) -> None:
    """Replace tensors, given by their ids, in all layers that have them."""
    for module in model.modules() if tensors else ():
        owns: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for own in owns:
            for name, tensor in own.items():
                if id(tensor) in tensors:
                    own[name] = tensors[id(tensor)]


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f" {what} {', '.join(names[:_MOST_NAMED])}{more}." if names else ""


def _readers(source: str | os.PathLike[str] | Mapping[str, Tensor], files: ExitStack) -> dict[str, _Reader]:
    if isinstance(source, Mapping):
        return {name: _reader_of(tensor) for name, tensor in source.items() if isinstance(tensor, Tensor)}
    path = Path(source)
    if path.is_dir():
        index = path / _INDEX
        if index.exists():
            mapped = parse_json(read(str(index), MOST_JSON_BYTES))["weight_map"]
            names = dict.fromkeys(mapped.values())
            return {name: reader for file in names for name, reader in _of_file(path / file, files)}
        path = path / _FILE
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}. Pass a file of safetensors, a folder with one, or a state dict.")
    return dict(_of_file(path, files))


def _reader_of(tensor: Tensor) -> _Reader:
    def read(part: DividedPart | None, short: str) -> Tensor:
        return tensor if part is None else part.select(tensor, short)

    return _Reader(list(tensor.shape), read)


def _of_file(path: Path, files: ExitStack) -> Iterator[tuple[str, _Reader]]:
    """Yield readers of the tensors of a file, which read what they return only."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ArgumentError(f"files need the package safetensors ({error}): pip install safetensors.") from None
    try:
        opened: Any = files.enter_context(safe_open(path, "pt"))
    except SafetensorError as error:
        raise ArgumentError(f"{path} is no file of safetensors: {error}.") from error
    for name in opened.keys():  # noqa: SIM118 -- it is no dict
        stored = opened.get_slice(name)

        def read(part: DividedPart | None, short: str, stored: Any = stored) -> Tensor:
            if part is None:
                whole: Tensor = stored[...]
                return whole
            cut = part.cuts[short]
            before = (slice(None),) * cut.dim
            places = [(*before, slice(begin, begin + length)) for begin, length in cut.ranges(part.comm.rank)]
            ranges = [stored[place] for place in places]
            return torch.cat(ranges, cut.dim)

        yield name, _Reader(list(stored.get_shape()), read)
