"""A device that executes work late: streams, events and memory as CUDA defines them, run by a random scheduler.

Work queued on a stream runs at any later moment, in the order of the stream and after the events for which the stream
waits, and at the latest at a synchronization. Code that omits an event therefore computes wrong numbers for some
random numbers, as it sometimes would on a device.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchmpi.tensors import streams

DEVICE = torch.device("cuda", 0)


class Event:
    """Completes when the stream that recorded the event reaches this position."""

    def __init__(self, model: Model) -> None:
        self._model, self.has_happened = model, False

    def query(self) -> bool:
        self._model.drift()
        return self.has_happened

    def synchronize(self) -> None:
        self._model.run_until(lambda: self.has_happened)


class Stream:
    """A queue of work, of which any number of entries may have been executed."""

    def __init__(self, model: Model, device: torch.device = DEVICE) -> None:
        self.model, self.device = model, device
        self.queue: deque[Callable[[], bool]] = deque()
        """Each entry executes and returns True, or returns False if it cannot be executed yet."""

    def enqueue(self, work: Callable[[], object]) -> None:
        def done() -> bool:
            work()
            return True

        with self.model.lock:
            self.queue.append(done)
        self.model.drift()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.model)
        self.enqueue(lambda: setattr(event, "has_happened", True))
        return event

    def wait_event(self, event: Event) -> None:
        assert self is not self.model.captured, "a captured stream waits for work outside of the graph"
        with self.model.lock:
            self.queue.append(lambda: event.has_happened)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.model.run_until(lambda: not self.queue)


class Model:
    """The device: its streams, and the random numbers."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self._dice = random.Random(seed)
        self._haste = seed % 4  # no work is done until a synchronization
        self._streams: list[Stream] = []
        self._current = threading.local()
        self.contexts: set[int] = set()
        """The devices that were current when a stream was set, which costs memory on them."""
        self.default = self.stream()
        self.captured: Stream | None = None
        """The stream that a graph captures."""

    def stream(self, device: Any = DEVICE, **options: Any) -> Stream:
        stream = Stream(self, torch.device("cuda", getattr(device, "index", device)))
        self._streams.append(stream)
        return stream

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._current, "stream", self.default)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before
            self.contexts.add(self.current_device())

    def current_device(self) -> int:
        return getattr(self._current, "device", 0)

    def set_device(self, device: torch.device) -> None:
        assert device.index is not None
        self._current.device = device.index

    def drift(self) -> None:
        """Execute a random amount of the queued work."""
        with self.lock:
            for _ in range(self._dice.randrange(self._haste + 1)):
                self._step()

    def _step(self) -> bool:
        ready = [stream for stream in self._streams if stream.queue]
        self._dice.shuffle(ready)
        for stream in ready:
            if stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        with self.lock:
            while not is_reached():
                assert self._step(), "streams wait for each other forever"

    def tensor(self, values: torch.Tensor) -> DeviceTensor:
        """Return initialized memory of the device with these values."""
        return values.clone().as_subclass(DeviceTensor)

    def temporary(self, values: torch.Tensor) -> DeviceTensor:
        """Like `tensor`; when it is freed, the stream on which it was made reuses the memory, as with an allocator."""
        tensor = self.tensor(values)
        tensor.users = []
        weakref.finalize(tensor, self._reuse, plain(tensor), self.current_stream(), tensor.users)
        return tensor

    def _reuse(self, memory: torch.Tensor, stream: Stream, users: list[Stream]) -> None:
        for user in users:
            stream.wait_stream(user)
        stream.enqueue(lambda: memory.fill_(-1))

    def install(self, monkeypatch: Any) -> None:
        """The replacement of torch.cuda's streams."""
        monkeypatch.setattr(DeviceTensor, "model", self, raising=False)
        monkeypatch.setattr(streams, "_address_of_current", None)
        monkeypatch.setattr(streams, "_unused", {})
        for name, value in {
            "current_stream": self.current_stream,
            "Stream": self.stream,
            "stream": self.use,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "is_current_stream_capturing": lambda: self.current_stream() is self.captured,
            "Event": lambda **options: Event(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


class DeviceTensor(torch.Tensor):
    """A tensor whose copies are queued; other operations are not."""

    model: Model
    users: list[Stream]
    """The streams, besides the one of the allocation, that use the memory of a temporary tensor."""
    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]
    device = DEVICE  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Stream) -> None:
        """Let the memory of a temporary tensor be reused only after the work that the stream has when it is freed."""
        self.__dict__.get("users", []).append(stream)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.clone:
            return torch.empty(args[0].shape, dtype=args[0].dtype).as_subclass(cls).copy_(args[0])
        if func is torch.Tensor.copy_:
            target, source = (plain(tensor) for tensor in args[:2])
            stream = cls.model.current_stream()
            stream.enqueue(lambda: target.copy_(source))
            is_on_device = all(isinstance(tensor, DeviceTensor) for tensor in args[:2])
            if not (is_on_device or kwargs.get("non_blocking", False)):
                stream.synchronize()
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of the tensor, without the device."""
    return tensor.as_subclass(torch.Tensor)


def compute(tensor: DeviceTensor, function: Callable[[torch.Tensor], object]) -> None:
    """Queue a kernel on the current stream."""
    tensor.model.current_stream().enqueue(lambda: function(plain(tensor)))
