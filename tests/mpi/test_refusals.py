"""To whoever passes invalid arguments: all ranks raise the same error before anything is sent, and go on."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.neighbors import neighbors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import torchmpi as mpi
import torchmpi.horovod as hvd
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi import errors
from torchmpi.engine import AllReduceSGDEngine, ClassErrorMeter, EarlyStop

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("world")]

ONES = torch.ones(3)
NET = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(NET.parameters(), lr=0.1)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _fake():
    with FakeTensorMode():
        return torch.ones(3)


def _mpi4py():
    from mpi4py import MPI  # after start(), which loads the library

    return MPI


CASES = {
    "unknown op": (
        lambda: mpi.allreduce(ONES, op="mean"),
        errors.ArgumentError,
        "Use op='avg'; the operations are: sum, avg",
    ),
    "op of another library": (
        lambda: mpi.allreduce(ONES, op=dist.ReduceOp.PREMUL_SUM),
        errors.ArgumentError,
        "sum, avg",
    ),
    "op of mpi4py": (lambda: mpi.allreduce(ONES, op=_mpi4py().MINLOC), errors.ArgumentError, "sum, avg"),
    "list of ops": (lambda: mpi.allreduce(ONES, op=["sum"]), errors.ArgumentError, "sum, avg"),
    "op of Horovod": (lambda: mpi.allreduce(ONES, op=0), errors.ArgumentError, "sum, avg"),
    "no op": (lambda: mpi.allreduce(ONES, op=None), errors.ArgumentError, "sum, avg"),
    "op as out": (lambda: mpi.allreduce(ONES, "avg"), errors.DtypeError, "op='avg'"),
    "op of torch as out": (lambda: mpi.allreduce(ONES, dist.ReduceOp.MAX), errors.DtypeError, "op='max'"),
    "op of a number as out": (lambda: mpi.allreduce(1, "avg"), errors.DtypeError, "op='avg'"),
    "op as root": (lambda: mpi.reduce(ONES, "max"), errors.ArgumentError, "op='max'"),
    "avg of integers": (lambda: mpi.allreduce(torch.ones(3, dtype=torch.int32), op="avg"), errors.DtypeError, "divide"),
    "sum of bool": (lambda: mpi.allreduce(torch.ones(3, dtype=torch.bool)), errors.DtypeError, "lor"),
    "max of complex": (lambda: mpi.allreduce(torch.ones(3, dtype=torch.complex64), op="max"), errors.DtypeError, "abs"),
    "bits of floats": (lambda: mpi.allreduce(ONES, op="band"), errors.DtypeError, "integers"),
    "sum of 8 bit floats": (lambda: mpi.allreduce(ONES.to(torch.float8_e5m2)), errors.DtypeError, "bfloat16"),
    "quantized": (
        lambda: mpi.broadcast(torch.quantize_per_tensor(ONES, 1.0, 0, torch.qint8)),
        errors.DtypeError,
        "Convert",
    ),
    "not a tensor": (lambda: mpi.allreduce([1.0, 2.0]), errors.DtypeError, "torch.Tensor or a number"),
    "none": (lambda: mpi.allreduce(None), errors.DtypeError, "torch.Tensor or a number"),
    "sparse": (lambda: mpi.allreduce(ONES.to_sparse()), errors.ArgumentError, "to_dense"),
    "meta": (lambda: mpi.allreduce(torch.ones(3, device="meta")), errors.DeviceError, "cpu"),
    "expanded": (lambda: mpi.allreduce(torch.ones(1).expand(3)), errors.ArgumentError, "contiguous"),
    "root too large": (lambda: mpi.broadcast(ONES, root=99), errors.ArgumentError, "root=99"),
    "negative root": (lambda: mpi.reduce(ONES, root=-1), errors.ArgumentError, "root=-1"),
    "root no integer": (lambda: mpi.broadcast(ONES, root=1.0), errors.ArgumentError, "root=1.0"),
    "out of another shape": (lambda: mpi.allreduce(ONES, torch.ones(4)), errors.ArgumentError, "[4]"),
    "out of another dtype": (lambda: mpi.allreduce(ONES, ONES.double()), errors.DtypeError, "float64"),
    "out no tensor": (lambda: mpi.allreduce(ONES, [0.0]), errors.DtypeError, "list"),
    "unknown backend": (lambda: mpi.allreduce(ONES, backend="tcp"), errors.BackendUnavailableError, "mpi"),
    "backend of another type": (
        lambda: mpi.allreduce(ONES, backend=[]),
        errors.BackendUnavailableError,
        "'[]' is unknown",
    ),
    "of a list": (lambda: mpi.allreduce_many([ONES], backend=[]), errors.BackendUnavailableError, "'[]' is unknown"),
    "in the background": (
        lambda: mpi.allgather_async(ONES, backend={}),
        errors.BackendUnavailableError,
        "'{}' is unknown",
    ),
    "for GPUs only": (lambda: mpi.allreduce(ONES, backend="nccl"), errors.BackendUnavailableError, "CUDA tensors only"),
    "unknown level": (lambda: mpi.allreduce(ONES, comm=99), errors.CommunicatorError, "from 0 to"),
    "communicator of another kind": (lambda: mpi.allreduce(ONES, comm="world"), errors.CommunicatorError, "mpi.group("),
    "unknown level to use": (lambda: mpi.set_communicator(99), errors.CommunicatorError, "from 0 to"),
    "span outside": (lambda: mpi.set_collective_span(0, 99), errors.CommunicatorError, "begin <= end"),
    "span backwards": (lambda: mpi.set_collective_span(1, 0), errors.CommunicatorError, "begin <= end"),
    "key of another kind": (lambda: mpi.push_communicator(1.5), errors.ArgumentError, "string or an integer"),
    "integer too long": (lambda: mpi.allreduce(1 << 64), errors.DtypeError, "64 bits"),
    "vmap": (lambda: torch.vmap(mpi.allreduce)(torch.ones(2, 3)), errors.ArgumentError, "vmap, grad, jvp"),
    "grad": (lambda: torch.func.grad(lambda x: mpi.allreduce(x).sum())(ONES), errors.ArgumentError, "vmap, grad, jvp"),
    "fake": (lambda: mpi.allreduce(_fake()), errors.DtypeError, "FakeTensor"),
    "dtype as string": (lambda: mpi.empty_shared(3, dtype="float32"), errors.DtypeError, "torch.float32"),
    "shape as string": (lambda: mpi.empty_shared("three"), errors.ArgumentError, "whole numbers"),
    "optimizer alone": (lambda: mpinn.DistributedOptimizer(OPTIMIZER), errors.ArgumentError, "(optimizer, model)"),
    "model for optimizer": (lambda: mpinn.DistributedOptimizer(NET), errors.ArgumentError, "(opt=...)"),
    "model first": (lambda: mpinn.DistributedOptimizer(NET, OPTIMIZER), errors.ArgumentError, "not a Linear. opt: Any"),
    "negative norm": (lambda: mpinn.clip_grad_norm_(NET, -1.0), errors.ArgumentError, "max_norm=-1.0"),
    "norm nan": (lambda: mpinn.clip_grad_norm_(NET, math.nan), errors.ArgumentError, "from 0"),
    "negative value": (lambda: mpinn.clip_grad_value_(NET, -1.0), errors.ArgumentError, "clip_value=-1.0"),
    "number with out": (lambda: mpi.allreduce(1, ONES), errors.ArgumentError, "out"),
    "number to split": (lambda: mpi.alltoall(1), errors.DtypeError, "row per rank"),
    "send to nobody": (lambda: mpi.send(ONES, 99), errors.ArgumentError, "dst=99"),
    "send to a rank of mpi4py": (lambda: mpi.send(ONES, dest=0), errors.KeywordError, "Use dst=."),
    "no rank": (lambda: mpi.recv(ONES), errors.KeywordError, "src is missing"),
    "no tensor": (lambda: mpi.allreduce(op="max"), errors.DtypeError, "the tensor is missing"),
    "no tensor, later": (lambda: mpi.broadcast_async(root=0), errors.DtypeError, "the tensor is missing"),
    "no tensors": (lambda: mpi.allreduce_many(), errors.ArgumentError, "expected an iterable of tensors"),
    "send to oneself": (lambda: mpi.send(ONES, mpi.rank()), errors.ArgumentError, "send_async"),
    "receive from oneself": (lambda: mpi.recv(ONES, mpi.rank()), errors.ArgumentError, "recv_async"),
    "scatter without a tensor": (lambda: mpi.scatter(None, mpi.rank()), errors.DtypeError, "Pass a torch.Tensor."),
    "second start": (lambda: mpi.start(), errors.AlreadyStartedError, "stop()"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_rank_and_remedy(agree, name):
    call, kind, remedy = CASES[name]
    before = mpi.communicator(0).intra.call_log.seq
    agree.raises(kind, call, remedy, f"rank {mpi.rank()}")
    agree.equal(mpi.communicator(0).intra.call_log.seq, before, "it communicated")
    agree.equal(mpi.allreduce(1), mpi.size(), "the next call")


WATCHED = {
    "allreduce": lambda: mpi.allreduce(ONES),
    "number": lambda: mpi.allreduce(1.0),
    "in the background": lambda: mpi.allreduce_async(ONES).wait(),
    "list": lambda: mpi.allreduce_many([ONES, ONES.clone()]),
    "alltoall": lambda: mpi.alltoall(torch.ones(mpi.size(), 3)),
    "object": lambda: mpi.broadcast_object("value"),
    "barrier": lambda: mpi.barrier(),
    "exchange": lambda: mpi.sendreceive(ONES, *neighbors()),
    "gradients": lambda: mpinn.synchronize_gradients(NET),
}
"""Calls, which the fast path makes when they are repeated."""


@pytest.mark.parametrize("call", WATCHED)
def test_a_call_that_torch_would_lose_is_refused(agree, call):
    """Regression: graphs of make_fx had no trace of a call on tensors with values."""
    for parameter in NET.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        WATCHED[call]()
    with Watching():
        WATCHED[call]()  # a mode that records nothing
    before = mpi.communicator(0).intra.call_log.seq

    def traced(**options: bool) -> object:
        return make_fx(lambda x: (WATCHED[call](), x)[1], **options)(ONES)

    def simulated() -> object:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return WATCHED[call]()

    def jit_traced() -> object:
        return torch.jit.trace(lambda x: (WATCHED[call](), x + 1)[1], ONES)

    agree.raises(errors.ArgumentError, jit_traced, "torch.jit.trace cannot record")
    agree.raises(errors.ArgumentError, traced, "make_fx cannot record", f"rank {mpi.rank()}")
    agree.raises(errors.ArgumentError, lambda: traced(pre_dispatch=True), "make_fx cannot record")
    agree.raises(errors.ArgumentError, simulated, "FakeTensorMode simulates")
    agree.equal(mpi.communicator(0).intra.call_log.seq, before, "it communicated")
    WATCHED[call]()
    agree.equal(mpi.allreduce(1), mpi.size(), "the next call")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("SUM", "sum"), ("AVG", "avg"), ("PRODUCT", "prod"), ("MIN", "min"), ("MAX", "max"), ("BOR", "bor")],
)
def test_operations_of_torch_and_mpi4py_are_accepted(agree, theirs, ours):
    tensor = torch.full((3,), mpi.rank() + 1, dtype=torch.int64 if ours == "bor" else torch.float64)
    op = getattr(dist.ReduceOp, theirs)
    expected = mpi.allreduce(tensor.clone(), op=ours)
    # MPI has no average.
    ops = [op] if ours == "avg" else [op, getattr(_mpi4py(), {"PRODUCT": "PROD"}.get(theirs, theirs))]
    for op in ops:
        for _ in range(2):
            agree.equal(mpi.allreduce(tensor.clone(), op=op), expected)
        agree.equal(mpi.allreduce(tensor, torch.empty_like(tensor), op=op), expected)
        agree.equal(mpi.reduce_scatter(tensor.clone(), op=op), mpi.reduce_scatter(tensor.clone(), op=ours))
        agree.equal(mpi.allreduce_async(tensor.clone(), op=op).wait(), expected)
        agree.equal(mpi.allreduce_many([tensor.clone(), tensor.clone()], op=op)[1], expected)
        agree.equal(mpi.allreduce(mpi.rank() + 1, op=op), mpi.allreduce(mpi.rank() + 1, op=ours))


@pytest.mark.filterwarnings("ignore:.*(CSR|nested)")
def test_layouts_are_refused_for_prepared_calls(agree):
    """Regression: torch raised its own errors for these layouts when the other ranks were in the call already."""
    square = torch.ones(4, 4)
    kinds = [
        square.to_sparse(),
        square.to_sparse_csr(),
        torch.nested.nested_tensor([square, square[:2]]),
    ]
    if torch.backends.mkldnn.is_available():
        kinds.append(square.to_mkldnn())
    for collective in ("allreduce", "broadcast", "allgather", "reduce_scatter"):
        for _ in range(2):
            getattr(mpi, collective)(square.clone())
        for tensor in kinds:
            agree.raises(errors.ArgumentError, partial(getattr(mpi, collective), tensor))
    agree.equal(mpi.allreduce(1), mpi.size())


def test_sums_of_integers_that_do_not_fit(agree):
    """Regression: they wrapped around. The result of the call is that of the largest integers."""
    most = ((1 << 63) - 1) // mpi.size()
    agree.equal(mpi.allreduce(most), most * mpi.size())
    agree.equal(mpi.allreduce(-most, op="sum"), -most * mpi.size())
    agree.equal(mpi.allreduce((1 << 63) - 1, op="max"), (1 << 63) - 1)
    for call in (mpi.allreduce, mpi.reduce, lambda value: mpi.allreduce_async(value).wait()):
        agree.raises(errors.DtypeError, lambda c=call: c(most + 1), "does not fit into 64 bits", f"rank {mpi.rank()}")


def test_objects_without_a_pickle_are_refused_on_all_ranks(agree):
    root = mpi.size() - 1
    text = "pickle raises" if mpi.rank() == root else f"see the error of rank {root}"
    for call in (
        lambda: mpi.broadcast_object(lambda: 0, root),
        lambda: mpi.allgather_object((lambda: 0) if mpi.rank() == root else 0),
    ):
        agree.raises(errors.ArgumentError, call, text, "cannot be sent", f"rank {mpi.rank()}")
    agree.equal(mpi.broadcast_object("next", root), "next")


def test_shape_of_a_result_that_does_not_fit(agree):
    long = torch.empty(3 * mpi.size() + 1)
    told = f"rank {mpi.rank()}: allgather: out has shape"
    agree.raises(errors.ArgumentError, lambda: mpi.allgather(torch.ones(3), long), told)
    told = f"rank {mpi.rank()}: alltoall: out is torch.float64"
    rows, splits = torch.ones(mpi.size()), [1] * mpi.size()
    agree.raises(errors.DtypeError, lambda: mpi.alltoall(rows, rows.double(), splits=splits), told)


def train(**wrong: object) -> object:
    """Train with valid arguments but for the `wrong` ones."""
    valid = {"network": NET, "criterion": torch.nn.MSELoss(), "iterator": [], "lr": 0.1}
    return AllReduceSGDEngine(progress=False).train(**valid | wrong)


@pytest.mark.parametrize(("call", "text"), [
    (lambda: mpinn.synchronize_gradients(None), "a module or an iterable of tensors, not a NoneType"),
    (lambda: mpinn.check_with_allreduce(3), "a module or an iterable of tensors, not an int"),
    (lambda: mpinn.register_async_backward(NET, sync_gradient_frequency="2"), "='2'): expected an integer, not a str"),
    (lambda: mpinn.register_async_backward(NET, sync_gradient_frequency=0), "=0 must be an integer, at least 1"),
    (lambda: mpinn.synchronize_gradients([3]), "=...): expected a module or an iterable of tensors, not a list of int"),
    (lambda: mpinn.set_sharded(3), "mpinn.set_sharded(tensor=3): expected a tensor, not an int. tensor: The shard"),
    (lambda: mpinn.sharding_of(None), "mpinn.sharding_of(tensor=None): expected a tensor"),
    (lambda: mpinn.MPLinear(3, "a"), "mpinn.MPLinear(out_features='a'): expected an integer, not a str"),
    (lambda: mpinn.MPLinear(3, 3, dtype="float32"), "(dtype='float32'): expected a torch.dtype or None, not a str"),
    (lambda: mpinn.SyncBatchNorm(None), "mpinn.SyncBatchNorm(num_features=None): expected an integer"),
    (lambda: mpinn.SyncBatchNorm(3, moment=0.1), "mpinn.SyncBatchNorm() has no parameter 'moment'. Use momentum="),
    (lambda: mpinn.DistributedSampler(3), "mpinn.DistributedSampler(dataset=3): expected a Dataset, not an int"),
    (lambda: mpinn.DistributedSampler([1], shufle=True), "has no parameter 'shufle'. Use shuffle="),
    (lambda: mpinn.DistributedOptimizer(3, NET), "mpinn.DistributedOptimizer(opt=3): expected an Optimizer"),
    (lambda: mpinn.DistributedOptimizer(OPTIMIZER, NET, compresion="fp16"), "'compresion'. Use compression="),
    (lambda: mpinn.DistributedOptimizer(OPTIMIZER, NET, group=None), "no parameter 'group'. Use comm="),
    (lambda: mpinn.DistributedOptimizer(OPTIMIZER, NET, tag=1), "no parameter 'tag'. Its parameters are: opt, model"),
    (lambda: mpinn.clip_grad_norm_(3, 1.0), "mpinn.clip_grad_norm_(net=3): expected a module or an iterable"),
    (lambda: mpinn.clip_grad_norm_(NET, "a"), "(max_norm='a'): expected a number, not a str"),
    (lambda: mpi.allreduce_many(3), "mpi.allreduce_many(tensors=3): expected an iterable of tensors, not an int"),
    (lambda: mpi.allreduce_many_async(None), "mpi.allreduce_many_async(tensors=None): expected an iterable of tensors"),
    (lambda: mpi.autotune(3), "mpi.autotune(verbs=3): expected a string or an iterable of strings or None, not an int"),
    (lambda: mpi.autotune(seconds="a"), "mpi.autotune(seconds='a'): expected a number"),
    (lambda: mpi.push_communicator(None), "mpi.push_communicator(key=None): expected a string or an integer"),
    (lambda: ps.save(None), "ps.save(folder=None): expected a string or a path, not a NoneType. folder:"),
    (lambda: ps.sync_handles(3), "ps.sync_handles(handles=3): expected an iterable of"),
    (lambda: ps.init_tensors(3), "ps.init_tensors(tensors=3): expected an iterable of tensors, not an int"),
    (lambda: ps.sgd("a"), "ps.sgd(lr='a'): expected a number, not a str"),
    (lambda: ps.Clock("a"), "ps.Clock(max_staleness='a'): expected a number"),
    (lambda: ps.EASGDUpdate(NET, beta="a"), "ps.EASGDUpdate(beta='a'): expected a number"),
    (lambda: ps.EASGDUpdate(NET, updat_frequency=3), "() has no parameter 'updat_frequency'. Use update_frequency="),
    (lambda: ps.DiLoCoUpdate(3), "mpinn.DiLoCoUpdate(network=3): expected a module, not an int"),
    (lambda: EarlyStop(min_delta=None), "engine.EarlyStop(min_delta=None): expected a number, not a NoneType"),
    (lambda: ClassErrorMeter(3), "engine.ClassErrorMeter(topk=3): expected a list or tuple of integers, not an int"),
    (lambda: AllReduceSGDEngine(prefetch="a"), "engine.AllReduceSGDEngine(prefetch='a'): expected an integer"),
    (lambda: hvd.allreduce(3), "hvd.allreduce(tensor=3): expected a tensor, not an int"),
    (lambda: hvd.allreduce(ONES, compression=None), "hvd.allreduce(compression=None): expected a class"),
    (lambda: hvd.broadcast_(ONES, None), "hvd.broadcast_(root_rank=None): expected an integer"),
    (lambda: hvd.DistributedOptimizer(NET), "(optimizer=...): expected an Optimizer, not a Linear"),
    (lambda: mpinn.TopK("a"), "fraction='a'"),
    (lambda: mpinn.PowerSGD(rank="a"), "rank='a'"),
    (lambda: ps.init_tensors(NET), "expected an iterable of tensors, not a Linear"),
    (lambda: train(network=None), "network= and criterion= are a NoneType and a MSELoss: expected a module"),
    (lambda: train(criterion="mse"), "a Linear and a str: expected a module and a function"),
    (lambda: train(max_epochs="2"), "max_epochs='2': expected a number of epochs"),
])  # fmt: skip
def test_wrong_types_are_named(agree, call, text):
    """Regression: texts such as "'<' not supported between instances of 'str' and 'int'"."""
    kind = errors.KeywordError if "no parameter" in text or ". Use " in text else errors.ArgumentError
    agree.raises(kind, call, text, *([f"rank {mpi.rank()}: "] if "): expected" in text else []))


class Reducing(torch.nn.Module):
    def forward(self, tensor):
        return mpi.allreduce(tensor)


@pytest.mark.parametrize("call", (mpi.allreduce, Reducing()), ids=("function", "module"))
def test_a_repeated_call_is_no_part_of_a_trace(agree, call):
    """Regression: machine code ran the call, and the traced function lacked it without a word."""
    tensor = torch.zeros(7)
    for _ in range(3):
        call(tensor)
    agree.raises(errors.ArgumentError, lambda: torch.jit.trace(call, tensor), "torch.jit.trace cannot record")
    agree.equal(call(torch.ones(7)), torch.full((7,), float(mpi.size())))


def test_argument_errors_are_subclasses_of_builtin_exceptions(agree):
    agree(issubclass(errors.ArgumentError, ValueError))
    agree(issubclass(errors.DtypeError, TypeError))


@pytest.mark.min_ranks(2)
def test_strict_checking_raises_on_all_ranks_and_goes_on(agree):
    """Across hosts there is no status board: a header is compared before each call. Requested by a setting here."""
    from torchmpi.communicators.group import Group, GroupContext

    world = mpi.communicator(0).intra
    context = GroupContext(world.context.MPI, world.context.hosts, check="strict", threaded=True, slot_bytes=1 << 16)
    group = Group(world.comm.Dup(), "strict", world.world_ranks, context)
    strict = type("Communicator", (), {"intra": group, "level": -1})()
    from torchmpi.collectives import prepared
    from torchmpi.communicators.plan import PLAIN, PlanKey

    def allreduce(tensor):
        plan = prepared.plan_for(strict, PlanKey("allreduce", "sum", tensor.dtype, PLAIN))
        return group.call(plan, tensor, None, 0)

    messages = []
    try:
        allreduce(torch.ones(3 if mpi.rank() == 0 else 4))
    except errors.MismatchError as error:
        messages.append(str(error))
    afterwards = allreduce(torch.ones(3))
    group.free()
    agree(messages and "rank 0 called allreduce(float32 [3], sum)" in messages[0], str(messages))
    agree(messages and "rank 1 called allreduce(float32 [4], sum)" in messages[0], str(messages))
    agree.equal(afterwards, torch.full((3,), float(mpi.size())))
