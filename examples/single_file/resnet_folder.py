"""A small ResNet on a folder of images, one folder for each class, with DistributedDataParallel.

    torchmpi run -n 2 examples/single_file/resnet_folder.py [FOLDER]

Without FOLDER, rank 0 draws images of squares, discs and crosses into a temporary folder.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler

SIDE, EPOCHS, BATCH_SIZE = 24, 4, 32


class ImageFolder(Dataset):
    """Images and the numbers of their folders. A file is read when it is needed, by workers of a DataLoader if any."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [(path, i) for i, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        pixels = np.asarray(Image.open(path).convert("RGB").resize((SIDE, SIDE)), np.float32)
        return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1), label


class Block(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(before, after, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def draw_images(folder: Path, per_class: int = 100) -> None:
    """Draw images of three classes at random places, in random colors, with noise."""
    random = np.random.default_rng(0)
    for name in ("cross", "disc", "square"):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            image = Image.fromarray(random.integers(0, 90, (SIDE, SIDE, 3), np.uint8))
            (x, y), r = random.integers(8, SIDE - 8, 2).tolist(), int(random.integers(4, 8))
            color, pen = tuple(random.integers(150, 256, 3).tolist()), ImageDraw.Draw(image)
            if name == "cross":
                pen.line((x - r, y - r, x + r, y + r), color, 2)
                pen.line((x - r, y + r, x + r, y - r), color, 2)
            else:
                (pen.ellipse if name == "disc" else pen.rectangle)((x - r, y - r, x + r, y + r), color)
            image.save(folder / name / f"{i}.png")


def main() -> None:
    dist.init_process_group("torchmpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as temporary:
        place = [sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/images"]
        dist.broadcast_object_list(place)  # the folder of rank 0; hosts must share it
        if rank == 0 and len(sys.argv) < 2:
            draw_images(Path(place[0]))
        dist.barrier()
        images = ImageFolder(Path(place[0]))
        num_test = len(images) // 5
        parts = random_split(images, [len(images) - num_test, num_test], torch.Generator().manual_seed(0))
        train, test = (DataLoader(p, BATCH_SIZE // size, sampler=DistributedSampler(p)) for p in parts)

        torch.manual_seed(0)
        net = nn.Sequential(Block(3, 16), Block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for epoch in range(EPOCHS):
            train.sampler.set_epoch(epoch)
            for inputs, targets in train:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()

        model.eval()
        counts = torch.zeros(2)  # right, all: the sampler repeats images so that all ranks have equally many
        with torch.no_grad():
            for inputs, targets in test:
                counts += torch.tensor([(model(inputs).argmax(1) == targets).sum(), len(targets)])
        dist.all_reduce(counts)
        accuracy = (counts[0] / counts[1]).item()
        if rank == 0:
            print(f"resnet_folder: {size} ranks, {len(images)} images, test accuracy {accuracy:.3f}")
        assert accuracy > 0.85
        dist.barrier()  # rank 0 removes the images
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
