"""Generate from a model whose matrices are divided over the ranks, by ``mpinn.tensor_parallel``.

Each rank has some of the heads and some of the columns of the feed-forward network. Two allreduces per block add up the
parts, of 4 bytes per feature and prompt when a token is generated. Tokens and logits are compared with those of the
undivided model; ``torchmpi bench parallel`` also measures DTensor.

    mpirun -n 2 python examples/llm/tp_generate.py
    python examples/llm/tp_generate.py
"""

from __future__ import annotations

import argparse
import time

import torch
from llama_model import HEAD, NUM_TOKENS, Llama, generate

import torchmpi as mpi
import torchmpi.nn as mpinn


def plan(width: int) -> dict[str, mpinn.TensorSplit]:
    """Return which layers are divided, and how: two heads of queries have one of keys and values."""
    num_key_heads = width // HEAD // 2
    return {
        "tokens": mpinn.TensorSplit("embedding"),
        "attention.[qkv]": mpinn.TensorSplit("columns", num_key_heads),
        "attention.o": mpinn.TensorSplit("rows", num_key_heads),
        "feed_forward.gate": mpinn.TensorSplit("columns"),
        "feed_forward.up": mpinn.TensorSplit("columns"),
        "feed_forward.down": mpinn.TensorSplit("rows"),
        "head": mpinn.TensorSplit("head"),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="number of features (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="number of blocks (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="number of prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="to generate for each prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts (default: %(default)s)")
    options = parser.parse_args()
    if options.width < 2 * HEAD or options.width % (2 * HEAD):
        parser.error(f"--width {options.width} is no multiple of {2 * HEAD}, the features of two heads")
    return options


def main() -> None:
    options = parse()
    mpi.start(with_cuda=False)
    torch.manual_seed(0)  # the same model and prompts on all ranks
    model = Llama(options.width, options.depth).eval()
    prompt = torch.randint(NUM_TOKENS, (options.batch_size, 16))
    expected_tokens, expected_logits = generate(model, prompt, options.tokens)
    num_whole = sum(parameter.numel() for parameter in model.parameters())
    mpinn.tensor_parallel(model, plan(options.width))  # with too many ranks, an error that says how many work

    seconds = []
    for _ in range(options.rounds):
        mpi.barrier()
        begin = time.perf_counter()
        tokens, logits = generate(model, prompt, options.tokens)
        seconds.append(time.perf_counter() - begin)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens, expected_tokens)
    share = sum(parameter.numel() for parameter in model.parameters()) / num_whole
    if mpi.rank() == 0:
        speed = options.batch_size * options.tokens / min(seconds)
        print(f"{mpi.size()} rank{'s' * (mpi.size() > 1)}: the tokens and logits of one process", flush=True)
        print(f"{speed:.0f} tokens per second, {share:.0%} of the weights on rank 0", flush=True)
    mpi.stop()


if __name__ == "__main__":
    main()
