"""Pictures and plots: what their scripts draw, from which numbers, and that pages show them."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import draw_benchmarks
import draw_levels
import draw_pictures
import measure_costs
import pytest
import torch
from simulator.messages import Comm, World
from simulator.plans import Ranks

from torchmpi import plots
from torchmpi.backends import number_exchange, pieces, round_messages, shm
from torchmpi.config import Config
from torchmpi.parameterserver import remote, shards
from torchmpi.parameterserver.kernels.shard_layout import CHUNK_BYTES
from torchmpi.session import mpi_progress
from torchmpi.shared_memory import memory_layout

ROOT = Path(__file__).resolve().parents[2]
HOW = ROOT / "docs" / "how"


def test_the_pictures_are_current():
    names = [path.name for path in draw_pictures.stale()]
    assert not names, f"{names}: run scripts/draw_pictures.py"


def test_each_page_has_its_picture():
    shown = [re.findall(r"!\[[^]]+\]\(\.\./images/(how_\w+\.svg)\)", page.read_text()) for page in HOW.glob("*.md")]
    assert sorted(shown) == sorted([name] for name in draw_pictures.PICTURES)


def test_a_text_that_does_not_fit_is_refused():
    picture = draw_pictures.Picture("")
    picture.cell(0, 0, 60, 30, "rank 0")
    with pytest.raises(ValueError, match="needs"):
        picture.cell(0, 0, 60, 30, "rank 0 of 1024")


def test_links_carry_the_bytes_of_the_picture():
    """The code sends what the picture says, on simulated hosts: a block more or less, since parts are not all equal."""
    hosts = [host for host in range(draw_pictures.HOSTS) for _ in range(draw_pictures.RANKS_OF_HOST)]
    world = World(hosts, seed=1)

    def work(comm: Comm) -> None:
        call = Ranks(comm, compared=False).prepare("allreduce", "hierarchical", torch.float32, "sum")
        call(torch.zeros(draw_pictures.PAYLOAD // 4))

    world.run(work)
    drawn = draw_pictures.link_bytes(draw_pictures.HOSTS, draw_pictures.RANKS_OF_HOST, draw_pictures.PAYLOAD)
    for host in range(draw_pictures.HOSTS):
        sent = sum(count for (source, _), count in world.sent_bytes.items() if source == host)
        received = sum(count for (_, target), count in world.sent_bytes.items() if target == host)
        assert sent == pytest.approx(sum(each[0] for each in drawn), abs=64)
        assert received == pytest.approx(sum(each[1] for each in drawn), abs=64)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("servers", f"| {remote._REQUEST} | client to thread | header"),
        ("servers", f"| {remote._DATA_TO_SERVER} | client to thread | data of a send, at most"),
        ("servers", f"| {remote._DATA_TO_CLIENT} | thread to client | data of a receive"),
        ("servers", f"| {remote._REPLY} | thread to client | reply"),
        ("servers", f"at most {shards.MESSAGE_BYTES >> 20} MB in a message, {remote._MAX_IN_FLIGHT} messages in"),
        ("servers", f"chunk by chunk ({CHUNK_BYTES >> 10} KB)"),
        ("servers", f"{remote._MIN_SLEEP * 1e6:g} us to {remote._MAX_IDLE_SLEEP * 1e3:g} ms"),
        ("allreduce-hosts", f"`MPI_Sendrecv`, {number_exchange._TAG};"),
        ("allreduce-hosts", f"`MPI_Test`, {round_messages._TAG} |"),
        ("allreduce-hosts", f"over {Config().pipeline_bytes >> 20} MB (`pipeline_bytes`)"),
        ("allreduce-hosts", f"pieces of {pieces.piece_sizes(3, 'MPICH').piece >> 10} KB"),
        ("allreduce-hosts", f"at most {pieces.piece_sizes(3, 'MPICH').most >> 20} MB at a time"),
        ("allreduce-hosts", f"every {mpi_progress._PERIOD_SECONDS * 1e3:g} ms"),
        ("allreduce-host", f"up to {memory_layout.PAYLOAD_BYTES} bytes"),
        ("allreduce-host", f"up to {shm.WHOLE_BYTES >> 10} KB"),
        ("allreduce-host", f"chunks of {shm._MAX_CHUNK_BYTES >> 10} KB ({shm._CROWDED_CHUNK_BYTES >> 10} KB"),
        ("backward", f"at most {Config().bucket_bytes >> 20} MB"),
        ("lost-rank", f"{Config().heartbeat_seconds:g} s (`heartbeat_seconds`)"),
    ],
)
def test_pages_have_the_numbers_of_the_code(page, text):
    assert text in (HOW / f"{page}.md").read_text()


# --- plots of results/


def test_tables_of_the_bench_are_read_as_printed():
    heading, text = (
        "Messages and other calls",
        """torchmpi bench calls
  software   torchmpi 0.1.0, Python 3.11.7, torch 2.13.0+cpu
  processor  AMD EPYC, 2 CPUs
  2 ranks    MPICH 5.0.2, 1 per core

2 ranks: us (spread)

  call        bytes  auto async  mpi4py in place
  round trip     1M   245 (12%)                -
  exchange        4           -        1.06 (3%)
""",
    )
    facts = dict.fromkeys(("title", "date", "introduction", "command"), "") | {"load": 0.5}
    page = measure_costs.written({(heading, "calls -n 2"): [("MPICH 5.0.2, 2 ranks", text)]}, **facts)
    rows = draw_benchmarks.bench_tables(page, f"## {heading}")
    found = {(row["verb"], row["bytes"], row["contestant"]): row["median_us"] for row in rows}
    assert found == {("round trip", 1 << 20, "auto async"): 245, ("exchange", 4, "mpi4py in place"): 1.06}
    facts = draw_benchmarks.bench_facts(page, f"## {heading}")
    assert facts == {"mpi": "MPICH 5.0.2", "versions": {"torch": "2.13.0"}, "processor": "AMD EPYC, 2 CPUs"}
    assert doctest.testmod(measure_costs).failed == 0
    rows = draw_benchmarks.bench_tables(
        (ROOT / "results/benchmark-tables.md").read_text(), "## Allreduce within a host"
    )
    times = {(row["ranks"], row["bytes"], row["contestant"]): row for row in rows}
    assert times[2, 64 << 20, "auto shared"]["median_us"] == 4980
    assert times[2, 64, "auto"]["high_us"] == pytest.approx(1.21)


def test_tables_of_faults_memory_and_steps_are_read():
    reliability, tables = ((ROOT / f"results/{name}.md").read_text() for name in ("reliability", "benchmark-tables"))
    assert draw_benchmarks.fault_counts(reliability)["MPICH"] == {"jobs": 86, "well": 67, "explained": 19}
    seconds = draw_benchmarks.fault_seconds(reliability)
    assert seconds["os._exit(0)"]["torchrun, backend torchmpi"] == [8.3, 1.5, 1.1, 1.9]
    assert "raise in a callback" not in seconds  # not under each launcher
    stages = draw_benchmarks.stages_of_memory(tables)
    assert stages["torchmpi altogether"] == 11.1
    assert draw_benchmarks.training_steps(tables)["transformer"]["ddp"] == 46.0
    assert draw_benchmarks.gradients_alone(tables)["mpi4py"] == 26.71


def test_tables_of_links_are_read():
    found = draw_benchmarks.links((ROOT / "results/slow-links.md").read_text())
    assert found["TCP with cubic"]["LocalSGD"] == {"seconds": 7.8, "MB": 1.52}
    assert len(found["TCP with BBR"]) == 12
    page = (ROOT / "results" / draw_benchmarks.SIMULATED).read_text()
    assert draw_benchmarks.predicted(page)["64 KB"]["ring"] == {16: 1.083, 64: 1.711, 256: 6.356, 1024: 24.98}


def test_a_legend_fits_its_figure():
    pytest.importorskip("matplotlib", reason="plots need matplotlib: install the extra examples")
    for width, names in ((6, "sequential allreduce Downpour EASGD EAMSGD LocalSGD DiLoCo"), (3, "a" * 30 + " b")):
        figure, panels = plots.new_figure(width, 4)
        for name in names.split():
            panels[0, 0].plot([0, 1], [0, 1], label=name)
        plots.legend(figure, panels)
        figure.canvas.draw()
        assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1


def test_each_image_is_shown_and_can_be_made_again():
    """By a script of plots or pictures, by an experiment file, or by a command that a page has."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("results/*.md")]
    text = "".join(page.read_text() for page in pages)
    images = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert images == set(re.findall(r"images/([\w.]+)\)", text))
    findings = (ROOT / "examples" / "async_sgd" / "findings").glob("*.toml")
    drawn = {f"{name}.png" for name in draw_benchmarks.PLOTS} | {f"finding_{path.stem}.svg" for path in findings}
    others = images - drawn - set(draw_pictures.PICTURES) - {draw_levels.IMAGE.name}
    assert [name for name in sorted(others) if f"docs/images/{name}" not in text] == []
