"""How ranks find each other through a store: on one host, on several, with strangers about, and if one is missing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from sockets_rig import on_all

from torchmpi.distributed.sockets import addresses, enter, wire
from torchmpi.distributed.sockets.addresses import Place
from torchmpi.distributed.sockets.rendezvous_store import _TABLE, StoreRendezvous
from torchmpi.errors import LaunchError

ONE_HOST = [Place("a", "a")] * 3
TWO_HOSTS = [Place("a", "a"), Place("b", "b"), Place("a", "a")]
THREE_HOSTS = [Place(name, name) for name in "abc"]


@pytest.fixture(params=("HashStore", "FileStore", "TCPStore"))
def stores(request, tmp_path):
    """Of each rank: a client of TCPStore serves one thread at a time."""
    if request.param == "HashStore":
        found = [dist.HashStore()] * 3
    elif request.param == "FileStore":
        found = [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    else:
        first = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
        found = [first, *(dist.TCPStore("127.0.0.1", first.port, 3, False, wait_for_workers=False) for _ in range(2))]
    return [dist.PrefixStore("job", store) for store in found]


def meet(stores, places, *, timeout_seconds=30.0):
    """The stand-in of each rank, or the error."""
    size = len(places)

    def come(rank):
        rendezvous = StoreRendezvous(stores[rank], rank, size, places[rank], timeout_seconds=timeout_seconds)
        return enter(rendezvous, rank, size)

    return on_all(range(size), come)


def listening():
    """The sockets of this process at which others could come in."""
    entries = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    own = {os.readlink(entry) for entry in entries if os.path.lexists(entry)}
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    tcp = [line.split() for table in tables for line in table]
    inodes = [fields[6] for fields in unix if fields[3] == "00010000"] + [line[9] for line in tcp if line[3] == "0A"]
    return sorted(inode for inode in inodes if f"socket:[{inode}]" in own)


@pytest.mark.parametrize("places", (ONE_HOST, TWO_HOSTS, THREE_HOSTS), ids=("one host", "two hosts", "three hosts"))
def test_all_meet_and_nothing_is_left(stores, places):
    before = listening()
    for _ in range(2):  # also again, through the same store
        ranks = meet(stores, places)
        assert [type(rank).__name__ for rank in ranks] == ["StandIn"] * 3, ranks
        assert listening() == before
        families = {
            (rank, peer): connection._socket.family
            for rank, stand_in in enumerate(ranks)
            for peer, connection in stand_in._endpoint._connections.items()
        }
        assert families == {
            (rank, peer): socket.AF_UNIX if places[rank] == places[peer] else socket.AF_INET
            for rank in range(3) for peer in range(3) if rank != peer
        }  # fmt: skip
        assert on_all(ranks, lambda MPI: MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank)) == [[0, 1, 2]] * 3
        near = on_all(ranks, lambda MPI: MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).world_ranks)
        assert near == [tuple(other for other in range(3) if places[other] == places[rank]) for rank in range(3)]
        assert not any(stores[0].check([key]) for key in (_TABLE, *(f"{_TABLE} {rank}" for rank in range(3))))
        for MPI in ranks:
            MPI.close()
        assert ranks[0].Is_finalized()


def test_a_stranger_is_dropped(tmp_path):
    """Who does not show the secret, says too little, or pretends to be who is there already."""
    store, results = dist.HashStore(), {}

    def come(rank):
        results[rank] = enter(StoreRendezvous(store, rank, 2, ONE_HOST[rank], timeout_seconds=30), rank, 2)

    first = threading.Thread(target=come, args=(0,), daemon=True)
    first.start()
    store.wait([f"{_TABLE} 0"])
    name = store.get(f"{_TABLE} 0").decode().split('"name": "')[1].split('"')[0]
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for stranger, fields in zip(strangers, (wire.GREETING.pack(b"x" * 16, 1), b"hello", b""), strict=True):
        stranger.connect("\0" + name)
        stranger.sendall(fields)
    come(1)
    first.join(30)
    assert results[0].COMM_WORLD.size == 2
    for stranger in strangers:
        stranger.settimeout(30)
        with contextlib.suppress(ConnectionResetError):  # unread data
            assert stranger.recv(1) == b""
        stranger.close()
    on_all([results[0], results[1]], lambda MPI: MPI.close())


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    with pytest.raises(LaunchError, match="rank 0: rank 1 has not come in time"):
        StoreRendezvous(store, 0, 2, ONE_HOST[0], timeout_seconds=0.3).run()


def test_who_fails_between_the_steps_is_named():
    """Rank 1 is in the table, but does not connect."""
    store = dist.HashStore()
    store.set(f"{_TABLE} 1", '{"place": ["a", "a"], "name": "nobody", "cores": [0]}')
    with pytest.raises(LaunchError, match="rank 0: rank 1 has not connected in time"):
        StoreRendezvous(store, 0, 2, ONE_HOST[0], timeout_seconds=0.5).run()
    store = dist.HashStore()
    entry = {"place": ["a", "a"], "name": "nobody", "cores": [0]}
    store.set(_TABLE, json.dumps({"ranks": [entry, entry], "secret": "00" * 16}))
    with pytest.raises(LaunchError, match=r"rank 1: rank 0 cannot be reached on this host: .*refused"):
        StoreRendezvous(store, 1, 2, ONE_HOST[1], timeout_seconds=5).run()


def test_the_own_address():
    own = addresses.interface_addresses()
    assert own["lo"] == "127.0.0.1"
    for name, address in own.items():
        assert addresses.own_address(None, {"GLOO_SOCKET_IFNAME": f"nosuch0,{name}"}) == address
    outside = [address for address in own.values() if not address.startswith("127.")]
    chosen = addresses.own_address(None, {})
    assert chosen in (outside or ["127.0.0.1"])
    assert addresses.here() == addresses.here()


def test_an_address_to_listen_at_is_that_towards_the_store():
    own = [address for address in addresses.interface_addresses().values() if not address.startswith("127.")]
    if not own:
        pytest.skip("this host has no network")
    store = dist.TCPStore(own[-1], 0, 1, True, wait_for_workers=False)
    assert addresses.own_address(dist.PrefixStore("a", dist.PrefixStore("b", store)), {}) == own[-1]
