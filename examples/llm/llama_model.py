"""A model of the shape of Llama with random weights: rotary positions, grouped queries, SwiGLU, a cache of keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_TOKENS, HEAD = 4096, 64


def rotated(x: Tensor, start: int) -> Tensor:
    """Rotate pairs of features [batch, heads, time, HEAD] by angles that grow with the position."""
    positions = torch.arange(start, start + x.shape[2], dtype=torch.float32)
    angles = positions[:, None] * 10_000 ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Attention(nn.Module):
    """Causal self-attention. The number of heads is that of the weights, so each rank may have some of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        num_heads = width // HEAD
        self.q, self.o = (nn.Linear(width, num_heads * HEAD, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, num_heads // 2 * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        start = cache[0].shape[2] if cache else 0
        q, k = rotated(q, start), rotated(k, start)
        if cache:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(cache, (k, v), strict=True))
        cache[:] = [k, v]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=start == 0, enable_gqa=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward network, each with a norm before and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width), FeedForward(width)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        x = x + self.attention(self.norm_1(x), cache)
        return x + self.feed_forward(self.norm_2(x))


class Llama(nn.Module):
    """Predicts the next token at each position."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, NUM_TOKENS, bias=False)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]]) -> Tensor:
        x = self.tokens(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return self.head(self.norm(x))


@torch.inference_mode()
def generate(model: Llama, prompt: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Append the likeliest tokens to prompts [batch, time]; return them, and the logits of the last positions."""
    caches: list[list[Tensor]] = [[] for _ in model.blocks]
    tokens, logits, new = [prompt], [], prompt
    for _ in range(num_tokens):
        logits.append(model(new, caches)[:, -1])
        new = logits[-1].argmax(dim=-1, keepdim=True)
        tokens.append(new)
    return torch.cat(tokens, dim=1), torch.stack(logits, dim=1)
