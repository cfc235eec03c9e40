"""Connections between the hosts of a job: lost hosts end the job, and ranks ask each other for their status.

The first ranks of the hosts form a ring, and the other ranks of a host are connected to the first one. The kernels
probe the connections (:func:`torchmpi.launch.network.limit_silence`), so the thread of this module sleeps until a
message arrives or a connection ends. No message goes through MPI, which may crash when it sends to a process that has
ended.
docs/design/heartbeat.md has the reasons.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..communicators.rank_status import RankStatus
from ..launch import launcher, network
from .host_ring import HostLink, Message, ahead_of, leaders_of, next_hop

_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
# Before a rank reports a lost host: until then reports of other ranks arrive, and the lowest rank reports.
_LOSS_SECONDS = 1.0
# Before a rank reports a process that has ended: until then the launcher usually ends the job, with its own message,
# which names the rank, except under MPICH.
_GONE_SECONDS = 2.0
# Before a rank ends because another one has reported: until then the launcher usually ends this process.
_GRACE_SECONDS = 4.0
_SILENT_PROBES = 2.5
_QUIET_SECONDS = 1.0  # without an answer, after which no notice is sent
_TO_ALL = _NOBODY = -1


class HeartbeatQuestion:
    """A question to ranks for their status, over the connections between the hosts."""

    def __init__(self, heartbeat: Heartbeat, number: int, wanted: set[int]) -> None:
        self._heartbeat, self._number, self._wanted = heartbeat, number, wanted
        self._replies: dict[int, RankStatus] = {}
        heartbeat.replies[number] = self._replies

    def is_answered(self) -> bool:
        return self._wanted == self._replies.keys()

    def answers(self) -> dict[int, RankStatus]:
        """Return the answers, and for ranks behind one that does not answer that they cannot be asked."""
        self._heartbeat.replies.pop(self._number, None)
        answers = dict(self._replies)
        for rank in self._wanted - answers.keys():
            leader = self._heartbeat.leaders[rank]
            if rank != leader and leader in self._wanted and leader not in self._replies:
                answers[rank] = RankStatus(problem=f"cannot be asked, since rank {leader} does not reply")
        return answers


class Heartbeat:
    """The connections of this rank, and the thread that reads them."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        names: Sequence[str],
        sockets: Mapping[int, socket.socket],
        *,
        limit_seconds: float,
        own_status: Callable[[], RankStatus],
        location: Callable[[], str],
        end_job: Callable[[str, int], None],
        save_record: Callable[[str], None],
    ) -> None:
        """Start to read.

        `end_job` is called with a message and a status, and does not return; `save_record` with a folder to which this
        rank is to write its flight record.
        """
        self._rank, self._hosts, self._names = rank, tuple(hosts), tuple(names)
        self._limit_seconds, self._own_status = limit_seconds, own_status
        self._location, self._end_job, self._save_record = location, end_job, save_record
        leaders = leaders_of(hosts)
        self.leaders = [leaders[host] for host in hosts]
        """For each rank the first one of its host, to which its connection leads."""
        self._links = {peer: HostLink(peer, sock) for peer, sock in sockets.items()}
        for link in self._links.values():
            if self._is_far(link):
                network.limit_silence(link.sock, limit_seconds)
        self.replies: dict[int, dict[int, RankStatus]] = {}
        """By the number of the question, of which threads may ask several at once."""
        self._numbers = itertools.count()
        self.notices: dict[tuple[str, int], Any] = {}
        """The last notice on each subject, and of each rank (:meth:`send_notice`)."""
        self._seen: set[str] = set()
        self._losses: dict[str, int] = {}
        """Reports of lost hosts and ranks, each with the lowest rank that has noticed the loss."""
        self._end_at, self._has_waited = float("inf"), False
        self._quiet_status: int | None = None
        """The status with which another rank, which reports the reason, ends the job."""
        self.is_stalled = False
        """Whether a rank has told rank 0 that it waits."""
        self._is_closing = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="torchmpi heartbeat", daemon=True)
        self._thread.start()
        _open.add(self)

    @property
    def _silent_limit(self) -> float:
        """The seconds without an answer to a probe after which a host counts as unreachable."""
        return _SILENT_PROBES * max(1.0, self._limit_seconds / 6)

    def _is_far(self, link: HostLink) -> bool:
        return self._hosts[link.peer] != self._hosts[self._rank]

    # --- calls of other threads

    @property
    def is_this_thread(self) -> bool:
        """Whether the calling thread reads the connections, so that it cannot wait for replies."""
        return threading.current_thread() is self._thread

    def ask(self, ranks: Iterable[int]) -> HeartbeatQuestion:
        """Ask some ranks for their status."""
        wanted = set(ranks)
        question = HeartbeatQuestion(self, number := next(self._numbers), wanted)
        for rank in wanted:
            self._pass_on({"kind": "request", "to": rank, "from": self._rank, "number": number})
        return question

    def announce_stall(self) -> None:
        """Tell rank 0, which searches for deadlocks, that this rank waits."""
        if self._rank == 0:
            self.is_stalled = True
        else:
            self._pass_on({"kind": "stalled", "to": 0, "from": self._rank})

    def send_notice(self, to: int, subject: str, value: Any, of: int | None = None) -> None:
        """Tell a rank something, in types of JSON, of this rank or `of`; it replaces what that rank was told before."""
        of = self._rank if of is None else of
        self._pass_on({"kind": "notice", "to": to, "from": self._rank, "subject": subject, "of": of, "value": value})

    def ask_round_trip(self) -> int:
        """Return the round trip to the next host of the ring, in microseconds, and have the kernel measure it again.

        0 if it is not known: on a rank that is not the first one of its host, or of one host.
        """
        ahead = ahead_of(self._hosts, self._rank)
        link = self._links.get(ahead)
        if link is None or link.is_closed:
            return 0
        if self._takes_notices(link):
            link.send({"kind": "measure", "to": ahead, "from": self._rank})
        return network.round_trip_us(link.sock)

    def ask_for_records(self, request: Mapping[str, Any]) -> None:
        """Have the ranks of other hosts write their flight records to the folder of a request."""
        host = self._hosts[self._rank]  # equal for all ranks of this host, so that each rank answers once
        self._tell_all({"kind": "save", "to": _TO_ALL, "from": _NOBODY, "host": host, **request})

    def announce_end(self, status: int) -> None:
        """Tell all ranks that this one ends the job, in case that the launcher cannot end them."""
        self._tell_all({"kind": "ending", "to": _TO_ALL, "from": self._rank, "status": status})

    def close(self) -> None:
        """Say goodbye, and close the connections. A second call has no effect."""
        if self._is_closing:
            return
        for link in self._links.values():
            link.send({"kind": "goodbye", "to": link.peer, "from": self._rank})
        self._is_closing = True
        os.eventfd_write(self._bell, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors; also called in a forked child, which has inherited them."""
        _open.discard(self)
        for link in self._links.values():
            link.is_closed = True
            link.sock.close()
        os.close(self._bell)

    # --- the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        by_descriptor = {link.sock.fileno(): link for link in self._links.values()}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        while not self._is_closing:
            seconds = self._end_at - time.monotonic()
            for descriptor, _ in poll.poll(None if seconds > 1e6 else max(0.0, 1000 * seconds)):
                link = by_descriptor.get(descriptor)
                if link is None:
                    continue
                messages, error = link.receive()
                if self._is_far(link) and error is None:  # else up to 40 ms later, which `ask_round_trip` would measure
                    link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                for message in messages:
                    self._take(message, link)
                if self._is_far(link) and any(message["kind"] == "notice" for message in messages):
                    # So both sides of a link that is cut in one direction wait for an acknowledgement, and notice.
                    link.send({"kind": "heard", "to": link.peer, "from": self._rank})
                if error is not None:
                    poll.unregister(descriptor)
                    link.is_closed = True
                    self._lose(link, error)
            if time.monotonic() >= self._end_at and not self._is_closing:
                self._end()

    def _take(self, message: Message, link: HostLink) -> None:
        if message["kind"] in ("heard", "measure"):
            return
        if message["kind"] == "goodbye":
            link.said_goodbye = True
        elif message["to"] == _TO_ALL:
            self._tell_all(message)
        elif message["to"] != self._rank:
            self._pass_on(message, link.peer)
        elif message["kind"] == "request":
            reply = {"kind": "reply", "to": message["from"], "from": self._rank, "number": message["number"]}
            self._pass_on({**reply, "status": self._own_status().packed()})
        elif message["kind"] == "stalled":
            self.is_stalled = True
        elif message["kind"] == "notice":
            self.notices[message["subject"], message["of"]] = message["value"]
        else:
            replies = self.replies.get(message["number"], {})  # of a question that has ended: a late reply
            replies[message["from"]] = RankStatus.unpacked(message["status"])

    def _tell_all(self, message: Message) -> None:
        """Handle a message to all ranks, and pass it on; it arrives several times, since the hosts form a ring."""
        text = json.dumps(message, sort_keys=True)
        if text in self._seen:
            return
        self._seen.add(text)
        for link in self._links.values():
            link.send(message)
        if message["kind"] == "save":
            if message["host"] != self._hosts[self._rank]:
                # In a thread, since a slow file system must not delay the report of a lost host.
                threading.Thread(target=self._save_record, args=(message["folder"],), daemon=True).start()
            return
        if message["from"] == self._rank:
            return
        if message["kind"] == "ending":
            self._quiet_status = message["status"]
            self._end_at = time.monotonic() + _GRACE_SECONDS
        elif self._quiet_status is None:
            self._note_loss(message["report"], message["from"], _LOSS_SECONDS)

    def _pass_on(self, message: Message, came_from: int | None = None) -> None:
        """Send a message towards its destination, or reply in the place of a rank that cannot be reached."""
        to = message["to"]
        # Not back to where it came from: before a gap in the ring, two ranks would send it to each other forever.
        closed = [peer for peer, link in self._links.items() if link.is_closed or peer == came_from]
        hop = next_hop(self._hosts, self._rank, to, closed)
        problem = self._problem_with(to, hop)
        if hop is not None and not problem:
            if message["kind"] != "notice" or self._takes_notices(self._links[hop]):
                self._links[hop].send(message)
        elif message["kind"] == "request":
            reply = {"kind": "reply", "to": message["from"], "from": to, "number": message["number"]}
            reply["status"] = RankStatus(problem=problem).packed()
            if message["from"] == self._rank:
                self._take(reply, self._links[min(self._links)])
            else:
                self._pass_on(reply)

    def _takes_notices(self, link: HostLink) -> bool:
        """Return whether notices may be sent: not to a host that is silent.

        Through a link that is cut in one direction they would still arrive, and keep that host from noticing.
        """
        return not self._is_far(link) or network.silent_seconds(link.sock) < _QUIET_SECONDS

    def _problem_with(self, to: int, hop: int | None) -> str:
        """Return why a rank cannot be reached, if it is on this host or the next one; '' otherwise."""
        name = self._names[to]
        if hop is None:
            return "cannot be asked: a connection between the hosts has ended"
        if self._hosts[to] == self._hosts[hop] != self._hosts[self._rank]:
            seconds = network.silent_seconds(self._links[hop].sock)
            if seconds > self._silent_limit:
                return f"on host {name}: the host has been unreachable for {seconds:.0f} s"
        return ""

    # --- losses

    def _lose(self, link: HostLink, error: OSError) -> None:
        """Prepare the end of the job, because a connection has ended."""
        if link.said_goodbye or self._is_closing:
            return
        name = self._names[link.peer]
        seconds = network.silent_seconds(link.sock) if self._is_far(link) else 0.0
        if error.errno == errno.ETIMEDOUT:  # nothing was acknowledged for as long, whatever has arrived meanwhile
            seconds = max(seconds, self._limit_seconds)
        # Where a link is cut in one direction, the other host may notice first, and its reset arrives.
        if self._is_far(link) and (error.errno in _UNREACHABLE or seconds > self._silent_limit):
            ranks = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[link.peer]]
            listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            report, delay = f"host {name} ({listed}) has been unreachable for {seconds:.0f} s", _LOSS_SECONDS
        else:
            report = f"rank {link.peer} on host {name} has ended without mpi.stop() (killed?), or the host has crashed"
            # Without its only connection this rank does not hear of the report of another one.
            is_named = launcher.family(launcher.detect().name or "") != "MPICH"
            delay = _GONE_SECONDS * is_named + (
                _GRACE_SECONDS if len(self._links) == 1 and not self._is_far(link) else 0
            )
        if self._quiet_status is None:
            self._note_loss(report, self._rank, delay)
        self._tell_all({"kind": "lost", "to": _TO_ALL, "from": self._rank, "report": report})

    def _note_loss(self, report: str, rank: int, delay_seconds: float) -> None:
        self._losses[report] = min(rank, self._losses.get(report, rank))
        self._end_at = min(self._end_at, time.monotonic() + delay_seconds)

    def _end(self) -> None:
        if self._quiet_status is not None:
            self._end_job("", self._quiet_status or 1)
            return
        if min(self._losses.values()) != self._rank and not self._has_waited:
            # Another rank reports, and announces the end; this rank reports only if that does not happen.
            self._has_waited = True
            self._end_at = time.monotonic() + _GRACE_SECONDS
            return
        what = "; ".join(self._losses)
        self._end_job(f"{what}, which ends the job. Rank {self._rank} was {self._location()}", 1)


_open: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _in_forked_child() -> None:
    for heartbeat in list(_open):
        heartbeat.abandon()  # otherwise a connection would not end with the rank


os.register_at_fork(after_in_child=_in_forked_child)  # cannot be undone, so registered once
