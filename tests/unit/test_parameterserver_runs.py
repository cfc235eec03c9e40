"""To a reader of records of runs: columns, files, staleness by pairs of ranks, and times are right."""

from __future__ import annotations

import contextlib
import csv
import doctest
import io
import json
import os
import random
import sys

import numpy as np
import pytest

import torchmpi.parameterserver as ps
from torchmpi.cli import main
from torchmpi.errors import ArgumentError
from torchmpi.parameterserver.runs import call_order, observed_run, run_record
from torchmpi.parameterserver.runs.observed_run import RECEIVE, SEND, STEP, WAIT
from torchmpi.parameterserver.runs.run_record import RunRecord

NAN = float("nan")


@pytest.mark.parametrize("module", [observed_run, run_record, call_order])
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0


def random_run(num_ranks: int, num_calls: int, seed: int) -> tuple[list[tuple], dict[tuple[int, int], list[int]]]:
    """Events of ranks that fetch and send at random, and for each pair the updates missing, by listing them."""
    generator = random.Random(seed)
    events, log = [], []
    fetched = dict.fromkeys(range(num_ranks), 0)
    missing: dict[tuple[int, int], list[int]] = {}
    for time in range(num_calls):
        rank = generator.randrange(num_ranks)
        if generator.random() < 0.4:
            fetched[rank] = len(log)
            events.append((RECEIVE, rank, "w 0", "", time, time + 1, float(len(log)), NAN, 8, NAN, -1, 0))
            continue
        others = [sender for sender in log[fetched[rank] :] if sender != rank]
        for other in set(range(num_ranks)) - {rank}:
            missing.setdefault((rank, other), []).append(others.count(other))
        events.append((SEND, rank, "w 0", "add", time, time + 1, float(len(log)), float(len(others)), 8, NAN, -1, 0))
        log.append(rank)
    return events, missing


@pytest.mark.parametrize(("num_ranks", "seed"), [(1, 1), (2, 2), (3, 3), (7, 4)])
def test_staleness_of_pairs_is_that_of_a_list_of_all_updates(num_ranks, seed):
    events, missing = random_run(num_ranks, 400, seed)
    generator = random.Random(seed)
    shuffled = generator.sample(events, len(events))
    record = RunRecord.joined(
        [RunRecord.of([e for e in shuffled if e[1] == rank], num_ranks=num_ranks) for rank in range(num_ranks)]
    )
    found = record.staleness_of_pairs()
    assert found.keys() == missing.keys()
    for pair, counts in missing.items():
        assert found[pair].tolist() == np.bincount(counts).tolist(), pair
    ages = [event[7] for event in events if event[0] == SEND]
    assert record.staleness().tolist() == np.bincount(np.array(ages, int)).tolist()
    own = [event[7] for event in events if event[0] == SEND and event[1] == 0]
    assert record.staleness(0).tolist() == np.bincount(np.array(own, int)).tolist()
    # Each update misses as many as its staleness, from whomever they come.
    for sender, row in enumerate(record.mean_of_pairs()):
        own = [event[7] for event in events if event[0] == SEND and event[1] == sender]
        assert np.nansum(row) == pytest.approx(np.mean(own))


def small_run() -> RunRecord:
    events = [
        (STEP, 0, "", "", 0, 2_000_000_000, 0.0, NAN, 0, NAN, -1, 0),
        (STEP, 0, "", "", 5_000_000_000, 6_000_000_000, 1.0, NAN, 0, NAN, -1, 0),
        (WAIT, 0, "", "", 5_100_000_000, 5_400_000_000, NAN, NAN, 0, NAN, -1, 0),
        (SEND, 0, "w 0", "add", 5_500_000_000, 5_700_000_000, 0.0, 0.0, 12, 2.5, -1, 0),
        (SEND, 0, "clock", "max", 5_800_000_000, 5_900_000_000, 0.0, 7.0, 16, NAN, -1, 0),
    ]
    return RunRecord.of(events, num_ranks=1)


def test_times_and_updates():
    record = small_run()
    times = record.times(0)
    assert times.total == pytest.approx(4.0), "from the end of the first step"
    assert (times.computing, times.num_steps) == (pytest.approx(3.0), 2)
    assert (times.calling, times.waiting) == (pytest.approx(0.3), pytest.approx(0.3))
    assert record.compute_times(0) == pytest.approx([3.7]), "with the step, but for its calls"
    assert record.staleness().tolist() == [1], "sends of a clock are no updates"
    assert record.times(5).total == 0.0
    steps = [(STEP, 0, "", "", begin, begin + 10**9, 0.0, NAN, 0, NAN, -1, 0) for begin in (0, 3 * 10**9, 9 * 10**9)]
    assert RunRecord.of(steps, num_ranks=1).times(0).computing == pytest.approx(2 + 5), "between three steps"


@pytest.mark.slow
def test_file_and_table(tmp_path, capsys):
    record = small_run()
    record.save(tmp_path / "run.npz")
    found = ps.read_run(tmp_path / "run.npz")
    assert found.about == record.about
    for name, column in record.columns.items():
        assert found.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(found.columns[name], column)
    paths = [str(tmp_path / name) for name in ("run.npz", "run.csv", "run.png")]
    assert main(["staleness", paths[0], "--csv", paths[1], "--plot", paths[2]]) == 0
    assert "staleness: mean 0.00, largest 0" in capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run.csv").read_text())))
    assert [row["kind"] for row in rows] == ["step", "wait", "send", "send", "step"]
    assert (rows[2]["server"], rows[2]["rule"], rows[2]["norm"], rows[3]["norm"]) == ("w 0", "add", "2.5", "")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_files_are_written_although_the_reader_of_the_text_has_ended(tmp_path, monkeypatch):
    record, table = tmp_path / "run.npz", tmp_path / "run.csv"
    small_run().save(record)
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        main(["staleness", str(record), "--csv", str(table)])
    assert table.read_text().startswith("kind,rank")


def test_an_empty_run_has_a_report():
    text = RunRecord.of([], num_ranks=2).text()
    assert "0 updates" in text
    assert text.splitlines()[-1].split() == ["1", "0", "0", "-", "0.0%", "0.0%"]  # without steps it is not known


def damaged(**changes: object) -> bytes:
    record = small_run()
    content = {**record.columns, "about": np.frombuffer(json.dumps(record.about).encode(), np.uint8), **changes}
    file = io.BytesIO()
    np.savez(file, **{name: value for name, value in content.items() if value is not None})
    return file.getvalue()


COLUMNS = small_run().columns
OF_OTHERS = [
    (b"no file of numpy", "no record"),
    (damaged(about=None), "no record"),
    (damaged(about=np.frombuffer(b'{"format": "another"}', np.uint8)), "'about': its format"),
    (damaged(norm=None), "column 'norm' is missing"),
    (damaged(rank=COLUMNS["rank"][:3]), "column 'rank' has another type or length"),
    (damaged(kind=COLUMNS["kind"][:0]), "column 'rank' has another type or length"),
    (damaged(rank=COLUMNS["rank"] + np.int32(4)), "column 'rank', row 0: 4 is not from 0 to 0"),
    (damaged(server=COLUMNS["server"] + np.int16(9)), "column 'server', row 0: 8"),
    (damaged(end=COLUMNS["end"] * NAN), "column 'end', row 0"),
    (damaged(staleness=COLUMNS["staleness"] + 1e15), "column 'staleness', row 2"),
    (damaged(norm=np.array([{}] * 5)), "no record"),
]


@pytest.mark.parametrize(("content", "problem"), OF_OTHERS)
def test_files_that_are_no_records_are_refused(tmp_path, content, problem, capsys):
    path = tmp_path / "run.npz"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="Record the run again") as refused:
        ps.read_run(path)
    assert str(refused.value).startswith(str(path)) and problem in str(refused.value)
    assert main(["staleness", str(path)]) == 1
