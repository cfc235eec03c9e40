"""A GPT on long texts that are divided over the ranks, by ring attention, with the losses and gradients of one process.

torchmpi run -n 2 examples/single_file/ring_attention.py

Each text has 2n parts, of which rank r has the parts r and 2n-1-r, so that causal attention is the same work on all
ranks. Keys and values travel around the ring. Backward computes each block of attention again, so that a rank holds
the scores of one block only.
"""

import copy
import pydoc_data.topics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import torchmpi as mpi
import torchmpi.nn as mpinn

WIDTH, HEADS, DEPTH, BATCH, STEPS = 64, 4, 2, 4, 5
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Part = tuple[Tensor, Tensor]  # the attention to some blocks, and the logarithms of its sums of exponentials


def block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Part:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    return (scores - sums).exp() @ v, sums


def attend(q: Tensor, k: Tensor, v: Tensor, before: Part | None = None, is_causal: bool = False) -> Part:
    """Attend to one block more."""
    out, sums = checkpoint(block, q, k, v, is_causal, use_reentrant=False)
    if before is None:
        return out, sums
    total = torch.logaddexp(sums, before[1])
    return out * (sums - total).exp() + before[0] * (before[1] - total).exp(), total


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of both parts of this rank, the first dimension, to the parts of all ranks."""
    rank, size = mpi.rank(), mpi.size()
    early = attend(q[0], k[0], v[0], is_causal=True)
    late = attend(q[1], k[0], v[0], attend(q[1], k[1], v[1], is_causal=True))
    both = torch.stack([k, v])
    for distance in range(1, size):
        both = mpinn.functional.sendreceive(both, src=(rank - 1) % size, dst=(rank + 1) % size)
        k, v = both
        late = attend(q[1], k[0], v[0], late)
        if distance <= rank:  # these are of a rank before this one
            early = attend(q[0], k[0], v[0], early)
        else:
            late = attend(q[1], k[1], v[1], late)
    return torch.stack([early[0], late[0]])


class GPT(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(length, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(DEPTH))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(DEPTH))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for y in qkv(self.norm(x)).chunk(3, -1))
            x = x + attention(q, k, v).transpose(-3, -2).flatten(-2)
            x = x + down(gelu(up(self.norm(x))))
        return self.head(self.norm(x))


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    length = 2 * size * 64
    text = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()[: STEPS * BATCH * length + 1]))
    positions = torch.arange(length)

    def own(whole: Tensor) -> Tensor:
        """The two parts of this rank, along a new first dimension."""
        return whole.unflatten(-1, (2 * size, -1)).movedim(-2, 0)[[rank, 2 * size - 1 - rank]]

    torch.manual_seed(0)
    model = GPT(length)
    twin = copy.deepcopy(model)  # is trained in one process
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin)]
    for step in range(STEPS):
        inputs, targets = (
            text[begin : begin + STEPS * BATCH * length].view(STEPS, BATCH, length)[step] for begin in (0, 1)
        )
        logits = model(own(inputs), own(positions).unsqueeze(1), ring_attention)
        loss = cross_entropy(logits.flatten(0, -2), own(targets).flatten())
        expected = twin(inputs, positions, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
        expected_loss = cross_entropy(expected.flatten(0, -2), targets.flatten())
        for optimizer, each in zip(optimizers, (loss, expected_loss), strict=True):
            optimizer.zero_grad()
            each.backward()
        mpinn.synchronize_gradients(model)
        torch.testing.assert_close(mpi.allreduce(loss.detach(), op="avg"), expected_loss.detach())
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        for optimizer in optimizers:
            optimizer.step()
    if rank == 0:
        print(f"ring_attention: {size} ranks, {length} tokens, loss {expected_loss:.3f} as in one process")
    mpi.stop()


if __name__ == "__main__":
    main()
