"""Generate with Transformers from a Llama that ``tp_plan="auto"`` divides over the ranks. The weights are random.

The program is one for gloo, and unchanged. Transformers (``pip install 'transformers>=5.0'``) makes the process group:

    torchmpi run -n 2 --as gloo examples/llm/tp_transformers.py
    torchrun --nproc-per-node 2 examples/llm/tp_transformers.py
    python examples/llm/tp_transformers.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"This example needs Transformers ({error}): pip install 'transformers>=5.0'") from None

NUM_TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="number of features (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="number of blocks (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="number of prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="to generate for each prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts (default: %(default)s)")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.depth,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 128,
    )
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config).eval()
    prompt = torch.randint(NUM_TOKENS, (options.batch_size, 16))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    # Every rank reads weights of its own, so the ranks need no common folder.
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        divided = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto" if size > 1 else None).eval()

    arguments = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}
    expected = whole.generate(prompt, **arguments)
    seconds = []
    for _ in range(options.rounds):
        if size > 1:
            dist.barrier()
        begin = time.perf_counter()
        found = divided.generate(prompt, **arguments)
        seconds.append(time.perf_counter() - begin)
    with torch.inference_mode():
        torch.testing.assert_close(divided(found).logits, whole(expected).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, expected)
    if int(os.environ.get("RANK", "0")) == 0:
        speed = options.batch_size * options.tokens / min(seconds)
        print(f"{size} rank{'s' * (size > 1)}: the logits of one process", flush=True)
        print(f"{speed:.0f} tokens per second", flush=True)
    if size > 1:
        dist.barrier()  # no rank may leave while others communicate
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
