"""To a user of several hosts, here simulated by names: collectives over them equal references.

Only the names of the hosts are simulated; processes, messages and groups are real.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import pytest
import torch
from helpers import compressors, contract
from mpi4py import MPI
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi import errors
from torchmpi.collectives import exchange
from torchmpi.config import Config
from torchmpi.session import runtime

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.ranks(3, 4)
# The host of each rank. All placements are tried with the present ranks.
PLACEMENTS = {"block": "aabb", "cyclic": "abab", "uneven": "aaab", "back and forth": "abba", "three": "abca"}
# With these ranks; without one host, and without one rank on each.
PLACEMENTS = {name: hosts for name, hosts in PLACEMENTS.items() if 1 < len(set(hosts[:SIZE])) < SIZE}
# Nothing; fewer than ranks; short enough for the first ranks; a few chunks, the last one shorter.
NUMELS = (0, 1, 2047, 20_011)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.uint64, torch.bool)


def hosts_of(placement: str) -> list[list[int]]:
    """The ranks of each host, hosts in order of their first ranks."""
    names = placement[:SIZE]
    return [[rank for rank in range(SIZE) if names[rank] == name] for name in dict.fromkeys(names)]


def start(placement: str, **settings) -> None:
    given = dataclasses.replace(Config.from_environment(), host_name=placement[RANK], **settings)
    mpi.start(config=given)


@pytest.fixture(autouse=True, scope="module")
def nothing_else_runs() -> Iterator[None]:
    """Stop torchmpi; restore the start of the session afterwards."""
    was_running = runtime.is_running()
    mpi.stop()
    yield
    if was_running:
        mpi.start()


@pytest.fixture(params=PLACEMENTS, ids=lambda name: name.replace(" ", "-"), scope="module")
def hosts(request, nothing_else_runs) -> Iterator[list[list[int]]]:
    """torchmpi, started on these hosts, with chunks so small that there are several."""
    placement = PLACEMENTS[request.param]
    start(placement, pipeline_bytes=40_000)
    yield hosts_of(placement)
    mpi.stop()


def test_a_group_takes_what_the_last_one_of_its_ranks_has_left(agree, hosts):
    """A rank that has left free() must not clear memory that the others of its host still read."""
    used = []
    for number in range(6):
        with mpi.group(range(SIZE)) as comm:
            group = comm.intra
            used.append([id(part.comm) for part in (group, group.intra_host, group.inter_host) if part is not None])
            if number % SIZE == RANK:
                time.sleep(0.002)
            for numel in NUMELS:
                total = mpi.allreduce(torch.full((numel,), float(RANK + number)), comm=comm)
                agree.equal(total, torch.full((numel,), float(sum(range(SIZE)) + number * SIZE)))
    agree.equal(used, [used[0]] * len(used), "other communicators")
    for _ in range(20):
        mpi.group(range(SIZE)).free()
    with mpi.group(range(SIZE)) as comm:
        agree.raises(errors.MismatchError, lambda: mpi.allreduce(torch.ones(3 + RANK), comm=comm))
        failed = comm.intra.comm
    with mpi.group(range(SIZE)) as comm:
        agree(comm.intra.comm is not failed, "MPI may have messages of the call that has failed")
        agree.equal(mpi.allreduce(1, comm=comm), SIZE)


def test_groups_within_and_across_hosts(agree, hosts):
    world = runtime.current().world
    mine = next(ranks for ranks in hosts if RANK in ranks)
    is_grid = len({len(ranks) for ranks in hosts}) == 1
    place = mine.index(RANK)
    across = tuple(ranks[place] for ranks in hosts) if is_grid or place == 0 else None
    agree.equal(world.is_grid, is_grid)
    agree.equal(world.intra_host.world_ranks if world.intra_host else (RANK,), tuple(mine))
    agree.equal(world.inter_host.world_ranks if world.inter_host else None, across)
    for part in filter(None, (world.intra_host, world.inter_host)):
        agree.equal((part.intra_host, part.inter_host), (None, None), "no groups of groups")
    level = mpi.push_communicator(0)
    twin = runtime.current().communicators.find(level).intra
    if across is not None:
        agree(twin.inter_host is not world.inter_host, "a group has parts of its own")
    agree.equal(mpi.allreduce(1, comm=level), SIZE)


# The order of additions depends on the placement, the arithmetic on the dtype: all dtypes on one placement.
CASES = [(name, dtype) for name in PLACEMENTS for dtype in (DTYPES if name == "block" else DTYPES[1:3])]


@pytest.mark.parametrize(("hosts", "dtype"), CASES, ids=str, indirect=["hosts"], scope="module")
def test_reductions_add_host_by_host(agree, hosts, dtype):
    cases = [(numel, [contract.values((numel,), dtype, r) for r in range(SIZE)]) for numel in NUMELS]
    assert len(contract.OPS_OF[dtype]) % 2  # each operation with every other length
    for number, ((numel, inputs), op) in enumerate([*itertools.product(cases, contract.OPS_OF[dtype])][::2]):
        expected, root = contract.reduced_by_host(inputs, op, hosts), (0, SIZE - 1)[number % 2]
        result = mpi.allreduce(inputs[RANK].clone(), op=op, backend="hierarchical")
        agree.bits(result, expected, f"allreduce {op} {numel}")
        result = mpi.reduce(inputs[RANK].clone(), root, op=op, backend="hierarchical")
        agree.bits(result, expected if root == RANK else inputs[RANK], f"reduce {op} {numel} root={root}")
        source = inputs[RANK].clone()
        result = mpi.reduce_scatter(source, op=op, backend="hierarchical")
        mine = contract.rows(expected, RANK, SIZE)
        agree.bits(result, mine, f"reduce_scatter {op} {numel}")
        agree.bits(source, inputs[RANK], f"reduce_scatter {op} {numel}: the input was changed")


def test_movements_preserve_every_bit(agree, hosts):
    shapes = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (9001, 3))
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn), shapes):
        inputs = [contract.values(shape, dtype, r) for r in range(SIZE)]
        for root in range(SIZE):
            result = mpi.broadcast(inputs[RANK].clone(), root, backend="hierarchical")
            agree.bits(result, inputs[root], f"broadcast {dtype} {shape} root={root}")
        everything = torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in inputs])
        result = mpi.allgather(inputs[RANK], backend="hierarchical")
        agree.bits(result, everything, f"allgather {dtype} {shape}")
    inputs = [contract.values((100 * r, 2), torch.float32, r) for r in range(SIZE)]
    agree.equal(mpi.allgather(inputs[RANK], backend="hierarchical"), torch.cat(inputs), "uneven")
    mpi.barrier()


def test_rows_of_more_than_one_dimension_and_out(agree, hosts):
    for shape in ((7, 3), (SIZE, 2), (SIZE + 1, 5), (1000, 17), (3, 0)):
        inputs = [contract.values(shape, torch.float32, r) for r in range(SIZE)]
        expected = contract.reduced_by_host(inputs, "avg", hosts)
        part = mpi.reduce_scatter(contract.strided(inputs[RANK]), op="avg", backend="hierarchical")
        out = torch.zeros(shape)
        mpi.allreduce(contract.strided(inputs[RANK]), out, op="avg", backend="hierarchical")
        agree.bits(part, contract.rows(expected, RANK, SIZE), f"{shape}")
        agree.bits(out, expected, f"{shape}")


@pytest.mark.parametrize("numel", (3, 70_001))
def test_exchanges_in_place(agree, hosts, numel):
    """What is sent has the memory of the output, or that of another rank's part."""
    group, part = runtime.current().world, torch.arange(numel)
    parts = [part + 1000 * RANK + other for other in range(SIZE)]
    exchange.exchange(group, parts, parts)
    agree.equal(torch.stack(parts), torch.stack([part + 1000 * other + RANK for other in range(SIZE)]))
    lengths = [numel + other % 2 for other in range(SIZE)]
    whole = torch.full((sum(lengths),), RANK)
    exchange.exchange(group, [whole[: lengths[RANK]]] * SIZE, whole.split(lengths))
    agree.equal(whole, torch.arange(SIZE).repeat_interleave(torch.tensor(lengths)))


def test_bits_do_not_depend_on_size_or_position(agree, hosts):
    """Neither on slices or first ranks, nor on chunks, nor on the collective."""
    for dtype in contract.FLOATS:
        inputs = contract.values((40_000,), dtype, RANK, seed=3)
        whole = mpi.allreduce(inputs.clone(), backend="hierarchical")
        cut = inputs.split([1, 2, 1000, 7, 30_000, 8990])
        parts = torch.cat([mpi.allreduce(part.clone(), backend="hierarchical") for part in cut])
        scattered = mpi.allgather(mpi.reduce_scatter(inputs.clone(), backend="hierarchical"))
        at_root = mpi.broadcast(mpi.reduce(inputs.clone(), SIZE - 1, backend="hierarchical"), SIZE - 1)
        agree.bits(whole, parts, f"{dtype}: parts differ")
        agree.bits(whole, scattered, f"{dtype}: reduce_scatter differs")
        agree.bits(whole, at_root, f"{dtype}: reduce differs")


def test_many_calls_in_the_background_and_several_communicators(agree, hosts):
    level = mpi.push_communicator("again")
    mpi.set_communicator(0)
    tensors = [torch.full((30_000,), float(RANK + k)) for k in range(6)]
    handles = [
        mpi.allreduce_async(tensor, comm=(0, level)[k % 2], backend="hierarchical") for k, tensor in enumerate(tensors)
    ]
    for k, handle in enumerate(handles):
        expected = sum(range(SIZE)) + k * SIZE
        agree(bool((handle.wait() == expected).all()), f"call {k}: {tensors[k]} instead of {expected}")


def test_memory_of_inference_mode_and_of_parameters(agree, hosts):
    with torch.inference_mode():
        mpi.allreduce(torch.ones(9000), op="avg", backend="hierarchical")
        mpi.allreduce(torch.ones(9000, dtype=torch.bfloat16), op="avg", backend="hierarchical")
    leaf = torch.nn.Parameter(torch.ones(9000))
    mpi.allreduce(leaf, op="avg", backend="hierarchical")
    half = torch.nn.Parameter(torch.ones(9000, dtype=torch.bfloat16))
    mpi.allreduce(half, op="avg", backend="hierarchical")
    agree.equal(leaf.detach(), torch.ones(9000))
    agree.equal(half.detach(), torch.ones(9000, dtype=torch.bfloat16))


def test_starting_and_stopping_leaves_no_groups(agree, hosts):
    """The number of communicators of MPI is limited."""
    for _ in range(3):
        copy = runtime.current().world.duplicate("copy")
        copy.free()
    names = [group.name for group in runtime.current().context.groups]
    agree.equal(len(names), len(set(names)), "groups are left over")


@pytest.mark.any_mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("make_compressor", [mpinn.EightBit, lambda: mpinn.TopK(0.5), lambda: mpinn.PowerSGD(3)])
def test_compressors_are_used_between_hosts_only(agree, hosts, make_compressor):
    """The ranks of a host have different gradients, whose sum is compressed; the first rank of each host sends it."""
    net, compressor = nn.Linear(20, 15), make_compressor()
    lossy, exact, largest = torch.zeros(15, 20), torch.zeros(15, 20), 0.0
    for step in range(12):
        for parameter in net.parameters():
            parameter.grad = contract.values(tuple(parameter.shape), torch.float32, RANK, step) + 1
        largest = max(largest, *(parameter.grad.abs().max().item() for parameter in net.parameters()))
        exact += mpi.allreduce(net.weight.grad.clone(), op="avg")
        mpinn.synchronize_gradients(net, compression=compressor)
        mpinn.check_with_allreduce([parameter.grad for parameter in net.parameters()])
        lossy += net.weight.grad
    kept, limit = compressors.kept(compressor, net.weight), 0.0
    if isinstance(compressor, mpinn.EightBit):
        kept, limit = torch.zeros_like(kept), compressors.most_kept_by_8_bits(max(mpi.allgather_object(largest)), SIZE)
    # A step adds and rounds a few numbers in float32, of which none is above twice the largest one.
    exact_to = 12 * 8 * 2 * max(mpi.allgather_object(largest)) * torch.finfo(torch.float32).eps
    lacking = (exact - lossy - kept / SIZE).abs().max().item()
    agree(lacking <= limit / SIZE + exact_to, f"{lacking} above {limit / SIZE} and {exact_to}")
    agree.equal(compressor.payload_bytes > 0, RANK in {ranks[0] for ranks in hosts})
