"""Draw the pictures of docs/how: how a job, an allreduce, backward, servers and the loss of a rank work.

    python scripts/draw_pictures.py            # write docs/images/how_*.svg
    python scripts/draw_pictures.py --check    # exit with status 1 if one of them is out of date

Groups, parts, buckets and bytes are computed by the functions that the package uses. An image has its own background,
and follows the color scheme of the page. Text that does not fit is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchmpi.backends import round_messages  # noqa: E402
from torchmpi.communicators import algorithms, splits  # noqa: E402
from torchmpi.config import Config  # noqa: E402
from torchmpi.parameterserver import remote  # noqa: E402
from torchmpi.parameterserver.kernels.shard_layout import CHUNK_BYTES  # noqa: E402
from torchmpi.parameterserver.shards import MESSAGE_BYTES  # noqa: E402
from torchmpi.tensors import bucket_plan, partition, schedule  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH, MARGIN = 480, 16
TEXT, SMALL = 15, 13
_CHARACTER_WIDTH = 0.56  # of the size of the font, on average; browsers have different fonts

# Light and dark, in this order. Ranks and parts of a tensor have the same four colors.
_COLORS = {
    ".paper": ("fill:#ffffff;stroke:#d5dae1", "fill:#1c2029;stroke:#3a4150"),
    ".box": ("fill:#f4f6f9;stroke:#8a94a3", "fill:#272d38;stroke:#7c8799"),
    ".c0": ("fill:#d3e5f8;stroke:#2a6db0", "fill:#1d4066;stroke:#6aaaf0"),
    ".c1": ("fill:#fbe1c6;stroke:#b8661a", "fill:#5c3b18;stroke:#e9a45c"),
    ".c2": ("fill:#d5eedd;stroke:#2b8551", "fill:#1f4d33;stroke:#66c48d"),
    ".c3": ("fill:#e6dcf5;stroke:#7650b0", "fill:#432f66;stroke:#b493ea"),
    ".sum": ("fill:#fff3b8;stroke:#9a7b00", "fill:#57490d;stroke:#e0c04a"),
    ".lost": ("fill:#f8d4d4;stroke:#b3261e", "fill:#6a2320;stroke:#f28b82"),
    ".off": ("fill:none;stroke:#a5adb9;stroke-dasharray:4 3", "fill:none;stroke:#6d7788;stroke-dasharray:4 3"),
    ".line": ("fill:none;stroke:#6b7583;stroke-width:1.5", "fill:none;stroke:#9aa5b5;stroke-width:1.5"),
    ".head": ("fill:#6b7583", "fill:#9aa5b5"),
    "text": ("fill:#1c2430", "fill:#e8ebf0"),
    ".dim": ("fill:#535d6b", "fill:#b0b8c5"),
}
_SHAPES = ".box,.c0,.c1,.c2,.c3,.sum,.lost{stroke-width:1.3}"


class Picture:
    """An image that is drawn from top to bottom; `y` is where the next thing begins."""

    def __init__(self, description: str) -> None:
        self.description, self.y, self.parts = description, MARGIN, list[str]()

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')

    def text(
        self, x: float, y: float, text: str, *, room: float, size: int = SMALL, anchor: str = "middle", kind: str = ""
    ) -> None:
        """Write a text whose baseline is at y, and which has so much room."""
        if len(text) * size * _CHARACTER_WIDTH > room:
            raise ValueError(f"{text!r} needs {len(text) * size * _CHARACTER_WIDTH:.0f} of {room:.0f}")
        bold = ' font-weight="600"' if size == TEXT else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{bold} text-anchor="{anchor}"'
            + (f' class="{kind}"' if kind else "")
            + f">{escape(text)}</text>"
        )

    def cell(self, x: float, y: float, width: float, height: float, text: str, kind: str = "box") -> None:
        """Draw a box with a text in its middle."""
        self.box(x, y, width, height, kind)
        self.text(x + width / 2, y + height / 2 + 5, text, room=width)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, both: bool = False) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        self.parts.append(f'<path class="line" d="M{x0:g},{y0:g} L{x1:g},{y1:g}"{start} marker-end="url(#head)"/>')

    def line(self, *points: tuple[float, float]) -> None:
        self.parts.append('<path class="line" d="M' + " L".join(f"{x:g},{y:g}" for x, y in points) + '"/>')

    def step(self, title: str, *lines: str) -> None:
        """Write a title over the whole width, and lines under it."""
        self.y += 20
        self.text(MARGIN, self.y, title, room=WIDTH - 2 * MARGIN, size=TEXT, anchor="start")
        for line in lines:
            self.y += 18
            self.text(MARGIN, self.y, line, room=WIDTH - 2 * MARGIN, anchor="start", kind="dim")
        self.y += 10

    def svg(self) -> str:
        height = self.y + MARGIN
        light, dark = ("".join(f"{name}{{{pair[scheme]}}}" for name, pair in _COLORS.items()) for scheme in range(2))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * 1.15:g}" height="{height * 1.15:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" font-family="system-ui, sans-serif" role="img">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
        )
        style = f"<style>{_SHAPES}{light}@media (prefers-color-scheme: dark){{{dark}}}</style>"
        paper = f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="6"/>'
        title = f"<title>{escape(self.description)}</title>"
        return "\n".join([head, title, style, marker, paper, *self.parts, "</svg>", ""])


def columns(count: int, gap: float = 14, left: float = MARGIN) -> tuple[list[float], float]:
    """Return where equal columns begin, and their width."""
    width = (WIDTH - MARGIN - left - gap * (count - 1)) / count
    return [left + i * (width + gap) for i in range(count)], width


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:g} MB"


# --- a job -----------------------------------------------------------------------------------------------


def job() -> Picture:
    """Two hosts of two ranks, and the groups of their levels."""
    hosts = "aabb"
    by_host = splits.plan_split(hosts, cartesian=True)
    picture = Picture("A job of four ranks on two hosts, and its communicators")
    picture.step("Processes")
    picture.cell(130, picture.y, 220, 30, "torchmpi run, mpirun or srun")
    top = picture.y + 58
    xs, width = columns(2, gap=40)
    for number, ranks in enumerate(by_host.groups):
        x = xs[number]
        picture.arrow(240, picture.y + 30, x + width / 2, top - 3)
        picture.box(x, top, width, 150)
        picture.text(x + 10, top + 20, f"host {hosts[ranks[0]]}", room=90, anchor="start")
        for i, rank in enumerate(ranks):
            picture.box(x + 10 + i * 92, top + 30, 82, 54, f"c{rank}")
            picture.text(x + 51 + i * 92, top + 53, f"rank {rank}", room=82, size=TEXT)
            picture.text(x + 51 + i * 92, top + 73, "a process", room=82, kind="dim")
            picture.arrow(x + 51 + i * 92, top + 85, x + 51 + i * 92, top + 107, both=True)
        picture.cell(x + 10, top + 109, width - 20, 30, "shared memory")
    picture.arrow(xs[0] + width + 2, top + 57, xs[1] - 2, top + 57, both=True)
    picture.text(240, top + 46, "MPI", room=40)
    picture.y = top + 160
    picture.step("Communicators that start() makes")
    left = 150
    xs, width = columns(4, gap=8, left=left)
    rows: list[tuple[str, str, Sequence[Sequence[int]]]] = [
        ("level 0", "world", [range(len(hosts))]),
        ("level 1, intra", "one host", by_host.groups),
        ("level 1, inter", "across hosts", sorted({m.inter for m in by_host.members if m.inter})),
    ]
    for name, note, groups in rows:
        picture.text(MARGIN, picture.y + 17, name, room=left - MARGIN, anchor="start")
        picture.text(MARGIN, picture.y + 34, note, room=left - MARGIN, anchor="start", kind="dim")
        adjacent = all(group[-1] - group[0] == len(group) - 1 for group in groups)
        for number, group in enumerate(groups):
            y = picture.y + (0 if adjacent else 44 * number)
            if adjacent:
                picture.box(xs[group[0]] - 3, y, xs[group[-1]] + width + 3 - xs[group[0]] + 3, 38)
            else:
                picture.line(*((xs[rank] + width / 2, y + 19) for rank in group))
            for rank in group:
                picture.cell(xs[rank] + 2, y + 5, width - 4, 28, str(rank), f"c{rank}")
        picture.y += 48 if adjacent else 44 * len(groups)
    return picture


# --- an allreduce on one host ----------------------------------------------------------------------------

_OPERANDS = "abc"


def allreduce_on_a_host() -> Picture:
    """Three ranks add a tensor in parts, through slots of shared memory."""
    size = len(_OPERANDS)
    parts = [partition.part_of(size, size, rank) for rank in range(size)]
    assert parts == [(rank, 1) for rank in range(size)]  # (first element, number): rank r adds part r
    own = [[(f"{name}{part}", f"c{rank}") for part in range(size)] for rank, name in enumerate(_OPERANDS)]
    total = [(f"Σ{part}", "sum") for part in range(size)]
    nothing = ("", "off")
    picture = Picture("An allreduce of three ranks on one host, step by step")
    xs, width = columns(size, gap=20)

    def memory(title: str, rows: Sequence[Sequence[tuple[str, str]]]) -> None:
        picture.text(MARGIN, picture.y + 12, title, room=WIDTH - 2 * MARGIN, anchor="start", kind="dim")
        for x, row in zip(xs, rows, strict=True):
            for part, (text, kind) in enumerate(row):
                picture.cell(x + part * width / size, picture.y + 20, width / size, 28, text, kind)
        picture.y += 56

    for rank, x in enumerate(xs):
        picture.text(x + width / 2, picture.y + 16, f"rank {rank}", room=width, size=TEXT)
    picture.y += 28
    memory("tensors, each in the memory of its rank", own)
    picture.step("1. Copy the parts of the others into my slot")
    copied = [[cell if part != rank else nothing for part, cell in enumerate(own[rank])] for rank in range(size)]
    memory("slots, in memory that all ranks map", copied)
    picture.step("Announce: signature, then sequence number", "then wait until all ranks have announced the same call")
    picture.step(
        "2. Rank r adds part r, in the order of the ranks", "Σ0 = (a0 + b0) + c0, and writes it over all operands"
    )
    tensor = [[total[part] if part == rank else cell for part, cell in enumerate(own[rank])] for rank in range(size)]
    memory("tensors", tensor)
    results = [[total[part] if part != rank else nothing for part in range(size)] for rank in range(size)]
    memory("slots", results)
    picture.step("Wait until all parts are done")
    picture.step("3. Copy the results from my slot into my tensor")
    memory("tensors: the same bits on all ranks", [total] * size)
    return picture


# --- backward --------------------------------------------------------------------------------------------


def backward() -> Picture:
    """Buckets of eight layers: what runs in which thread, with and without overlap."""
    layers = [torch.empty(700, 700, device="meta") for _ in range(8)]
    limit = Config().bucket_bytes
    buckets = bucket_plan.plan_buckets(layers[::-1], limit)  # parameters in reverse order, as in nn/async_backward.py
    picture = Picture("Buckets of gradients are reduced while backward computes the next ones")
    left, unit = 118, 19.0
    layer_time, reduce_time = 1.0, 1.8

    def lane(name: str, note: str, blocks: Sequence[tuple[float, float, str, str]]) -> None:
        picture.text(MARGIN, picture.y + 14, name, room=left - MARGIN, anchor="start")
        picture.text(MARGIN, picture.y + 30, note, room=left - MARGIN, anchor="start", kind="dim")
        for begin, end, text, kind in blocks:
            picture.cell(left + begin * unit, picture.y, (end - begin) * unit, 34, text, kind)
        picture.y += 44

    def color(bucket: int) -> str:
        return f"c{bucket % 4}"

    computed = [
        (bucket, len(layers) - index) for bucket, members in enumerate(buckets) for index in members
    ]  # in the order of backward
    work = [
        (i * layer_time, (i + 1) * layer_time, str(number), color(bucket))
        for i, (bucket, number) in enumerate(computed)
    ]
    ready = [max(end for _, end, _, kind in work if kind == color(bucket)) for bucket in range(len(buckets))]
    reductions, free = [], 0.0
    for bucket, begin in enumerate(ready):
        begin = max(begin, free)
        free = begin + reduce_time
        reductions.append((begin, free, f"b{bucket}", color(bucket)))
    end_of_work = work[-1][1]
    picture.step("register_async_backward(net)", "gradients of layers 8 to 1; two of them fill a bucket")
    lane("main thread", "backward", [*work, (free, free + 2, "step", "box")])
    picture.y -= 4
    for bucket, begin in enumerate(ready):
        picture.arrow(left + begin * unit, picture.y - 6, left + reductions[bucket][0] * unit + 4, picture.y + 8)
    picture.y += 10
    lane("helper thread", "allreduce", reductions)
    saved = end_of_work + reduce_time * len(buckets) - free
    picture.step("synchronize_gradients(net)", "the same work, one after the other")
    after = [
        (end_of_work + i * reduce_time, end_of_work + (i + 1) * reduce_time, f"b{i}", color(i))
        for i in range(len(buckets))
    ]
    lane("main thread", "both", [*work, *after, (after[-1][1], after[-1][1] + 2, "step", "box")])
    assert saved > 0
    x = left + (free + 2) * unit
    picture.arrow(left + (after[-1][1] + 2) * unit, picture.y + 2, x, picture.y + 2)
    picture.text(x + saved * unit / 2, picture.y + 20, "saved", room=saved * unit)
    picture.y += 26
    picture.step(
        f"A bucket has at most {limit >> 20} MB (bucket_bytes)",
        "b0 is sent first, also if b1 is complete before it.",
        "The lengths in this picture are not measured.",
    )
    return picture


# --- an allreduce over hosts -----------------------------------------------------------------------------

HOSTS, RANKS_OF_HOST, PAYLOAD = 3, 2, 6_000_000


def link_bytes(hosts: int, ranks_of_host: int, payload: float) -> list[tuple[float, float]]:
    """Return what a host sends and receives in each round of an allreduce by slices, counted in the plans."""
    block = payload / ranks_of_host / hosts
    rounds = [plan(0, hosts) for plan in (schedule.exchange, schedule.spread)]
    return [(ranks_of_host * len(each.sends) * block, ranks_of_host * len(each.receives) * block) for each in rounds]


def allreduce_over_hosts() -> Picture:
    """Three hosts of two ranks: the steps, and the bytes on the links."""
    split = splits.plan_split([rank // RANKS_OF_HOST for rank in range(HOSTS * RANKS_OF_HOST)], cartesian=True)
    steps = [
        [(step.group, step.collective) for step in splits.allreduce_over_hosts((algorithms.SLICES, False), rank, split)]
        for rank in range(HOSTS * RANKS_OF_HOST)
    ]
    assert all(each == [("intra", "reduce_scatter"), ("inter", "allreduce"), ("intra", "allgather")] for each in steps)
    slice_bytes = PAYLOAD / RANKS_OF_HOST
    message = slice_bytes / HOSTS
    sent, received = (sum(each) for each in zip(*link_bytes(HOSTS, RANKS_OF_HOST, PAYLOAD), strict=True))
    picture = Picture("An allreduce over three hosts of two ranks, with the bytes on each link")
    xs, width = columns(HOSTS, gap=24)
    half = (width - 24) / RANKS_OF_HOST

    def hosts(cells: Callable[[int], tuple[str, str]]) -> None:
        for host, x in enumerate(xs):
            picture.box(x, picture.y, width, 62)
            picture.text(x + width / 2, picture.y + 17, f"host {host}", room=width, kind="dim")
            for i, rank in enumerate(split.groups[host]):
                text, kind = cells(rank)
                picture.cell(x + 8 + i * (half + 8), picture.y + 26, half, 28, text, kind)
        picture.y += 70

    picture.step(f"Each rank has a tensor of {megabytes(PAYLOAD)}", "float32, ranks placed host by host")
    hosts(lambda rank: (f"rank {rank}", "c3"))
    picture.step(
        "1. intra reduce_scatter", f"in shared memory: each rank has {megabytes(slice_bytes)} of the sum of its host"
    )
    hosts(lambda rank: (f"slice {rank % RANKS_OF_HOST}", f"c{rank % RANKS_OF_HOST}"))
    picture.step(
        "2. inter allreduce, slice by slice",
        f"MPI_Isend, MPI_Irecv, tag {round_messages._TAG}, between ranks of equal color:",
        f"exchange parts ({megabytes(message)} to each peer), add, spread results",
    )
    top = picture.y
    picture.box(MARGIN, top + 66, WIDTH - 2 * MARGIN, 30)
    picture.text(WIDTH / 2, top + 86, "network", room=200)
    for host, x in enumerate(xs):
        middle = x + width / 2
        picture.cell(x + width / 2 - 40, top, 80, 28, f"host {host}")
        picture.arrow(middle, top + 30, middle, top + 64, both=True)
        picture.text(middle + 10, top + 45, f"out {megabytes(sent)}", room=width / 2 + 8, anchor="start")
        picture.text(middle + 10, top + 61, f"in {megabytes(received)}", room=width / 2 + 8, anchor="start")
    picture.y = top + 104
    picture.text(
        MARGIN, picture.y + 12, f"out: {RANKS_OF_HOST} ranks x 2 rounds x {HOSTS - 1} peers x "
        f"{megabytes(message)}", room=WIDTH - 2 * MARGIN, anchor="start", kind="dim",
    )  # fmt: skip
    picture.y += 18
    picture.step("3. intra allgather", "in shared memory: each rank copies the other slice")
    hosts(lambda rank: (megabytes(PAYLOAD), "sum"))
    return picture


# --- the parameter server --------------------------------------------------------------------------------


def servers() -> Picture:
    """A tensor in four shards, and the paths of one send."""
    hosts = "aabb"
    by_host = splits.plan_split(hosts, cartesian=True)
    numel = 1_000_000
    shards = [partition.part_of(numel, len(hosts), rank) for rank in range(len(hosts))]
    picture = Picture("A parameter server: each rank holds a shard, and is a client. There is no server process")
    picture.step("There is no server process", "each rank holds one shard, and sends to all shards")
    xs, width = columns(2, gap=84)
    top = picture.y
    picture.cell(MARGIN, top, 190, 34, "rank 0: send(s, gradient)", "c0")
    picture.y = top + 74
    for number, ranks in enumerate(by_host.groups):
        x = xs[number]
        picture.box(x, picture.y, width, 176)
        picture.text(x + 10, picture.y + 20, f"host {hosts[ranks[0]]}", room=80, anchor="start")
        picture.text(x + width - 10, picture.y + 20, "shared memory", room=110, anchor="end", kind="dim")
        for i, rank in enumerate(ranks):
            y = picture.y + 32 + i * 70
            begin, count = shards[rank]
            picture.box(x + 10, y, width - 20, 60, f"c{rank}")
            picture.text(x + width / 2, y + 22, f"shard of rank {rank}", room=width - 24, size=TEXT)
            picture.text(x + width / 2, y + 44, f"{begin:,} to {begin + count - 1:,}", room=width - 24)
    picture.arrow(MARGIN + 70, top + 36, MARGIN + 70, picture.y - 4)
    picture.text(MARGIN + 78, top + 60, "1. rule, in place", room=130, anchor="start")
    right = xs[1]
    picture.line((MARGIN + 190, top + 17), (right + 60, top + 17))
    picture.arrow(right + 60, top + 17, right + 60, picture.y - 4)
    picture.text(right + 68, top + 36, "2. messages", room=110, anchor="start")
    picture.text(right + 68, top + 54, "to 2 threads", room=110, anchor="start")
    picture.y += 184
    picture.step(
        "1. Shards of my host",
        f"my thread runs the rule on them, in chunks of {CHUNK_BYTES >> 10} KB,",
        "each under a lock. Their ranks do nothing.",
    )
    picture.step(
        "2. Shards of other hosts",
        "a thread in each rank there runs the same rule:",
    )
    rows = [
        ("rank 0", f"tag {remote._REQUEST}: header", "thread of rank 2"),
        ("rank 0", f"tag {remote._DATA_TO_SERVER}: data, {MESSAGE_BYTES >> 20} MB each", "thread of rank 2"),
        ("thread of rank 2", f"tag {remote._REPLY}: reply", "rank 0"),
    ]
    for sender, text, receiver in rows:
        forward = sender == "rank 0"
        ends = ("rank 0", receiver if forward else sender)
        picture.cell(MARGIN, picture.y, 62, 30, ends[0], "c0")
        picture.cell(WIDTH - MARGIN - 122, picture.y, 122, 30, ends[1], "c2")
        x0, x1 = MARGIN + 66, WIDTH - MARGIN - 126
        picture.arrow(
            *((x0, picture.y + 22, x1, picture.y + 22) if forward else (x1, picture.y + 22, x0, picture.y + 22))
        )
        picture.text((x0 + x1) / 2, picture.y + 15, text, room=x1 - x0)
        picture.y += 38
    picture.step(f"receive: the same, with the data under tag {remote._DATA_TO_CLIENT}")
    return picture


# --- the loss of a rank ----------------------------------------------------------------------------------


def lost_rank() -> Picture:
    """Three ranks, of which one is killed: restart, continue, spare."""
    picture = Picture(
        "A rank is killed: restart the job, continue without the rank, or give its number to a spare rank"
    )
    left, end, killed, again = 96, WIDTH - MARGIN, 190.0, 320.0

    def lane(name: str, *blocks: tuple[float, float, str, str]) -> None:
        picture.text(MARGIN, picture.y + 20, name, room=left - MARGIN, anchor="start")
        for begin, until, text, kind in blocks:
            picture.cell(begin, picture.y, until - begin, 30, text, kind)
        picture.y += 36

    def killed_lane(*blocks: tuple[float, float, str, str]) -> None:
        lane("rank 1", (left, killed, "updates", "c1"), (killed, killed + 44, "killed", "lost"), *blocks)

    picture.step("Restart: --restarts N", "any MPI; state from the checkpoint on disk")
    for rank in (0, 2):
        if rank == 2:
            killed_lane((again, end, "from checkpoint", "c1"))
        kind = f"c{rank}"
        lane(f"rank {rank}", (left, killed + 30, "updates", kind), (again, end, "from checkpoint", kind))
    picture.text((killed + 30 + again) / 2, picture.y - 14, "new mpirun", room=again - killed - 30, kind="dim")
    picture.step("Continue: --on-lost-rank continue", "Open MPI 5, or no MPI; state from the copy in memory")
    for rank in (0, 2):
        if rank == 2:
            killed_lane()
        kind = f"c{rank}"
        lane(
            f"rank {rank}",
            (left, killed + 30, "updates", kind),
            (killed + 30, again - 30, "recover()", "box"),
            (again - 30, end, "from copy, 2 ranks", kind),
        )
    picture.step("Spare: --on-lost-rank continue --spares 1", "Open MPI 5, one host; the number of ranks remains 3")
    for rank in (0, 2):
        if rank == 2:
            killed_lane()
        kind = f"c{rank}"
        lane(
            f"rank {rank}",
            (left, killed + 30, "updates", kind),
            (killed + 30, again - 30, "recover()", "box"),
            (again - 30, end, "from copy, 3 ranks", kind),
        )
    lane("spare", (left, again - 30, "waits in start()", "off"), (again - 30, end, "is rank 1", "c1"))
    picture.text(
        MARGIN, picture.y + 12, "Time runs to the right. The lengths are not measured.", room=440, anchor="start"
    )
    picture.y += 16
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "how_job.svg": job,
    "how_allreduce_host.svg": allreduce_on_a_host,
    "how_backward.svg": backward,
    "how_allreduce_hosts.svg": allreduce_over_hosts,
    "how_servers.svg": servers,
    "how_lost_rank.svg": lost_rank,
}


def stale() -> dict[Path, str]:
    """Return the files that are not what this script draws, with what it draws."""
    wanted = {IMAGES / name: draw().svg() for name, draw in PICTURES.items()}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    found = stale()
    for path, text in found.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run scripts/draw_pictures.py")
        else:
            path.write_text(text)
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
