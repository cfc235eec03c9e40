"""To a reader of pictures and plots: they show the code and the results, and can be made again."""

from __future__ import annotations

import re
from pathlib import Path

import draw_benchmarks
import draw_levels
import draw_pictures
import pytest
import torch
from simulator.messages import Comm, World
from simulator.plans import Ranks

from torchmpi import plots

ROOT = Path(__file__).resolve().parents[2]
HOW = ROOT / "docs" / "how"


@pytest.mark.slow
def test_the_pictures_are_current():
    names = [path.name for path in draw_pictures.stale()]
    assert not names, f"{names}: run scripts/draw_pictures.py"
    assert not draw_levels.stale(), f"{list(draw_levels.stale())}: run scripts/draw_levels.py"


def test_each_page_has_its_picture():
    shown = [re.findall(r"!\[[^]]+\]\(\.\./images/(how_\w+\.svg)\)", page.read_text()) for page in HOW.glob("*.md")]
    assert sorted(shown) == sorted([name] for name in draw_pictures.PICTURES)


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


# --- plots of results/


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
