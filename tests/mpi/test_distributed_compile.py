"""torch.compile over torchmpi: a model under DDP, sharded layers, and functions with collectives in their graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers.distributed_rig import SMALL_BUCKETS, TIGHT, net, sgd, share, train, trained_alone, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

# Newer versions have other names for some collectives, which older ones do not know.
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(1, 2),
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
]
BACKEND = "aot_eager"
"""The forward and backward graphs, without C++ code, which takes very long to compile."""


@pytest.fixture(autouse=True)
def forgetting() -> Iterator[None]:
    """Every test compiles for itself, and nothing is left for other files."""
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A new class of modules: under DDP torch.compile does not compile those of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@pytest.mark.ranks(2)  # compiling takes seconds
def test_compiled_ddp(agree, monkeypatch):
    """The graph is split at the buckets, so that buckets are reduced during the computation of others."""
    graphs: list[Any] = []
    aot_eager = torch._dynamo.lookup_backend(BACKEND)

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 200)
    model = DDP(Net(), **SMALL_BUCKETS)
    train(torch.compile(model, backend=counted), sgd(model.parameters()), share())
    agree.close(values(model), values(trained_alone()), **TIGHT)
    agree(len(graphs) > 1, f"{len(graphs)} graphs")


def everything(x: Tensor, group: Any) -> Tensor:
    total = funcol.all_reduce(x * 2, "sum", group)
    whole = funcol.all_gather_tensor(total + 1, 0, group)
    part = funcol.reduce_scatter_tensor(whole, "sum", 0, group)
    exchanged = funcol.all_to_all_single(part, None, None, group)
    return exchanged * 3


def test_compiled_collectives(agree):
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    compiled = torch.compile(everything, fullgraph=True, backend=BACKEND)
    for start in (0.0, 5.0):  # the second time with the compiled code
        x = torch.arange(start, start + 2 * size) + rank
        agree.equal(compiled(x, group), everything(x, group))


class Watching(TorchFunctionMode):
    """A mode of the program, as PyTorch's tests have one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_does_not_see_the_tensors_of_a_call(agree):
    """Torch 2.14 compiles such a mode and returns one attribute of a tensor for another: broadcast found it nested."""
    size, mode = dist.get_world_size(), Watching()
    one, whole = torch.ones(4), torch.empty(4 * size)
    with mode:
        mode.seen.clear()
        dist.group.WORLD.broadcast(one, 0).wait()
        dist.group.WORLD.allreduce([one]).wait()
        dist.group.WORLD._allgather_base(whole, one).wait()
        seen = list(mode.seen)
    agree(seen == [], str(seen))
    agree.equal(whole, torch.full_like(whole, size))
