"""Load the next batches in a background thread, in order and without disturbing random numbers.

A thread that draws from the global random generators while the network draws its dropout from them would make
runs differ from one another. So the thread starts only after the iterator has shown that it leaves them
alone: the first batch (where samplers draw their seed) and the second are loaded in the training thread; if
the second drew numbers too, as random augmentation does, all batches are loaded there.
``DataLoader(num_workers=1)`` then loads ahead, as its workers have generators of their own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from . import rng

T = TypeVar("T")

# How long close() waits for a load that is under way when the run has failed: a job must end within seconds.
CLOSE_PATIENCE = 2.0


class Prefetcher(Generic[T]):
    """Iterate over what `load` returns until it raises ``StopIteration``, up to `depth` batches ahead.

    What `load` raises is raised where the batch would have been taken, with the traceback of the thread.

        with Prefetcher(iter(batches).__next__, depth=1) as ahead:
            for batch in ahead:
                train_on(batch)
    """

    def __init__(self, load: Callable[[], T], depth: int) -> None:
        self._load, self._depth = load, depth
        self._num_direct = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._room = threading.Semaphore(depth)
        self._loaded: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    @property
    def is_ahead(self) -> bool:
        """Whether a thread is loading ahead by now."""
        return self._thread is not None

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
        before = rng.fingerprint() if watched else None
        item = self._load()
        self._num_direct += 1
        if watched and rng.fingerprint() == before:
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
                del error  # else this frame, the error and its traceback keep each other alive
        return item  # type: ignore[return-value]  # None only with an error, or as what was loaded

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
        """Stop loading and wait until the thread has ended, at most `timeout` seconds. Twice is harmless.

        >>> Prefetcher(iter([1]).__next__, depth=1).close()
        """
        self._is_closed = True
        if self._thread is not None:
            self._room.release()
            self._thread.join(timeout)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.close(CLOSE_PATIENCE if kind else None)
