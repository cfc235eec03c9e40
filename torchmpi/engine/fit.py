"""Training in one call, from a network and a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from ..argument_types import checks_types
from ..errors import ArgumentError, kind_of
from ..session import api
from .allreduce_engine import AllReduceSGDEngine
from .meters import AverageValueMeter
from .state import State
from .updates import trained_parameters

Data = Dataset[Any] | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FitResult:
    """Result of :func:`fit`, equal on all ranks except for `rank` and the state.

    Attributes:
        network: The trained network.
        history: For each epoch of this call a dict: "epoch", "loss" (mean over all examples while training), and with
            validation data "validation", a dict of "loss", "error" for a classification, and the metrics.
        state: Final state of the run.
        rank: Rank of this process, also if ``fit()`` has started torchmpi and stopped it.

    Example:
        if result.rank == 0:
            print(result.history[-1]["validation"]["error"])
    """

    network: nn.Module
    history: list[dict[str, Any]]
    state: State
    rank: int


@checks_types
def fit(
    network: nn.Module,
    data: Data,
    *,
    batch_size: int = 32,
    max_epochs: int = 1,
    criterion: Callable[..., Tensor] | None = None,
    lr: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    validate: Data | None = None,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    engine: AllReduceSGDEngine | None = None,
    **options: Any,
) -> FitResult:
    """Train a network on a dataset, divided over the ranks of the current communicator. Collective.

    The result does not depend on the number of ranks, apart from rounding and from layers such as batch norm and
    dropout: each batch has `batch_size` examples in total, in the same order, and all examples have equal weights. If
    torchmpi is not started, this function starts it, and stops it before it returns.

    Args:
        network: Network to train; moved to the device of this rank. The weights of rank 0 are copied to all ranks.
        data: Dataset of pairs ``(input, target)`` with a length, or two tensors. All ranks pass the same data.
        batch_size: Number of examples of a batch, over all ranks.
        max_epochs: Number of epochs.
        criterion: Loss, a mean over examples. Default: ``nn.CrossEntropyLoss()`` if targets are single integers.
        lr: Learning rate for plain SGD.
        optimizer: Any optimizer; default, without `lr`: ``torch.optim.Adam`` with its defaults.
        validate: Data to measure after each epoch, divided over the ranks too.
        shuffle: Shuffle the data anew in each epoch.
        seed: Seed of the order of the data.
        num_workers: Number of loading processes of each rank, as for a ``DataLoader``.
        engine: Engine with hooks and checkpoints; default: a new ``AllReduceSGDEngine()``.
        **options: Further options of ``AllReduceSGDEngine.train()``, such as `accumulate`, `clip_grad_norm`,
            `scheduler`, `autocast`, `metrics`, `stop_early` or `resume`.

    Returns:
        The network, the losses of all epochs, and the final state.

    Raises:
        ArgumentError: The data have no length, `batch_size` is less than the number of ranks, a criterion is needed, or
            as ``AllReduceSGDEngine.train()``.

    Example:
        result = fit(network, dataset, batch_size=64, max_epochs=5, lr=0.1, validate=test_dataset)
        print(result.history[-1]["validation"])
    """
    with ExitStack() as stack:
        if not api.is_started():
            stack.enter_context(api.started())
        dataset = _dataset("data", data)
        criterion = _default_criterion(dataset) if criterion is None else criterion
        batches = partial(_loader, dataset, batch_size, seed if shuffle else None, num_workers)
        if validate is not None:
            options["validate"] = partial(_loader, _dataset("validate", validate), batch_size, None, num_workers)
        if lr is None and optimizer is None:
            optimizer = torch.optim.Adam(trained_parameters(network, criterion))
        engine = AllReduceSGDEngine() if engine is None else engine
        history = stack.enter_context(_History(engine))
        state = engine.train(
            network=network,
            criterion=criterion,
            iterator=batches,
            lr=lr,
            optimizer=optimizer,
            max_epochs=max_epochs,
            **{"weight": "example", **options},
        )
        return FitResult(network, history.epochs, state, api.rank())


class DividedBatches(Sampler[list[int]]):
    """The indices of the part of one rank in each batch, in an order that depends on seed and epoch only.

    A `seed` of None takes the order of the data.

    A rank may have no part in the last batch.

    Example:
        >>> [list(DividedBatches(5, 4, rank, 2, None)) for rank in range(2)]
        [[[0, 1]], [[2, 3], [4]]]
    """

    def __init__(self, num_examples: int, batch_size: int, rank: int, size: int, seed: int | None) -> None:
        self._num_examples, self._batch_size, self._rank, self._size = num_examples, batch_size, rank, size
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self._epoch = epoch

    def _parts(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self._num_examples, self._batch_size):
            num = min(self._batch_size, self._num_examples - begin)
            first, last = num * self._rank // self._size, num * (self._rank + 1) // self._size
            if first < last:
                yield begin + first, begin + last

    def __len__(self) -> int:
        return sum(1 for _ in self._parts())

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._num_examples, device="cpu")
        if self._seed is not None:
            generator = torch.Generator("cpu").manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._num_examples, generator=generator, device="cpu")
        for first, last in self._parts():
            yield order[first:last].tolist()


class _History:
    """Losses of the epochs of a run, recorded by hooks."""

    def __init__(self, engine: AllReduceSGDEngine) -> None:
        self._engine, self._loss = engine, AverageValueMeter()
        self.epochs: list[dict[str, Any]] = []
        self._hooks = {
            "on_start_epoch": self._begin,
            "on_forward_criterion": self._count,
            "on_end_epoch": self._record,
        }

    def __enter__(self) -> _History:
        self._engine.add(self._hooks)
        self._engine.keep(fit_loss=self._loss)
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine._kept["fit_loss"]
        for name, hook in self._hooks.items():
            self._engine.hooks.at(name).remove(hook)  # type: ignore[arg-type]  # the keys are names of hooks

    def _begin(self, state: State) -> None:
        self._loss.reset()

    def _count(self, state: State) -> None:
        if state.training and state.sample is not None and state.loss is not None and state.sample.num_rows:
            self._loss.add(state.loss.detach(), state.sample.num_rows)

    def _record(self, state: State) -> None:
        epoch: dict[str, Any] = {"epoch": state.epoch, "loss": self._loss.synchronize().value()}
        if state.validation is not None:
            epoch["validation"] = {"loss": state.validation.loss.value(), **state.validation.metrics}
            if state.validation.error.num_samples:
                epoch["validation"]["error"] = state.validation.error.value()
        self.epochs.append(epoch)


def _dataset(name: str, data: Data) -> Dataset[Any]:
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        data = TensorDataset(*data)
    is_iterated = isinstance(data, (DataLoader, IterableDataset))
    if is_iterated or not (isinstance(data, Sized) and hasattr(data, "__getitem__")):
        raise ArgumentError(
            f"fit({name}=): {kind_of(data)} cannot be divided over the ranks; expected a dataset with a length "
            "and __getitem__, or two tensors. With other iterables use AllReduceSGDEngine.train(iterator=...)."
        )
    if not len(data):
        raise ArgumentError(f"fit({name}=): the dataset is empty")
    return data  # type: ignore[return-value]  # a list of pairs is a dataset too


def _loader(dataset: Dataset[Any], batch_size: int, seed: int | None, num_workers: int) -> DataLoader[Any]:
    rank, size = api.rank(), api.size()
    if batch_size < size:
        raise ArgumentError(f"fit(batch_size={batch_size}): a batch is divided over {size} ranks; use at least {size}")
    assert isinstance(dataset, Sized)
    sampler = DividedBatches(len(dataset), batch_size, rank, size, seed)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)


def _default_criterion(dataset: Dataset[Any]) -> nn.Module:
    example = dataset[0]
    target = example[1] if isinstance(example, (tuple, list)) and len(example) == 2 else None
    is_class = isinstance(target, int) and not isinstance(target, bool)
    if isinstance(target, Tensor):
        is_class = target.dim() == 0 and not target.is_floating_point() and target.dtype is not torch.bool
    if not is_class:
        kind = f"{target.dtype} of shape {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentError(
            f"fit() needs criterion=, since the target of the first example is {kind}; the default, cross entropy, is "
            "for single integers. Pass nn.MSELoss(), nn.BCEWithLogitsLoss() or another mean over examples."
        )
    return nn.CrossEntropyLoss()
