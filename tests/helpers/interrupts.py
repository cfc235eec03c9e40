"""Ctrl-C while a rank waits for rank 0 in a call."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

import torchmpi as mpi
from torchmpi import errors


def fails_or_is_interrupted(comm: mpi.Communicator, call: Callable[[], object]) -> None:
    """Make a call in which rank 0 comes later and differs; the other ranks get SIGINT in it."""
    main, is_over = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt() -> None:
        while comm.intra.call_log.current is None and not is_over.wait(0.001):
            pass
        if not is_over.is_set():
            signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if mpi.rank() == 0:
            time.sleep(0.3)
        else:
            interrupter.start()
        with pytest.raises((errors.MismatchError, KeyboardInterrupt)):
            call()
        is_over.set()
        if mpi.rank() != 0:
            interrupter.join()
    except KeyboardInterrupt:  # the signal arrived as the call ended
        is_over.set()
    finally:
        signal.signal(signal.SIGINT, before)
