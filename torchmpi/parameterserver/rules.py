"""Rules: what a server does with what is sent to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..shared_memory.kernels import server_rules as native
from ..shared_memory.kernels.shard_layout import MOST_STATES, NUM_COEFFICIENTS

Function = Callable[..., object]
MOST_COEFFICIENTS = NUM_COEFFICIENTS - 2
MOST_NAME_BYTES = 64
"""What a request to another host has room for."""


@dataclass(frozen=True)
class Rule:
    """A rule with its coefficients; what `scaled_add` and the others make, and names stand for."""

    name: str
    coefficients: tuple[float, ...] = ()


def scaled_add(alpha: float) -> Rule:
    """``value += alpha * sent``.

    >>> scaled_add(-0.1)
    Rule(name='scaled_add', coefficients=(-0.1,))
    """
    return Rule("scaled_add", (float(alpha),))


def axpby(a: float, b: float) -> Rule:
    """``value = a * sent + b * value``.

    >>> axpby(0.1, 0.9).coefficients
    (0.1, 0.9)
    """
    return Rule("axpby", (float(a), float(b)))


def sgd(lr: float, momentum: float = 0.0, *, weight_decay: float = 0.0, nesterov: bool = False) -> Rule:
    """What is sent is a gradient: a step of SGD as torch.optim.SGD makes it, the momentum being kept by the server.

    >>> sgd(0.1, 0.9).name
    'sgd'
    """
    return Rule("sgd", (float(lr), float(momentum), float(weight_decay), float(nesterov)))


def adagrad(lr: float, *, eps: float = 1e-10, weight_decay: float = 0.0) -> Rule:
    """What is sent is a gradient: a step of torch.optim.Adagrad.

    >>> adagrad(0.01).coefficients
    (0.01, 1e-10, 0.0)
    """
    return Rule("adagrad", (float(lr), float(eps), float(weight_decay)))


def adam(lr: float, betas: tuple[float, float] = (0.9, 0.999), *, eps: float = 1e-8, weight_decay: float = 0.0) -> Rule:
    """What is sent is a gradient: a step of torch.optim.Adam. Each chunk counts its own steps.

    >>> adam(0.001).coefficients
    (0.001, 0.9, 0.999, 1e-08, 0.0)
    """
    return Rule("adam", (float(lr), float(betas[0]), float(betas[1]), float(eps), float(weight_decay)))


class Prepared(NamedTuple):
    """A rule for a dtype: an address, or a function of Python."""

    name: str
    coefficients: tuple[float, ...]
    num_states: int
    address: int
    function: Function | None


class _Registered(NamedTuple):
    function: Function
    num_states: int


_registered: dict[str, _Registered] = {}
_changing = threading.Lock()


def register_rule(name: str, function: Function, *, num_states: int = 0) -> None:
    """Add a rule of your own: ``function(values, sent, *states)`` changes `values` (and `states`) in place.

    It is called for each chunk, with flat tensors of some thousand elements, by the client that sends or by the server
    of another host, in whatever thread: it must depend on nothing but its arguments. If it raises, the chunk stays as
    it was. Register it under the same name on all ranks. States (at most two) start at zero; they are float32, for
    float64 float64.

        def clipped(values, sent):
            values.add_(sent.clamp(-1, 1))
        ps.register_rule("clipped", clipped)
        ps.send(server, gradient, "clipped").wait()
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"register_rule: {name!r} is not a name. Use letters, digits and underscores.")
    if not callable(function):
        raise ArgumentError(f"register_rule: the function of rule {name!r} is a {type(function).__name__}.")
    if not 0 <= num_states <= MOST_STATES:
        raise ArgumentError(
            f"register_rule: num_states={num_states} for rule {name!r}; 0 to {MOST_STATES} are possible."
        )
    if len(name.encode()) > MOST_NAME_BYTES:
        raise ArgumentError(f"register_rule: the name {name!r} is longer than {MOST_NAME_BYTES} bytes.")
    with _changing:
        if name in native.BUILT_IN:
            raise ArgumentError(f"register_rule: {name!r} is built in. Take another name.")
        _registered[name] = _Registered(function, num_states)


def prepare(rule: object, dtype: torch.dtype) -> Prepared:
    """Find what a rule means for a dtype, or refuse it.

    >>> prepare("nonsense", torch.float32)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: unknown rule 'nonsense'. There are adagrad, adam, add, axpby, copy, max, min, \
scaled_add, sgd, zero, and what register_rule adds.
    """
    if isinstance(rule, str):
        rule = Rule(rule)
    if not isinstance(rule, Rule):
        raise ArgumentError(f"a rule is a name or what torchmpi.parameterserver.scaled_add(...) gives, not {rule!r}.")
    if len(rule.coefficients) > MOST_COEFFICIENTS:
        raise ArgumentError(
            f"rule {rule.name!r} has {len(rule.coefficients)} coefficients; {MOST_COEFFICIENTS} are possible."
        )
    own = _registered.get(rule.name)
    if own is not None:
        return Prepared(rule.name, rule.coefficients, own.num_states, 0, own.function)
    code = native.BUILT_IN.get(rule.name)
    if code is None:
        names = ", ".join(sorted({*native.BUILT_IN, *_registered}))
        raise ArgumentError(f"unknown rule {rule.name!r}. There are {names}, and what register_rule adds.")
    if len(rule.coefficients) != code.num_coefficients:
        raise ArgumentError(
            f"rule {rule.name!r} needs {code.num_coefficients} coefficients: write "
            f"torchmpi.parameterserver.{rule.name}(...)."
        )
    return Prepared(rule.name, rule.coefficients, code.num_states, native.address(dtype, rule.name), None)
