"""The rules of the parameter server in plain torch: a formula and coefficients of each, and torch's own optimizers."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from torchmpi.parameterserver.kernels import server_rules

COEFFICIENTS = {
    "scaled_add": [(0.3,), (-1.0,), (0.0,)],
    "axpby": [(0.1, 0.9), (1.0, -2.5)],
    "sgd": [(0.1, 0.9, 0.01, 1.0), (0.1, 0.9, 0.01, 0.0), (0.3, 0.0, 0.0, 0.0)],
    "adagrad": [(0.1, 1e-10, 0.0), (0.3, 0.1, 0.02)],
    "buffered": [(1.0, 0.5, 3.0), (0.5, 0.25, 1.0)],
    "adam": [(0.01, 0.9, 0.999, 1e-8, 0.0), (0.3, 0.5, 0.6, 0.1, 0.02)],
}


def power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent:
        result, base, exponent = result * (base if exponent & 1 else 1.0), base * base, exponent >> 1
    return result


def twin(
    name: str, c: tuple[float, ...], arrays: list[torch.Tensor], incoming: torch.Tensor, step: int = 1
) -> list[torch.Tensor]:
    """Return the new value and states."""
    value, dtype = arrays[0], arrays[0].dtype
    if name in ("zero", "copy"):
        return [torch.zeros_like(value) if name == "zero" else incoming.clone()]
    if not dtype.is_floating_point:
        return [{"add": torch.add, "max": torch.maximum, "min": torch.minimum}[name](value, incoming)]
    wide = server_rules.state_dtype(dtype)
    v, g, states = value.to(wide), incoming.to(wide), arrays[1:]
    if name == "add":
        return [(v + g).to(dtype)]
    if name in ("max", "min"):
        better = (g > v) if name == "max" else (g < v)
        return [torch.where(better | (g.isnan() & ~v.isnan()), g, v).to(dtype)]
    if name == "adam":
        c = (*c, power(c[1], step), power(c[2], step))
    new, *states = FORMULAS[name](c, v, g, *states)
    return [new.to(dtype), *states]


def root(tensor: torch.Tensor) -> torch.Tensor:
    """NumPy's square root, which is correctly rounded. That of torch sometimes differs in the last bit."""
    return torch.from_numpy(np.sqrt(tensor.numpy()))


def sgd(c, v, g, m):
    lr, momentum, weight_decay, nesterov = c[:4]
    d = g + weight_decay * v
    m = momentum * m + d
    return v - lr * (d + momentum * m if nesterov else m), m


def adagrad(c, v, g, s):
    lr, eps, weight_decay = c[:3]
    d = g + weight_decay * v
    s = s + d * d
    return v - lr * d / (root(s) + eps), s


def adam(c, v, g, m, s):
    lr, beta1, beta2, eps, weight_decay, power1, power2 = c
    d = g + weight_decay * v
    m = beta1 * m + (1 - beta1) * d
    s = beta2 * s + (1 - beta2) * d * d
    bias = math.sqrt(1 - power2)  # into the step and eps: the same as dividing each sqrt(s) by it
    return v - (lr * bias / (1 - power1)) * m / (root(s) + eps * bias), m, s


def buffered(c, v, g, m, s):
    weight, lr, size = c[:3]
    m, s = m + weight * g, s + 1
    full = s >= size
    zero = torch.zeros_like(s)
    return torch.where(full, v - lr * (m / size), v), torch.where(full, zero, m), torch.where(full, zero, s)


FORMULAS = {
    "scaled_add": lambda c, v, g: (v + c[0] * g,),
    "axpby": lambda c, v, g: (c[0] * g + c[1] * v,),
    "sgd": sgd,
    "adagrad": adagrad,
    "adam": adam,
    "buffered": buffered,
}


OPTIMIZERS = [
    ("sgd_plain", (0.1, 0.0, 0.0, 0.0), partial(torch.optim.SGD, lr=0.1)),
    ("sgd_plain", (0.1, 0.0, 0.02, 0.0), partial(torch.optim.SGD, lr=0.1, weight_decay=0.02)),
    ("sgd", (0.1, 0.9, 0.0, 0.0), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    ("sgd", (0.1, 0.9, 0.02, 0.0), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02)),
    ("sgd", (0.1, 0.9, 0.02, 1.0), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02, nesterov=True)),
    ("adagrad", (0.1, 1e-10, 0.0), partial(torch.optim.Adagrad, lr=0.1)),
    ("adagrad", (0.1, 0.01, 0.02), partial(torch.optim.Adagrad, lr=0.1, eps=0.01, weight_decay=0.02)),
    ("adam", (0.01, 0.9, 0.999, 1e-8, 0.0), partial(torch.optim.Adam, lr=0.01)),
    (
        "adam",
        (0.01, 0.8, 0.95, 0.1, 0.02),
        partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.95), eps=0.1, weight_decay=0.02),
    ),
]
