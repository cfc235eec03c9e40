"""LLVM code of the parameter server's rules: one pass over a chunk, out of place, in vectors.

The optimizers are written as formulas of numbers that stand for vectors of the generated code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .simd_ir import BYTE, DOUBLE, FLOAT, I64, Lanes, in_vectors, spread

# Bytes of values in flight, as they are computed: more of the optimizers' would not stay in registers.
_BLOCK_BYTES, _OPTIMIZER_BLOCK_BYTES = 256, 128
_NUM_COEFFICIENTS = 8


class _Number:
    """A number or vector that generated code computes; arithmetic emits instructions."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def _with(self, value: Any) -> _Number:
        return _Number(self.builder, value)

    def __add__(self, other: _Number) -> _Number:
        return self._with(self.builder.fadd(self.value, other.value))

    def __sub__(self, other: _Number) -> _Number:
        return self._with(self.builder.fsub(self.value, other.value))

    def __mul__(self, other: _Number) -> _Number:
        return self._with(self.builder.fmul(self.value, other.value))

    def __truediv__(self, other: _Number) -> _Number:
        return self._with(self.builder.fdiv(self.value, other.value))

    def sqrt(self) -> _Number:
        """Emit LLVM's intrinsic, which is exact, sets no errno, and becomes one instruction."""
        kind, module = self.value.type, self.builder.module
        element = "f64" if getattr(kind, "element", kind) == DOUBLE else "f32"
        name = f"llvm.sqrt.v{kind.count}{element}" if isinstance(kind, ir.VectorType) else f"llvm.sqrt.{element}"
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [kind]), name)
        return self._with(self.builder.call(function, [self.value]))

    def choose(self, yes: _Number, no: _Number) -> _Number:
        """Select ``yes`` where this is not 0, else ``no``."""
        zero = ir.Constant(self.value.type, [0.0] * self.value.type.count)
        return self._with(self.builder.select(self.builder.fcmp_unordered("!=", self.value, zero), yes.value, no.value))


# Formulas of coefficients, value, incoming and states: the new value, then the new states.


def _scaled_add(c: list[_Number], v: _Number, g: _Number) -> tuple[_Number, ...]:
    return (v + c[0] * g,)


def _axpby(c: list[_Number], v: _Number, g: _Number) -> tuple[_Number, ...]:
    return (c[0] * g + c[1] * v,)


def _sgd(c: list[_Number], v: _Number, g: _Number, m: _Number) -> tuple[_Number, ...]:
    lr, momentum, weight_decay, nesterov = c
    d = g + weight_decay * v
    m = momentum * m + d
    return v - lr * nesterov.choose(d + momentum * m, m), m


def _adagrad(c: list[_Number], v: _Number, g: _Number, s: _Number) -> tuple[_Number, ...]:
    lr, eps, weight_decay = c
    d = g + weight_decay * v
    s = s + d * d
    return v - (lr * d) / (s.sqrt() + eps), s


def _adam(c: list[_Number], v: _Number, g: _Number, m: _Number, s: _Number) -> tuple[_Number, ...]:
    step, eps, beta1, rest1, beta2, rest2, weight_decay = c
    d = g + weight_decay * v
    m = beta1 * m + rest1 * d
    s = beta2 * s + rest2 * d * d
    return v - (step * m) / (s.sqrt() + eps), m, s


def _adam_coefficients(c: list[_Number], one: _Number) -> list[_Number]:
    """Apply both bias corrections to step size and eps, once and in float64, instead of to each element."""
    lr, beta1, beta2, eps, weight_decay, _, correction1, correction2 = c
    root = correction2.sqrt()
    return [lr * root / correction1, eps * root, beta1, one - beta1, beta2, one - beta2, weight_decay]


_FORMULAS: dict[str, Callable[..., tuple[_Number, ...]]] = {
    "scaled_add": _scaled_add,
    "axpby": _axpby,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adam": _adam,
}


def module_text(lane: str, op: str, num_parts: int, sizes: tuple[int, int] = (0, 0), *, has_half: bool = True) -> str:
    """Return a module with a function `function`: `op` is `zero`, `copy`, one of simd_ir's, or the name of a formula.

    `num_parts` lanes make an element. `sizes` are how many coefficients the formula takes, and how many states.
    Without `has_half`, 16-bit floats are converted by integer arithmetic: for processors that cannot.

    >>> "fmul <64 x float>" in module_text("f32", "scaled_add", 1, (1, 0))
    True
    """
    module = ir.Module(name="rule")
    pointer = BYTE.as_pointer()
    table = pointer.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [table, table, pointer, I64, DOUBLE.as_pointer()])
    function = ir.Function(module, kind, "function")
    function.attributes.add("nounwind")
    _Rule(function, (lane, op, num_parts, sizes), has_half).emit()
    return str(module)


class _Rule:
    """The emitter of one rule."""

    def __init__(self, function: Any, key: tuple[str, str, int, tuple[int, int]], has_half: bool) -> None:
        lane, self.op, self.num_parts, (self.num_coefficients, self.num_states) = key
        self.targets, self.arrays, self.incoming, self.numel, self.table = function.args
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        # Next to states, which are in the order of memory, numbers must be too.
        self.numbers = Lanes(self.builder, lane, has_half, is_paired=not self.num_states)
        self.states = Lanes(self.builder, "f64" if lane == "f64" else "f32", has_half)

    def emit(self) -> None:
        """Emit the whole function."""
        b, kind = self.builder, self.numbers.kind
        self.coefficients = self._prepared()
        # Loaded before any store, since LLVM cannot know that no target overlaps the tables.
        self.bases, self.goals = (
            [b.load(b.gep(table, [ir.Constant(I64, index)])) for index in range(1 + self.num_states)]
            for table in (self.arrays, self.targets)
        )
        num_bytes = b.mul(self.numel, ir.Constant(I64, kind.itemsize * self.num_parts))
        block_bytes = _OPTIMIZER_BLOCK_BYTES if self.num_states else _BLOCK_BYTES
        in_vectors(b, num_bytes, (kind.itemsize, block_bytes // kind.wide_itemsize), self._block)
        b.ret_void()

    def _prepared(self) -> list[Any]:
        """Compute the coefficients of the formula in float64, and round them to its dtype."""
        if self.op not in _FORMULAS:
            return []
        b = self.builder
        used = range(_NUM_COEFFICIENTS if self.op == "adam" else self.num_coefficients)
        numbers = [_Number(b, b.load(b.gep(self.table, [ir.Constant(I64, index)]), align=1)) for index in used]
        if self.op == "adam":
            numbers = _adam_coefficients(numbers, _Number(b, ir.Constant(DOUBLE, 1.0)))
        is_narrow = self.numbers.kind.wide_type == FLOAT
        return [b.fptrunc(number.value, FLOAT) if is_narrow else number.value for number in numbers]

    def _block(self, lanes: int, offset: Any) -> None:
        """Emit one vector of elements."""
        wider = self.states.kind.itemsize // self.numbers.kind.itemsize if self.num_states else 1
        state_offset = self.builder.mul(offset, ir.Constant(I64, wider))
        values = [] if self.op in ("zero", "copy") else self.numbers.load(self.bases[0], offset, lanes)
        others = [] if self.op == "zero" else self.numbers.load(self.incoming, offset, lanes)
        states = [self.states.load(base, state_offset, lanes) for base in self.bases[1:]]
        if self.op == "zero":
            results = [[ir.Constant(ir.VectorType(self.numbers.kind.wide_type, lanes), None)]]
        elif self.op == "copy":
            results = [others]
        elif self.op in _FORMULAS:
            each = [self._formula(vectors) for vectors in zip(values, others, *states, strict=True)]
            results = [list(vectors) for vectors in zip(*each, strict=True)]
        else:
            results = [[self.numbers.combine(self.op, *pair) for pair in zip(values, others, strict=True)]]
        self.numbers.store(results[0], self.goals[0], offset)
        for state, goal in zip(results[1:], self.goals[1:], strict=True):
            self.states.store(state, goal, state_offset)

    def _formula(self, vectors: tuple[Any, ...]) -> list[Any]:
        b = self.builder
        # Inside the loops: vectors that live through them would take several registers.
        coefficients = [_Number(b, spread(b, scalar, vectors[0].type)) for scalar in self.coefficients]
        return [new.value for new in _FORMULAS[self.op](coefficients, *(_Number(b, vector) for vector in vectors))]
