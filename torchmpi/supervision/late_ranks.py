"""The check of the watchdog that names ranks for which the others wait, while the job runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..communicators.group import GroupContext
from ..log import logger
from .heartbeat import Heartbeat
from .host_ring import leaders_of
from .lateness import (
    NUM_WINDOWS,
    PERIODS_PER_WINDOW,
    Evidence,
    LateWatch,
    Looks,
    Verdict,
    compared_round_trips,
    likely_cause,
)
from .pace import Note, PaceReader, StackLooks, account
from .report import named
from .status_exchange import StatusExchange

_LOOKS_PER_PERIOD = 25
_PERIODS_OF_LOOKS = NUM_WINDOWS // 2 * PERIODS_PER_WINDOW - 1
"""Until the verdict after a suspicion."""
_PACE, _LOOK, _WATCHED = "pace", "look", "watched"
_WATCHED_PERIODS = 4
"""For how many checks a question of rank 0 counts, which repeats it in each of its own."""


class LateRanks:
    """Each rank publishes its pace on the status board of its host; rank 0 compares them, and logs what follows.

    `names`: the host of each rank; `least`: the setting `late_rank_share`; `period`: the time between two checks.

    The first rank of another host passes on what its host has published, over the connections of the heartbeat. When
    rank 0 suspects a rank, all ranks look where their main threads are, until the verdict. While ``torchmpi top`` looks
    at rank 0 of a job on several hosts, the ranks of the others tell more, and all of it goes to the flight record of
    rank 0.
    """

    def __init__(
        self, context: GroupContext, exchange: StatusExchange, names: Sequence[str], least: float, period: float
    ) -> None:
        self._exchange, self._names, self._period = exchange, names, period
        self._rank, self._hosts = exchange.world.rank, context.hosts
        self._ring = list(leaders_of(context.hosts).values())
        self._watch = LateWatch(least)
        self._reader = PaceReader(context)
        self._looks: StackLooks | None = None
        self._wanted = 0
        """The number of the last request for looks."""
        self._asked_at, self._watched_checks = 0, 0
        """The last question of viewers, and for how many checks it still is to be answered."""
        self._has_failed = False

    def check(self) -> None:
        """Publish the pace of this rank; on rank 0, compare the ranks."""
        if self._has_failed:
            return
        try:
            notes = self._exchange_notes()
            if self._rank == 0:
                self._show(notes)
                trips = [notes[rank].round_trip for rank in self._ring if rank in notes]
                for verdict in self._watch.add({rank: note.pace for rank, note in notes.items()}, trips):
                    self._act(verdict, notes, trips)
        except ValueError:  # the group of the host was freed meanwhile: this rank is in stop()
            pass
        except Exception as error:  # nothing that only observes may end the job
            self._has_failed = True
            logger.warning(f"rank {self._rank}: late ranks are not looked for any more: {error!r}")

    def close(self) -> None:
        """End the looks, and close what is open."""
        if self._looks is not None:
            self._looks.stop()
        self._reader.close()

    def _exchange_notes(self) -> dict[int, Note]:
        """Publish the pace of this rank, and return those that it passes on, or compares."""
        host, heartbeat = self._exchange.host, self._exchange.heartbeat
        board = None if host is None else host.log_board
        ranks = [self._rank] if host is None or board is None else list(host.world_ranks)
        notes: dict[int, Note] = {}
        if board is not None and host is not None:
            # The others need only what the first one asks for.
            for index, rank in enumerate(ranks if self._rank == ranks[0] else ranks[:1]):
                if rank != self._rank and (note := Note.unpacked(board.read_note(index))) is not None:
                    notes[rank] = note
        first = ranks[0]
        if self._rank == first and self._rank != 0 and heartbeat is not None:
            self._look(heartbeat.notices.get((_LOOK, 0), 0))
            self._hear(heartbeat.notices.get((_WATCHED, 0), 0))
        elif first in notes:
            self._look(notes[first].wanted)
            self._watched_checks = int(notes[first].is_watched)
        looks = Looks() if self._looks is None else self._looks.result()
        is_watched = self._watched_checks > 0
        told = account(self._exchange) if is_watched else {}
        trip = 0 if heartbeat is None else heartbeat.ask_round_trip()
        notes[self._rank] = own = Note(self._reader.read(), looks, self._wanted, is_watched, told, trip)
        if board is not None and host is not None and not board.write_note(host.rank, own.packed()):
            board.write_note(host.rank, own.without_lines().packed())
        if heartbeat is not None and self._rank == 0:
            for (subject, rank), value in list(heartbeat.notices.items()):
                if subject == _PACE and (note := Note.unpacked(value)) is not None:
                    notes[rank] = note
        elif heartbeat is not None and self._rank == first and self._hosts[0] != self._hosts[first]:
            for rank, note in notes.items():
                heartbeat.send_notice(0, _PACE, note.packed(), of=rank)
        return notes

    def _hear(self, question: int) -> None:
        """Note whether rank 0 has asked again for what viewers want to know."""
        self._watched_checks = _WATCHED_PERIODS if question != self._asked_at else max(0, self._watched_checks - 1)
        self._asked_at = question

    def _show(self, notes: Mapping[int, Note]) -> None:
        """On rank 0: show viewers what all ranks have told, and ask those of other hosts for more."""
        record, heartbeat = self._exchange.context.flight_record, self._exchange.heartbeat
        if record is None or heartbeat is None or not record.is_looked_at():
            return
        self._asked_at += 1
        for leader in self._other_leaders(heartbeat):
            heartbeat.send_notice(leader, _WATCHED, self._asked_at)
        record.tell_of_all(
            {str(rank): [self._names[rank], list(note.pace), dict(note.told)] for rank, note in sorted(notes.items())}
        )

    def _other_leaders(self, heartbeat: Heartbeat) -> set[int]:
        return {rank for rank in heartbeat.leaders if self._hosts[rank] != self._hosts[0]}

    def _look(self, number: int) -> None:
        """Look where the main thread is, if that has been asked for since the last time."""
        if number != self._wanted:
            self._wanted = number
            if self._looks is not None:
                self._looks.stop()
            self._looks = StackLooks(_PERIODS_OF_LOOKS * self._period, self._period / _LOOKS_PER_PERIOD)

    def _ask_for_looks(self) -> None:
        self._look(self._wanted + 1)
        heartbeat = self._exchange.heartbeat
        if heartbeat is not None:
            for leader in self._other_leaders(heartbeat):
                heartbeat.send_notice(leader, _LOOK, self._wanted)

    def _act(self, verdict: Verdict, notes: Mapping[int, Note], trips: Sequence[float]) -> None:
        rank = self._ring[verdict.number] if verdict.of == "host" else verdict.number
        ranks = [each for each, host in enumerate(self._hosts) if host == self._hosts[rank]]
        name = f"host {self._names[rank]}"
        who = f"{name} ({named(ranks)})" if verdict.of == "host" else f"rank {rank} on {name}"
        if verdict.kind == "suspected":
            if verdict.of == "rank":
                self._ask_for_looks()
            return
        if verdict.kind == "over":
            logger.warning(f"{who} is not late any more, after {verdict.seconds:.0f} s.")
            return
        if verdict.of == "host":
            own, others = (each / 1000 for each in compared_round_trips(trips)[verdict.number])
            what = "delays the calls of all ranks by"
            cause = f"its network: a message and its acknowledgement take {own:.3g} ms, elsewhere {others:.3g} ms"
        else:
            found = {number: Evidence(self._watch.pace(number), note.looks) for number, note in notes.items()}
            what = "is late: the other ranks wait for it"
            cause = likely_cause(verdict.share, found.pop(rank), list(found.values()))
        logger.warning(
            f"{who} {what} {100 * verdict.share:.0f} % of the time, for {verdict.seconds:.0f} s now. "
            f"Likely cause: {cause}."
        )
