"""Rules: functions by which a server combines its values with the sent values."""

from __future__ import annotations

import hashlib
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..argument_types import checks_types
from ..errors import ArgumentError, kind_of
from .kernels import server_rules as native
from .kernels.shard_layout import MOST_STATES, NUM_COEFFICIENTS

__all__ = [
    "Rule",
    "RuleContext",
    "adagrad",
    "adam",
    "axpby",
    "buffered",
    "damped",
    "register_rule",
    "scaled_add",
    "sgd",
]

Function = Callable[..., object]
MAX_NAME_BYTES = 64
"""Space for the name in a request to another host."""


@dataclass(frozen=True)
class Rule:
    """A rule with its coefficients.

    Functions such as :func:`sgd` return one; a rule without coefficients may be given by its name alone.

    Args:
        name: Name of a built-in rule, or of one of :func:`register_rule`.
        coefficients: A tuple of at most six numbers. A registered rule gets them as its last arguments.
        power: See :func:`damped`.
        offset: Likewise.

    Raises:
        ArgumentError: The coefficients are not a tuple.

    Example:
        ps.send(server, gradient, ps.Rule("clipped", (0.5,)))
    """

    name: str
    coefficients: tuple[float, ...] = ()
    power: float = 0.0
    offset: float = 0.0

    def __repr__(self) -> str:
        damping = f", power={self.power!r}, offset={self.offset!r}" if self.power else ""
        return f"Rule(name={self.name!r}, coefficients={self.coefficients!r}{damping})"

    def __post_init__(self) -> None:
        if not isinstance(self.coefficients, tuple):
            raise ArgumentError(
                f"Rule({self.name!r}, {self.coefficients!r}): the coefficients are a tuple of numbers, such as (0.5,)."
            )


@checks_types
def scaled_add(alpha: float) -> Rule:
    """Return the rule ``value += alpha * sent``.

    Args:
        alpha: Factor of the sent values.

    Returns:
        The rule, for floating-point servers.

    Example:
        >>> scaled_add(-0.1)
        Rule(name='scaled_add', coefficients=(-0.1,))
    """
    return Rule("scaled_add", (_number("alpha", alpha),))


@checks_types
def axpby(a: float, b: float) -> Rule:
    """Return the rule ``value = a * sent + b * value``.

    Args:
        a: Factor of the sent values.
        b: Factor of the values of the server.

    Returns:
        The rule, for floating-point servers.

    Example:
        >>> axpby(0.1, 0.9).coefficients
        (0.1, 0.9)
    """
    return Rule("axpby", (_number("a", a), _number("b", b)))


@checks_types
def sgd(lr: float, momentum: float = 0.0, *, weight_decay: float = 0.0, nesterov: bool = False) -> Rule:
    """Return the rule that takes a step of ``torch.optim.SGD``; the sent values are a gradient.

    Args:
        lr: Learning rate.
        momentum: Momentum. Unless it is zero, the server keeps the momentum buffer, which all senders share.
        weight_decay: Weight decay.
        nesterov: Whether to use Nesterov's momentum.

    Returns:
        The rule, for floating-point servers.

    Raises:
        ArgumentError: A number is negative, or Nesterov's momentum is zero.

    Example:
        >>> sgd(0.1, 0.9).name
        'sgd'
    """
    _check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ArgumentError("sgd: nesterov=True needs a momentum.")
    return Rule("sgd", (float(lr), float(momentum), float(weight_decay), float(nesterov)))


@checks_types
def adagrad(lr: float, *, eps: float = 1e-10, weight_decay: float = 0.0) -> Rule:
    """Return the rule that takes a step of ``torch.optim.Adagrad``; the sent values are a gradient.

    Args:
        lr: Learning rate.
        eps: Term added to the denominator.
        weight_decay: Weight decay.

    Returns:
        The rule, for floating-point servers. The server keeps the sum of squares.

    Raises:
        ArgumentError: A number is negative.

    Example:
        >>> adagrad(0.01).coefficients
        (0.01, 1e-10, 0.0)
    """
    _check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    return Rule("adagrad", (float(lr), float(eps), float(weight_decay)))


@checks_types
def adam(lr: float, betas: tuple[float, float] = (0.9, 0.999), *, eps: float = 1e-8, weight_decay: float = 0.0) -> Rule:
    """Return the rule that takes a step of ``torch.optim.Adam``; the sent values are a gradient.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Term added to the denominator.
        weight_decay: Weight decay.

    Returns:
        The rule, for floating-point servers. The server keeps both moments, and a step count per chunk.

    Raises:
        ArgumentError: A number is negative, or a decay rate is not below 1.

    Example:
        >>> adam(0.001).coefficients
        (0.001, 0.9, 0.999, 1e-08, 0.0)
    """
    _check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= _number("betas", beta) < 1 for beta in betas):
        raise ArgumentError(f"betas={betas!r}: expected two numbers from 0 to below 1.")
    return Rule("adam", (float(lr), float(betas[0]), float(betas[1]), float(eps), float(weight_decay)))


@checks_types
def buffered(lr: float, size: int) -> Rule:
    """Return the rule that adds up `size` sent values and then takes one step: ``value -= lr * sum / size``.

    Args:
        lr: The rate of the step.
        size: How many sends, of any ranks, make a step. All ranks pass the same.

    Returns:
        The rule, for floating-point servers, which keep the sum and the count of sends for each element. :func:`damped`
        divides the weight of a sent value, which is 1, by a power of its staleness.

    Raises:
        ArgumentError: A number is invalid.

    Example:
        >>> buffered(0.5, 4).coefficients
        (1.0, 0.5, 4.0)
    """
    _check_not_negative(lr=lr)
    if size < 1:
        raise ArgumentError(f"buffered: size={size!r}: expected a whole number from 1.")
    return Rule("buffered", (1.0, float(lr), float(size)))


@checks_types
def damped(rule: Rule, power: float = 1.0, *, offset: float = 0.0) -> Rule:
    """Return a rule whose rate is divided by a power of the staleness: ``rate / max(1, staleness + offset) ** power``.

    The staleness is the number of rules that other ranks have applied since the sender fetched the values from which it
    has computed what it sends, in each chunk of the server; 0 if it has fetched none.

    Args:
        rule: The result of :func:`sgd`, :func:`adagrad`, :func:`adam`, :func:`scaled_add` or :func:`axpby`, whose first
            coefficient is divided. It stays compiled.
        power: The power, a multiple of 0.5: 1 for Zhang et al. (2015), 0.5 with ``offset=1`` for FedBuff.
        offset: What is added to the staleness.

    Returns:
        The rule.

    Raises:
        ArgumentError: The rule has no rate, or a number is invalid.

    Example:
        >>> damped(sgd(0.1), 0.5, offset=1).power
        0.5
    """
    power, offset = _number("power", power), _number("offset", offset)
    if not 0 < power <= 8 or (2 * power) % 1:
        raise ArgumentError(f"damped: power={power!r}: expected a multiple of 0.5, at most 8.")
    if not 0 <= offset < math.inf:
        raise ArgumentError(f"damped: offset={offset!r}: expected a number from 0.")
    code = native.BUILT_IN.get(rule.name)
    if code is None or not code.coefficients:
        rated = ", ".join(name for name, each in native.BUILT_IN.items() if each.coefficients)
        raise ArgumentError(
            f"damped: rule {rule.name!r} has no rate to divide; {rated} have one. A rule of register_rule() that takes "
            "`context` knows the staleness itself."
        )
    return replace(rule, power=power, offset=offset)


def _check_not_negative(**numbers: float) -> None:
    for name, number in numbers.items():
        if not _number(name, number) >= 0:
            raise ArgumentError(f"{name}={number}: expected a number from 0.")


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last two of strings and tensors
        raise ArgumentError(f"{name}={value!r}: expected a number.") from None


@dataclass(frozen=True)
class RuleContext:
    """What a registered rule that takes `context` is told, within a host and between hosts.

    Attributes:
        sender: Rank of the sender in the communicator of the server.
        num_clients: Number of ranks that send: those of the communicator, or the clients of an update.
        version: Rules that had been applied to the chunk before this one.
        fetched: The version that the sender's values had, including its own sends since; None if it has fetched none.
        staleness: Rules of other ranks that the sender's values lack: ``version - fetched``; 0 if it has fetched none.

    Example:
        def polite(values, sent, rate, *, context):
            values.sub_(sent, alpha=rate / (1 + context.staleness))

        ps.register_rule("polite", polite)
        ps.send(server, gradient, ps.Rule("polite", (0.1,)))
    """

    sender: int
    num_clients: int
    version: int
    fetched: float | None
    staleness: float


class PreparedRule(NamedTuple):
    """A rule for one dtype: the address of native code, or a Python function."""

    name: str
    coefficients: tuple[float, ...]
    num_states: int
    address: int
    function: Function | None
    takes_context: bool = False
    halves: int = 0
    """Twice the power of the staleness by which the first coefficient is divided,"""
    offset: float = 0.0
    """to which this is added before."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """All numbers on which its result depends."""
        return *self.coefficients, self.halves, self.offset

    @property
    def needs_versions(self) -> bool:
        """Return whether the rule depends on the versions of the values that the sender has used."""
        return self.takes_context or self.halves > 0


_registered: dict[str, tuple[Function, int, bool]] = {}
"""Functions and numbers of states of registered rules, and whether they take a context."""
_changing = threading.Lock()
_boards: set[RuleBoard] = set()


class RuleBoard:
    """Shows the ranks that share memory which rules each of them has registered.

    A rank applies a rule to the shards of its host itself, so that no other one would find that it lacks the rule. Of
    each name a byte of its digest is set, so that one of many thousand missing rules is not noticed.

    >>> memory = np.zeros(2 * RuleBoard.BYTES, np.uint8)
    >>> board = RuleBoard(memory, 1); board.add("clipped"); board.lacking("clipped")
    [0]
    >>> board.close()
    """

    BYTES = 32768
    """Of the memory of each rank."""

    def __init__(self, memory: NDArray[np.uint8], index: int) -> None:
        self._flags, self._index = memory.reshape(-1, self.BYTES), index
        with _changing:
            _boards.add(self)
            for name in _registered:
                self.add(name)

    def add(self, name: str) -> None:
        """Show that this rank has registered a rule."""
        self._flags[self._index, self._place(name)] = 1

    def lacking(self, name: str) -> list[int]:
        """Return the numbers of the ranks that have not registered a rule."""
        return [int(index) for index in np.flatnonzero(self._flags[:, self._place(name)] == 0)]

    def close(self) -> None:
        """Let the memory be released."""
        with _changing:
            _boards.discard(self)

    def _place(self, name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") % self.BYTES


@checks_types
def register_rule(name: str, function: Function, *, num_states: int = 0) -> None:
    """Add a rule written in Python. Call it on all ranks.

    ``function(values, sent, *states, *coefficients)`` is called for each chunk, with flat tensors of at most 64 KB. It
    changes `values` and `states` in place; `sent` is a copy. The function runs in any thread of the sender, or of a
    rank on another host, under the lock of the chunk, and must depend on its arguments only: calls of torchmpi in it
    raise. If it has a parameter `context`, that is the :class:`RuleContext` of the chunk. If it raises, the chunk stays
    unchanged, later ones are left out, and ``wait()`` of the sender raises an error that names the chunks to which the
    rule has been applied.

    Register a rule on all ranks before one of them sends with it; otherwise ``wait()`` of the sender raises, and
    nothing is applied.

    Args:
        name: Name of the rule: an identifier, the same on all ranks. A registered rule may be replaced.
        function: The rule.
        num_states: Number of tensors, at most two, that the server keeps for the rule. They start at zero, in float64
            for float64 servers and in float32 for all others.

    Raises:
        ArgumentError: The name is not an identifier or that of a built-in rule, or another argument is invalid.

    Example:
        def clipped(values, sent):
            values.add_(sent.clamp(-1, 1))

        ps.register_rule("clipped", clipped)
        ps.send(server, gradient, "clipped").wait()
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"register_rule: {name!r} is not a name. Use letters, digits and underscores.")
    if not callable(function):
        raise ArgumentError(f"register_rule: the function of rule {name!r} is {kind_of(function)}.")
    if not isinstance(num_states, int) or not 0 <= num_states <= MOST_STATES:
        raise ArgumentError(
            f"register_rule: num_states={num_states} for rule {name!r}; 0 to {MOST_STATES} are possible."
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ArgumentError(f"register_rule: the name {name!r} is longer than {MAX_NAME_BYTES} bytes.")
    try:
        takes_context = "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C
        takes_context = False
    with _changing:
        if name in native.BUILT_IN:
            raise ArgumentError(f"register_rule: {name!r} is built in. Use another name.")
        _registered[name] = function, num_states, takes_context
        for board in _boards:
            board.add(name)


def prepare(rule: object, dtype: torch.dtype) -> PreparedRule:
    """Return a rule for a dtype, or raise an error.

    >>> prepare("nonsense", torch.float32)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: unknown rule 'nonsense'. Available: ... register_rule adds others.
    """
    if isinstance(rule, str):
        rule = Rule(rule)
    if not isinstance(rule, Rule):
        raise ArgumentError(
            f"a rule is a name or a torchmpi.parameterserver.Rule, not {rule!r}. Register a function by "
            "register_rule(name, function) on all ranks, and pass the name."
        )
    if rule.power or rule.offset:
        damped(rule, rule.power, offset=rule.offset)  # raises unless it can be
    if len(rule.coefficients) > NUM_COEFFICIENTS:
        raise ArgumentError(
            f"rule {rule.name!r} has {len(rule.coefficients)} coefficients; {NUM_COEFFICIENTS} are possible."
        )
    try:
        tuple(map(float, rule.coefficients))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"rule {rule.name!r}: a coefficient is no number: {error}.") from None
    registered = _registered.get(rule.name)
    if registered is not None:
        function, num_states, takes_context = registered
        return PreparedRule(rule.name, rule.coefficients, num_states, 0, function, takes_context)
    code = native.BUILT_IN.get(rule.name)
    if code is None:
        names = ", ".join(sorted({*native.BUILT_IN, *_registered}))
        raise ArgumentError(f"unknown rule {rule.name!r}. Available: {names}. register_rule adds others.")
    if len(rule.coefficients) != len(code.coefficients):
        raise ArgumentError(
            f"rule {rule.name!r} needs {len(code.coefficients)} coefficients: write "
            f"torchmpi.parameterserver.{rule.name}(...)."
        )
    is_plain = code.is_plain(rule.coefficients)
    address = native.address(dtype, rule.name + native.PLAIN * is_plain)
    num_states, halves = 0 if is_plain else code.num_states, int(2 * rule.power)
    return PreparedRule(rule.name, rule.coefficients, num_states, address, None, halves=halves, offset=rule.offset)
