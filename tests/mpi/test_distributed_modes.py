"""To an author of torch modes that watch operators: they see the calls of a process group as they see gloo's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401, gives the operators results without values
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchmpi.errors import ArgumentError

# Newer versions have other names for some collectives, which older ones do not know.
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(2),  # the way to the dispatcher does not depend on their number
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
]
Call = Callable[[Tensor, Any], Any]


@pytest.fixture(scope="module")
def gloo(default_group: None) -> Iterator[Any]:
    yield dist.new_group(backend="gloo")


def parts(x: Tensor) -> list[Tensor]:
    return [torch.zeros_like(x) for _ in range(dist.get_world_size())]


def all_gather(x: Tensor, group: Any) -> Any:
    dist.all_gather(received := parts(x), x, group)
    return received


def gather(x: Tensor, group: Any) -> Any:
    received = parts(x)
    dist.gather(x, received if dist.get_rank() == 0 else None, 0, group)
    return received


def scatter(x: Tensor, group: Any) -> Any:
    received = torch.zeros_like(x)
    dist.scatter(received, [x + 1, x + 2] if dist.get_rank() == 0 else None, 0, group)
    return received


def reduce_scatter(x: Tensor, group: Any) -> Any:
    dist.reduce_scatter(received := torch.zeros_like(x), [x, x + 1], group=group)
    return received


def reduce_scatter_tensor(x: Tensor, group: Any) -> Any:
    dist.reduce_scatter_tensor(received := x.new_zeros(x.numel() // 2), x, group=group)
    return received


def all_gather_into_tensor(x: Tensor, group: Any) -> Any:
    dist.all_gather_into_tensor(received := x.new_zeros(2 * x.numel()), x, group)
    return received


def all_to_all(x: Tensor, group: Any) -> Any:
    dist.all_to_all(received := parts(x), [x, x + 1], group)
    return received


def all_to_all_single(x: Tensor, group: Any, *splits: list[int]) -> Any:
    dist.all_to_all_single(received := torch.zeros_like(x), x, *splits, group=group)
    return received


def messages(x: Tensor, group: Any) -> Any:
    other, received = 1 - dist.get_rank(), torch.zeros_like(x)
    steps = [lambda: dist.send(x, other, group), lambda: dist.recv(received, other, group)]
    for step in steps if dist.get_rank() == 0 else steps[::-1]:
        step()
    return received


def batch(x: Tensor, group: Any) -> Any:
    other, received = 1 - dist.get_rank(), torch.zeros_like(x)
    ops = [dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, received, other, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


CALLS: dict[str, Call] = {
    "all_reduce": lambda x, group: (dist.all_reduce(x, group=group), x)[1],
    "all_reduce of the largest": lambda x, group: (dist.all_reduce(x, dist.ReduceOp.MAX, group), x)[1],
    "all_reduce later": lambda x, group: (dist.all_reduce(x, group=group, async_op=True).wait(), x)[1],
    "all_reduce_coalesced": lambda x, group: (dist.all_reduce_coalesced([x, x * 2], group=group), x)[1],
    "broadcast": lambda x, group: (dist.broadcast(x, 1, group), x)[1],
    "reduce": lambda x, group: (dist.reduce(x, 0, group=group), x if dist.get_rank() == 0 else 0)[1],
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single with splits": lambda x, group: all_to_all_single(x, group, [2, 2], [2, 2]),
    "barrier": lambda x, group: dist.barrier(group),
    "messages": messages,
    "batch": batch,
}
WITHOUT_SHAPES = "all_reduce_coalesced"
"""torch has no result without values for it."""


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def watched(call: Call, group: Any) -> Any:
    with Watching() as outer, Watching() as inner:
        result = call(tensor(), group)
    return [name for name in outer.seen if "c10d" in name], outer.seen == inner.seen, result


def counted(call: Call, group: Any) -> Any:
    with CommDebugMode() as mode:
        result = call(tensor(), group)
    return {str(name): number for name, number in mode.get_comm_counts().items()}, result


def graph_of(call: Call, group: Any, **options: Any) -> Any:
    return make_fx(lambda x: call(x, group), **options)(tensor())


def operators(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)]


def simulated(call: Call, group: Any) -> Any:
    if call is CALLS[WITHOUT_SHAPES]:
        return None
    with FakeTensorMode():
        result = call(tensor(), group)
    return [each.shape for each in result] if isinstance(result, list) else getattr(result, "shape", None)


def shapes_only(call: Call, group: Any) -> Any:
    return None if call is CALLS[WITHOUT_SHAPES] else operators(graph_of(call, group, tracing_mode="fake"))


MODES = {
    "two modes": watched,
    "CommDebugMode": counted,
    "make_fx": lambda call, group: operators(graph_of(call, group)),
    "make_fx with shapes": shapes_only,
    "make_fx before dispatch": lambda call, group: operators(graph_of(call, group, pre_dispatch=True)),
    "FakeTensorMode": simulated,
}


def plain(result: Any) -> Any:
    """The numbers of tensors, which can be compared as parts of other values."""
    return pytree.tree_map_only(Tensor, Tensor.tolist, result)


def tensor() -> Tensor:
    return torch.arange(4.0) + 10 * dist.get_rank()


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sees_what_it_sees_of_gloo(agree, gloo, mode):
    """Regression: graphs had no call of the group, since none was an operator."""
    for name, call in CALLS.items():
        for _ in range(2):  # the second time by machine code
            call(tensor(), dist.group.WORLD)
        ours, theirs = (MODES[mode](call, group) for group in (dist.group.WORLD, gloo))
        agree.equal(plain(ours), plain(theirs), name)
        unseen = (WITHOUT_SHAPES, "barrier", "messages", "batch")
        agree(bool(theirs) or name in unseen or mode == "FakeTensorMode", f"{name}: nothing is seen")


def test_a_graph_makes_the_calls_that_it_has_recorded(agree):
    group = dist.group.WORLD
    for name, call in CALLS.items():
        if name in ("all_reduce later", "messages", "batch"):  # torch records no wait
            continue
        graph = graph_of(call, group)
        for _ in range(2):
            agree.equal(plain(graph(tensor())), plain(call(tensor(), group)), name)


def test_works_of_watched_calls_are_those_of_the_group(agree):
    with Watching():
        work = dist.all_reduce(x := tensor(), async_op=True)
        agree(work.result()[0] is x, "another tensor")
        work.wait()
        agree(work.is_completed() and work.is_success(), repr(work))
        received = torch.zeros(4)
        dist.isend(tensor(), other := 1 - dist.get_rank())
        agree.equal(dist.recv(received), other)


def test_a_factor_reaches_a_watched_call_but_no_graph(agree):
    reduction = dist._make_nccl_premul_sum(0.5)
    with Watching():
        dist.all_reduce(x := tensor(), reduction)
    dist.all_reduce(expected := tensor(), reduction)
    agree.equal(x, expected)
    graph = graph_of(lambda x, group: dist.all_reduce(x, reduction), None)
    agree.raises(ArgumentError, lambda: graph(tensor()), "PREMUL_SUM", "use SUM")


def test_jit_trace_is_refused(agree):
    """Of gloo, too: torch cannot record the group."""
    for name, call in CALLS.items():
        agree.raises(ArgumentError, lambda c=call: torch.jit.trace(lambda x: c(x, None), tensor()), "cannot record")
        agree.equal(plain(call(tensor(), None)), plain(call(tensor(), dist.group.WORLD)), f"{name}: the next call")
