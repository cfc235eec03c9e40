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


def _check_parameters(documented, signature):
    described = _sections(documented).get("Args", "")
    for name, parameter in signature.parameters.items():
        shown = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + name
        assert name == "self" or re.search(rf"^ +{re.escape(shown)}: ", described, re.M), f"{shown} is not described"


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS])
def test_the_first_line_says_in_the_imperative_what_the_function_does(function):
    first = (inspect.getdoc(function) or "").split("\n")[0]
    assert first.endswith((".", ":")), first
    verb = first.split()[0].rstrip(",")
    assert verb.istitle() and verb not in ("The", "A", "An", "This", "It"), first
    assert not verb.endswith("s") or verb.endswith("ss"), first


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS])
def test_parameters_result_errors_and_an_example_are_described(function):
    sections, signature = _sections(function), inspect.signature(function)
    _check_parameters(function, signature)
    if signature.return_annotation not in (None, "None", "NoReturn"):
        assert {"Returns", "Yields"} & set(sections), "the result is not described"
    if function in METHODS:
        return
    assert "Raises" in sections or function.__name__ in RAISE_NOTHING, "no errors are described"
    assert "Example" in sections, "there is no example"


@pytest.mark.parametrize("of_class", CLASSES)
def test_the_parameters_of_every_constructor_are_described(of_class):
    _check_parameters(of_class, inspect.signature(of_class))


@pytest.mark.parametrize("module", MODULES)
def test_examples_for_the_interpreter_give_what_they_show(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize("name", MOVING)
def test_a_collective_says_what_it_overwrites(name):
    assert re.search(r"[Ii]n place|is not changed", _sections(getattr(mpi, name))[""]), name


@pytest.mark.parametrize("name", ("", ".nn", ".engine", ".parameterserver", ".distributed"))
def test_dir_has_the_public_names_only(name):
    module = importlib.import_module(f"torchmpi{name}")
    assert dir(module) == sorted(module.__all__)


def test_there_are_functions_to_test():
    assert len(FUNCTIONS) > 70 and len(CLASSES) > 10 and len(MOVING) > 20
