"""To a user of torch.profiler: one event for each call, native or of torch.distributed, with sizes and group."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import torch_rig
from helpers.torch_rig import Setting

import torchmpi as mpi
from torchmpi.collectives import movements, point_to_point, reductions, tensor_lists
from torchmpi.timeline import events

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2), pytest.mark.usefixtures("world")]


def profiled(action, config=None):
    """The events of torch.profiler during an action, by name."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, experimental_config=config
    ) as profile:
        action()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        found = json.loads(Path(file.name).read_text())["traceEvents"]
    return [each for each in found if each.get("name", "").startswith("torchmpi")]


def test_calls_are_events_of_the_profiler(agree):
    """Synchronous calls have the fields of torch's own backends; the fast path is off only while the profiler runs."""
    tensor = torch.ones(6)
    mpi.allreduce(tensor.fill_(1))

    def calls():
        mpi.allreduce(tensor.fill_(1))
        mpi.allgather(torch.ones(2))
        mpi.allreduce_async(tensor).wait()
        mpi.barrier()

    found = profiled(calls)
    names = [each["name"] for each in sorted(found, key=lambda each: each["ts"])]
    names = [name for name in names if name != "torchmpi queued:barrier"]  # if the worker has not ended yet
    expected = (":all_reduce", ":all_gather", ":all_reduce", " queued:all_reduce", ":barrier")
    agree.equal(names, [f"torchmpi{name}" for name in expected])
    fields = {each["name"]: each["args"] for each in found if "Collective name" in each["args"]}
    reduction, gathering = fields["torchmpi:all_reduce"], fields["torchmpi:all_gather"]
    expected = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 6, "Out msg nelems": 6}
    agree.equal({name: reduction[name] for name in expected}, expected)
    agree.equal((reduction["Group size"], gathering["Out msg nelems"]), (mpi.size(), 2 * mpi.size()))
    agree(events.recorder is None)
    agree.equal(len(profiled(lambda: None)), 0)


@pytest.mark.parametrize("all_threads", [False, True])
def test_queued_calls_and_messages_have_the_fields_of_synchronous_ones(agree, all_threads):
    tensor, size = torch.ones(6), mpi.size()
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True) if all_threads else None
    ring = (mpi.rank() + 1) % size, (mpi.rank() - 1) % size

    def calls(is_queued):
        mpi.barrier()
        if is_queued:
            mpi.broadcast_async(tensor, size - 1).wait()
            mpi.allreduce_async(tensor, op="max").wait()
            if size > 1:
                handles = [mpi.send_async(tensor, ring[0]), mpi.recv_async(torch.empty(6), ring[1])]
                [handle.wait() for handle in handles]
        else:
            mpi.broadcast(tensor, size - 1)
            mpi.allreduce(tensor, op="max")
            if size > 1:
                first, second = (0, 1) if mpi.rank() % 2 == 0 else (1, 0)
                actions = [lambda: mpi.send(tensor, ring[0]), lambda: mpi.recv(torch.empty(6), ring[1])]
                if size % 2:  # no order of blocking calls serves all ranks of an odd ring
                    handle = mpi.recv_async(torch.empty(6), ring[1])
                    actions[0]()
                    handle.wait()
                else:
                    actions[first]()
                    actions[second]()

    def fields(is_queued):
        found = {}
        for each in profiled(lambda: calls(is_queued), config):
            known = {key: value for key, value in each["args"].items() if key in NAMES}
            found.setdefault(each["name"], []).append((known, each["args"].get("finished", True)))
        return found

    queued, direct = fields(True), fields(False)
    messages = [] if size == 1 else ["torchmpi:send"] if size % 2 else ["torchmpi:send", "torchmpi:recv"]
    names = ["torchmpi:broadcast", "torchmpi:all_reduce", *messages]  # in an odd ring no recv is synchronous
    for name in names:
        agree.equal(queued[name.replace(":", " queued:")], direct[name], name)
        agree.equal(queued[name], [({}, True)], name)
        known, _ = direct[name][0]
        if all_threads and name not in messages:  # torch 2.13 keeps no fields then; a message begins at once
            agree.equal(queued[name.replace(":", " task:")], direct[name], name)
        elif not all_threads:
            agree.equal(known["Group size"], size)


NAMES = ("Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size", "Process Group Name",
         "Process Group Ranks", "Reduction", "Root Rank")  # fmt: skip


# --- every call -----------------------------------------------------------------------------------------------------

Sizes = tuple[str, int | None, int | None]
"""Name of the event, elements passed and received; None where they are not known before the call."""


def shown(action: Callable[[], Any]) -> list[dict[str, Any]]:
    """The fields of the events of all calls, in order; those of asynchronous ones are in an event of their own."""
    found = sorted(profiled(action), key=lambda each: each["ts"])
    fields = []
    queued = [each for each in found if each["name"].startswith("torchmpi queued:")]
    for event in (each for each in found if each["name"].startswith("torchmpi:")):
        name = event["name"].removeprefix("torchmpi:")
        if "Collective name" not in event["args"]:
            own = next(each for each in queued if each["name"] == f"torchmpi queued:{name}")
            queued.remove(own)
            assert event["args"].get("finished", True), event
            event = own
        fields.append({"event": name, **{key: value for key, value in event["args"].items() if key in NAMES}})
    assert not queued, queued
    return fields


def sizes(fields: list[dict[str, Any]]) -> list[Sizes]:
    return [(each["event"], each.get("In msg nelems"), each.get("Out msg nelems")) for each in fields]


class Call:
    """A call of the package with its events."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        self.names = [function.__name__]
        self.run = lambda: getattr(function(*arguments, **keywords), "wait", lambda: None)()

    def has(self, event: str, sent: int | None, received: int | None) -> tuple[Call, list[Sizes]]:
        return self, [(event, sent, received)]


def native_calls(rank: int, size: int) -> dict[str, tuple[Call, list[Sizes]]]:
    flat, rows, own, last = torch.ones(6), torch.ones(2 * size, 3), torch.ones(2, 3), size - 1
    uneven, ragged = torch.ones(size + 1, 3), torch.ones(1 + rank, 3)
    part = 3 * (len(torch.arange(size + 1).tensor_split(size)[rank]))
    given = rows if rank == last else None
    splits = [2 * size] + [0] * (size - 1)
    found = {
        "barrier": Call(mpi.barrier).has("barrier", 0, 0),
        "allreduce into": Call(mpi.allreduce, flat, torch.empty(6)).has("all_reduce", 6, 6),
        "reduce into": Call(mpi.reduce, flat, last, torch.empty(6)).has("reduce", 6, 6),
        "allreduce of a list": Call(mpi.allreduce_many, [flat, own], backend="mpi").has("allreduce_many", 12, 12),
    }
    for end in ("", "_async"):

        def call(name: str, *arguments: Any, end: str = end, **keywords: Any) -> Call:
            return Call(getattr(mpi, name + end), *arguments, **keywords)

        found |= {
            f"allreduce{end}": call("allreduce", flat, op="max").has("all_reduce", 6, 6),
            f"allreduce{end} of a number": call("allreduce", 1.5).has("all_reduce", 1, 1),
            f"allreduce{end} of columns": call("allreduce", rows.t()).has("all_reduce", 6 * size, 6 * size),
            f"allreduce{end} by MPI": call("allreduce", flat, backend="mpi").has("all_reduce", 6, 6),
            f"reduce{end}": call("reduce", flat, last).has("reduce", 6, 6),
            f"broadcast{end}": call("broadcast", flat, last).has("broadcast", 6, 6),
            f"allgather{end}": call("allgather", own).has("all_gather", 6, 6 * size),
            f"allgather{end} into": call("allgather", own, out=torch.empty_like(rows)).has("all_gather", 6, 6 * size),
            f"allgather{end} of numbers": call("allgather", rank).has("all_gather", 1, size),
            f"allgather{end} of any length": call("allgather", ragged).has(
                "all_gather", 3 * (1 + rank), 3 * (1 + rank) * size),
            f"gather{end}": call("gather", own, last).has("gather", 6, 6 * size),
            f"scatter{end} into": call("scatter", given, last, torch.empty_like(own)).has("scatter", 6 * size, 6),
            f"scatter{end}": call("scatter", given, last).has(
                "scatter", *((6 * size, 6) if rank == last else (None, None))),
            f"reduce_scatter{end}": call("reduce_scatter", uneven).has("reduce_scatter", 3 * (size + 1), part),
            f"alltoall{end}": call("alltoall", rows).has("all_to_all", 6 * size, 6 * size),
            f"alltoall{end} of splits": call("alltoall", rows, splits=splits).has("all_to_all", 6 * size, None),
            f"allreduce_many{end}": call("allreduce_many", [flat, own]).has("allreduce_many", 12, 12),
            f"allreduce_many{end} of one": call("allreduce_many", [own]).has("all_reduce", 6, 6),
            f"allreduce_many{end} of columns": call("allreduce_many", [rows.t(), own]).has(
                "allreduce_many", 6 * size + 6, 6 * size + 6),
            f"sendreceive{end}": call("sendreceive", flat, (rank - 1) % size, (rank + 1) % size).has(
                "sendreceive", 6, 6),
        }  # fmt: skip
    if rank < 2 <= size:
        name = "recv" if rank else "send"
        for end in ("", "_async"):
            found[f"message{end}"] = Call(getattr(mpi, name + end), flat, 1 - rank).has(name, 6, 6)
            name = "send" if rank else "recv"
    return found


CASES = list(native_calls(0, 2))


@pytest.mark.parametrize("case", CASES)
def test_each_native_call_is_one_event(agree, case):
    rank, size = mpi.rank(), mpi.size()
    calls = native_calls(rank, size)
    if case not in calls:
        return
    call, expected = calls[case]
    call.run()  # plans are made
    fields = shown(call.run)
    agree.equal(sizes(fields), expected)
    agree.equal([each["Process Group Ranks"] for each in fields], [str(list(range(size)))])
    agree.equal([each["Group size"] for each in fields], [size])
    agree.equal([each["Process Group Name"] for each in fields], ["world"])
    if expected[0][0] != "barrier" and expected[0][1] is not None and "number" not in case:
        agree.equal([each["dtype"] for each in fields], ["Float"])


def test_all_functions_are_tested():
    tested = {name for rank in range(2) for call, _ in native_calls(rank, 2).values() for name in call.names}
    modules = movements, point_to_point, reductions, tensor_lists
    assert tested == {name for module in modules for name in module.__all__}


@pytest.mark.parametrize("action", [
    lambda: mpi.broadcast_object({"a": 1}, mpi.size() - 1), lambda: mpi.allgather_object([mpi.rank()]),
])  # fmt: skip
def test_each_call_of_an_object_is_an_event(agree, action):
    agree.equal(counted_calls(action), len(shown(action)))


def counted_calls(action: Callable[[], Any]) -> int:
    def number() -> int:
        return sum(each["calls"] for calls in mpi.metrics()["calls"].values() for each in calls.values())

    before = number()
    action()
    return number() - before


def expected_of_torch(name: str, rank: int, size: int) -> list[Sizes]:
    """The events of a call of torch_rig with three elements and root 0."""

    def lengths(ranks: range) -> list[int]:
        return [3 + each % 3 for each in ranks]

    ranks, mine = range(size), 3 + rank % 3
    found: dict[str, list[Sizes]] = {
        "all_reduce": [("all_reduce", 3, 3)],
        "all_reduce_coalesced": [("all_reduce", 12, 12)],
        "reduce": [("reduce", 3, 3)],
        "reduce_scatter": [("reduce_scatter", 3 * size, 3)],
        "reduce_scatter_uneven": [("reduce_scatter", sum(lengths(ranks)), mine)],
        "reduce_scatter_tensor": [("reduce_scatter", 3 * size, 3)],
        "broadcast": [("broadcast", 3, 3)],
        "all_gather_uneven": [("all_gather", mine, sum(lengths(ranks)))],
        "all_gather_coalesced": [("all_gather", 3, 3 * size), ("all_gather", 4, 4 * size)],
        **{key: [("gather", 3, 3 * size)] for key in ("gather", "gather_single")},
        "scatter": [("scatter", 3 * size, 3)],
        "all_to_all": [("all_to_all", *(3 * sum((each[0] + 2 * each[1]) % 4 for each in pairs) for pairs in (
            [(rank, other) for other in ranks], [(other, rank) for other in ranks])))],
        **{key: [("all_to_all", 3 * size, 3 * size)] for key in ("all_to_all_single", "all_to_all_even")},
        "barrier": [("barrier", 0, 0)],
    }  # fmt: skip
    found["all_to_all_single_uneven"] = found["all_to_all"]
    return found.get(name, [("all_gather", 3, 3 * size)])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", torch_rig.CALLS)
def test_each_call_of_torch_distributed_is_one_event(agree, default_group, name, asynchronous):
    def run() -> None:
        work, _ = torch_rig.CALLS[name](Setting(dist.group.WORLD, asynchronous=asynchronous))
        if work is not None:
            work.wait()

    run()
    fields = shown(run)
    agree.equal(sizes(fields), expected_of_torch(name, mpi.rank(), mpi.size()))
    agree.equal({each["Process Group Ranks"] for each in fields}, {str(list(range(mpi.size())))})
    agree.equal({(each.get("dtype"), each["Process Group Name"]) for each in fields},
                {(None if name == "barrier" else "Float", "process group")})  # fmt: skip
    if "reduce" in name:
        agree.equal({each["Reduction"] for each in fields}, {"sum"})
    if name in ("reduce", "broadcast", "gather", "scatter"):
        agree.equal({each["Root Rank"] for each in fields}, {0})


def torch_objects() -> dict[str, Callable[[], Any]]:
    size = mpi.size()
    return {
        "all_gather_object": lambda: dist.all_gather_object([None] * size, "a"),
        "broadcast_object_list": lambda: dist.broadcast_object_list(["a"], 0),
        "gather_object": lambda: dist.gather_object("a", [None] * size if mpi.rank() == 0 else None, 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], ["a"] * size, 0),
    }


@pytest.mark.parametrize("name", ["all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"])
def test_each_call_of_torch_distributed_for_objects_is_an_event(agree, default_group, name):
    action = torch_objects()[name]
    agree.equal(counted_calls(action), len(shown(action)))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", ["send", "isend", "recv from any rank", "batch_isend_irecv"])
def test_each_message_of_torch_distributed_is_one_event(agree, default_group, name):
    rank, size, tensor = mpi.rank(), mpi.size(), torch.ones(6)
    right, left = (rank + 1) % size, (rank - 1) % size

    def run() -> None:
        if name == "send":
            work = dist.irecv(torch.empty(6), left)
            dist.send(tensor, right)
        elif name == "isend":
            work = dist.isend(tensor, right)
            dist.recv(torch.empty(6), left)
        elif name == "recv from any rank":
            work = dist.isend(tensor, right)
            dist.recv(torch.empty(6))
        else:
            works = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, torch.empty(6), left)]
            *others, work = dist.batch_isend_irecv(works)
            [other.wait() for other in others]
        work.wait()

    fields = shown(run)
    agree.equal(sorted(sizes(fields)), [("recv", 6, 6), ("send", 6, 6)])
    agree.equal({(each["dtype"], each["Group size"]) for each in fields}, {("Float", size)})


def test_a_monitored_barrier_is_an_event(agree, default_group):
    agree.equal(sizes(shown(dist.monitored_barrier)), [("monitored_barrier", 0, 0)])


def test_events_have_the_ranks_of_their_group(agree, default_group):
    ranks = sorted({0, mpi.size() - 1})
    comm, group = mpi.group(ranks), dist.new_group(ranks)
    found = []
    if mpi.rank() in ranks:
        for action in (
            lambda: mpi.allreduce(torch.ones(3), comm=comm), lambda: mpi.allreduce_async(1, comm=comm).wait(),
            lambda: dist.all_gather([torch.empty(3) for _ in ranks], torch.ones(3), group=group),
            lambda: dist.reduce(torch.ones(3), ranks[-1], group=group, async_op=True).wait(),
        ):  # fmt: skip
            found += shown(action)
    comm.free()
    expected = [(str(ranks), len(ranks))] * 4 if mpi.rank() in ranks else []
    agree.equal([(each["Process Group Ranks"], each["Group size"]) for each in found], expected)


@pytest.mark.parametrize("case", ["allreduce", "into", "sendreceive", "torch"])
def test_synchronous_calls_behind_others_are_events_too(agree, default_group, case):
    """Regression: they raised a TypeError, or had the name of the communicator."""
    rank, size, tensor = mpi.rank(), mpi.size(), torch.ones(6)
    right, left = (rank + 1) % size, (rank - 1) % size
    group = dist.group.WORLD._group if case == "torch" else mpi.communicator().intra
    queue = group.peer_queue("send", right) if case == "sendreceive" else group.call_queue
    actions = {
        "allreduce": lambda: mpi.allreduce(tensor),
        "into": lambda: mpi.allreduce(tensor, torch.empty(6)),
        "sendreceive": lambda: mpi.sendreceive(tensor, left, right),
        "torch": lambda: dist.all_gather_into_tensor(torch.empty(6 * size), tensor),
    }
    actions[case]()

    def behind() -> None:
        queue.run_lock.acquire()
        before = queue.submit(lambda: None, "drain")
        threading.Timer(0.05, queue.run_lock.release).start()
        actions[case]()
        before.wait()

    event = {"sendreceive": "sendreceive", "torch": "all_gather"}.get(case, "all_reduce")
    agree.equal(sizes(shown(behind)), [(event, 6, 6 * size if case == "torch" else 6)])
