"""To a user of other libraries: for their names, keywords and operations, errors name the replacement."""

from __future__ import annotations

import importlib
import re

import pytest

import torchmpi as mpi
from torchmpi import errors, other_names


@pytest.mark.parametrize("name", other_names.NAMES)
def test_every_name_of_another_library_has_a_replacement_that_exists(name):
    if name in mpi.__all__:
        pytest.fail(f"mpi.{name} exists: remove it from the table")
    with pytest.raises(AttributeError, match=re.escape(f"'{name}'")) as caught:
        getattr(mpi, name)
    assert other_names.NAMES[name] in str(caught.value)
    for module, replacement in re.findall(r"\b(mpi|torchmpi\.\w+)\.(\w+)", other_names.NAMES[name]):
        where = importlib.import_module(module.replace("mpi", "torchmpi") if module == "mpi" else module)
        assert replacement in where.__all__, f"{module}.{replacement} does not exist"


@pytest.mark.parametrize(
    ("module", "name", "replacement"),
    [
        ("nn", "broadcast_parameters", "torchmpi.nn.synchronize_parameters"),
        ("nn", "synchronise_gradients", "torchmpi.nn.synchronize_gradients"),
        ("nn", "DistributedDataParallel", "torchmpi.nn.synchronize_parameters"),
        ("engine", "AllReduceEngine", "torchmpi.engine.AllReduceSGDEngine"),
        ("engine", "sgd_engine_", "torchmpi.engine.SGDEngine"),
        ("parameterserver", "recieve", "torchmpi.parameterserver.receive"),
    ],
)
def test_packages_name_replacements_too(module, name, replacement):
    with pytest.raises(
        AttributeError, match=rf"module 'torchmpi.{module}' has no attribute '{name}'. Use {replacement}"
    ):
        getattr(getattr(mpi, module), name)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("allredcue", "mpi.allreduce"),
        ("Allreduce", "mpi.allreduce"),
        ("allreduceTensor", "mpi.allreduce"),
        ("pushCommunicator", "mpi.push_communicator"),
        ("Barrier", "mpi.barrier"),
        ("comunicator", "mpi.communicator"),
    ],
)
def test_a_misspelt_name_gives_the_nearest_one(name, replacement):
    with pytest.raises(AttributeError, match=rf"Use {re.escape(replacement)}\."):
        getattr(mpi, name)


def test_a_name_without_a_similar_one_has_no_suggestion():
    with pytest.raises(AttributeError, match=r"has no attribute 'frobnicate'$"):
        mpi.frobnicate  # noqa: B018


@pytest.mark.parametrize(
    ("function", "keyword", "remedy"),
    [
        ("allreduce", "average", "op='avg'"),
        ("allreduce", "async_op", "mpi.allreduce_async"),
        ("allreduce_async", "async_op", "Omit it: mpi.allreduce_async returns a handle."),
        ("allreduce", "group", "comm="),
        ("allreduce", "name", "Omit it"),
        ("allreduce", "ops", "Use op=."),
        ("allreduce_many", "average", "op='avg'"),
        ("broadcast", "src", "Use root=."),
        ("broadcast", "root_rank", "Use root=."),
        ("broadcast", "average", "Its parameters are: tensor, root, out, comm, backend."),
        ("scatter", "src", "Use root=."),
        ("gather", "dst", "Use root=."),
        ("allgather", "output_tensor", "Use out=."),
        ("barrier", "async_op", "Its parameters are: comm."),
        ("send", "dest", "Use dst=."),
        ("recv", "source", "Use src=."),
        ("broadcast_object", "src", "Use root=."),
        ("sendreceive", "dest", "Use src= or dst=."),
    ],
)
def test_a_keyword_of_another_library_is_refused_with_the_one_here(function, keyword, remedy):
    with pytest.raises(errors.KeywordError, match=re.escape(remedy)) as caught:
        getattr(mpi, function)(None, **{keyword: 0})  # Regression: Python named the missing dst, not dest
    assert f"mpi.{function}() has no parameter {keyword!r}" in str(caught.value)
    assert isinstance(caught.value, TypeError)
