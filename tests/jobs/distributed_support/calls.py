"""Collectives, with every operation, dtype and layout; works; messages; objects."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from features import Wrong, equal, feature, finished, ones, other, rank
from helpers.torch_rig import CALLS, LAYOUTS, OPS, Setting

BOTH_ROOTS = (0, 1)
COLLECTIVES: dict[str, tuple[str, tuple[int, ...]]] = {
    "`all_reduce`": ("all_reduce", (0,)),
    "`all_reduce_coalesced`": ("all_reduce_coalesced", (0,)),
    "`broadcast`": ("broadcast", BOTH_ROOTS),
    "`reduce`": ("reduce", BOTH_ROOTS),
    "`all_gather`": ("all_gather", (0,)),
    "`all_gather` of different lengths": ("all_gather_uneven", (0,)),
    "`all_gather` into views of one tensor": ("all_gather_into_views", (0,)),
    "`all_gather_coalesced`": ("all_gather_coalesced", (0,)),
    "`all_gather_single`, `all_gather_into_tensor`": ("all_gather_single", (0,)),
    "the same with one dimension more": ("all_gather_into_tensor", (1,)),
    "`reduce_scatter`": ("reduce_scatter", (0,)),
    "`reduce_scatter` of different lengths": ("reduce_scatter_uneven", (0,)),
    "`reduce_scatter_single`, `reduce_scatter_tensor`": ("reduce_scatter_single", (0,)),
    "the same from one dimension more": ("reduce_scatter_tensor", (0,)),
    "`gather`": ("gather", BOTH_ROOTS),
    "`scatter`": ("scatter", BOTH_ROOTS),
    "`all_to_all`": ("all_to_all_even", (0,)),
    "`all_to_all` of different lengths": ("all_to_all", (0,)),
    "`all_to_all_single`": ("all_to_all_single", (0,)),
    "`all_to_all_single` of different lengths": ("all_to_all_single_uneven", (0,)),
    "`barrier`": ("barrier", (0,)),
}
OPERATIONS = {
    "`SUM`, `PRODUCT`, `MIN`, `MAX`": (("sum", "prod", "min", "max"), torch.float32),
    "`AVG`": (("avg",), torch.float32),
    "`BAND`, `BOR`, `BXOR`": (("band", "bor", "bxor"), torch.int32),
}
DTYPES = {
    "`float64`, `float32`": (torch.float64, torch.float32),
    "`float16`, `bfloat16`": (torch.float16, torch.bfloat16),
    "`complex64`, `complex128`": (torch.complex64, torch.complex128),
    "`int8`, `uint8`, `int32`, `int64`": (torch.int8, torch.uint8, torch.int32, torch.int64),
    "`int16`": (torch.int16,),
    "`uint16`, `uint32`, `uint64`": (torch.uint16, torch.uint32, torch.uint64),
}
MODES = {"sync": False, "async": True}


def all_to_all_even(it: Setting) -> tuple[Any, Any]:
    inputs, outputs = [ones() * 10**part for part in range(2)], [torch.zeros(3), torch.zeros(3)]
    expected = [torch.full((3,), float(source + 1) * 10 ** rank()) for source in range(2)]
    return dist.all_to_all(outputs, inputs, **it.common), list(zip(outputs, expected, strict=True))


def all_gather_single(it: Setting) -> tuple[Any, Any]:
    """Concatenate along dim 0."""
    output, expected = torch.zeros(4, 3), torch.tensor([1.0, 1.0, 2.0, 2.0])
    return dist.all_gather_single(output, ones(2, 3), **it.common), [(output, expected.view(4, 1).expand(4, 3))]


def reduce_scatter_single(it: Setting) -> tuple[Any, Any]:
    """Reduce a concatenation along dim 0."""
    inputs = [it.laid(torch.cat([it.value(each, part) for part in range(2)])) for each in range(2)]
    expected = it.reduced(inputs).chunk(2)[rank()]
    output = it.blank(expected)
    return dist.reduce_scatter_single(output, inputs[rank()], OPS[it.op], **it.common), [(output, expected)]


OWN = {call.__name__: call for call in (all_to_all_even, all_gather_single, reduce_scatter_single)}


def compare(call: str, **setting: Any) -> None:
    """Make a call of the tests of collectives and check its results."""
    it = Setting(group=dist.group.WORLD, **setting)
    work, pairs = (OWN | CALLS)[call](it)
    if it.asynchronous:
        if work is None:
            raise Wrong("returns no work")
        finished(work)
    if call == "reduce" and rank() != it.root:
        return  # the result on other ranks is undefined
    for actual, expected in pairs:
        equal(actual, expected)


for title, (call, seeds) in COLLECTIVES.items():
    for mode, asynchronous in MODES.items():
        for seed in seeds:
            feature("Collectives", f"{title}|{mode}")(
                partial(compare, call, shape=(4, 3), asynchronous=asynchronous, seed=seed)
            )
for title, (ops, dtype) in OPERATIONS.items():
    for op in ops:
        feature("Operations and dtypes", f"{title} in `all_reduce`")(partial(compare, "all_reduce", op=op, dtype=dtype))
        feature("Operations and dtypes", f"{title} in `reduce_scatter_tensor`")(
            partial(compare, "reduce_scatter_single", op=op, dtype=dtype)
        )


@feature("Operations and dtypes", "`AVG` of integers, rounded towards zero")
def _() -> None:
    for sign in (1, -1):
        tensor = sign * ones().long()
        dist.all_reduce(tensor, OPS["avg"])
        equal(tensor, [sign] * 3)


@feature("Operations and dtypes", "`PREMUL_SUM`")
def _() -> None:
    tensor = ones()
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    equal(tensor, [1.5] * 3)


for title, dtypes in DTYPES.items():
    for dtype in dtypes:
        feature("Operations and dtypes", f"{title} reduced")(partial(compare, "all_reduce", dtype=dtype))
        feature("Operations and dtypes", f"{title} sent")(partial(compare, "all_gather", dtype=dtype))


@feature("Operations and dtypes", "`bool`: `SUM` as torch adds them, `MIN`, `MAX`")
def _() -> None:
    for op, expected in (("sum", [True, True]), ("min", [False, True]), ("max", [True, True])):
        tensor = torch.tensor([rank() == 0, True])
        dist.all_reduce(tensor, OPS[op])
        equal(tensor, expected)


for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    feature("Operations and dtypes", "`float8` sent")(partial(compare, "broadcast", dtype=dtype))
for layout in LAYOUTS:
    for call in ("all_reduce", "all_gather", "reduce_scatter_single", "broadcast"):
        feature("Operations and dtypes", {
            "contiguous": "contiguous tensors", "transposed": "tensors with any strides",
            "leaf": "tensors with `requires_grad`", "inference": "tensors of `inference_mode`",
        }[layout])(partial(compare, call, shape=(4, 3), layout=layout))  # fmt: skip
for shape in ((), (0,), (2, 0, 3)):
    for call in ("all_reduce", "all_gather"):
        feature("Operations and dtypes", "0-dim tensors, empty tensors")(partial(compare, call, shape=shape))


@feature("Operations and dtypes", "sparse tensors in `all_reduce`")
def _() -> None:
    tensor = torch.sparse_coo_tensor([[rank()]], [1.0], (2,))
    dist.all_reduce(tensor)
    equal(tensor.to_dense(), [1.0, 1.0])


# --- works ----------------------------------------------------------------------------------------------------------


@feature("Work objects", "`wait()`, `is_completed()`, `is_success()`, `result()`, `exception()`")
def _() -> None:
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    equal(work.wait(), True)
    equal((work.is_completed(), work.is_success()), (True, True))
    equal(work.result()[0], [3.0] * 3)
    if not isinstance(work.exception(), (type(None), RuntimeError)):
        raise Wrong(f"exception() is {work.exception()!r}")


@feature("Work objects", "`wait(timeout)`")
def _() -> None:
    tensor = ones()
    dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=30))
    equal(tensor, [3.0] * 3)


@feature("Work objects", "`get_future()`, `then()`")
def _() -> None:
    future = dist.all_reduce(ones(), async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    equal(future.wait(), [6.0] * 3)


@feature("Work objects", "a call that waits within `then()`")
def _() -> None:
    def again(future: torch.futures.Future) -> torch.Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return tensor

    equal(dist.all_reduce(ones(), async_op=True).get_future().then(again).wait(), [6.0] * 3)


@feature("Work objects", "calls of two groups, in a different order on each rank")
def _() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [ones(), ones() * 10]
    order = (0, 1) if rank() == 0 else (1, 0)
    finished([dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order])
    equal(torch.stack(tensors), [[3.0] * 3, [30.0] * 3])


for coalesced in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
    for mode, asynchronous in MODES.items():

        @feature("Work objects", f"`_coalescing_manager` around `{coalesced}`|{mode}")
        def _(name: str = coalesced, asynchronous: bool = asynchronous) -> None:
            tensors = [ones(2), ones(2)]
            outputs = {"all_gather_single": torch.zeros(2, 4), "reduce_scatter_single": torch.zeros(2, 1)}
            with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
                for index, tensor in enumerate(tensors):
                    getattr(dist, name)(*([outputs[name][index]] if name in outputs else []), tensor)
            if asynchronous:
                manager.wait()
            expected = {"all_reduce": 3.0, "all_gather_single": [[1.0, 1.0, 2.0, 2.0]], "reduce_scatter_single": 3.0}
            actual = outputs.get(name, torch.stack(tensors))
            equal(actual, torch.as_tensor(expected[name]).expand(actual.shape))


# --- messages -------------------------------------------------------------------------------------------------------


def exchange_by(asynchronous: bool, **receiver: Any) -> None:
    """Send a message from rank 0 to rank 1, and one back."""
    received = torch.zeros(3)

    def send() -> Any:
        return dist.isend(ones(), other()) if asynchronous else dist.send(ones(), other())

    def receive() -> Any:
        return dist.irecv(received, **receiver) if asynchronous else dist.recv(received, **receiver)

    works = [step() for step in ((send, receive) if rank() == 0 else (receive, send))]
    if asynchronous:
        finished(works)
    equal(received, [other() + 1.0] * 3)


@feature("Messages", "`send`, `recv`")
def _() -> None:
    exchange_by(False, src=other())


@feature("Messages", "`recv` from any rank")
def _() -> None:
    exchange_by(False)


@feature("Messages", "`isend`, `irecv`")
def _() -> None:
    exchange_by(True, src=other())


@feature("Messages", "`irecv` from any rank")
def _() -> None:
    exchange_by(True)


@feature("Messages", "tags: messages received in a different order than sent")
def _() -> None:
    sent, received = [torch.tensor([1.0]), torch.tensor([2.0])], [torch.zeros(1), torch.zeros(1)]
    if rank() == 0:
        finished([dist.isend(tensor, 1, tag=tag) for tag, tensor in enumerate(sent)])
    else:
        for tag in (1, 0):
            dist.recv(received[tag], 0, tag=tag)
        equal(received[0].item() + 10 * received[1].item(), 21.0)


@feature("Messages", "`batch_isend_irecv`")
def _() -> None:
    received = torch.zeros(3)
    both = [dist.P2POp(dist.isend, ones(), other()), dist.P2POp(dist.irecv, received, other())]
    finished(dist.batch_isend_irecv(both))
    equal(received, [other() + 1.0] * 3)


@feature("Messages", "a long `isend`, then a collective before it is received")
def _() -> None:
    tensor = torch.full((1 << 20,), 7.0)
    if rank() == 0:
        work = dist.isend(tensor, 1)
        dist.barrier()
        work.wait()
    else:
        received = torch.zeros_like(tensor)
        dist.recv(received, 0)
        dist.barrier()
        equal(received, tensor)


# --- objects --------------------------------------------------------------------------------------------------------


@feature("Objects", "`all_gather_object`")
def _() -> None:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank()})
    equal(found, [{"rank": 0}, {"rank": 1}])


@feature("Objects", "`gather_object`")
def _() -> None:
    found: list[Any] | None = [None, None] if rank() == 0 else None
    dist.gather_object("x" * (rank() + 1), found)
    equal(found, ["x", "xx"] if rank() == 0 else None)


@feature("Objects", "`broadcast_object_list`")
def _() -> None:
    objects = ["a", {"b": 1}] if rank() == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1)
    equal(objects, ["a", {"b": 1}])


@feature("Objects", "`scatter_object_list`")
def _() -> None:
    found: list[Any] = [None]
    dist.scatter_object_list(found, ["a", "b"] if rank() == 0 else None)
    equal(found, ["ab"[rank()]])


@feature("Objects", "`send_object_list`, `recv_object_list`")
def _() -> None:
    if rank() == 0:
        dist.send_object_list(["a", 1], 1)
    else:
        objects: list[Any] = [None, None]
        dist.recv_object_list(objects, 0)
        equal(objects, ["a", 1])
