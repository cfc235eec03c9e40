"""To whoever shares a network: random content gives clear errors and no hang. For files: fuzz_inputs.py."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchmpi.cli.doctor import diagnosis
from torchmpi.launch.launcherless.endpoint import _HEAD, Endpoint
from torchmpi.launch.launcherless.requests import CommunicationError

FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
MANY = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


# --- messages between ranks without a launcher -----------------------------------------------------------------------

frames = st.builds(
    lambda context, length, tag, kind, body: _HEAD.pack(context, length, tag, kind) + body,
    st.integers(0, 3) | st.integers(0, 2**64 - 1),
    st.integers(0, 64) | st.integers(0, 2**64 - 1),
    st.integers(-3, 3) | st.integers(-(2**31), 2**31 - 1),
    st.sampled_from((0, 0, 0, 1, 2, 3)) | st.integers(4, 2**32 - 1),
    st.binary(max_size=80),
)


@FEW
@given(st.lists(frames | st.binary(max_size=64), max_size=6))
def test_an_endpoint_survives_any_bytes_of_a_peer(stream):
    """Receives end with a message or an error; the memory taken does not follow the announced length."""
    own, other = socket.socketpair()
    endpoint = Endpoint(0, ["here", "there"], {1: own}, 50e-6)
    endpoint._end_with = lambda *_: None  # type: ignore[method-assign]  # which ends this process
    try:
        receive = endpoint.receive(0, 1, 0, memoryview(bytearray(64)), [0, 1])
        other.settimeout(5)
        try:
            other.sendall(b"".join(stream))
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused
        with contextlib.suppress(CommunicationError):
            receive.Wait()
        assert endpoint._reader.is_alive() or not endpoint._links_open
    finally:
        other.close()
        endpoint.close()


@pytest.mark.parametrize("length", (2**63, 2**48, 2**40))
def test_an_announced_length_beyond_the_memory_ends_the_connection(length):
    """Regression: the reading thread died in the allocation, and later receives waited forever."""
    own, other = socket.socketpair()
    endpoint = Endpoint(0, ["here", "there"], {1: own}, 50e-6)
    try:
        other.sendall(_HEAD.pack(0, length, 5, 0))
        receive = endpoint.receive(0, 1, 0, memoryview(bytearray(8)), [0, 1])
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(CommunicationError):
            receive.Wait()
    finally:
        other.close()
        endpoint.close()


# --- output of trial processes --------------------------------------------------------------------------------------


@MANY
@given(st.text(max_size=60), json_values)
def test_messages_of_trial_processes_in_any_output(noise, value):
    mark = diagnosis._MESSAGE_MARK
    found = diagnosis.messages(f"{noise}\n{mark}{noise}\n{mark}{json.dumps({'value': str(value)})}")
    assert {"value": str(value)} in found
