"""The options of ``resnet.py``."""

from __future__ import annotations

import argparse

from resnet_model import MODELS


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    parser.add_argument("--model", choices=MODELS, default="resnet18", help="default: %(default)s")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--synthetic", action="store_true", help="synthetic images (the default)")
    source.add_argument("--data", metavar="DIR", help="directory of CIFAR-10's binary version: 32x32 images")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank (default: %(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="of synthetic images (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=1000, help="of synthetic images (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps, and steps alone (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch in each rank (default: unchanged)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 with autocast")
    parser.add_argument("--cpu", action="store_true", help="use the CPU (default: GPUs if there are any)")
    parser.add_argument("--json", metavar="FILE", help="add the figures to those of runs on other numbers of ranks")
    parser.add_argument("--plot", metavar="FILE", help="save a bar chart of these runs as an image")
    options = parser.parse_args()
    for name in ("batch_size", "image_size", "classes", "steps", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.data:
        options.image_size, options.classes = 32, 10
    return options
