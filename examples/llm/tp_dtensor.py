"""Generate as ``tp_generate.py`` does, with PyTorch's ``parallelize_module`` (DTensor), over any backend.

DTensor combines with FSDP2 (``parallel_gpt.py``), and takes longer for a token. The logits are compared with those of
the undivided model.

    mpirun -n 2 python examples/llm/tp_dtensor.py
    torchrun --nproc-per-node 2 examples/llm/tp_dtensor.py --backend gloo
    python examples/llm/tp_dtensor.py
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from llama_model import HEAD, NUM_TOKENS, Llama, generate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

COLUMNS = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
ROWS = ("attention.o", "feed_forward.down")


def divide(model: Llama, mesh: DeviceMesh) -> None:
    """Divide the matrices of the model over the ranks of the mesh, in place."""
    for block in model.blocks:
        columns = {name: ColwiseParallel() for name in COLUMNS}
        parallelize_module(block, mesh, columns | {name: RowwiseParallel() for name in ROWS})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="number of features (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="number of blocks (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="number of prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="to generate for each prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts (default: %(default)s)")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    step = 2 * HEAD * size  # two heads have one key
    if options.width % step:
        if rank == 0:
            nearest = max(1, round(options.width / step)) * step
            print(
                f"{size} rank{'s' * (size > 1)} cannot divide the heads of --width {options.width} evenly. Choose a "
                f"multiple of {step}, such as --width {nearest}.",
                file=sys.stderr,
            )
        dist.destroy_process_group()
        sys.exit(2)

    torch.manual_seed(0)
    model = Llama(options.width, options.depth).eval()
    prompt = torch.randint(NUM_TOKENS, (options.batch_size, 16))
    expected = generate(model, prompt, options.tokens)
    if size > 1:
        divide(model, init_device_mesh("cpu", (size,)))
    seconds = []
    for _ in range(options.rounds):
        dist.barrier()
        begin = time.perf_counter()
        tokens, logits = generate(model, prompt, options.tokens)
        seconds.append(time.perf_counter() - begin)
    torch.testing.assert_close(logits, expected[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens, expected[0])
    if rank == 0:
        speed = options.batch_size * options.tokens / min(seconds)
        print(f"{size} rank{'s' * (size > 1)} on {dist.get_backend()}: the logits of one process", flush=True)
        print(f"{speed:.0f} tokens per second", flush=True)
    dist.barrier()  # no rank may leave while others communicate
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
