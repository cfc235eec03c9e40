"""To a reader of the site: the strict build, every public name in the reference, and a search that finds the page."""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import lunr
import pytest

ROOT = Path(__file__).resolve().parents[2]
import docs_site  # noqa: E402

pytestmark = pytest.mark.any_mpi

PACKAGES = [name for name in docs_site.REFERENCE.values() if name != "torchmpi.errors"]  # a module without __all__


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. Not with --quiet, with which mkdocs counts no warnings."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def inventory(site) -> dict[str, str]:
    """The page and anchor of every documented name."""
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = [line.split(" ") for line in zlib.decompress(content).decode().splitlines()]
    return {name: where.replace("$", name) for name, _, _, where, *_ in lines}


@pytest.fixture(scope="module")
def search(site):
    """``search(query)``: the pages, as the script of the theme ranks them."""
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    plain = lambda text: html.unescape(re.sub(r"<[^>]+>", " ", text))  # noqa: E731
    documents = [
        {"location": entry["location"], "title": plain(entry["title"]), "text": plain(entry["text"])}
        for entry in entries
    ]
    index = lunr.lunr("location", [{"field_name": "title", "boost": 1000}, "text"], documents)

    def pages(query: str) -> list[str]:
        scores: dict[str, float] = {}
        for found in index.search(query):
            page, _, anchor = found["ref"].partition("#")
            boost = (not anchor) + (len(found["match_data"].metadata) >= len(query.split()))
            scores[page] = max(scores.get(page, 0), found["score"] * (1 + boost**2))
        return sorted(scores, key=lambda page: -scores[page])

    return pages


def test_every_public_name_is_in_the_reference(inventory):
    names = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    assert names
    assert [name for name in names if name not in inventory] == []


def test_nothing_is_loaded_from_the_network(site):
    loaded = re.compile(r'<(script|img|iframe)[^>]*src="(https?:)?//|<link[^>]*rel="(stylesheet|preconnect)"[^>]*//')
    pages = list(site.rglob("*.html"))
    assert pages
    assert [page.name for page in pages if loaded.search(page.read_text())] == []


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("timeout", "hangs.html"),
        ("Slurm", "slurm.html"),
        ("bfloat16", "mixed-precision.html"),
        ("hang", "hangs.html"),
        ("hostfile", "hosts.html"),
        ("mixed precision", "mixed-precision.html"),
        ("gradient accumulation", "gradient-accumulation.html"),
        ("checkpoint", "checkpoints.html"),
        ("NUMA", "binding.html"),
        ("Horovod", "horovod.html"),
        ("allreduce", "api/torchmpi.html"),
        ("install", "install.html"),
        ("docker", "containers.html"),
        ("clip_grad_norm_", "api/nn.html"),
    ],
)
def test_the_search_has_the_right_page_first(search, query, page):
    assert search(query)[:1] == [page], search(query)[:5]
