"""Functions of ``horovod.common.util`` that programs import."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

cache: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.lru_cache(maxsize=None)


@contextmanager
def env(**variables: str) -> Iterator[None]:
    """Context manager that sets environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can be used: only torch."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, *_: Any) -> None:
    """Raise ImportError for other frameworks than torch."""
    if "torch" not in ext_name.lower():
        raise ImportError(f"{ext_name} is not available: torchmpi.horovod is for torch.")


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Return whether torch has a GPU."""
    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: list[Any], num_parts: int) -> list[list[Any]]:
    """Split a list into consecutive parts whose lengths differ by at most one."""
    least, num_larger = divmod(len(values), num_parts)
    begins = [index * least + min(index, num_larger) for index in range(num_parts + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(begins)]


def is_iterable(value: Any) -> bool:
    """Return whether a value can be iterated."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def run(*_: Any, **__: Any) -> NoReturn:
    """Refuse to start a job from Python."""
    raise NotImplementedError(
        "horovod.run() and horovodrun start no jobs here. Start the program on all ranks: "
        "mpirun -n 4 python -m torchmpi.horovod train.py"
    )
