"""What stands where the module ``mpi4py.MPI`` does: its names, as far as torchmpi uses them."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from ... import _version
from .addresses import Place
from .datatypes import DATATYPES, IN_PLACE, OPS, Datatype, Op, buffer
from .intracomm import COMM_TYPE_SHARED, Intracomm
from .losses import LossWatch
from .requests import ANY, NOBODY, UNDEFINED, CommunicationError, Request, Status
from .socket_endpoint import Endpoint


class StandIn:
    """A world of ranks that have met."""

    ANY_SOURCE = ANY_TAG = ANY
    PROC_NULL = NOBODY
    UNDEFINED = UNDEFINED
    COMM_TYPE_SHARED = COMM_TYPE_SHARED
    COMM_NULL = None
    IN_PLACE = IN_PLACE
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    Request, Status, Datatype, Op, buffer = Request, Status, Datatype, Op, buffer
    Exception = CommunicationError

    def __init__(self, endpoint: Endpoint, places: list[Place]) -> None:
        self._endpoint = endpoint
        self.COMM_WORLD = Intracomm(endpoint, range(endpoint.size), 0, [place.memory for place in places])
        atexit.register(self.close)

    def __getattr__(self, name: str) -> Any:
        """The types and operations."""
        found = DATATYPES.get(name) or OPS.get(name)
        if found is None:
            raise AttributeError(f"torchmpi's sockets have no MPI.{name}")
        return found

    def get_vendor(self) -> tuple[str, tuple[int, ...]]:
        """Name and version, as mpi4py has them of the MPI library."""
        numbers = _version.__version__.split(".")[:3]
        return "torchmpi sockets", tuple(int(number) for number in numbers if number.isdigit())

    def Query_thread(self) -> int:
        """All threads may call at once."""
        return self.THREAD_MULTIPLE

    def Is_initialized(self) -> bool:
        """Yes: it exists."""
        return True

    def Is_finalized(self) -> bool:
        """Whether it has been closed."""
        return self._endpoint.is_closed

    def watch_ranks(self, end_job: Callable[[str, int], None]) -> Callable[[], None]:
        """Have the job ended when a rank dies without a word; gives what ends the watch."""
        watch = LossWatch(self._endpoint.rank, end_job)
        self._endpoint.on_loss = watch.note

        def stop() -> None:
            self._endpoint.on_loss = None
            watch.stop()

        return stop

    def close(self) -> None:
        """Say goodbye and leave; nothing stays open. A second call is harmless."""
        self._endpoint.close()
        atexit.unregister(self.close)

    Finalize = close
