"""To a user of several networks: the address at which other hosts reach this one is chosen, and silence is limited."""

from __future__ import annotations

import errno
import socket

import psutil
import pytest

from torchmpi.launch import network

BRIDGE = "172.17.0.1/16"


@pytest.mark.parametrize(
    ("own", "others", "address"),
    [
        (["10.0.0.1/24"], [["10.0.0.2/24"], ["10.0.0.3/24"]], "10.0.0.1"),
        (["127.0.0.1/8", BRIDGE, "10.1.0.1/24"], [["127.0.0.1/8", BRIDGE, "10.1.0.2/24"]], "10.1.0.1"),
        (["10.0.0.1/24", "10.1.0.1/24"], [["10.0.0.2/24", "10.1.0.2/24"], ["10.1.0.3/24"]], "10.1.0.1"),
        (["fd00::1/64", "fe80::1/64"], [["fe80::2/64", "fd00::2/64"]], "fd00::1"),
        (["fd00::1/64", "10.0.0.1/24"], [["fd00::2/64", "10.0.0.2/24"]], "10.0.0.1"),
        (["fe80::1/64"], [["fe80::2/64"]], None),
        (["10.0.0.1/24"], [["10.9.0.2/24"]], None),
        ([], [["10.9.0.2/24"]], None),
    ],
)
def test_the_network_that_all_hosts_share(own, others, address):
    assert network.address_among(own, others) == address


def test_ranks_of_one_host_use_loopback():
    assert network.choose([("a", ["10.0.0.1/24"])] * 3, 1) == network.loopback()


def test_hosts_without_a_common_network_use_the_route():
    assert network.choose([("a", ["10.0.0.1/32"]), ("b", ["10.0.0.2/32"])], 0) == network.address_of_route()


def test_own_interfaces_include_loopback():
    assert any(interface.split("/")[0] == network.loopback() for interface in network.own_interfaces())


def test_interfaces_are_found_where_their_speed_cannot_be_asked(monkeypatch):
    """Regression: under qemu, psutil raises OSError for the state of the interfaces."""

    def refused():
        raise OSError(errno.ENOSYS, "Function not implemented (originated from ioctl(SIOCETHTOOL))")

    expected = network.own_interfaces(["lo"])
    monkeypatch.setattr(psutil, "net_if_stats", refused)
    assert network.own_interfaces(["lo"]) == expected != []


@pytest.mark.parametrize(("seconds", "probe"), [(60.0, 10), (6.5, 1), (0.5, 1)])
def test_a_silent_connection_is_probed_and_ended_by_the_kernel(seconds, probe):
    with socket.socket(socket.AF_INET) as sock:
        network.limit_silence(sock, seconds)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        found = [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert found == [probe, probe, 1000 * seconds]
