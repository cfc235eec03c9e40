"""To a user of updates with servers: schedules, buffers, arithmetic, and refused options, without ranks."""

from __future__ import annotations

import doctest
import importlib
import itertools
import math

import pytest
import torch
from torch import nn

import torchmpi.parameterserver as ps
from torchmpi.errors import ArgumentError, CheckpointError, NotStartedError
from torchmpi.nn.periodic_update import check_whole
from torchmpi.parameterserver.parameter_lists import _checked_allocator, apply_local_update
from torchmpi.parameterserver.updates.easgd import _attract
from torchmpi.parameterserver.updates.update import FetchSchedule
from torchmpi.tensors.flat_buffers import FlatBuffers

MODULES = (
    "shard_checkpoint", "rules", "shards", "staleness", "parameter_lists", "updates.update", "updates.easgd",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"torchmpi.parameterserver.{name}"))
    assert result.failed == 0


# --- schedules


def steps_by_counting(update_frequency: int, init_delay: int, prefetch: int, last: int) -> tuple[list[int], list[int]]:
    """Reference implementation: the steps that fetch and those that integrate, by counters."""
    fetches, integrations = [], []
    next_integration = init_delay + update_frequency
    next_fetch = next_integration - prefetch
    for step in range(last):
        if step == next_fetch:
            fetches.append(step)
            next_fetch += update_frequency
        if step == next_integration:
            integrations.append(step)
            next_integration += update_frequency
    return fetches, integrations


def test_schedule():
    frequencies = [(frequency, prefetch) for frequency in (1, 2, 3, 7, 10) for prefetch in range(frequency + 1)]
    for (update_frequency, prefetch), init_delay in itertools.product(frequencies, (0, 1, 5, 12)):
        schedule = FetchSchedule(update_frequency, init_delay, prefetch)
        fetches = [step for step in range(60) if schedule.fetches(step)]
        integrations = [step for step in range(60) if schedule.integrates(step)]
        assert (fetches, integrations) == steps_by_counting(update_frequency, init_delay, prefetch, 60)
        assert all(step >= init_delay for step in fetches), "there is no server before"
        # Each integration uses the fetch `prefetch` steps earlier.
        assert all(fetch + prefetch == used for fetch, used in zip(fetches, integrations, strict=False))


# --- arithmetic


def test_attraction_against_a_reference():
    torch.manual_seed(0)
    centers, locals_ = [torch.randn(5, 3), torch.randn(2)], [torch.randn(5, 3), torch.randn(2)]
    momenta = [torch.randn(5, 3), torch.randn(2)]
    alpha, lr, delta = 0.3, 0.1, 0.9
    for given_momenta in ([], momenta):
        ahead = [delta * -lr * momentum for momentum in given_momenta] or [0.0, 0.0]
        differences = [
            alpha * ((local - lead) - center) for local, center, lead in zip(locals_, centers, ahead, strict=True)
        ]
        distances, moved = [tensor.clone() for tensor in centers], [tensor.clone() for tensor in locals_]
        _attract(distances, moved, given_momenta, alpha=alpha, ahead=lr * delta)
        for local, result, distance, difference in zip(locals_, moved, distances, differences, strict=True):
            torch.testing.assert_close(result, local - difference)
            torch.testing.assert_close(-alpha * distance, difference)  # the change of the center


@pytest.mark.parametrize("result", [None, torch.zeros(())], ids=["nothing", "a number"])
def test_local_update_must_return_a_tensor_of_the_same_shape(result):
    with pytest.raises(ArgumentError, match="must return the tensor to send, of shape \\[3\\]"):
        apply_local_update(lambda update: result, FlatBuffers([torch.zeros(3)]))


def test_staleness_meter():
    meter = ps.StalenessMeter()
    assert math.isnan(meter.mean) and math.isnan(meter.last) and meter.count == 0
    for value in (2.0, 5.0, 0.0):
        meter.add(value)
    assert (meter.last, meter.max, meter.count) == (0.0, 5.0, 3)
    assert meter.mean == pytest.approx(7 / 3)
    again = ps.StalenessMeter()
    again.load_state_dict(meter.state_dict())
    again.add(9.0)
    assert (again.mean, again.max, again.count) == (4.0, 9.0, 4)


# --- invalid arguments


@pytest.mark.parametrize("given", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2], None])
def test_a_wrong_allocator_is_rejected(given):
    with pytest.raises(ArgumentError, match=r"prefetch_allocator\(3, torch.float32\) must return"):
        FlatBuffers([torch.zeros(3)], _checked_allocator(lambda numel, dtype: given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_frequency": 0}, "update_frequency=0: expected a whole number from 1"),
        ({"update_frequency": 2.5}, "update_frequency=2.5"),
        ({"init_delay": -1}, "init_delay=-1: expected a whole number from 0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"prefetch": 11}, "prefetch=11 is more than update_frequency=10"),
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"max_staleness": math.nan}, "max_staleness=nan"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ArgumentError, match=message):
        ps.Update(nn.Linear(2, 2), **options)
    with pytest.raises(ArgumentError, match=message):
        ps.EASGDUpdate(nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.1, "local_update": abs}, {"lr": 0.1, "rule": ps.adam(0.1)}], ids=["none", "two", "both"]
)
def test_downpour_needs_exactly_one_rule_for_gradients(options):
    with pytest.raises(ArgumentError, match="pass lr=, or local_update=, or"):
        ps.DownpourUpdate(nn.Linear(2, 2), **options)


def test_other_invalid_arguments():
    net = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="send_frequency=0"):
        ps.DownpourUpdate(net, lr=0.1, send_frequency=0)
    with pytest.raises(ArgumentError, match="beta=0 must be greater"):
        ps.EASGDUpdate(net, beta=0)
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ArgumentError, match="nesterov=True"):
        ps.EAMSGDUpdate(net, plain)
    with pytest.raises(ArgumentError, match="there is no server before step 100"):
        _ = ps.EASGDUpdate(net).servers
    with pytest.raises(ArgumentError, match="step=-1"):
        ps.EASGDUpdate(net).update(-1)
    with pytest.raises(ArgumentError, match="expected a whole number"):
        check_whole("step", True, 0)


def test_states_of_another_class_are_rejected():
    state = ps.EASGDUpdate(nn.Linear(2, 2)).state_dict()
    with pytest.raises(CheckpointError, match="state of a EASGDUpdate, not of a DownpourUpdate"):
        ps.DownpourUpdate(nn.Linear(2, 2), lr=0.1).load_state_dict(state)


def test_errors_before_start_name_the_remedy():
    with pytest.raises(NotStartedError, match=r"mpi\.start"):
        ps.EASGDUpdate(nn.Linear(2, 2), init_delay=0).update()
    with pytest.raises(NotStartedError, match=r"mpi\.start"):
        ps.LocalSGDUpdate(nn.Linear(2, 2))
    with pytest.raises(NotStartedError, match=r"mpi\.start"):
        ps.init_tensors([torch.zeros(2)])


def test_steps_before_the_servers_and_after_finish():
    update = ps.EASGDUpdate(nn.Linear(2, 2), init_delay=5)
    assert [update.update() for _ in range(5)] == [False] * 5
    assert update.step == 5 and update.metrics()["num_sends"] == 0
    update.finish()
    update.finish()
    with pytest.raises(ArgumentError, match="after finish"):
        update.update()


def test_a_subclass_must_implement_integrate():
    class Nothing(ps.Update):
        pass

    with pytest.raises(NotImplementedError, match="Nothing does not implement integrate"):
        Nothing(nn.Linear(2, 2)).integrate([])


def test_before_the_start_alpha_is_beta_and_nobody_has_waited():
    update = ps.EASGDUpdate(nn.Linear(2, 2), beta=0.6)
    assert update.alpha == 0.6
    update._num_clients = 3
    assert update.alpha == pytest.approx(0.2)
    metrics = update.metrics()
    assert (metrics["num_waits"], metrics["waited_seconds"]) == (0, 0.0)


def test_the_round_of_a_saved_update_is_that_of_the_next_save():
    state = ps.EASGDUpdate(nn.Linear(2, 2)).state_dict() | {"rounds": 7}
    resumed = ps.EASGDUpdate(nn.Linear(2, 2))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
