"""A decoder that generates tokens, in one process and divided over the ranks, for ``torchmpi bench parallel``."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import nn as mpinn
from ...launch import affinity
from ...nn.row_product import linear
from .bench_job import BenchJob
from .divided_work import ONE_PROCESS, ParallelContestant, held_bytes

_NUM_TOKENS, _NUM_LAYERS, HEAD, _LENGTH = 1000, 4, 64, 64
_COMPARED, _TOLERANCE = 8, 1e-3
COLUMNS, ROWS = ("q", "k", "v", "up"), ("o", "down")


class DecoderBlock(nn.Module):
    """Attention with a cache of keys and values, and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        z = self.norm_1(x)
        q, k, v = (layer(z).view(1, -1, HEAD).transpose(0, 1) for layer in (self.q, self.k, self.v))
        if cache:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        cache[:] = k, v
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(attended.transpose(0, 1).flatten(1))
        output: Tensor = x + self.down(torch.relu(self.up(self.norm_2(x))))
        return output


class Decoder(nn.Module):
    """Predicts the next token after one token.

    >>> model = Decoder(128)
    >>> len(model.blocks), model(torch.tensor([3]), [[] for _ in model.blocks]).shape
    (4, torch.Size([1, 1000]))
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(_NUM_TOKENS, width), nn.Linear(width, _NUM_TOKENS, bias=False)
        self.blocks, self.norm = nn.ModuleList(DecoderBlock(width) for _ in range(_NUM_LAYERS)), nn.LayerNorm(width)

    def forward(self, token: Tensor, caches: list[list[Tensor]]) -> Tensor:
        x = self.tokens(token)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_decoder(width: int) -> Decoder:
    """Make the same decoder on every rank."""
    torch.manual_seed(1)
    return Decoder(width).eval()


class Generation:
    """Generates texts of 64 tokens, one token per call."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._position, self.logits = model, 0, torch.empty(0)
        self._caches: list[list[Tensor]] = []

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Generate one token; begin a new text after the last one."""
        if self._position % _LENGTH == 0:
            self._token, self._caches = torch.tensor([1]), [[] for _ in range(_NUM_LAYERS)]
        self._position += 1
        self.logits = self._model(self._token, self._caches)
        self._token = self.logits.argmax(-1)
        return self._token

    def first(self) -> tuple[list[int], Tensor]:
        """Return the first tokens of a text, and the logits of the last of them; begin a new text."""
        self._position = 0
        tokens = [int(self.step()) for _ in range(_COMPARED)]
        self._position = 0
        return tokens, self.logits


def plan(width: int) -> dict[str, mpinn.TensorSplit]:
    """Return how the decoder is divided; the embedding is replicated, of which a token uses one row."""
    heads = width // HEAD
    return {
        "[qkv]": mpinn.TensorSplit("columns", heads),
        "o": mpinn.TensorSplit("rows", heads),
        "up": mpinn.TensorSplit("columns"),
        "down": mpinn.TensorSplit("rows"),
        "head": mpinn.TensorSplit("head"),
    }


def _by_torch(model: Decoder, group: Any) -> nn.Module:
    """Divide a decoder by DTensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, "cpu")
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    styles |= {name: RowwiseParallel() for name in ROWS}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))
    return model


def decoders(job: BenchJob, width: int, batch: int, groups: Mapping[str, Any]) -> list[ParallelContestant]:
    """Make the contestants: one process, with one thread and with all cores, and the decoder divided over the ranks."""
    whole = make_decoder(width)
    alone = Generation(whole)
    expected = alone.first()
    cores = sorted({core for own in job.comm.allgather(sorted(affinity.current())) for core in own})
    held = held_bytes(whole)
    found = [ParallelContestant(ONE_PROCESS, alone.step, alone=True, held_bytes=held)]
    if job.one_clock and len(cores) > 1:
        step = _on_cores(cores, alone.step)
        found.append(ParallelContestant(f"{ONE_PROCESS}, {len(cores)} threads", step, alone=True, held_bytes=held))

    def add(name: str, divide: Callable[[Decoder], nn.Module], why_not: str | None = None) -> nn.Module:
        model = copy.deepcopy(whole) if why_not else divide(copy.deepcopy(whole))
        generation = Generation(model)
        why_not = why_not or _difference(generation.first(), expected)
        found.append(ParallelContestant(name, generation.step, why_not=why_not, held_bytes=held_bytes(model)))
        return model

    divided = add("tensor_parallel", lambda model: mpinn.tensor_parallel(model, plan(width)))
    found.append(ParallelContestant("its products", _products(divided)))
    uneven = f"DTensor cannot divide {width // HEAD} heads over {job.size} ranks" if width // HEAD % job.size else None
    for name, group in groups.items():
        add(f"DTensor on {name}", partial(_by_torch, group=group), uneven)
    return found


def _products(model: nn.Module) -> Callable[[], None]:
    """Return a step that reads the weights as a token does, without communication and all else: the limit."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    rows = [torch.randn(1, weight.shape[1]) for weight in weights]

    @torch.no_grad()
    def step() -> None:
        for row, weight in zip(rows, weights, strict=True):
            linear(row, weight)

    return step


def _difference(found: tuple[list[int], Tensor], expected: tuple[list[int], Tensor]) -> str | None:
    if found[0] != expected[0]:
        return f"wrong: the tokens {found[0]} instead of {expected[0]}"
    is_close = torch.allclose(found[1], expected[1], rtol=_TOLERANCE, atol=_TOLERANCE)
    return None if is_close else "wrong: the logits differ from those of one process"


def _on_cores(cores: list[int], step: Callable[[], object]) -> Callable[[], object]:
    """Return a step that may use these cores, with one thread on each."""

    def on_cores() -> None:
        own, threads = affinity.current(), torch.get_num_threads()
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        try:
            step()
        finally:
            torch.set_num_threads(threads)
            os.sched_setaffinity(0, own)

    return on_cores
