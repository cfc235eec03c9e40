"""To whoever passes an argument: for every public function with annotations, what they accept is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import torchmpi
import torchmpi.engine
import torchmpi.horovod
import torchmpi.nn
import torchmpi.parameterserver
from torchmpi.argument_types import checks_types, kinds_of
from torchmpi.errors import ArgumentError, KeywordError

PACKAGES = (torchmpi, torchmpi.nn, torchmpi.engine, torchmpi.parameterserver, torchmpi.horovod)


def checked_functions() -> dict[str, object]:
    """All public functions and constructors with checks."""
    found = {}
    for package in PACKAGES:
        for name in dir(package):
            value = getattr(package, name)
            function = value.__init__ if isinstance(value, type) else value
            if getattr(getattr(function, "__code__", None), "co_name", "") == "checked":
                found[f"{package.__name__}.{name}"] = function.__wrapped__
    return found


@pytest.mark.parametrize("name", checked_functions())
def test_annotations_can_be_read(name):
    """A name that is imported for type checkers only would raise at the first call."""
    assert kinds_of(checked_functions()[name])


def accepts(annotation: object, value: object) -> bool:
    def function(value):
        return True

    function.__annotations__ = {"value": annotation}
    try:
        return checks_types(function)(value)
    except ArgumentError:
        return False


class Wrapper:
    """An optimizer by its methods."""

    def __getattr__(self, name: str) -> object:
        return len


@pytest.mark.parametrize(("annotation", "right", "wrong"), [
    (int, (3, True, np.int64(3), torch.tensor(3)), (None, "3", 3.0, torch.ones(2))),
    (float, (3, 0.5, np.float32(1), torch.tensor(1.0)), (None, "3", [1.0], object())),
    (bool, (True, 0, np.bool_(True)), (None, "yes")),
    (str, ("a",), (None, 3, b"a")),
    (int | None, (3, None), ("a",)),
    ("float | None", (3, None), ("a",)),
    (torch.Tensor, (torch.ones(1), torch.nn.Parameter(torch.ones(1))), (None, 3, [torch.ones(1)])),
    (list[torch.Tensor], ([torch.ones(1)], (torch.ones(1),), []), (3, [3], "a")),
    (dict[str, int], ({}, {"a": 1}), (3, [1])),
    (torch.optim.Optimizer, (torch.optim.SGD([torch.ones(1)]), Wrapper()), (None, torch.nn.Linear(1, 1))),
    (Dataset, ([1], torch.ones(1), torch.utils.data.TensorDataset(torch.ones(1))), (None, 3, object())),
    (type[int], (int, Wrapper()), (None, 3)),
    (torch.Tensor | object, (None, 3), ()),
], ids=lambda each: "values" if isinstance(each, tuple) else str(each))  # fmt: skip
def test_accepted_values(annotation, right, wrong):
    assert [accepts(annotation, value) for value in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


def test_unknown_keywords():
    @checks_types
    def function(first: int, second: int = 0) -> int:
        return first + second

    with pytest.raises(KeywordError, match=r"mpi.function\(\) has no parameter 'secnd'. Use second="):
        function(1, secnd=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        function()
    assert function(1, second=2) == 3
