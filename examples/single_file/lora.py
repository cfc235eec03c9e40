"""Fine-tune a causal language model of Transformers with LoRA: small matrices beside frozen ones are trained.

    torchmpi run -n 2 examples/single_file/lora.py

The model is a small one with random weights, made on the spot; yours is AutoModelForCausalLM.from_pretrained(...).
Only the gradients of the small matrices are sent: torchmpi leaves frozen parameters out.
Needs ``pip install 'transformers>=5.0'``.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import torchmpi as mpi
import torchmpi.nn as mpinn

RANK_OF_LORA, LENGTH, VOCABULARY, EPOCHS, BATCH_SIZE = 8, 12, 16, 6, 32


class LoRA(nn.Module):
    """A frozen linear layer plus the product of two small matrices, the second of which begins with zeros."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK_OF_LORA, bias=False)
        self.up = nn.Linear(RANK_OF_LORA, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def add_lora(model: nn.Module) -> None:
    """Freeze a model, and put LoRA around each of its linear layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child))


def sequences(number: int, seed: int) -> TensorDataset:
    """Numbers that count up from a random one: the next is always the last plus 1."""
    starts = torch.randint(VOCABULARY, (number, 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset((starts + torch.arange(LENGTH)) % VOCABULARY)


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    add_lora(model)
    mpinn.synchronize_parameters(model)  # all ranks have the random numbers of rank 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    train = sequences(480, seed=1)
    sampler = DistributedSampler(train, num_replicas=size, rank=rank)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (tokens,) in DataLoader(train, BATCH_SIZE // size, sampler=sampler):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            mpinn.synchronize_gradients(model)
            optimizer.step()

    (tokens,) = sequences(60, seed=2)[rank::size]
    with torch.no_grad():
        right = (model(input_ids=tokens[:, :-1]).logits.argmax(-1) == tokens[:, 1:]).float().mean()
    accuracy = mpi.allreduce(right, op="avg").item()
    if rank == 0:
        part = sum(each.numel() for each in trained) / sum(each.numel() for each in model.parameters())
        print(f"lora: {size} ranks, {part:.0%} of the parameters trained, accuracy of the next token {accuracy:.3f}")
    assert accuracy > 0.9
    mpi.stop()


if __name__ == "__main__":
    main()
