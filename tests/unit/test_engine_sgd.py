"""To a user of SGDEngine: it does what an explicit loop does."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from torchmpi.engine import HOOK_NAMES, AllReduceSGDEngine, Sample, SGDEngine, State
from torchmpi.engine.progressbar import ProgressBar
from torchmpi.errors import ArgumentError, HookError, NotStartedError


def batches(num: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(num)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def quiet() -> SGDEngine:
    return SGDEngine(progress=False)


def explicit_loop(net: nn.Module, optimizer: torch.optim.Optimizer, max_epochs: int) -> None:
    for _ in range(max_epochs):
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    ],
)
def test_equals_an_explicit_loop(make):
    net = network()
    reference = copy.deepcopy(net)
    explicit_loop(reference, make(reference.parameters()), 3)
    state = quiet().train(
        network=net,
        criterion=nn.CrossEntropyLoss(),
        iterator=batches(),
        optimizer=make(net.parameters()),
        max_epochs=3,
    )
    assert (state.epoch, state.t) == (3, 12)
    for mine, theirs in zip(net.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_lr_is_plain_sgd_and_trains_the_criterion():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.scale, target)

    criterion, net = Scaled(), network()
    state = quiet().train(network=net, criterion=criterion, iterator=batches(), lr=0.1)
    assert criterion.scale.item() != 1
    assert isinstance(state.optimizer, torch.optim.SGD) and state.lr == 0.1


def test_hooks_fire_in_order_with_the_right_state():
    engine, seen = quiet(), []
    for name in HOOK_NAMES:
        engine.hooks.at(name).append(lambda state, name=name: seen.append((name, state.epoch, state.t, state.batch)))
    engine.train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(2), lr=0.1, max_epochs=2)
    step = ["on_sample", "on_forward", "on_forward_criterion", "on_backward_criterion", "on_backward"]
    expected = [("on_start", 0, 0, 0)]
    for epoch in range(2):
        expected.append(("on_start_epoch", epoch, 2 * epoch, 2 * (epoch > 0)))
        for batch in range(2):
            t = 2 * epoch + batch
            expected += [(name, epoch, t, batch) for name in step] + [("on_update", epoch, t + 1, batch + 1)]
        expected.append(("on_end_epoch", epoch, 2 * epoch + 2, 2))
    expected.append(("on_end", 2, 4, 2))
    assert seen == expected


def test_state_at_each_hook():
    engine = quiet()
    has_gradient: dict[str, bool] = {}

    def look(name: str, state: State) -> None:
        has_gradient[name] = next(state.network.parameters()).grad is not None
        assert isinstance(state.sample, Sample)
        assert (state.output is None) == (name == "on_sample")
        assert (state.loss is None) == (name in ("on_sample", "on_forward"))

    for name in HOOK_NAMES[2:8]:
        engine.on(name)(lambda state, name=name: look(name, state))
    engine.train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(), lr=0.1)
    assert [name for name, has in has_gradient.items() if has] == ["on_backward", "on_update"]


def test_hooks_may_change_sample_loss_gradients_and_lr():
    engine, net = quiet(), network()
    before = copy.deepcopy(net.state_dict())

    @engine.on("on_sample")
    def halve(state):
        state.sample = state.sample.input[:2], state.sample.target[:2]

    @engine.on("on_forward_criterion")
    def none(state):
        assert len(state.output) == 2
        state.loss = state.loss * 0

    @engine.on("on_update")
    def decay(state):
        state.lr *= 0.5

    state = engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=batches(3), lr=0.8)
    assert torch.equal(net[0].weight, before["0.weight"])
    assert state.lr == 0.1


def test_errors_of_hooks_and_data_propagate_and_leave_no_thread():
    engine = quiet()

    @engine.on("on_update")
    def fail(state):
        if state.t == 3:
            raise ZeroDivisionError("in the hook")

    arguments = dict(network=network(), criterion=nn.CrossEntropyLoss(), lr=0.1)
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        engine.train(iterator=batches(9), **arguments)
    with pytest.raises(ArgumentError, match="list of length 3"):
        quiet().train(iterator=[[1, 2, 3]], **arguments)
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]
    engine.hooks.on_update.clear()
    engine.train(iterator=batches(), **arguments)  # the engine is usable again


@pytest.mark.parametrize("is_training", [True, False])
def test_modules_in_evaluation_mode_remain_so_unless_all_are(is_training):
    net = network().train(is_training)
    net[1].eval()
    quiet().train(network=net, criterion=nn.CrossEntropyLoss(), iterator=batches(1), lr=0.1)
    assert (net.training, net[1].training) == (True, not is_training)


def test_stop_ends_the_epoch():
    engine, ends = quiet(), []
    engine.hooks.on_update.append(lambda state: setattr(state, "stop", state.t == 5))
    engine.hooks.on_end_epoch.append(lambda state: ends.append(state.epoch))
    engine.hooks.on_end.append(lambda state: ends.append("end"))
    state = engine.train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(), lr=0.1, max_epochs=9)
    assert (state.t, state.epoch, state.batch) == (5, 1, 1)
    assert ends == [0, "end"]


@pytest.mark.parametrize(("hook", "t"), [("on_start", 0), ("on_end_epoch", 4), ("on_start_epoch", 1)])
def test_stop_from_any_hook(hook, t):
    engine = quiet()
    engine.on(hook)(lambda state: setattr(state, "stop", True))
    state = engine.train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(), lr=0.1, max_epochs=9)
    assert state.t == t


def test_unknown_hooks_are_refused():
    engine = quiet()
    with pytest.raises(HookError, match=r"no hook point 'on_smaple'\. Did you mean 'on_sample'\? There are on_start,"):
        engine.hooks.on_smaple.append(print)
    with pytest.raises(HookError, match="on_smaple"):
        engine.on("on_smaple")
    with pytest.raises(HookError, match="append"):
        engine.hooks.on_sample = print
    with pytest.raises(HookError, match="no hook point"):
        engine.hooks.on_smaple = []
    assert not hasattr(engine.hooks, "on_smaple")


@pytest.mark.parametrize(("wrong", "nearest"), [("on_updat", "on_update"), ("on_epoch_end", "on_end_epoch")])
def test_unknown_hooks_are_answered_with_the_nearest_name(wrong, nearest):
    engine = quiet()
    callback = type("Callback", (), {wrong: lambda self, state: None})()
    for use in (
        lambda: getattr(engine.hooks, wrong),
        lambda: engine.on(wrong),
        lambda: engine.add({"on_start": print, wrong: print}),
        lambda: engine.add(callback),
    ):
        with pytest.raises(HookError, match=f"{wrong}'. Did you mean '{nearest}'"):
            use()
    assert engine.hooks.on_start == []  # nothing of the mapping was added


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    on_time = 3  # no method

    def on_update(self, state: State) -> None:
        self.calls.append(f"update {state.t}")

    def on_end(self, state: State) -> None:
        self.calls.append("end")


def test_callback_objects():
    engine = quiet()
    recorder = engine.add(Recorder())
    engine.add({"on_start": lambda state: recorder.calls.append("start")})
    engine.train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(2), lr=0.1)
    assert recorder.calls == ["start", "update 1", "update 2", "end"]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Recorder, r"add\(Recorder\(...\)\)"),
        (object(), "no method"),
        ({}, "no method"),
        ({"on_end": 3}, "on_end is an int"),
    ],
)
def test_callbacks_that_do_nothing_are_refused(callback, message):
    with pytest.raises(HookError, match=message):
        quiet().add(callback)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": torch.optim.LBFGS([torch.zeros(1)])}, "LBFGS.step.. needs a closure"),
        ({"optimizer": [torch.optim.SGD([torch.zeros(1)], lr=1.0)]}, "is a list.*one optimizer"),
        ({"lr": 0.1, "accumulate": 0}, "accumulate=0"),
        ({"lr": 0.1, "weight": "rows"}, "weight='rows'"),
        ({}, "either lr="),
        ({"lr": 0.1, "optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "either lr="),
        ({"lr": 0.1, "iterator": []}, "no batch in epoch 0"),
        ({"lr": 0.1, "iterator": iter(batches()), "max_epochs": 2}, "no batch in epoch 1.*generator"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    options = {"network": network(), "criterion": nn.CrossEntropyLoss(), "iterator": batches(), **arguments}
    with pytest.raises(ArgumentError, match=message):
        quiet().train(**options)


def concatenated(num_together: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = batches(7)
    groups = [data[i : i + num_together] for i in range(0, 7, num_together)]
    return [tuple(torch.cat(part) for part in zip(*group, strict=True)) for group in groups]


@pytest.mark.parametrize("accumulate", [1, 2, 3, 9])
def test_accumulation_equals_concatenated_batches(accumulate):
    nets, calls = [], []
    for data, options in ((batches(7), {"accumulate": accumulate}), (concatenated(accumulate), {})):
        net, engine = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), quiet()
        nn.utils.vector_to_parameters(torch.linspace(-1, 1, 51).double(), net.parameters())
        engine.on("on_sample")(lambda state: calls.append((state.accumulate, state.batch)))
        data = [(x.double(), y) for x, y in data]
        state = engine.train(
            network=net, criterion=nn.CrossEntropyLoss(), iterator=data, lr=0.5, max_epochs=2, **options
        )
        assert (state.t, state.batch) == (2 * -(-7 // accumulate), len(data))
        nets.append(net)
    assert calls[:14] == [(accumulate, batch) for batch in range(7)] * 2
    for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_weights_of_examples_need_tensors():
    class Criterion(nn.Module):
        def forward(self, output, target):
            return nn.functional.cross_entropy(output, target[0])

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, parts):
            return self.layer(parts[0])

    data = [((x,), (y,)) for x, y in batches()]
    with pytest.raises(ArgumentError, match="neither is a tensor"):
        quiet().train(network=First(), criterion=Criterion(), iterator=data, lr=0.1, weight="example")


def test_misuse_is_refused():
    with pytest.raises(ArgumentError, match="prefetch=-1"):
        SGDEngine(prefetch=-1)
    with pytest.raises(ArgumentError, match="state_dict"):
        quiet().keep(meter=3)
    with pytest.raises(ArgumentError, match="no optimizer"):
        State(network(), nn.CrossEntropyLoss(), []).lr = 0.1
    engine = quiet()
    arguments = dict(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(), lr=0.1)
    engine.hooks.on_update.append(lambda state: engine.train(**arguments))
    with pytest.raises(ArgumentError, match="while this engine is training"):
        engine.train(**arguments)


class Sampler(torch.utils.data.RandomSampler):
    def __init__(self, rows: torch.utils.data.Dataset) -> None:
        super().__init__(rows)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("is_nested", [False, True])
def test_set_epoch_of_samplers_is_called(is_nested):
    rows = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    sampler = Sampler(rows)
    batch_sampler = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
    options = {"batch_sampler": batch_sampler} if is_nested else {"batch_size": 4, "sampler": sampler}
    loader = torch.utils.data.DataLoader(rows, **options)
    quiet().train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=loader, lr=0.1, max_epochs=3)
    assert sampler.epochs == [0, 1, 2]


# --- test() -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_measures_loss_and_error_of_all_rows(reduction):
    net, data = network(), [(x[: 5 - i], y[: 5 - i]) for i, (x, y) in enumerate(batches())]
    net[0].eval()  # must remain in evaluation mode
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    result = quiet().test(network=net, criterion=nn.CrossEntropyLoss(reduction=reduction), iterator=data, topk=(1, 2))
    net_in_eval = copy.deepcopy(net).eval()
    output = net_in_eval(x)
    assert result.loss.value() == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-6)
    assert result.error.value(1) == pytest.approx(100 * (output.argmax(1) != y).double().mean().item())
    assert result.loss.num_samples == result.error.num_samples == len(y)
    assert net.training and net[1].training and not net[0].training
    assert all(parameter.grad is None for parameter in net.parameters())


def test_regression_has_no_class_error():
    data = [(torch.randn(5, 4), torch.randn(5, 3))]
    result = quiet().test(network=network(), criterion=nn.MSELoss(), iterator=data)
    assert result.error.num_samples == 0 and result.loss.num_samples == 5


def test_testing_within_training():
    engine, losses, modes = quiet(), [], []
    criterion = nn.CrossEntropyLoss()
    engine.hooks.on_sample.append(lambda state: modes.append(state.training))

    @engine.on("on_end_epoch")
    def validate(state):
        losses.append(engine.test(network=state.network, criterion=criterion, iterator=batches()).loss.value())

    engine.train(network=network(), criterion=criterion, iterator=batches(), lr=0.5, max_epochs=3)
    assert losses == sorted(losses, reverse=True)
    assert modes == ([True] * 4 + [False] * 4) * 3


def test_mappings_and_nested_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, both):
            return self.layer(both["a"] + both["b"][0])

    data = [{"input": {"a": x, "b": (x,)}, "target": y} for x, y in batches()]
    state = quiet().train(network=Two(), criterion=nn.CrossEntropyLoss(), iterator=data, lr=0.1)
    assert state.t == 4


# --- the progress bar ---------------------------------------------------------------------------------


def epoch_state(num_epochs: int, epoch: int, iterator: Iterable[None]) -> State:
    return State(nn.Linear(1, 1), nn.MSELoss(), iterator, max_epochs=num_epochs, epoch=epoch)


@pytest.mark.parametrize("total", [1, None])
def test_bar_without_a_terminal_prints_plain_lines(total):
    stream, num_threads = io.StringIO(), threading.active_count()
    bar = ProgressBar(stream)
    for epoch in range(50):
        state = epoch_state(50, epoch, [None] if total else iter([None]))
        bar.begin_epoch(state)
        state.batch = 1
        bar.update(state)
    bar.close()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("epoch 50/50: 100%|" if total else "epoch 50/50: 1 batches")
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("progress", [True, False])
def test_progress_option(progress, capsys):
    SGDEngine(progress=progress).train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(), lr=0.1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("epoch 1/1" in captured.err) == progress


def test_the_engine_of_many_ranks_overrides_no_step_of_the_loop():
    """What depends on other ranks is a question to the coordinator."""
    common = vars(AllReduceSGDEngine).keys() & vars(SGDEngine).keys()
    assert {name for name in common if not name.startswith("__")} == set()


def test_many_ranks_need_a_started_runtime():
    with pytest.raises(NotStartedError, match="start"):
        AllReduceSGDEngine().train(network=network(), criterion=nn.CrossEntropyLoss(), iterator=batches(), lr=0.1)
