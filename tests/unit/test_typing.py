"""To a user of a type checker: it finds typical mistakes, and none in correct programs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from mypy import api

import torchmpi as mpi
from torchmpi.collectives import movements, reductions, signatures

PROGRAMS = Path(__file__).parent / "typing_programs"
FEWEST_FOUND = 35 / 40


@pytest.fixture(scope="module")
def found() -> dict[str, dict[int, str]]:
    """The errors of mypy, by file and line."""
    errors: dict[str, dict[int, str]] = {"correct.py": {}, "mistakes.py": {}}
    output, problems, status = api.run(["--strict", "--no-error-summary", *map(str, sorted(PROGRAMS.glob("*.py")))])
    assert status == 1 and not problems, problems
    for name, line, message in re.findall(r"(\w+\.py):(\d+): error: (.*)", output):
        errors[name][int(line)] = message
    return errors


@pytest.mark.slow
def test_correct_programs_have_no_errors(found):
    assert found["correct.py"] == {}


@pytest.mark.slow
def test_most_mistakes_are_found_and_nothing_else(found):
    lines = enumerate((PROGRAMS / "mistakes.py").read_text().splitlines(), 1)
    mistakes = {number: line for number, line in lines if line.endswith("# mistake")}
    assert len(mistakes) >= 50
    assert set(found["mistakes.py"]) <= set(mistakes), "errors on lines that are not marked"
    missed = [line for number, line in mistakes.items() if number not in found["mistakes.py"]]
    assert len(missed) <= (1 - FEWEST_FOUND) * len(mistakes), missed


def declared() -> dict[str, dict[str, object]]:
    """The parameters, with their defaults, of the first overload of each type that a decorator gives to functions."""
    tree = ast.parse(inspect.getsource(signatures))
    protocols = [
        each for each in tree.body if isinstance(each, ast.ClassDef) and "Protocol" in ast.unparse(each.bases[0])
    ]
    overloads = {each.name: next(node for node in each.body if isinstance(node, ast.FunctionDef)) for each in protocols}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])).startswith("like_"):
            protocol = re.match(r"_Typed\[(\w+)", ast.unparse(node.value))
            assert protocol
            arguments = overloads[protocol[1]].args
            positional = arguments.args[2:]
            defaults = zip(positional, arguments.defaults, strict=True)
            keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            found[name] = {each.arg: ast.literal_eval(value) for each, value in (*defaults, *keywords)}
    return found


@pytest.mark.parametrize("module", (movements, reductions), ids=lambda module: module.__name__)
def test_functions_have_the_parameters_of_their_types(module):
    types, num_checked = declared(), 0
    for node in ast.parse(inspect.getsource(module)).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if (name := ast.unparse(decorator).removeprefix("signatures.")) in types:
                parameters = list(inspect.signature(getattr(mpi, node.name)).parameters.values())
                assert parameters[0].name == "tensor"
                assert {each.name: each.default for each in parameters[1:]} == types[name], node.name
                num_checked += 1
    assert num_checked >= 4


def test_type_checkers_see_the_names_that_the_package_has():
    """What is imported for them with * are the modules of which the package has the names."""
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(mpi))) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imports if node.names[0].name == "*"] == sorted(mpi._MODULES_OF_FUNCTIONS)
    classes = {each.name: node.module for node in imports for each in node.names if each.name in mpi._CLASSES}
    assert classes == mpi._CLASSES
    for module in mpi._MODULES_OF_FUNCTIONS:  # they read no list that is computed
        assert re.search(r"^__all__ = \[\s*\"", inspect.getsource(importlib.import_module(f"torchmpi.{module}")), re.M)
