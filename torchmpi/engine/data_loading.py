"""One pass over the data: loading ahead in a thread, copying to the device, and resuming within an epoch.

Batches are loaded ahead in order, and without a change of random numbers. A loading thread that draws from the
global random generators, while dropout draws from them in the training thread, would make runs irreproducible. The
thread therefore starts only for an iterator that does not draw from these generators: the first batch (where samplers
draw their seed) and the second are loaded in the training thread; if the second draws too, as random augmentation
does, all batches are loaded there. ``DataLoader(num_workers=1)`` is loaded ahead, as its workers have generators of
their own.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import timeline
from ..errors import CheckpointError, kind_of
from ..tensors import random_states, streams
from . import rng
from .state import Sample, as_sample

T = TypeVar("T")
Source = Iterable[Any] | Callable[[], Iterable[Any]]
"""An iterator over batches, or a function that makes it for the present rank and number of ranks."""

CLOSE_TIMEOUT_S = 2.0
"""Limit of the wait for a load in progress after a run has failed: a failed job must end within seconds."""


def is_function(source: Source) -> bool:
    """Return whether a source makes its iterator.

    >>> is_function(lambda: [1, 2]), is_function([1, 2])
    (True, False)
    """
    return callable(source) and not hasattr(source, "__iter__")


def make(source: Source) -> Iterable[Any]:
    """Return the iterator of a source.

    >>> make(lambda: [1, 2]), make([3])
    ([1, 2], [3])
    """
    return source() if is_function(source) else source  # type: ignore[operator, return-value]


def num_batches(iterator: Iterable[Any]) -> int | None:
    """Return the number of batches of an epoch, or None if the iterator has no length.

    >>> num_batches([1, 2]), num_batches(iter([1, 2]))
    (2, None)
    """
    try:
        return len(iterator)  # type: ignore[arg-type]  # an iterator without a length raises
    except TypeError:
        return None


def set_epoch(iterator: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of the iterator and its samplers, if defined (as by ``DistributedSampler``)."""
    for owner in rng.owners(iterator):
        listener = getattr(owner, "set_epoch", None)
        if listener is not None:
            listener(epoch)


def iterator_state(iterator: Any) -> Any:
    """Return a copy of ``iterator.state_dict()``, or None if the iterator cannot save and load its state.

    >>> iterator_state([1, 2])
    """
    if hasattr(iterator, "state_dict") and hasattr(iterator, "load_state_dict"):
        return copy.deepcopy(iterator.state_dict())
    return None


def load_iterator_state(iterator: Any, state: Any) -> None:
    """Restore the result of :func:`iterator_state`.

    >>> load_iterator_state([1, 2], None)
    """
    if state is None:
        return
    if not hasattr(iterator, "load_state_dict"):
        raise CheckpointError(
            f"the checkpoint has the state of an iterator, but {kind_of(iterator)} has no load_state_dict()"
        )
    iterator.load_state_dict(state)


# --- copying to the device ---------------------------------------------------------------------------------


def map_tensors(function: Callable[[Tensor, str], Tensor], value: Any, name: str = "") -> Any:
    """Apply `function` to every tensor in nested tuples, lists and mappings, and to its name; keep all other values.

    >>> map_tensors(lambda tensor, name: print(name), {"a": (torch.ones(1), ["label"])})
    a.0
    {'a': (None, ['label'])}
    """

    def inner(key: Any, item: Any) -> Any:
        return map_tensors(function, item, f"{name}.{key}" if name else str(key))

    if isinstance(value, Tensor):
        return function(value, name)
    if isinstance(value, PackedSequence):
        kept = value.batch_sizes  # on the host, whatever the device
        return PackedSequence(
            *(item if item is kept else inner(field, item) for field, item in zip(value._fields, value, strict=True))
        )
    if isinstance(value, Mapping):
        return {key: inner(key, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [inner(index, item) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class DeviceCopy:
    """Copies batches to a device. On a GPU the copies use a stream of their own and overlap with the current step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.get_ident()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def send(self, sample: Sample) -> Sample:
        """Copy a batch; the copy is complete on return.

        >>> DeviceCopy(torch.device("cpu")).send(Sample(torch.ones(1), 0)).input
        tensor([1.])
        """
        if self._stream is None:
            return Sample(*(map_tensors(lambda t, _: t.to(self.device), part) for part in sample))
        if threading.get_ident() != self._thread:
            streams.move_to(self._stream.device)
        with torch.cuda.stream(self._stream):
            sent = Sample(*(map_tensors(lambda t, _: t.to(self.device, non_blocking=True), part) for part in sample))
        self._stream.synchronize()
        return sent

    def adopt(self, sample: Sample) -> Sample:
        """Make the result of `send` safe to use on the stream of the calling thread.

        >>> DeviceCopy(torch.device("cpu")).adopt(Sample(1, 2))
        Sample(input=1, target=2)
        """
        if self._stream is not None:
            # The memory belongs to the copy stream. Without the record, the allocator would use it for a later copy as
            # soon as the batch is dropped, although kernels of the step may still read the batch.
            current = torch.cuda.current_stream(self.device)

            def record(tensor: Tensor, _: str) -> Tensor:
                tensor.record_stream(current)
                return tensor

            for part in sample:
                map_tensors(record, part)
        return sample


# --- loading ahead -----------------------------------------------------------------------------------------


class Prefetcher(Generic[T]):
    """Iterates over the results of `load` until it raises ``StopIteration``, loading up to `depth` batches ahead.

    Exceptions of `load` are raised by the iteration that would have returned the batch, with the traceback of the
    thread.
    """

    def __init__(self, load: Callable[[], T], depth: int) -> None:
        self._load, self._depth = load, depth
        self._num_direct = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._room = threading.Semaphore(depth)
        self._loaded: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._is_closed:
            raise StopIteration
        try:
            return self._take() if self._thread else self._load_directly()
        except BaseException:
            self._is_closed = True
            raise

    def _load_directly(self) -> T:
        watched = self._depth > 0 and self._num_direct == 1
        before = random_states.fingerprint() if watched else None
        item = self._load()
        self._num_direct += 1
        if watched and random_states.fingerprint() == before:
            self._thread = threading.Thread(target=self._run, name="torchmpi-prefetch", daemon=True)
            self._thread.start()
        return item

    def _take(self) -> T:
        item, error = self._loaded.get()
        self._room.release()
        if error is not None:
            try:
                raise error
            finally:
                del error  # otherwise this frame, the error and its traceback keep each other alive
        return cast(T, item)  # T may itself be None, so None is no sign of an error

    def _run(self) -> None:
        while True:
            self._room.acquire()
            if self._is_closed:
                return
            try:
                self._loaded.put((self._load(), None))
            except BaseException as error:
                self._loaded.put((None, error))
                return

    def close(self, timeout: float | None = None) -> None:
        """Stop loading and wait up to `timeout` seconds for the thread to end. May be called twice.

        >>> Prefetcher(iter([1]).__next__, depth=1).close()
        """
        self._is_closed = True
        if self._thread is not None:
            self._room.release()
            self._thread.join(timeout)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(CLOSE_TIMEOUT_S if kind else None)


# --- one epoch ---------------------------------------------------------------------------------------------


class _Loaded(NamedTuple):
    sample: Sample
    iterator_state: Any


class Epoch:
    """One pass over `iterator`, from the beginning or from a saved position."""

    def __init__(
        self, iterator: Iterable[Any], device_copy: DeviceCopy, depth: int, position: dict[str, Any] | None = None
    ) -> None:
        self._iterator, self._device_copy = iterator, device_copy
        if position is None:
            self._rng = random_states.capture(device_copy.device)
            self._generators = rng.capture_generators(iterator)
            self._state = iterator_state(iterator)
            self._batches = iter(iterator)
        else:
            self._return_to(position)
        self._ahead = Prefetcher(self._load, depth)

    def position(self) -> dict[str, Any]:
        """Return the state from which to continue, besides the number of batches taken so far, for a checkpoint."""
        return {"begin": self._rng, "generators": self._generators, "iterator": self._state}

    def next(self) -> Sample | None:
        """Return the next batch on the device, or None after the last."""
        with timeline.range("wait for a batch"):
            loaded = next(self._ahead, None)
        if loaded is None:
            return None
        self._state = loaded.iterator_state
        return self._device_copy.adopt(loaded.sample)

    def _load(self) -> _Loaded:
        with timeline.range("load a batch"):
            sample = as_sample(next(self._batches))
            return _Loaded(self._device_copy.send(sample), iterator_state(self._iterator))

    def _return_to(self, position: dict[str, Any]) -> None:
        """Restore the iterator's own state, or else begin the epoch with the same random state and skip batches."""
        self._rng, self._generators, self._state = position["begin"], position["generators"], position["iterator"]
        num_skipped = 0
        if self._state is not None:
            load_iterator_state(self._iterator, self._state)
        else:
            num_skipped = position["batch"]
            rng.restore_generators(self._iterator, self._generators)
            random_states.restore(self._rng, self._device_copy.device)
        self._batches = iter(self._iterator)
        for index in range(num_skipped):
            if next(self._batches, self) is self:
                raise CheckpointError(
                    f"the checkpoint was written after {num_skipped} batches of this epoch, but the iterator "
                    f"ended after {index}: resume with the same data and batch size"
                )
        random_states.restore(position["rng"], self._device_copy.device)

    def __enter__(self) -> Epoch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ahead.__exit__(kind, error, traceback)
        # End the processes of a DataLoader here. If they were left to the garbage collector, it would finalize their
        # queues first, and then wait 5 s for each process.
        self._batches = iter(())
