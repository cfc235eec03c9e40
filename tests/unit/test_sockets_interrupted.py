"""Exceptions out of signal handlers, which come at any moment: they neither hang a rank nor spoil what it receives."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sockets_rig import on_all, world

from torchmpi.distributed.sockets.datatypes import DATATYPES
from torchmpi.distributed.sockets.requests import CommunicationError

BYTE = DATATYPES["BYTE"]
BIG = 20_000_000


@pytest.fixture
def alarm():
    """Signals whose handler raises."""

    def handle(signum, frame):
        raise InterruptedError("the alarm")

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("leads", (True, False))
def test_an_exception_out_of_a_signal_handler_waits_for_the_message(alarm, leads):
    """Or the message would be written to memory that the caller has given back."""
    with world(2) as comms:
        received = np.zeros(5, np.uint8)
        if not leads:
            time.sleep(0.05)  # then the thread has taken over
        begin = time.monotonic()
        threading.Timer(0.5, comms[0].Send, ((np.ones(5, np.uint8), BYTE), 1, 1)).start()
        with pytest.raises(InterruptedError, match="the alarm"):
            alarm(0.2)
            comms[1].Recv((received, BYTE), 0, 1)
        assert received.all() and time.monotonic() - begin > 0.4
        comms[0].Send((np.ones(5, np.uint8), BYTE), 1, 1)
        comms[1].Recv((received, BYTE), 0, 1)


def test_a_second_one_gets_through(alarm):
    with world(2) as comms:
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.3)
            comms[1].Recv((np.zeros(5, np.uint8), BYTE), 0, 1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with pytest.raises(CommunicationError, match="interrupted twice"):
            comms[1].Barrier()
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            comms[0].Recv((np.zeros(5, np.uint8), BYTE), 1, 1)


@pytest.mark.parametrize("error", (InterruptedError, BlockingIOError, KeyboardInterrupt))
def test_an_exception_at_any_moment_neither_hangs_nor_spoils(error):
    """It comes in the middle of sending, reading, matching: whatever is then lost is lost with an error."""

    def handle(signum, frame):
        raise error

    def echo(comm):
        memory = np.zeros(300_000, np.uint8)
        while True:
            comm.Recv((memory, BYTE), 0, 1)
            comm.Send((memory, BYTE), 0, 1)

    def talk(comm, chance):
        received = np.zeros(300_000, np.uint8)
        for step in itertools.count():
            sent = np.full(chance.choice((10, 300_000)), step % 251, np.uint8)
            request = comm.Isend((sent, BYTE), 1, 1)
            comm.Recv((received, BYTE), 1, 1)
            request.Wait()
            assert (received == step % 251)[: len(sent)].all()

    chance, before = random.Random(5), signal.getsignal(signal.SIGALRM)
    for _ in range(40):
        with world(2, eager_seconds=50e-6) as comms:
            others = []
            thread = threading.Thread(target=lambda comms=comms, others=others: others.extend(on_all(comms[1:], echo)))
            thread.start()
            signal.signal(signal.SIGALRM, handle)
            try:
                with pytest.raises(error):
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + chance.random() * 0.01)
                    talk(comms[0], chance)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            comms[0].endpoint.close()
            thread.join()
            assert "rank 0 " in str(others[0]), others


def test_signals_at_any_moment_lose_no_byte(alarm):
    """A thousand alarms without an exception, while much is sent both ways."""
    signal.signal(signal.SIGALRM, lambda signum, frame: None)
    with world(2) as comms:
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        data, received = np.arange(BIG).astype(np.uint8), np.zeros(BIG, np.uint8)

        def echo(comm):
            memory = np.zeros(BIG, np.uint8)
            for _ in range(5):
                comm.Recv((memory, BYTE), 0, 1)
                comm.Send((memory, BYTE), 0, 1)

        thread = threading.Thread(target=echo, args=(comms[1],), daemon=True)
        thread.start()
        for _ in range(5):
            comms[0].Send((data, BYTE), 1, 1)
            received[:] = 0
            comms[0].Recv((received, BYTE), 1, 1)
            assert (received == data).all()
        thread.join()
