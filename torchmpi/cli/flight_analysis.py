"""Comparison of the flight records of all ranks: where they part, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from ..communicators.call_codes import CallNumber, describe
from ..communicators.flight_record import GroupCalls, LoggedCall, RankCalls, is_step
from ..communicators.message_record import ANY_RANK, MANY_TAGS, NO_TAG, LoggedMessages
from ..communicators.rank_status import LastCall, RankStatus
from ..supervision.deadlock import ORDER, described, find_circle, waits_of
from ..supervision.report import named

_MOST_LAST_CALLS = 3


class Divergence(NamedTuple):
    """Where the ranks of one group are, and whether they have parted."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    """``different``: the ranks made different calls; ``deadlock``: ranks wait for each other, on different groups;
    ``missing``: some ranks wait for others, or have waited until the
    call failed; ``message``: a rank waits for a message; ``inside``: all have arrived in a call that has not ended;
    ``failed``: it has failed; ``idle``: no rank is in a call."""
    text: str
    states: Mapping[int, LastCall]
    """The last call of each rank on the group."""


def text_of(call: LoggedCall) -> str:
    """Describe a call as error messages do."""
    try:
        return describe(call.code, CallNumber(call.shape) if call.is_number else call.shape)
    except (IndexError, ValueError):  # a damaged file, or a later version
        return f"unknown call {call.code:#x}"


def analyze(records: Sequence[RankCalls]) -> list[Divergence]:
    """Compare the last calls of all ranks, group by group; groups on which ranks wait come first."""
    latest = max((_latest(record) for record in records), default=0.0)
    states = {record.rank: status_of(record, latest) for record in records}
    by_key: dict[int, list[tuple[RankCalls, GroupCalls]]] = {}
    for record in records:
        for group in record.groups:
            by_key.setdefault(group.key, []).append((record, group))
    findings = [_finding(parts, states) for parts in by_key.values() if any(group.calls for _, group in parts)]
    if circle := find_circle(waits_of(states)):
        name = by_key[states[circle[0]].blocked[0]][0][1].name
        last = {rank: states[rank].calls[states[rank].blocked[0]] for rank in circle}
        findings.append(Divergence(name, tuple(circle), "deadlock", f"{described(circle)} {ORDER}", last))
    findings += _awaited_messages(records, latest)
    order = ("different", "deadlock", "missing", "message", "inside", "failed", "idle")
    return sorted(findings, key=lambda found: (order.index(found.kind), is_step(found.group), -len(found.ranks)))


def _latest(record: RankCalls) -> float:
    """Return the latest time of which a record knows, since 1970."""
    times = (max(call.begin, call.end) for group in record.groups for call in group.calls)
    return max([record.last_ns, *times]) + record.wall_ns


def status_of(record: RankCalls, latest: float) -> RankStatus:
    """Return what a rank was doing according to its record. `latest`: the latest time that any record knows."""
    calls = {group.key: _last_call(record, group, latest) for group in record.groups}
    group, seq = record.blocked
    last = calls.get(group, LastCall())
    is_blocked = last.seq == seq and (last.is_inside or last.failed_after is not None)
    return RankStatus(calls=calls, blocked=record.blocked if is_blocked else (0, 0))


def _last_call(record: RankCalls, group: GroupCalls, latest: float) -> LastCall:
    if not group.calls:
        return LastCall()
    call = group.calls[-1]
    since = (call.end or call.begin) + record.wall_ns
    failed_after = (call.end - call.begin) / 1e9 if call.has_failed else None
    return LastCall(call.seq, not call.end, text_of(call), max(0.0, (latest - since) / 1e9), failed_after)


def _finding(parts: Sequence[tuple[RankCalls, GroupCalls]], states: Mapping[int, RankStatus]) -> Divergence:
    first = parts[0][1]
    last = {record.rank: states[record.rank].calls.get(first.key, LastCall()) for record, _ in parts}
    kind, text = _difference(first, parts) or _waiting(first, last)
    return Divergence(first.name, first.ranks, kind, text, last)


def _difference(first: GroupCalls, parts: Sequence[tuple[RankCalls, GroupCalls]]) -> tuple[str, str] | None:
    """Find the first call that is not the same on all ranks whose record has it."""
    signatures: dict[int, dict[tuple[Any, ...], list[tuple[int, LoggedCall]]]] = {}
    for record, group in parts:
        for call in group.calls:
            found = signatures.setdefault(call.seq, {})
            found.setdefault((call.code, call.shape), []).append((record.rank, call))
    for seq, found in sorted(signatures.items()):
        if len(found) > 1:
            made = "; ".join(
                f"{named([rank for rank, _ in calls])} made {text_of(calls[0][1])}" for calls in found.values()
            )
            return "different", f"call #{seq} on {first.name} is not the same on all ranks: {made}."
    return None


def _waiting(first: GroupCalls, last: Mapping[int, LastCall]) -> tuple[str, str]:
    seq = max(each.seq for each in last.values())
    there = {rank: each for rank, each in last.items() if each.seq == seq}
    inside = {rank: each for rank, each in there.items() if each.is_inside}
    failed = {rank: each for rank, each in there.items() if each.failed_after is not None}
    ended = there.keys() - inside.keys() - failed.keys()
    behind = {rank: each for rank, each in last.items() if each.seq < seq}
    unknown = sorted(set(first.ranks) - last.keys())
    about_unknown = f" There is no record of {named(unknown)}." if unknown else ""
    call = f"{next(iter(there.values())).call}, call #{seq}"
    if not inside and not failed:
        return "idle", f"no rank is in a call on {first.name}; the last one was {call}.{about_unknown}"
    if inside:
        are, duration = "is" if len(inside) == 1 else "are", _duration(inside.values())
        kind, text = "inside", f"{named(sorted(inside))} {are} in {call} on {first.name}, for {duration}"
        text += f"; {named(sorted(failed))} {_have(failed)} failed in it" if failed else ""
    else:
        seconds = max(each.failed_after or 0.0 for each in failed.values())
        kind, text = "failed", f"{named(sorted(failed))} failed in {call} on {first.name}, after {seconds:.3g} s"
    if behind:
        return "missing", f"{text}. Not arrived: {'; '.join(_about_behind(behind))}.{about_unknown}"
    if ended:
        return kind, f"{text}; {named(sorted(ended))} {_have(ended)} ended it.{about_unknown}"
    return ("missing", f"{text}.{about_unknown}") if unknown else (kind, f"{text}: all ranks have arrived.")


def _awaited_messages(records: Sequence[RankCalls], latest: float) -> list[Divergence]:
    """Describe the messages that have not ended, and how far the other rank is."""
    by_channel = {
        (each.key, record.rank, each.peer, each.is_receive, each.tag): each
        for record in records
        for each in record.messages
    }
    known, found = {record.rank for record in records}, []
    for record in records:
        for each in record.messages:
            count = each.num_begun - each.num_ended
            if count <= 0:
                continue
            seconds = max(0.0, (latest - each.begin - record.wall_ns) / 1e9)
            other = by_channel.get((each.key, each.peer, record.rank, not each.is_receive, each.tag))
            receiver = record.rank if each.is_receive else each.peer
            from_any = by_channel.get((each.key, receiver, ANY_RANK, True, each.tag))
            may_be_among_many = each.tag == MANY_TAGS or (each.key, receiver, ANY_RANK, True, MANY_TAGS) in by_channel
            if other is None and (each.key, each.peer, record.rank, not each.is_receive, MANY_TAGS) in by_channel:
                may_be_among_many = True
            there = _about_peer(each, other, from_any) if each.peer in known and not may_be_among_many else ""
            if each.peer not in known and each.peer != ANY_RANK:
                there = f"; there is no record of rank {each.peer}"
            text = f"rank {record.rank} {_awaited(each, count)} on {each.group}, for {seconds:.3g} s{there}."
            found.append(Divergence(each.group, (record.rank,), "message", text, {}))
    return found


def _awaited(message: LoggedMessages, count: int) -> str:
    tag = {NO_TAG: "", MANY_TAGS: " with one of many tags"}.get(message.tag, f" with tag {message.tag}")
    whom = "any rank" if message.peer == ANY_RANK else f"rank {message.peer}"
    what = f"a message{tag}" if count == 1 else f"{count} messages{tag}"
    size = f"({message.dtype}, {message.num_bytes} bytes)"
    return f"waits for {what} from {whom} {size}" if message.is_receive else f"sends {what} to {whom} {size}"


def _about_peer(message: LoggedMessages, other: LoggedMessages | None, from_any: LoggedMessages | None) -> str:
    """Describe how many messages the other rank has sent or received; `from_any`: the receives from any rank."""
    num_there, peer = 0 if other is None else other.num_begun, f"rank {message.peer}"
    num_missing = message.num_begun - num_there
    if from_any is not None:  # it may have taken messages of this channel
        if not message.is_receive:
            return f"; {peer} has received {from_any.num_ended or 'none'} from any rank"
        return f"; {peer} has sent {num_there or 'none'} in all"
    if num_missing <= 0:
        return f"; {peer} has sent it" if message.is_receive else f"; {peer} receives it"
    what = "sent" if message.is_receive else "received"
    return f"; {peer} has {what} {'none' if num_there == 0 else f'{num_there} of {message.num_begun}'}"


def _about_behind(last: Mapping[int, LastCall]) -> list[str]:
    groups: dict[tuple[int, str, bool, bool], list[int]] = {}
    for rank, each in last.items():
        groups.setdefault((each.seq, each.call, each.is_inside, each.failed_after is not None), []).append(rank)
    lines = []
    for (seq, call, is_inside, has_failed), ranks in groups.items():
        who, how = named(sorted(ranks)), "failed in" if has_failed else "ended"
        duration = _duration(last[rank] for rank in ranks)
        if not call:
            lines.append(f"{who}, without a call on it")
        elif is_inside:
            lines.append(f"{who}, in {call}, call #{seq}, for {duration}")
        else:
            lines.append(f"{who}, which {how} {call}, call #{seq}, {duration} before")
    return lines


def _duration(calls: Iterable[LastCall]) -> str:
    return f"{max(each.seconds for each in calls):.3g} s"


def _have(ranks: Sized) -> str:
    return "has" if len(ranks) == 1 else "have"


def report(records: Sequence[RankCalls]) -> str:
    """Describe the records of a job: the ranks without a record, the findings, and the last calls of each rank."""
    size = max((record.about["size"] for record in records), default=0)
    missing = sorted(set(range(size)) - {record.rank for record in records})
    ended = sum(record.has_ended for record in records)
    lines = [f"{len(records)} of {size} ranks; {ended} of them reached the end of stop()."]
    if missing:
        lines.append(f"No record of {named(missing)}.")
    findings = analyze(records)
    shown = [found for found in findings if found.kind != "idle"] or findings[:1]
    lines += [f"* {found.text}" for found in shown] or ["No rank has made a call."]
    for record in sorted(records, key=lambda record: record.rank):
        about = record.about
        lines.append(f"rank {record.rank} on {about.get('host')}, process {about.get('process')}; last calls:")
        calls = [(call, group.name) for group in record.groups for call in group.calls]
        for call, name in sorted(calls, key=lambda item: item[0].begin)[-_MOST_LAST_CALLS:]:
            lines.append(f"  {name} #{call.seq} {text_of(call)}: {_how_it_ended(call)}")
        for each in sorted(record.messages, key=lambda each: each.begin)[-_MOST_LAST_CALLS:]:
            lines.append(f"  {each.group} message #{each.num_begun}, {each}: {_how_messages_ended(each)}")
        for each in sorted(record.requests, key=lambda each: each.begin)[-_MOST_LAST_CALLS:]:
            which = f"server {each.tag} {'receive' if each.is_receive else 'send'} #{each.num_begun}"
            what = f"{each.dtype}, {each.num_bytes} bytes"
            lines.append(f"  {each.group} {which} ({what}): {_how_messages_ended(each)}")
    return "\n".join(lines)


def _how_it_ended(call: LoggedCall) -> str:
    if not call.end:
        return "not ended"
    return f"{'failed after ' if call.has_failed else ''}{(call.end - call.begin) / 1e3:.1f} us"


def _how_messages_ended(messages: LoggedMessages) -> str:
    count = messages.num_begun - messages.num_ended
    if count:
        return "not ended" if count == 1 else f"{count} have not ended"
    return f"ended {(messages.end - messages.begin) / 1e3:.1f} us after its start"


def as_json(records: Sequence[RankCalls]) -> dict[str, Any]:
    """Return findings and calls of all ranks as objects for JSON."""
    findings = [
        {**found._asdict(), "states": [{"rank": rank, **last._asdict()} for rank, last in found.states.items()]}
        for found in analyze(records)
    ]
    ranks = [
        {
            **record.about, "ended": record.has_ended, "wall_ns": record.wall_ns,
            "groups": [
                {
                    "name": group.name, "ranks": group.ranks, "freed": group.is_freed,
                    "calls": [
                        {
                            "number": call.seq, "call": text_of(call), "begin_ns": call.begin, "end_ns": call.end,
                            "failed": call.has_failed,
                        }
                        for call in group.calls
                    ],
                }
                for group in record.groups
            ],
            "messages": [each._asdict() for each in record.messages],
            "requests": [each._asdict() for each in record.requests],
        }
        for record in records
    ]  # fmt: skip
    return {"findings": findings, "ranks": ranks}
