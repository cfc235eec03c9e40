"""To a user of ``help()``: each public name says what it does, each parameter is described, each example runs."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import torchmpi as mpi
from torchmpi import horovod

PACKAGES = (
    "torchmpi", "torchmpi.nn", "torchmpi.nn.functional", "torchmpi.engine", "torchmpi.parameterserver",
    "torchmpi.distributed", "torchmpi.horovod", "torchmpi.timeline",
)  # fmt: skip
MODULES = [
    each.name
    for each in pkgutil.walk_packages(mpi.__path__, "torchmpi.")
    if not each.name.endswith("__main__") and ".kernels" not in each.name  # those are compiled
]
MADE_BY_FUNCTIONS = ("Communicator", "Handle", "NullCommunicator", "Recording", "Server", "Rule", "Sharding")
"""Classes that a program does not instantiate itself."""


def _public(kind):
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if kind(value := getattr(module, name)) and value.__module__.startswith("torchmpi"):
                yield pytest.param(value, id=f"{package}.{name}")


FUNCTIONS = list(_public(inspect.isfunction))
CLASSES = [
    each
    for each in _public(inspect.isclass)
    if "__init__" in vars(each.values[0])
    and not dataclasses.is_dataclass(each.values[0])
    and not issubclass(each.values[0], Exception)
    and each.values[0].__name__ not in MADE_BY_FUNCTIONS
]
METHODS = [getattr(mpi.Handle, name) for name in ("completed", "done", "wait", "when_done")]


def _described_by(documented) -> str:
    """The text that describes the parameters: for another form of a function, that of the function.

    A form for several tensors calls them `tensors`.
    """
    text = inspect.getdoc(documented) or ""
    same = re.match(r"Run :func:`(~torchmpi\.)?(\w+)` [^.]*, with the same parameters( but `\w+`)?\.", text)
    if same is None:
        return text
    described = _described_by(getattr(mpi if same[1] else horovod, same[2]))
    return re.sub(r"(?m)^( +tensor): ", r"\1s: ", described) if "several tensors" in same[0] else described


def _undescribed(documented, function) -> list[str]:
    """The parameters that a docstring does not describe."""
    _, _, described = _described_by(documented).partition("\nArgs:\n")
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.items()
    shown = [stars.get(each.kind, "") + name for name, each in parameters if name != "self"]
    return [name for name in shown if not re.search(rf"^ +{re.escape(name)}: ", described, re.M)]


def test_each_public_name_is_documented_with_its_parameters():
    documented = [*FUNCTIONS, *CLASSES, *(pytest.param(method, id=method.__qualname__) for method in METHODS)]
    assert FUNCTIONS and CLASSES
    problems = {each.id: _undescribed(each.values[0], each.values[0]) for each in documented}
    assert {name: missing for name, missing in problems.items() if missing} == {}
    named = [*_public(inspect.isfunction), *_public(inspect.isclass)]
    assert [each.id for each in named if not (each.values[0].__doc__ or "").strip()] == []


def test_each_method_of_a_public_class_is_documented():
    """There or in a base class, or, for a property, among the attributes of the class."""
    members = [
        (kind.values[0], name, member, getattr(member, "fget", member))
        for kind in _public(inspect.isclass)
        for name, member in inspect.getmembers(kind.values[0])
    ]
    methods = [
        (kind, name, member)
        for kind, name, member, function in members
        if not name.startswith("_") and getattr(function, "__module__", "").startswith("torchmpi")
    ]
    assert methods
    assert [
        f"{kind.__qualname__}.{name}"
        for kind, name, member in methods
        if not inspect.getdoc(member) and not re.search(rf"^ +{name}: ", inspect.getdoc(kind) or "", re.M)
    ] == []


def test_forms_in_the_background_have_the_parameters_that_they_refer_to():
    twins = [name for name in mpi.__all__ if name.endswith("_async")]
    assert twins
    for name in twins:
        of_twin, of_function = (
            [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
            for function in (getattr(mpi, name), getattr(mpi, name.removesuffix("_async")))
        )
        assert of_twin == of_function, name
        assert f":func:`~torchmpi.{name.removesuffix('_async')}`" in getattr(mpi, name).__doc__, name


@pytest.mark.slow
def test_examples_for_the_interpreter_give_what_they_show():
    finder, runner, failed = doctest.DocTestFinder(), doctest.DocTestRunner(), set()
    for module in MODULES:
        for documented in finder.find(importlib.import_module(module)):
            # Of the others, each would have the runner look whether any file in the cache of lines has changed.
            if documented.examples and runner.run(documented).failed:
                failed.add(documented.name)
    assert runner.summarize(verbose=False).attempted and failed == set()


@pytest.mark.parametrize("name", ("", ".nn", ".engine", ".horovod", ".parameterserver", ".distributed"))
def test_dir_has_the_public_names_only(name):
    module = importlib.import_module(f"torchmpi{name}")
    assert dir(module) == sorted(module.__all__)
