"""To the supervision of a job: the connections between hosts are made whatever the placement of the ranks."""

from __future__ import annotations

import socket

import pytest
from mpi4py import MPI

from torchmpi.supervision.host_ring import connect, connections

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2, 3), pytest.mark.min_ranks(2), pytest.mark.usefixtures("world")]
COMM = MPI.COMM_WORLD


@pytest.mark.parametrize("ranks_per_host", [1, 2, COMM.size])
def test_the_connected_ranks_meet(agree, ranks_per_host):
    """Ranks of one host by a socket without an address, others over the network."""
    hosts = [rank // ranks_per_host for rank in range(COMM.size)]
    sockets, names, problem = connect(COMM, hosts, f"h{hosts[COMM.rank]}")
    agree.equal(problem, "")
    agree.equal(names, [f"h{host}" for host in hosts])
    peers = {other for pair in connections(hosts) if COMM.rank in pair for other in pair} - {COMM.rank}
    agree.equal(set(sockets), peers)
    for sock in sockets.values():
        sock.settimeout(60)
        sock.sendall(bytes([COMM.rank]))
    for peer, sock in sockets.items():
        agree.equal(sock.recv(1), bytes([peer]))
        is_near = hosts[peer] == hosts[COMM.rank]
        agree.equal(sock.family, socket.AF_UNIX if is_near else socket.AF_INET, f"rank {peer}")
        sock.close()
