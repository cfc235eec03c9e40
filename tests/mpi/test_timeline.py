"""To a user of timelines: calls, messages, buckets and ranges leave what they were in the trace files."""

from __future__ import annotations

import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.collective_specs import CODES
from torchmpi.communicators.call_queue import CallQueue
from torchmpi.communicators.handle import Handle
from torchmpi.communicators.plan import Plan
from torchmpi.errors import TorchMPIError
from torchmpi.shared_memory import fast_path
from torchmpi.tensors.dtypes import OPS
from torchmpi.timeline import events
from torchmpi.timeline.aligned_calls import AlignedCalls, earliest_result
from torchmpi.timeline.merging import merged_events
from torchmpi.timeline.message_waits import MessageWaits
from torchmpi.timeline.step_times import call_sites
from torchmpi.timeline.trace_reader import read_folder

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks share."""
    return mpi.broadcast_object(str(tmp_path))


def traces_of(folder):
    mpi.barrier()
    return read_folder(Path(folder))


def test_every_call_is_a_slice_on_every_rank(agree, folder):
    tensor = torch.ones(3)
    with mpi.timeline.start(folder) as recording:
        for _ in range(50):
            mpi.allreduce(tensor.fill_(1))
            mpi.broadcast(tensor, 0)
        handles = [mpi.allreduce_async(torch.ones(1000)) for _ in range(10)]
        for handle in handles:
            handle.wait()
        with mpi.timeline.range("validation"):
            mpi.allreduce(1.5)
    traces = traces_of(folder)
    own = traces[mpi.rank()]
    agree(own.is_complete and own.num_lost == 0)
    agree.equal(str(recording.path), f"{folder}/rank{mpi.rank()}.json.gz")
    calls = [each for each in own.calls if each.details["communicator"] == "world"]
    agree.equal([each.seq for each in calls], list(range(calls[0].seq, calls[0].seq + 111)))
    agree.equal([each.collective for each in calls[:2]], ["allreduce", "broadcast"])
    first = calls[0].details
    agree.equal((first["op"], first["dtype"], first["bytes"]), ("sum", "float32", 12))
    agree(first["line"].startswith(__file__), first["line"])
    agree.equal(sum(each.is_queued for each in calls), 10)
    agree(all(each.queued <= each.begin <= each.end for each in calls))
    agree.equal([each.name for each in own.intervals("range")], ["validation"])
    aligned = [each for each in AlignedCalls(traces) if each.calls[min(each.calls)].details["communicator"] == "world"]
    agree(all(each.is_whole for each in aligned))
    earliest = earliest_result(AlignedCalls(traces))
    agree(earliest >= -2 * max(trace.error_seconds for trace in traces), str(earliest))


@pytest.mark.min_ranks(2)
def test_the_algorithm_is_named(agree, folder):
    is_pair, expected = mpi.size() == 2, []
    whole, swap, parts = "whole tensors to all", "swap of whole tensors", "exchange of parts"
    shared = mpi.empty_shared((100_000,)).fill_(1)
    mpi.allreduce(torch.ones(3), backend="p2p")
    with mpi.timeline.start(folder):
        mpi.allgather(torch.ones(3), backend="mpi")  # not by the algorithm of the call before
        expected.append(("allgather", "mpi", "library"))
        for _ in range(3):
            for call, tensor, backend, name in (
                (mpi.allreduce, torch.ones(3), "shm", "ring entries"),
                (mpi.allreduce, torch.ones(1000), "shm", "whole slots"),
                (mpi.allreduce, torch.ones(100_000), "shm", "slots in chunks"),
                (mpi.allreduce, shared, "shm", "shared tensors"),
                (mpi.allreduce, torch.ones(3), "mpi", "library" if is_pair else whole),
                (mpi.allreduce, torch.ones(100_000), "mpi", "library" if is_pair else parts),
                (mpi.allreduce, torch.ones(3), "p2p", swap if is_pair else whole),
                (mpi.allreduce, torch.ones(100_000), "p2p", swap if is_pair else parts),
                (mpi.allgather, torch.ones(3), "shm", "ring entries"),
                (mpi.allgather, torch.ones(1000), "shm", "whole slots"),
                (mpi.allgather, torch.ones(3), "mpi", "library"),
                (mpi.allgather, torch.ones(3), "p2p", "doubling"),
                (mpi.allgather, torch.ones(100_000), "p2p", "direct messages"),
                (mpi.allgather, torch.ones(3), "gloo", "direct messages"),
            ):
                call(tensor, backend=backend)
                expected.append((call.__name__, backend, name))
            for numel, backend, name in (
                (3, "shm", "ring entries"),
                (1000, "shm", "whole slots"),
                (100_000, "shm", "slots in chunks"),
                (3, "p2p", "tree"),
                (100_000, "p2p", "tree" if is_pair else "chain"),
                (3, "gloo", "library"),
            ):
                mpi.broadcast(torch.ones(numel), 0, backend=backend)
                expected.append(("broadcast", backend, name))
    calls = traces_of(folder)[mpi.rank()].calls
    agree.equal([(each.collective, each.details["backend"], each.details["algorithm"]) for each in calls], expected)
    sites = call_sites(AlignedCalls(traces_of(folder)))
    names = {f"{backend}: {name}" for what, backend, name in expected if what == "broadcast"}
    agree.equal({each.backends for each in sites if each.collective == "broadcast"}, {" + ".join(sorted(names))})


def test_buckets_have_the_names_of_their_parameters(agree, folder):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mpinn.register_async_backward(net)
    with mpi.timeline.start(folder):
        for _ in range(3):
            net(torch.ones(2, 3)).sum().backward()
            mpinn.synchronize_gradients_async(net)
            optimizer.step()
        mpinn.unregister_async_backward(net)
        mpinn.synchronize_gradients(net)
        mpinn.synchronize_gradients(net, compression="bf16", bucket_bytes=64)
    own = traces_of(folder)[mpi.rank()]
    labels = dict.fromkeys(each.details["label"] for each in own.calls if "label" in each.details)
    of_async, *of_sync = [label for label in labels if label != "gradients: 0.weight to 1.bias"]
    agree.equal(of_async, "bucket 0: 1.bias to 0.weight")
    agree.equal(of_sync, ["bucket 0: 0.weight to 0.bias", "bucket 1: 1.weight to 1.bias"])
    agree.equal(len(own.intervals("step")), 3)


def test_buckets_of_ddp_have_numbers(agree, folder, default_group):
    net = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
    net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.5)
    for step in range(5):
        if step == 2:  # DDP has chosen its buckets
            mpi.timeline.start(folder)
        net(torch.ones(2, 300)).sum().backward()
    mpi.timeline.stop()
    labels = [each.details["label"] for each in traces_of(folder)[mpi.rank()].calls if "label" in each.details]
    numbers = [int(label.removeprefix("bucket ").removesuffix(f" {events.OF_DDP}")) for label in labels]
    agree(len(numbers) % 3 == 0 and numbers == 3 * list(range(len(numbers) // 3)), f"{labels}")
    agree(len(numbers) >= 6, f"{labels}")


def test_exchanges_of_the_fast_path_are_recorded(agree, folder):
    size = mpi.size()
    right, left = (mpi.rank() + 1) % size, (mpi.rank() - 1) % size
    for _ in range(2):
        mpi.sendreceive(torch.ones(3), left, right)
    with mpi.timeline.start(folder):
        for _ in range(4):
            mpi.sendreceive(torch.ones(3), left, right)
    own = traces_of(folder)[mpi.rank()]
    agree.equal([each.name for each in own.intervals("message")], ["sendreceive"] * 4)
    details = [each["args"] for each in own.events if each.get("cat") == "message"]
    agree.equal({(each["bytes"], each["dtype"], each["peer"], each["communicator"]) for each in details},
                {(12, "float32", left, "world")})  # fmt: skip
    agree.equal({(each["from"], each["to"]) for each in details}, {(left, right)})
    for name in ("sent", "received"):
        numbers = [each[name] for each in details]
        agree.equal(numbers, list(range(numbers[0], numbers[0] + 4)))
    agree(all(each["line"].startswith(f"{__file__}:") for each in details), f"{details}")


@pytest.mark.min_ranks(2)
def test_messages_of_torch_distributed_are_recorded(agree, folder, default_group):
    """Several in flight to one rank: their slices do not overlap, and wait() is one of its own."""
    size = mpi.size()
    right, left = (mpi.rank() + 1) % size, (mpi.rank() - 1) % size
    dist = torch.distributed
    with mpi.timeline.start(folder):
        works = [dist.isend(torch.ones(100), right) for _ in range(3)]
        works += [dist.irecv(torch.empty(100), left) for _ in range(3)]
        for work in works:
            work.wait()
    own = traces_of(folder)[mpi.rank()]
    for name in ("send", "recv"):
        found = [each for each in own.intervals(events.BACKGROUND_MESSAGE) if each.name == name]
        found.sort(key=lambda each: each.begin)
        agree.equal(len(found), 3)
        agree(all(first.end <= second.begin + 1e-9 for first, second in pairwise(found)), f"{found}")
    details = [each["args"] for each in own.events if each.get("cat") == events.BACKGROUND_MESSAGE]
    agree.equal({each["peer"] for each in details}, {left, right})
    agree.equal({(each["bytes"], each["dtype"], each["line"].rpartition(":")[0]) for each in details},
                {(400, "float32", __file__)})  # fmt: skip


@pytest.mark.min_ranks(2)
def test_sends_are_connected_with_their_receives(agree, folder, default_group):
    """Also after messages of which the timeline has one part, or none; each message has a length of its own."""
    rank, size = mpi.rank(), mpi.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for _ in range(3):
        mpi.sendreceive(torch.ones(3), left, right)
    before = [mpi.send_async(torch.ones(1), right), dist.isend(torch.ones(2), right, tag=3)]
    before[0].wait()
    mpi.timeline.start(folder)
    mpi.recv(torch.empty(1), left)
    dist.recv(torch.empty(2), left, tag=3)
    for numel in (10, 12, 14):
        before.append(mpi.send_async(torch.ones(numel), right))
        mpi.recv(torch.empty(numel), left)
        mpi.sendreceive(torch.ones(numel + 1), left, right)
    numels = [20, 21, 22, 23]
    works = [dist.isend(torch.ones(numel), right, tag=tag) for numel, tag in zip(numels, (3, 4, 3, 5), strict=True)]
    works += [dist.irecv(torch.empty(numels[index]), left, tag=tag) for index, tag in ((1, 4), (0, 3), (2, 3))]
    works += [dist.irecv(torch.empty(numels[3]), tag=5)]  # from any rank
    for each in (*before, *works):
        each.wait()
    mpi.timeline.stop()
    traces = traces_of(folder)
    merged = list(merged_events(traces))
    found = [each for each in merged if each.get("cat") in ("message", events.BACKGROUND_MESSAGE)]
    slices, flows = ([each for each in found if each["ph"] in kinds] for kinds in ("X", "sf"))

    def slice_at(flow):
        place = flow["pid"], flow["tid"]
        (found,) = [
            each for each in slices
            if (each["pid"], each["tid"]) == place and each["ts"] <= flow["ts"] <= each["ts"] + each["dur"]
        ]  # fmt: skip
        return found

    ends = {kind: {each["id"]: slice_at(each) for each in flows if each["ph"] == kind} for kind in "sf"}
    agree.equal(ends["s"].keys(), ends["f"].keys())
    agree(all(ends["s"][number]["args"]["bytes"] == ends["f"][number]["args"]["bytes"] for number in ends["s"]))
    agree.equal({(each["pid"] + 1) % size for each in ends["s"].values()}, {each["pid"] for each in ends["f"].values()})
    sent = sorted(each["args"]["bytes"] for each in ends["s"].values() if each["pid"] == rank)
    agree.equal(sent, sorted(4 * numel for numel in (*range(10, 16), *numels[:3])))

    waits, own, other = MessageWaits(traces), traces[rank].messages, traces[left].messages
    is_receive = waits.sender[rank] >= 0
    agree.equal(set(waits.sender[rank][is_receive].tolist()), {left})  # also of the receive from any rank
    is_send = np.array([kind.name != "recv" for kind in other.kinds])[other.kind]
    begins = dict(zip(other.num_bytes[is_send].tolist(), other.begin[is_send].tolist(), strict=True))
    for size, begin, end, ready in np.column_stack((own.num_bytes, own.begin, own.end, waits.ready[rank]))[is_receive]:
        since = begins[size] if size in sent else end  # of others no trace has the send, or it is not known
        agree.equal(ready, min(max(begin, since), end))


@pytest.mark.min_ranks(2)
def test_a_failed_call_is_recorded_with_its_error(agree, folder):
    with mpi.timeline.start(folder):
        agree.raises(mpi.errors.MismatchError, lambda: mpi.allreduce(torch.ones(2 + mpi.rank() % 2)))
    failed = [each for each in traces_of(folder)[mpi.rank()].calls if "error" in each.details]
    agree.equal([each.details["error"] for each in failed], ["MismatchError"])


def test_calls_of_the_fast_path_are_recorded(agree, folder):
    """They run through Python meanwhile."""
    if not fast_path._fast_paths or mpi.size() < 2:
        pytest.skip("no fast path here")
    tensor, size = torch.ones(4), mpi.size()
    cached = fast_path._fast_paths["allreduce"].cached_calls
    for _ in range(2):  # the first one may make the plan, which the second one caches
        mpi.allreduce(tensor.fill_(1))
    num_cached = [len(cached)]
    with mpi.timeline.start(folder):
        for _ in range(3):
            mpi.allreduce(tensor.fill_(1))
            mpi.allgather(torch.ones(2), out=torch.empty(2 * size))
            mpi.barrier()
        mpi.allgather(torch.ones(2 + mpi.rank()))
        num_cached.append(len(cached))
    mpi.allreduce(tensor.fill_(1))
    num_cached.append(len(cached))
    with profiled_by_torch():
        num_cached.append(len(cached))
    mpi.allreduce(tensor.fill_(1))
    num_cached.append(len(cached))
    agree(num_cached[0] > 0 and num_cached[1:] == [0, 1, 0, 1], f"{num_cached}")
    calls = traces_of(folder)[mpi.rank()].calls
    agree.equal([each.collective for each in calls[:9]], ["allreduce", "allgather", "barrier"] * 3)
    agree.equal([each.seq for each in calls], list(range(calls[0].seq, calls[0].seq + len(calls))))
    agree.equal([each.num_bytes for each in calls[:3]], [16, 8, 0])
    first = calls[0].details
    agree.equal((first["op"], first["dtype"], first["backend"]), ("sum", "float32", "shm"))
    agree.equal({each.details["algorithm"] for each in calls[:9]}, {"ring entries"})
    agree(all(each.details["line"].startswith(f"{__file__}:") for each in calls[:10]), f"{calls}")
    agree(all(first.end <= second.begin + 1e-6 for first, second in pairwise(calls)), f"{calls}")


def test_lines_of_several_functions_and_of_the_caller_of_the_package_are_recorded(agree, folder):
    tensor, code = torch.ones(4), "mpi.allreduce(tensor)"
    programs = [compile(f"{newlines}{code}", f"program{len(newlines)}.py", "exec") for newlines in ("", "\n\n")]
    names = {"mpi": mpi, "tensor": tensor}
    exec(compile(f"def own(): {code}", events.__file__, "exec"), names)
    expected = []
    with mpi.timeline.start(folder):
        for _ in range(10):
            for program in programs:
                exec(program, names)
            names["own"]()
            expected += ["program0.py:1", "program2.py:3", f"{__file__}:{sys._getframe().f_lineno - 1}"]
    own = [each for each in traces_of(folder)[mpi.rank()].calls if each.collective == "allreduce"]
    agree.equal([each.details["line"] for each in own], expected)
    agree.equal([each.seq for each in own], list(range(own[0].seq, own[0].seq + len(own))))


def release_when_awaited(queue: CallQueue) -> None:
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code is not Handle.await_end.__code__:
        time.sleep(0.001)
    queue.run_lock.release()


def test_queued_and_labelled_calls_have_their_lines_and_times(agree, folder):
    names = {"mpi": mpi, "tensor": torch.ones(4)}
    exec(compile("def own(): mpi.broadcast(tensor, 0, backend='mpi')", events.__file__, "exec"), names)
    queue = mpi.communicator().intra.call_queue
    with mpi.timeline.start(folder):
        lines = [sys._getframe().f_lineno + number for number in (2, 2, 2, 3, 5)]
        for _ in range(3):  # the first one makes the code known
            mpi.broadcast(names["tensor"], 0, backend="mpi")
        names["own"]()
        with queue.run_lock:
            handle = mpi.broadcast_async(names["tensor"], 0, backend="mpi")
            threading.Thread(target=release_when_awaited, args=(queue,)).start()
            handle.wait()
            queue.run_lock.acquire()
        with events.labelled("a bucket"):
            mpi.broadcast(names["tensor"], 0, backend="mpi")
            lines.append(sys._getframe().f_lineno - 1)
        for _ in range(3):
            mpi.broadcast_async(names["tensor"], 0, backend="mpi").wait()
            lines.append(sys._getframe().f_lineno - 1)
    own = traces_of(folder)[mpi.rank()]
    calls = [each for each in own.calls if each.collective == "broadcast"]
    agree.equal([each.details["line"] for each in calls], [f"{__file__}:{line}" for line in lines])
    agree.equal([each.details.get("label") for each in calls], [None] * 5 + ["a bucket"] + [None] * 3)
    agree.equal({(each.details["backend"], each.details["root"], each.num_bytes) for each in calls}, {("mpi", 0, 16)})
    agree.equal([each.seq for each in calls], list(range(calls[0].seq, calls[0].seq + 9)))
    agree.equal([each.is_queued for each in calls], [False] * 4 + [True, False] + [True] * 3)
    agree(all(first.end <= second.begin for first, second in pairwise(calls)), f"{calls}")
    wait = own.intervals("wait")[0]
    agree(calls[4].queued <= wait.begin and calls[4].end <= wait.end + 0.001, f"{wait}, {calls[4]}")
    waits = [each["args"]["call"] for each in own.events if each.get("cat") == events.WAIT]
    agree.equal(set(waits), {f"rank {mpi.rank()}: broadcast"})


def test_calls_of_torch_and_of_the_package_have_the_line_of_the_program(agree, folder, default_group):
    """Several functions of torch and of the package are between the program and these calls."""
    tensor, network = torch.ones(4), torch.nn.Linear(3, 3)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    calls = [
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: dist.all_gather_into_tensor(torch.empty(4 * mpi.size()), tensor),
        dist.barrier,
        mpi.barrier,
        lambda: mpi.broadcast_object(1),
        lambda: mpi.allreduce(torch.ones(4, 3).t()),
        lambda: mpinn.synchronize_gradients(network),
        lambda: mpinn.synchronize_parameters(network),
    ]
    with mpi.timeline.start(folder):
        for call in calls:
            for _ in range(3):
                call()
    lines = {each.details["line"].rpartition(":")[0] for each in traces_of(folder)[mpi.rank()].calls}
    agree.equal(lines, {__file__})


@pytest.mark.min_ranks(2)
def test_combining_and_staging_are_parts_of_the_call(agree, folder):
    with mpi.timeline.start(folder):
        mpi.allreduce(torch.ones(300, 200).t(), backend="p2p")
        mpi.broadcast(torch.ones(3), 0, backend="mpi")
        mpi.allgather(torch.ones(300, 200).t(), out=torch.empty(300, 200 * mpi.size()).t(), backend="mpi")
    traces = traces_of(folder)
    own = traces[mpi.rank()]
    gathering = next(each for each in own.calls if each.collective == "allgather")
    parts = [each for each in own.events if each.get("cat") == events.PART]
    copies = [each["name"] for each in parts if each["args"]["call"] == gathering.seq]
    agree.equal(copies, ["staging", "staging"])
    parts = parts[: -len(copies)]
    call = next(each for each in own.calls if each.collective == "allreduce")
    agree.equal([parts[0]["name"], parts[-1]["name"]], ["staging", "staging"])
    agree.equal({each["name"] for each in parts[1:-1]}, {"combining"})
    agree.equal({(each["args"]["group"], each["args"]["call"]) for each in parts}, {(call.group, call.seq)})
    for part in parts:
        agree(call.begin - 1e-6 <= own.seconds(part["ts"]) <= own.seconds(part["ts"]) + part["dur"] / 1e6)
        agree(own.seconds(part["ts"]) + part["dur"] / 1e6 <= call.end + 1e-6, f"{part}, {call}")
    rows = {}
    for event in merged_events(traces):
        if event["ph"] == "X" and event.get("cat") in ("phase", events.PART):
            rows.setdefault((event["pid"], event["tid"], event["cat"]), []).append(event)
    for (pid, tid, category), found in rows.items():
        if category == events.PART:
            phases = [(each["ts"] - 0.01, each["ts"] + each["dur"] + 0.01) for each in rows[pid, tid, "phase"]]
            for each in found:
                times = each["ts"], each["ts"] + each["dur"]
                agree(any(begin <= times[0] and times[1] <= end for begin, end in phases), f"{each}, {phases}")


def test_a_call_in_several_chunks_is_recorded_from_its_begin(agree, folder):
    """Regression: chunks of calls of device tensors are calls in the log, and only the last was recorded."""
    group = mpi.communicator().intra
    entered = []

    def run(*arguments):
        log = group.call_log
        for _ in range(2):
            entered.append(events.now())
            log.enter_next_chunk()

    code = CODES.index("allreduce") | OPS.index("sum") << 8
    with mpi.timeline.start(folder):
        group.call(Plan("allreduce", code, run), torch.ones(3))
    found = traces_of(folder)[mpi.rank()].calls[-1]
    clock = traces_of(folder)[mpi.rank()].clock
    agree(found.begin <= clock.aligned(entered[0]) / 1e9, f"{found}, {entered}")


def test_a_call_of_a_callback_has_a_line_of_its_own(agree, folder):
    """Regression: it had the line, and the time in the queue, of the call that had ended."""
    done = threading.Event()
    with mpi.timeline.start(folder):
        handle = mpi.allreduce_async(torch.ones(3), backend="mpi")
        line = sys._getframe().f_lineno + 1
        handle.when_done(lambda: (mpi.broadcast(torch.ones(3), 0, backend="mpi"), done.set()))
        done.wait(10)
    (found,) = [each for each in traces_of(folder)[mpi.rank()].calls if each.collective == "broadcast"]
    agree.equal(found.details["line"], f"{__file__}:{line}")
    agree(not found.is_queued or found.queued <= found.begin, f"{found}")


def test_one_timeline_at_a_time(agree, folder):
    agree(not mpi.timeline.is_recording())
    with mpi.timeline.start(folder):
        agree(mpi.timeline.is_recording())
        agree.raises(TorchMPIError, lambda: mpi.timeline.start(folder), "mpi.timeline.stop()")
    mpi.timeline.stop()
    agree(not mpi.timeline.is_recording())


def test_a_file_that_one_rank_cannot_write_is_an_error_on_all(agree, folder):
    """Regressions: within a host, the other ranks recorded; the error of this rank had no remedy."""
    Path(folder, "elsewhere", "rank0.json.gz").mkdir(parents=True, exist_ok=True)  # a folder in place of the file
    mpi.barrier()
    reason = "Is a directory" if mpi.rank() == 0 else "other ranks"
    with pytest.raises(TorchMPIError, match=rf"^rank {mpi.rank()}: .*{reason}.*unset TORCHMPI_TIMELINE"):
        mpi.timeline.start(f"{folder}/elsewhere")
    agree(not mpi.timeline.is_recording())


def profiled_by_torch():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
