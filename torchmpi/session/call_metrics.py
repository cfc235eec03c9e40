"""``metrics()``: counts and times of the calls of this rank."""

from __future__ import annotations

from typing import Any

from . import runtime

__all__ = ["metrics"]


def metrics() -> dict[str, Any]:
    """Return counts and times of the calls that this rank has made since ``start()``. Not collective, and fast.

    A call is counted when it ends without an error. Its seconds include the wait for other ranks; those of an
    asynchronous call overlap with the program.

    The dictionary has these keys:

    - ``rank``, ``host``: of this process.
    - ``seconds``: in all calls together.
    - ``calls``: by name of the communicator and by collective, a dictionary of ``calls``, ``bytes``, ``seconds``,
      ``waited``, ``moved`` and ``stalls``. Bytes are those of the tensor that this rank passes, or receives if it
      passes none. ``waited`` is the part of the seconds in which this rank waited for others, ``moved`` the rest; both
      are 0 where that is not known.
    - ``steps``: the same for the steps of hierarchical calls, whose seconds are included in those of the calls.
    - ``messages``: the same for ``send``, ``recv`` and ``sendreceive``.
    - ``in_flight``: by name of the communicator, calls that have begun or are queued, and have not ended.
    - ``stalls``: calls and messages that have waited longer than ``stall_warning_seconds``.
    - ``updates``: the metrics of updates with parameter servers, by name.

    Returns:
        The dictionary.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            mpi.allreduce(tensor)
            print(mpi.metrics()["calls"]["world"]["allreduce"]["seconds"])
    """
    return runtime.current().metrics()
