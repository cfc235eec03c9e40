"""To an author of an elastic loop: after a loss each rank gets its copy, its random state and the state of the loop."""

from __future__ import annotations

import itertools

import pytest
from test_memory_copies import Threads

from torchmpi.continuing import attempts
from torchmpi.continuing.elastic_job import ElasticJob, elastic, renumbered
from torchmpi.continuing.numbered_copies import NumberedCopies
from torchmpi.errors import ArgumentError, RankLostError, TorchMPIError
from torchmpi.launch.abilities import Abilities
from torchmpi.session import recovery, runtime


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((3, 3, 3), "copy 2"),
        ((4, 3, 4), "copy 2"),  # one rank has not made the last copy
        ((0, 3, 4), "copy 2"),  # a spare rank has become rank 0
        ((3, 0, 0), "copy 2"),
        ((1, 0, 2), "copy 0"),
        ((0, 0, 0), None),  # a rank was lost before the first copy
    ],
)
def test_all_ranks_get_the_last_copy_that_each_rank_with_copies_has(numbers, expected):
    ranks = Threads(len(numbers))

    def agree(rank: int) -> tuple[str | None, str | None]:
        copies = NumberedCopies[str]()
        for number in range(numbers[rank]):
            copies.add(f"copy {number}")
        first = copies.agree(ranks.gather, ranks.broadcast, rank)
        copies.add("next")  # has the same number on all ranks
        return first, copies.agree(ranks.gather, ranks.broadcast, rank)

    assert ranks.run(agree) == [(expected, "next")] * len(numbers)


def test_a_spare_rank_takes_the_random_state_of_the_rank_that_it_replaces_also_after_further_losses():
    """Every sequence of three losses of three ranks, of which any may be replaced."""
    for events in itertools.product(range(3), (False, True), repeat=3):
        ranks, holders = tuple("abc"), tuple("abc")
        for victim, is_replaced in zip(events[::2], events[1::2], strict=True):
            if victim >= len(ranks) or (len(ranks) == 1 and not is_replaced):
                continue
            former = tuple(
                -1 if rank == victim else rank for rank in range(len(ranks)) if is_replaced or rank != victim
            )
            ranks = renumbered(ranks, former)
            holders = tuple(each for index, each in enumerate(holders) if is_replaced or index != victim)
            assert ranks == holders, events
    assert len(events) == 6


class OneRank(Abilities):
    """Takes the place of a runtime with its group and library, on a rank that was a spare."""

    is_newcomer = True

    def __init__(self, other: bool) -> None:
        """Create it; `other`: whether the other rank has a state."""
        self.MPI, self.world, self.comm, self.rank = self, self, self, 0
        self.allgather = lambda own: [own, other]

    def call_action(self, name: str, action):
        return action()


def test_a_loop_does_not_begin_anew_when_all_ranks_with_a_state_are_lost(monkeypatch):
    """Regression: spare ranks began with their initial values, without a message."""
    monkeypatch.setattr(recovery.runtime, "current", lambda: OneRank(other=True))
    recovery.begin_again()
    monkeypatch.setattr(recovery.runtime, "current", lambda: OneRank(other=False))
    with pytest.raises(TorchMPIError, match="rank 0: all ranks that had a state are lost"):
        recovery.begin_again()


@pytest.mark.parametrize("has_started", [False, True])
def test_a_newcomer_joins_again_only_in_its_first_start(monkeypatch, has_started):
    """Regression: later, recover() did not learn of the second loss, and returned wrong former ranks."""
    errors, log = [RankLostError("lost")], []

    def start(_: object) -> None:
        log.append("start")
        if errors:
            raise errors.pop()

    monkeypatch.setattr(runtime, "_has_started", has_started)
    monkeypatch.setattr(runtime, "_start", start)
    monkeypatch.setattr(runtime, "abandon", lambda: log.append("abandon"))
    monkeypatch.setattr(runtime.mpi_library, "is_newcomer", lambda: True)
    monkeypatch.setattr(runtime.mpi_library, "join_again", lambda: log.append("join"))
    if has_started:
        with pytest.raises(RankLostError):
            runtime.start()
    else:
        runtime.start()
    assert log == (["start"] if has_started else ["start", "join", "abandon", "start"])


class Losses:
    """Takes the place of the ranks: says of each failed call whether a rank is lost."""

    def __init__(self, monkeypatch, *lost: bool) -> None:
        self.log: list[str] = []
        answers = iter(lost)
        monkeypatch.setattr(recovery, "is_rank_lost", lambda: next(answers))
        monkeypatch.setattr(recovery, "recover", lambda timeout: self.log.append("recover") or (0,))
        monkeypatch.setattr(recovery, "confirm", self.step("confirm"))

    def step(self, name: str, *errors: Exception | None):
        left = iter(errors)

        def run(*_: object) -> str:
            self.log.append(name)
            if (error := next(left, None)) is not None:
                raise error
            return name

        return run


@pytest.mark.parametrize("hidden", [RankLostError("lost"), RuntimeError("of torch, which hides the loss")])
def test_each_state_of_the_loop_leads_back_to_its_beginning_after_a_loss(monkeypatch, hidden):
    losses = Losses(monkeypatch, True, True, True)
    monkeypatch.setattr(recovery, "confirm", losses.step("confirm", hidden))
    begin, attempt = losses.step("begin", hidden), losses.step("attempt", hidden)
    assert attempts.repeat(begin, attempt, losses.step("recovered"), 1.0) == "attempt"
    again = ["recover", "recovered"]
    assert losses.log == [
        *("begin", *again), *("begin", "attempt", *again), *("begin", "attempt", "confirm", *again),
        *("begin", "attempt", "confirm"),
    ]  # fmt: skip


def test_an_error_without_a_loss_ends_the_loop(monkeypatch):
    losses = Losses(monkeypatch, False)
    with pytest.raises(ZeroDivisionError):
        attempts.repeat(
            losses.step("begin"), losses.step("attempt", ZeroDivisionError()), losses.step("recovered"), 1.0
        )
    assert losses.log == ["begin", "attempt"]


def test_only_what_is_committed_is_an_attribute_of_the_job():
    job = ElasticJob({"step": 0})
    job.step += 1
    assert job.step == 1
    with pytest.raises(AttributeError, match=r"no 'steps', which a commit would not copy.*it has step"):
        job.steps = 2
    with pytest.raises(AttributeError, match="no 'epoch'"):
        _ = job.epoch
    for name in ("commit", "_copies"):
        with pytest.raises(ArgumentError, match=f"{name}=.*already"):
            elastic(**{name: 1})
