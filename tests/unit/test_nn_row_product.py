"""To who generates with a divided model: a linear layer of one row gives the numbers of torch."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from torchmpi.nn import row_product


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def operands(num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, num_inputs, generator=generator), torch.randn(num_outputs, num_inputs, generator=generator)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 256), (131, 127), (5, 4099), (3, 8192), (16400, 1)])
@pytest.mark.parametrize("shape", [(-1,), (1, -1), (1, 1, -1)], ids=len)
@torch.no_grad()
def test_equals_torch(num_outputs, num_inputs, shape, monkeypatch):
    row, weight = operands(num_outputs, num_inputs)
    row, bias = row.view(shape), weight[:, 0].clone()
    expected = functional.linear(row.double(), weight.double()).float()
    monkeypatch.setattr(row_product.functional, "linear", pytest.fail)
    found = row_product.linear(row, weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(row_product.linear(row, weight, bias), found + bias)


class Tagged(torch.Tensor):
    """A tensor of another class, of which operators may do something else."""


ROW, WEIGHT = operands(128, 256)
OTHERS = {
    "gradients": (torch.enable_grad(), ROW, WEIGHT.clone().requires_grad_()),
    "two rows": (torch.no_grad(), ROW.repeat(2, 1), WEIGHT),
    "float64": (torch.no_grad(), ROW.double(), WEIGHT.double()),
    "columns": (torch.no_grad(), ROW, WEIGHT.t().contiguous().t()),
    "a short weight": (torch.no_grad(), ROW, WEIGHT[:4]),
    "another class": (torch.no_grad(), ROW, WEIGHT.as_subclass(Tagged)),
    "no numbers": (torch.no_grad(), ROW.to("meta"), WEIGHT.to("meta")),
    "autocast": (torch.autocast("cpu"), ROW, WEIGHT),
}


@pytest.mark.parametrize("name", OTHERS)
def test_torch_computes_the_others(name, monkeypatch):
    monkeypatch.setattr(row_product, "compiled", pytest.fail)
    context, row, weight = OTHERS[name]
    with context, torch.set_grad_enabled(name == "gradients"):
        found, expected = row_product.linear(row, weight), functional.linear(row, weight)
    assert (found.dtype, found.requires_grad, type(found)) == (expected.dtype, name == "gradients", type(expected))
    assert found.is_meta or torch.equal(found, expected)


@torch.no_grad()
def test_what_records_or_transforms_operators_sees_them(monkeypatch):
    monkeypatch.setattr(row_product, "compiled", pytest.fail)
    assert "mm" in make_fx(lambda row, weight: row_product.linear(row, weight))(ROW, WEIGHT).code
    assert "linear" in str(torch.jit.trace(row_product.linear, (ROW, WEIGHT), check_trace=False).graph)
    rows = torch.cat([ROW, -ROW])
    found = torch.vmap(row_product.linear, in_dims=(0, None))(rows, WEIGHT)
    torch.testing.assert_close(found, functional.linear(rows, WEIGHT))
    _, tangent = torch.func.jvp(lambda row: row_product.linear(row, WEIGHT), (ROW,), (ROW,))
    torch.testing.assert_close(tangent, functional.linear(ROW, WEIGHT))


def test_a_wrong_length_is_refused_as_by_torch():
    with torch.no_grad(), pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        row_product.linear(ROW.t(), WEIGHT)
