"""To a user of a GPU: nn, torch.distributed, messages and servers take its tensors as those of the host.

Their behavior on the CPU is tested in other files.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi.collectives import prepared
from torchmpi.engine import AllReduceSGDEngine
from torchmpi.session import runtime

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.gpu]


@pytest.fixture
def device(world: None) -> torch.device:
    """The device of this rank. A CPU can be used too, to try the tests."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False here")
    return mpi.device()


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device)


def batch(device: torch.device, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + mpi.rank())
    return torch.randn(4, 6, generator=generator).to(device)


def train(net: nn.Module, device: torch.device, synchronize) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(batch(device, step)).square().sum().backward()
        synchronize(net)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


def by_hand(net: nn.Module) -> None:
    """The reference: gathered on the host, and averaged in rank order."""
    for parameter in net.parameters():
        everybody = mpi.allgather(parameter.grad.cpu().unsqueeze(0))
        parameter.grad.copy_(everybody.sum(0) / mpi.size())


@pytest.mark.parametrize("way", ("bucket after bucket", "during backward", "in blocks"))
def test_gradients(agree, device, way):
    expected = train(make_net(device), device, by_hand)
    net = make_net(device)
    if way == "in blocks":
        net = mpinn.BlockSequential(2, *net)
    if way == "during backward":
        mpinn.register_async_backward(net, bucket_bytes=64)
        found = train(net, device, mpinn.synchronize_gradients_async)
        mpinn.unregister_async_backward(net)
    else:
        found = train(net, device, mpinn.synchronize_gradients)
    mpinn.check_with_allreduce(net, buffers=False)
    for actual, wanted in zip(found, expected, strict=True):
        agree.close(actual, wanted, way)


def test_repeated_calls_with_an_operation_of_mpi4py(agree, device):
    """It has no hash, and plans are found by the operation."""
    from mpi4py import MPI  # after start(), which loads the library

    for _ in range(3):
        agree.equal(mpi.allreduce(torch.ones(2, device=device), op=MPI.SUM).tolist(), [mpi.size()] * 2)
        handle = mpi.allreduce_async(torch.ones(2, device=device), op=MPI.SUM)
        agree.equal(handle.wait().tolist(), [mpi.size()] * 2)


def test_gradients_that_come_on_streams_of_their_own(agree, device):
    """Autograd fills a bucket on the streams of the forward pass: the message must follow all of them."""
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    net = nn.ModuleList(nn.Linear(500, 500, bias=False) for _ in range(4)).to(device)
    mpinn.synchronize_parameters(net)
    mpinn.register_async_backward(net, bucket_bytes=1 << 30)
    x = torch.full((50, 500), 1.0 + mpi.rank(), device=device)
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    losses = []
    for index, layer in enumerate(net):
        with torch.cuda.stream(side if index % 2 else None):
            losses.append(layer(x).sum())
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    torch.stack(losses).sum().backward()
    mpinn.synchronize_gradients_async(net)
    found = [layer.weight.grad.cpu() for layer in net]
    mpinn.unregister_async_backward(net)
    mean = sum(1.0 + rank for rank in range(mpi.size())) / mpi.size()
    for gradient in found:
        agree.close(gradient, torch.full((500, 500), 50 * mean))


def test_an_optimizer_and_ranks_with_different_amounts_of_data(agree, device):
    net = make_net(device)
    optimizer = mpinn.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01), net)
    with mpinn.join(net, optimizer=optimizer.optimizer):
        for step in range(1 + mpi.rank()):
            optimizer.zero_grad()
            net(batch(device, step)).square().sum().backward()
            optimizer.step()
    mpinn.unregister_async_backward(net)
    mpinn.check_with_allreduce(net)
    agree(all(parameter.device == device for parameter in net.parameters()))


def test_an_engine(agree, device):
    batches = [(batch(torch.device("cpu"), step), torch.tensor([0, 1, 2, 0])) for step in range(3)]
    net = make_net(torch.device("cpu"))
    engine = AllReduceSGDEngine(use_gpu=device.type == "cuda", asynchronous=True, progress=False)
    engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=batches, lr=0.1, max_epochs=2)
    mpinn.check_with_allreduce(net, buffers=False)
    agree(next(net.parameters()).device == device)


def test_messages(agree, device):
    rank, size = mpi.rank(), mpi.size()
    tensor = torch.zeros(1000, device=device)
    tensor += rank  # queued, not done
    shifted = mpi.sendreceive(tensor, src=(rank - 1) % size, dst=(rank + 1) % size)
    doubled = (shifted * 2).cpu()
    handle = mpi.send_async(torch.full((3,), float(rank), device=device), (rank + 1) % size)
    received = mpi.recv_async(torch.empty(3, device=device), (rank - 1) % size).wait()
    handle.wait()
    agree.equal(doubled.tolist(), [2.0 * ((rank - 1) % size)] * 1000)
    agree.equal(received.cpu().tolist(), [float((rank - 1) % size)] * 3)


def test_a_parameter_server(agree, device):
    server = ps.init(torch.zeros(2000, device=device))
    update = torch.ones(2000, device=device)
    update *= 3  # queued, not done
    ps.send(server, update, "add").wait()
    mpi.barrier()
    values = ps.receive(server, torch.empty(2000, device=device)).wait()
    found = (values + 1).cpu()
    ps.free(server)
    agree.equal(found.tolist(), [3.0 * mpi.size() + 1] * 2000)


@pytest.fixture(scope="module")
def process_group(world: None) -> Iterator[None]:
    from torchmpi.distributed import registration

    registration.register()
    dist.init_process_group("torchmpi", store=dist.HashStore(), rank=mpi.rank(), world_size=mpi.size())
    yield
    dist.destroy_process_group()


def test_torch_distributed(agree, device, process_group):
    rank, size = mpi.rank(), mpi.size()
    tensor = torch.zeros(300_000, device=device)
    tensor += rank + 1
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    after = tensor * 2  # on the current stream, which follows
    future = dist.all_reduce(torch.ones(4, device=device), async_op=True).get_future()
    tripled = future.then(lambda done: done.value()[0] * 3).wait()
    gathered = torch.empty(2 * size, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=device))
    parts = [torch.empty(3, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((3,), float(rank), device=device), parts, 0)
    own = torch.empty(2, device=device)
    rows = [torch.full((2,), float(r), device=device) for r in range(size)]
    dist.scatter(own, rows if rank == 0 else None, 0)
    exchanged = [torch.empty(1 + r, device=device) for r in range(size)]
    dist.all_to_all(exchanged, [torch.full((1 + rank,), float(rank + r), device=device) for r in range(size)])
    dist.send(own, (rank + 1) % size) if rank % 2 == 0 and size > 1 else None
    total = sum(range(1, size + 1))
    if rank % 2 == 1:
        arrived = torch.empty(2, device=device)
        dist.recv(arrived, rank - 1)
        agree.equal(arrived.cpu().tolist(), [float(rank - 1)] * 2)
    elif size % 2 == 1 and rank == 0 and size > 1:
        dist.recv(torch.empty(2, device=device), size - 1)
    agree.equal(after.cpu().unique().tolist(), [2.0 * total])
    agree.equal(tripled.cpu().tolist(), [3.0 * size] * 4)
    agree.equal(gathered.cpu().tolist(), [float(r) for r in range(size) for _ in range(2)])
    agree.equal(own.cpu().tolist(), [float(rank)] * 2)
    agree.equal([part.cpu().tolist() for part in exchanged], [[float(rank + r)] * (1 + r) for r in range(size)])
    if parts is not None:
        agree.equal([part.cpu().tolist() for part in parts], [[float(r)] * 3 for r in range(size)])


def test_distributed_data_parallel(agree, device, process_group):
    expected = train(make_net(device), device, by_hand)
    own = make_net(device)
    net = nn.parallel.DistributedDataParallel(copy.deepcopy(own), bucket_cap_mb=0.0001)
    found = train(net, device, lambda net: None)
    for actual, wanted in zip(found, expected, strict=True):
        agree.close(actual, wanted)


def test_builtin_fp16_hook(agree, device, process_group):
    """Regression: the hook in C++ failed in the threads of autograd. What it decompresses must follow the allreduce."""
    own = make_net(device)
    net = nn.parallel.DistributedDataParallel(copy.deepcopy(own), bucket_cap_mb=0.0001)
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        net(batch(device, 0)).square().sum().backward()
        found = [parameter.grad.cpu() for parameter in net.parameters()]
    own(batch(device, 0)).square().sum().backward()
    by_hand(own)
    for actual, parameter in zip(found, own.parameters(), strict=True):
        wanted = parameter.grad.cpu()
        agree.close(actual, wanted, rtol=4e-3, atol=4e-3 * wanted.abs().max().item())


def test_distributed_data_parallel_equals_one_process(agree, device, process_group):
    """A convolutional network trained on parts of a batch, and on the whole of it."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
        return nn.Sequential(*layers).to(device)

    def trained(net: nn.Module, part: slice) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(4 * mpi.size(), 3, 16, 16, generator=generator)[part].to(device)
            labels = torch.randint(10, (4 * mpi.size(),), generator=generator)[part].to(device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()

    own, alone = make(), make()
    trained(nn.parallel.DistributedDataParallel(own), slice(4 * mpi.rank(), 4 * mpi.rank() + 4))
    trained(alone, slice(None))
    for actual, wanted in zip(own.parameters(), alone.parameters(), strict=True):
        agree.close(actual.detach().cpu(), wanted.detach().cpu(), rtol=1e-3, atol=1e-4)


def test_many_calls_leave_no_memory_allocated(agree, device):
    """Memory of the device and buffers of the host do not grow with the number of calls."""

    def use() -> int:
        for numel in (10, 100_000, 3_000_000):
            mpi.allreduce_async(torch.ones(numel, device=device)).wait()
            mpi.allgather(torch.ones(numel, device=device))
            mpi.allreduce_many_async([torch.ones(numel, device=device) for _ in range(3)]).wait()
        gc.collect()
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    use()
    before = use()
    for _ in range(10):
        after = use()
    pool = prepared._pools.get(runtime.current())
    agree.equal(after, before)
    agree(pool is None or pool.num_made <= 3, f"{pool and pool.num_made} buffers of the host")
