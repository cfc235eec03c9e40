"""One walk over the data: loads ahead, and can be taken up again in the middle."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from torchmpi.errors import CheckpointError

from . import rng
from .prefetch import Prefetcher
from .state import Sample, as_sample
from .transfer import Transfer


class _Loaded(NamedTuple):
    sample: Sample
    iterator_state: Any


def num_batches(iterator: Iterable[Any]) -> int | None:
    """How many batches an epoch has, if the iterator can tell.

    >>> num_batches([1, 2]), num_batches(iter([1, 2]))
    (2, None)
    """
    try:
        return len(iterator)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return None


def set_epoch(iterator: Any, epoch: int) -> None:
    """Tell the iterator or its sampler which epoch begins, if they want to know (``DistributedSampler``
    does).

    set_epoch(loader, 3)
    """
    for owner in (iterator, getattr(iterator, "sampler", None), getattr(iterator, "batch_sampler", None)):
        listener = getattr(owner, "set_epoch", None)
        if listener is not None:
            listener(epoch)


def iterator_state(iterator: Any) -> Any:
    """A copy of ``iterator.state_dict()``, or None if the iterator does not keep one.

    >>> iterator_state([1, 2])
    """
    if hasattr(iterator, "state_dict") and hasattr(iterator, "load_state_dict"):
        return copy.deepcopy(iterator.state_dict())
    return None


class Epoch:
    """One walk over `iterator`.

    with Epoch(loader, Transfer(device), depth=1) as epoch:
        while (sample := epoch.next()) is not None:
            train_on(sample)
    """

    def __init__(self, iterator: Iterable[Any], transfer: Transfer, depth: int, place: dict[str, Any] | None = None):
        self._iterator, self._transfer = iterator, transfer
        if place is None:
            self._rng = rng.capture(transfer.device)
            self._generators = rng.capture_generators(iterator)
            self._state = iterator_state(iterator)
            self._batches = iter(iterator)
        else:
            self._return_to(place)
        self._ahead = Prefetcher(self._load, depth)

    def place(self) -> dict[str, Any]:
        """What a checkpoint needs to continue after the batches taken so far, besides their number."""
        return {"begin": self._rng, "generators": self._generators, "iterator": self._state}

    def next(self) -> Sample | None:
        """The next batch on the device, or None after the last."""
        loaded = next(self._ahead, None)
        if loaded is None:
            return None
        self._state = loaded.iterator_state
        return self._transfer.adopt(loaded.sample)

    def _load(self) -> _Loaded:
        sample = as_sample(next(self._batches))
        return _Loaded(self._transfer.send(sample), iterator_state(self._iterator))

    def _return_to(self, place: dict[str, Any]) -> None:
        """Begin this epoch as it was begun, and skip what was taken; or leave it to an iterator that can do
        it.
        """
        self._rng, self._generators, self._state = place["begin"], place["generators"], place["iterator"]
        num_skipped = 0
        if self._state is not None:
            load_iterator_state(self._iterator, self._state)
        else:
            num_skipped = place["batch"]
            rng.restore_generators(self._iterator, self._generators)
            rng.restore(self._rng, self._transfer.device)
        self._batches = iter(self._iterator)
        for index in range(num_skipped):
            if next(self._batches, self) is self:
                raise CheckpointError(
                    f"the checkpoint was written after {num_skipped} batches of this epoch, but the iterator "
                    f"ended after {index}: resume with the same data and batch size"
                )
        rng.restore(place["rng"], self._transfer.device)

    def __enter__(self) -> Epoch:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ahead.__exit__(*exception)


def load_iterator_state(iterator: Any, state: Any) -> None:
    """Give an iterator back what :func:`iterator_state` took from it.

    >>> load_iterator_state([1, 2], None)
    """
    if state is None:
        return
    if not hasattr(iterator, "load_state_dict"):
        raise CheckpointError(
            f"the checkpoint has the state of an iterator, but a {type(iterator).__name__} has no load_state_dict()"
        )
    iterator.load_state_dict(state)
