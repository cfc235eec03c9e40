"""``help()`` of every public function: what it does, its parameters, result, errors and an example."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import torchmpi as mpi

PACKAGES = (
    "torchmpi", "torchmpi.nn", "torchmpi.nn.functional", "torchmpi.engine", "torchmpi.parameterserver",
    "torchmpi.distributed", "torchmpi.horovod", "torchmpi.timeline",
)  # fmt: skip
RAISE_NOTHING = (
    "adagrad", "adam", "axpby", "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "has_cuda",
    "has_gloo", "has_nccl", "is_initialized", "is_recording", "is_started", "mpi_built", "mpi_enabled", "nccl_built",
    "range", "register", "rocm_built", "scaled_add", "sgd", "shutdown", "stop_timeline",
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
MOVING = [name for name in mpi._MODULE_OF["collectives"].split() if not name.endswith("_object") and name != "barrier"]


def _sections(documented) -> dict[str, str]:
    """The text of each section of a docstring; that before the first one is ''."""
    text = inspect.getdoc(documented) or ""
    first, *others = re.split(r"^(Args|Returns|Raises|Example|Yields|Attributes)::?", text, flags=re.M)
    return {"": first, **dict(zip(others[::2], others[1::2], strict=True))}


def _undescribed(documented, signature) -> list[str]:
    """The parameters that the docstring does not describe."""
    described = _sections(documented).get("Args", "")
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = [stars.get(each.kind, "") + name for name, each in signature.parameters.items() if name != "self"]
    return [name for name in shown if not re.search(rf"^ +{re.escape(name)}: ", described, re.M)]


def _missing(function, is_method: bool) -> list[str]:
    """What the docstring of a function does not say."""
    sections, signature = _sections(function), inspect.signature(function)
    missing = _undescribed(function, signature)
    if not sections[""].strip():
        missing.append("what it does")
    if signature.return_annotation not in (None, "None", "NoReturn") and not {"Returns", "Yields"} & set(sections):
        missing.append("the result")
    if not is_method and "Raises" not in sections and function.__name__ not in RAISE_NOTHING:
        missing.append("errors")
    if not is_method and "Example" not in sections:
        missing.append("an example")
    return missing


def test_what_it_does_parameters_result_errors_and_an_example_are_described():
    problems = {each.id: _missing(each.values[0], False) for each in FUNCTIONS}
    problems |= {method.__qualname__: _missing(method, True) for method in METHODS}
    problems |= {each.id: _undescribed(each.values[0], inspect.signature(each.values[0])) for each in CLASSES}
    assert {name: missing for name, missing in problems.items() if missing} == {}


def test_examples_for_the_interpreter_give_what_they_show():
    finder, runner, failed = doctest.DocTestFinder(), doctest.DocTestRunner(), set()
    for module in MODULES:
        for documented in finder.find(importlib.import_module(module)):
            # Of the others, each would have the runner look whether any file in the cache of lines has changed.
            if documented.examples and runner.run(documented).failed:
                failed.add(documented.name)
    assert runner.summarize(verbose=False).attempted > 100
    assert failed == set()


def test_a_collective_says_what_it_overwrites():
    said = {name: _sections(getattr(mpi, name))[""] for name in MOVING}
    assert [name for name, text in said.items() if not re.search(r"[Ii]n place|is not changed", text)] == []


@pytest.mark.parametrize("name", ("", ".nn", ".engine", ".parameterserver", ".distributed"))
def test_dir_has_the_public_names_only(name):
    module = importlib.import_module(f"torchmpi{name}")
    assert dir(module) == sorted(module.__all__)


def test_there_are_functions_to_test():
    assert len(FUNCTIONS) > 70 and len(CLASSES) > 10 and len(MOVING) > 20
