"""Exchanges of short messages by the fast path: equal results to those through Python, errors, order, watchdog."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from helpers.neighbors import neighbors

import torchmpi as mpi
from torchmpi import errors
from torchmpi.backends.ring_transport import RingTransport
from torchmpi.collectives.message_handle import transport_of
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

pytestmark = pytest.mark.usefixtures("world")

SHAPES = ((), (1,), (5,), (3, 4), (0, 3), (2, 1, 7), (1024,))


@pytest.fixture(autouse=True)
def _need_fast_path() -> None:
    mpi.sendreceive(torch.zeros(1), *neighbors())
    if fast_path.sendreceive is fast_path._not_built:
        pytest.skip("this Python or this PyTorch has no fast path")
    if runtime.current().context.sleeps_before_mpi and not in_rings():
        pytest.skip("ranks sleep before they call MPI")


def exchanged(tensor: torch.Tensor, src: int, dst: int) -> bool:
    """Exchange by the fast path; return whether the fast path made the call."""
    path = fast_path.sendreceive if in_rings() else fast_path.sendreceive_by_mpi
    return path(tensor, None, fast_path.joint_key(src, dst), None, None) is tensor


def in_rings() -> bool:
    """Return whether messages go through shared memory, where they may be long."""
    return isinstance(transport_of(mpi.communicator().intra), RingTransport)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exchanges_equal_those_through_python(agree, shape, dtype):
    left, right = neighbors()
    numel = torch.Size(shape).numel()

    def values(rank: int) -> torch.Tensor:
        return (torch.arange(numel) % 3 + rank).to(dtype).reshape(shape)

    fits = in_rings() or numel * dtype.itemsize <= 4096
    plain = mpi.sendreceive(values(mpi.rank()), left, right)
    quick = values(mpi.rank())
    version = quick._version
    went = exchanged(quick, left, right)
    if not went:
        mpi.sendreceive(quick, left, right)
    agree.equal(went, fits, "by the fast path")
    agree.bits(quick, plain, "fast path")
    agree.bits(plain, values(left), "Python")
    agree(quick._version > version, "autograd does not notice the write")


def test_both_paths_meet_in_one_order(agree):
    left, right = neighbors()
    rank = mpi.rank()
    sends = [mpi.send_async(torch.full((length,), float(rank + length)), right) for length in (3, 5000)]
    receives = [mpi.recv_async(torch.empty(length), left) for length in (3, 5000)]
    last = mpi.sendreceive(torch.full((4,), float(rank)), left, right)  # queued behind the messages before it
    received = [handle.wait() for handle in receives]
    for handle in sends:
        handle.wait()
    odd = torch.full((4,), float(rank))  # ranks of the two paths exchange messages
    if rank % 2:
        mpi.sendreceive(odd, left, right)
    else:
        mpi.sendreceive_async(odd, left, right).wait()
    agree.equal(last, torch.full((4,), float(left)))
    for each in received:
        agree.equal(each, torch.full((each.numel(),), float(left + each.numel())))
    agree.equal(odd, torch.full((4,), float(left)))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("length", [5, 5000])
def test_a_message_of_another_shape_is_dropped(agree, length):
    left, right = neighbors()
    for _ in range(3):
        tensor = torch.ones(length if mpi.rank() == 0 else 4)
        if mpi.rank() in (0, 1):
            agree.raises(
                errors.MismatchError, lambda tensor=tensor: mpi.sendreceive(tensor, left, right), "sent float32"
            )
        else:
            mpi.sendreceive(tensor, left, right)
        agree.equal(mpi.sendreceive(torch.full((4,), float(mpi.rank())), left, right), torch.full((4,), float(left)))


@pytest.mark.min_ranks(2)
def test_a_waiting_exchange_is_described(agree):
    if mpi.size() < 2 or not runtime.current().threads_allowed:
        return
    left, right = neighbors()
    descriptions: list[object] = []
    if mpi.rank() == 0:
        queue = mpi.communicator().intra.peer_queue("receive", left)
        waiting = threading.Thread(target=exchanged, args=(torch.zeros(2, 3), left, right))
        waiting.start()
        limit = time.monotonic() + 20
        while queue.doing is None and time.monotonic() < limit:
            time.sleep(0.001)
        descriptions = [queue.doing, queue.doing]
    mpi.barrier()
    if mpi.rank() == 0:
        waiting.join()
        agree.equal(str(descriptions[0]), f"sendreceive(float32 [2, 3]) from rank {left}")
        agree(descriptions[0] is descriptions[1], "another object for the same call")
        agree(queue.doing is None, "described after its end")
    else:
        mpi.sendreceive(torch.zeros(2, 3), left, right)


def test_exchanges_are_counted(agree):
    left, right = neighbors()
    comm = mpi.group(range(mpi.size()), name="exchanges")
    for length in (3, 3, 5, 7):  # the first one through Python
        mpi.sendreceive(torch.ones(length), left, right, comm=comm)
    found = mpi.metrics()["messages"]["exchanges"]["sendreceive"]
    comm.free()
    kept = mpi.metrics()["messages"]["exchanges"]["sendreceive"]
    agree.equal((found["calls"], found["bytes"]), (4, 72))
    agree(0 <= found["waited"] <= found["seconds"], f"{found}")
    agree.equal(round(found["waited"] + found["moved"], 9), round(found["seconds"], 9))
    agree.equal(kept["calls"], 4)


def test_calls_that_the_fast_path_leaves_to_python(agree):
    left, right = neighbors()
    tensor = torch.ones(4, 4)
    agree(exchanged(tensor, left, right), "not by the fast path")
    for other in (
        tensor.t(),
        *(() if in_rings() else (torch.ones(5000),)),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64),
    ):
        agree(not exchanged(other, left, right), f"{type(other)} of shape {other.shape} by the fast path")
    agree.raises(errors.ArgumentError, lambda: mpi.sendreceive(tensor, mpi.size(), right), "is not a rank")
    agree.raises(errors.ArgumentError, lambda: mpi.sendreceive(tensor, left, [right]), "is not a rank")
    agree.equal(mpi.sendreceive(mpi.rank(), left, right), left)
