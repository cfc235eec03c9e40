"""To a reader of ``torchmpi bench``: tables, files and comparisons say what the rows say."""

from __future__ import annotations

import json

import pytest
from helpers.bench_rows import FACTS, cells_of, figures, row

import torchmpi.cli
from torchmpi.cli.bench import bench_report as report
from torchmpi.cli.bench import collective_bench, options, parallel, training
from torchmpi.errors import ArgumentError, JobError


def collectives(*rows):
    return report.new_report("collectives", [{"facts": FACTS, "rows": list(rows)}], {"seconds": 1})


CELL = [row("auto", 10.0), row("auto shared", 2.0), row("mpi4py", 15.0), row("gloo", 300.0), row("copy", 5.0)]


def test_overview_has_ratios_and_shares():
    text = collective_bench.as_text(collectives(*CELL, row("horovod", None)), details=False)
    line = next(cells for cells in cells_of(text) if cells[:3] == ["4K", "2", "4K"])
    # 15 / 10 and 5 / 10 for plain tensors, 15 / 2 and 5 / 2 for shared ones; 4096 bytes in 10 us.
    assert line[-6:] == ["0.41", "0.41", "1.50", "50%", "7.50", "250%"], text
    assert "horovod: not installed" in text and "Some MPI 1.0" in text and "Abacus" in text
    assert "10%" in text


def test_a_cell_without_a_figure_is_a_dash():
    more = [row(found["contestant"], None, num_bytes=16) for found in CELL]
    text = collective_bench.as_text(collectives(*CELL, *more), details=False)
    line = next(cells for cells in cells_of(text) if cells[:1] == ["16"])
    assert set(line[3:]) == {"-"} and "gloo: not installed" in text


# --- files and comparison


def saved(path, content):
    report.save(content, str(path))
    return str(path)


def test_reports_survive_the_file(tmp_path):
    content = collectives(*CELL)
    assert report.load(saved(tmp_path / "a.json", content)) == json.loads(json.dumps(content))
    with pytest.raises(JobError, match="cannot write"):
        report.save(content, str(tmp_path / "no" / "a.json"))


def test_comparison_marks_changes_beyond_the_spread(tmp_path):
    before = saved(tmp_path / "a.json", collectives(row("auto", 10.0), row("mpi", 10.0), row("gloo", 10.0)))
    after = saved(
        tmp_path / "b.json", collectives(row("auto", 5.0), row("mpi", 10.5), row("gloo", 20.0), row("x", 1.0))
    )
    text = report.compare_files(before, after)
    verdicts = {cells[5]: cells[-1] for cells in cells_of(text) if cells[:2] == ["2", "allreduce"]}
    assert verdicts == {"auto": "faster", "mpi": "1.05", "gloo": "slower"}, text
    assert "3 lines in both: 1 faster, 1 slower" in text and "only in B: 1." in text


def test_files_that_cannot_be_compared(tmp_path, capsys):
    good = saved(tmp_path / "good.json", collectives(*CELL))
    other = saved(tmp_path / "other.json", collectives(row("auto", 1.0, num_bytes=8)))
    leaks = saved(tmp_path / "leaks.json", report.new_report("leaks", [{"facts": FACTS, "rows": [{"rank": 0}]}], {}))
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "foreign.json").write_text('{"format": "something else"}')
    (tmp_path / "list.json").write_text("[]")
    for first, second, words in [
        ("missing.json", good, "cannot read"),
        (str(tmp_path / "text.json"), good, "is not JSON"),
        (good, str(tmp_path / "foreign.json"), "was not written by"),
        (str(tmp_path / "list.json"), good, "was not written by"),
        (good, other, "no line in common"),
        (good, leaks, "Compare files of one kind"),
        (leaks, leaks, "no times that could be compared"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            report.compare_files(first, second)
    assert torchmpi.cli.main(["bench", "compare", good, good]) == 0
    assert torchmpi.cli.main(["bench", "compare", good, str(tmp_path / "no.json")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_files_are_checked_before_anything_is_measured(tmp_path, capsys):
    for option in ("--json", "--plot"):
        if option == "--plot":
            pytest.importorskip("matplotlib", reason="for --plot: install the extra examples")
        assert torchmpi.cli.main(["bench", option, str(tmp_path / "no" / "file")]) == 1
        assert "the folder of" in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torchmpi.cli.bench.bench_report.find_spec", lambda name: None)
    assert torchmpi.cli.main(["bench", "--plot"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


# --- the other commands


def test_table_of_divided_models():
    def line(contestant: str, milliseconds: float | None):
        head = {"ranks": 2, "workload": "decoding", "size": 512, "batch": 1, "contestant": contestant}
        sizes = {"held_bytes": 2 * 10**6, "sent_bytes": 0}
        return head | sizes | figures(None if milliseconds is None else milliseconds * 1e3)

    rows = [line("one process", 4), line("tensor_parallel", 2), line("DTensor on gloo", None)]
    text = parallel.as_text(report.new_report("parallel", [{"facts": FACTS, "rows": rows}], {}))
    found = {cells[0]: cells[-6:] for cells in cells_of(text) if len(cells) >= 6}
    assert found["tensor_parallel"] == ["2.00", "10%", "500", "2.00", "2", "-"], text
    assert "batch 1, 4 layers of width 512, 2 ranks" in text and "DTensor on gloo: not installed" in text
    assert tuple(parallel.WORKLOADS) == options.WORKLOADS


def test_training_table():
    def line(contestant: str, milliseconds: float | None, part: str = "step"):
        return {"ranks": 2, "model": "mlp", "part": part, "contestant": contestant} | figures(
            None if milliseconds is None else milliseconds * 1e3
        )

    rows = [line("no communication", 50), line("synchronize_gradients", 100), line("ddp", 200)]
    rows += [line("communication alone", 40), line("register_async_backward", 62)]
    rows += [line("mpi4py", 10, "communication"), line("ddp's way on gloo", None, "communication")]
    text = training.as_text(report.new_report("train", [{"facts": FACTS, "rows": rows}], {}))
    found = {cells[0]: cells[-5:] for cells in cells_of(text) if len(cells) >= 4}
    assert found["synchronize_gradients"] == ["100.00", "10%", "50%", "-", "2.00"], text
    assert found["register_async_backward"] == ["62.00", "10%", "19%", "70%", "3.23"], text
    assert found["communication"] == ["40.00", "10%", "-", "-", "5.00"], text
    assert found["ddp"][-1] == "1.00" and found["mpi4py"][-1] == "-"
    assert "ddp's way on gloo: not installed" in text
