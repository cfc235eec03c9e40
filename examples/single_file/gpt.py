"""A small GPT on the texts that Python has with it, on torchmpi.nn; then rank 0 writes a sample.

torchmpi run -n 2 examples/single_file/gpt.py
"""

import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import torchmpi as mpi
import torchmpi.nn as mpinn

CONTEXT, WIDTH, DEPTH, STEPS, BATCH_SIZE = 32, 64, 2, 60, 32


class Windows(Dataset):
    """Windows of the bytes of a text, and the bytes that follow each of theirs."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(self.token(tokens) + self.position.weight[:length], mask=mask, is_causal=True))


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    text = "".join(pydoc_data.topics.topics.values()).encode()
    split = len(text) * 9 // 10
    train, held_out = Windows(text[:split]), Windows(text[split:])
    sampler = DistributedSampler(train, num_replicas=size, rank=rank)
    loader = DataLoader(train, BATCH_SIZE // size, sampler=sampler)

    torch.manual_seed(0)
    model = GPT()
    mpinn.synchronize_parameters(model)
    mpinn.register_async_backward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step, (inputs, targets) in zip(range(1, STEPS + 1), loader, strict=False):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        mpinn.clip_grad_norm_(model.parameters(), 1.0)  # also waits for the averages
        optimizer.step()
        if step % 20 == 0:
            average = mpi.allreduce(loss.detach(), op="avg").item()
            if rank == 0:
                print(f"gpt: step {step}, loss {average:.2f} nats per byte")

    with torch.no_grad():  # each rank has its part of the text that was held out
        inputs, targets = (
            torch.stack(each) for each in zip(*(held_out[i] for i in range(rank, 64, size)), strict=True)
        )
        sums = torch.tensor(
            [cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()]
        )
        mpi.allreduce(sums)
        tokens = torch.tensor([list(b"The ")])
        while rank == 0 and tokens.shape[1] < CONTEXT:
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    loss = (sums[0] / sums[1]).item()
    if rank == 0:
        print(f"gpt: {size} ranks, validation loss {loss:.3f}: {bytes(tokens[0].tolist())!r}")
    assert loss < 2.9  # 5.5 by guessing
    mpi.stop()


if __name__ == "__main__":
    main()
