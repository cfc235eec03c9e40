"""A small GPT over bytes, with its loss, its optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_TOKENS = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for last in (self.projection, self.feed_forward[-1]):
            nn.init.zeros_(last.weight)  # a block is the identity at first, which shortens the training

    def forward(self, x: Tensor) -> Tensor:
        # [batch, time, 3 * width] becomes three tensors [batch, heads, time, width / heads].
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_2(x))


class GPT(nn.Module):
    """Predicts the next byte at each position. The embedding of the bytes is the weight of the last layer too."""

    def __init__(self, *, context: int, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(NUM_TOKENS, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        # With the usual 0.02, the logits of a network as narrow as this one are too small to learn from at first.
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        return functional.linear(self.norm(x), self.tokens.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of all positions, in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_optimizer(
    model: nn.Module, *, lr: float, steps: int, warm_up: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW, with weight decay for matrices only, and a schedule: linear warm-up, then a cosine to zero."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return the mean loss of the batches, all of the same size."""
    model.eval()
    losses = [loss_of(model(inputs.to(device)), targets.to(device)) for inputs, targets in batches]
    return torch.stack(losses).mean()
