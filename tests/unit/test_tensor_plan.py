"""To a user of tensor_parallel: each number of a weight has one rank, heads stay whole, and errors say what fits."""

from __future__ import annotations

import pytest
import torch
from helpers.transformer_shapes import HEAD, HEADS, INNER, SHAPES, VOCABULARY, WIDTH, Bert, Llama, make_shape
from torch import nn
from torch.nn import functional

from torchmpi.errors import ArgumentError
from torchmpi.nn.tensor_plan import PLANS, TensorSplit, division_of_model

NUM_DIVIDED = {"gpt2": 10, "llama": 18, "bert": 14}
"""Layers of the two blocks, embedding and head."""


class Mlp(nn.Module):
    def __init__(self, width: int = 6, inner: int = 64, stacked: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, stacked * inner), nn.Linear(inner, width, bias=False)


def plan_of(units: int | None = None, rows: int | None = None, stacked: int = 1) -> dict[str, TensorSplit]:
    return {"up": TensorSplit("columns", units, stacked), "down": TensorSplit("rows", rows or units)}


@pytest.mark.parametrize("name", PLANS)
def test_each_number_of_each_weight_has_one_rank(name):
    """On as many ranks as there are heads, and fewer."""
    model = make_shape(name)
    for num_ranks in range(1, HEADS + 1):
        found = division_of_model(model, "auto", num_ranks)
        assert found == division_of_model(model, name, num_ranks) and len(found) == NUM_DIVIDED[name]
        for layer, division in found.items():
            for short, cut in division.cuts.items():
                whole = model.get_submodule(layer).get_parameter(short).data
                parts = [cut.select(whole, rank) for rank in range(num_ranks)]
                assert torch.equal(cut.join(parts), whole)
                assert all(cut.whole_shape(part) == list(whole.shape) for part in parts)
                lengths = [cut.width(rank) for rank in range(num_ranks)]
                step = cut.bounds[-1] // division.num_parts
                assert min(lengths) > 0 and max(lengths) - min(lengths) in (0, step), (layer, lengths)
                assert cut.bounds[-1] in (INNER, VOCABULARY) or all(length % HEAD == 0 for length in lengths)


@pytest.mark.parametrize(("units", "stacked"), [(None, 1), (64, 1), (64, 3)])
def test_parts_add_up_to_the_whole_on_1_to_64_ranks(units, stacked):
    model = Mlp(stacked=stacked).double()
    x = torch.randn(2, 6, dtype=torch.float64)

    def output(up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        matrices = functional.linear(x, up, bias).chunk(stacked, -1)
        return functional.linear(torch.stack(matrices).prod(0).tanh(), down)

    whole = output(model.up.weight, model.up.bias, model.down.weight)
    for num_ranks in range(1, 65):
        found = division_of_model(model, plan_of(units, stacked=stacked), num_ranks)
        up, down = found["up"].cuts, found["down"].cuts
        total = sum(
            output(
                up["weight"].select(model.up.weight, rank),
                up["bias"].select(model.up.bias, rank),
                down["weight"].select(model.down.weight, rank),
            )
            for rank in range(num_ranks)
        )
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [HEADS + 1, 64])
@pytest.mark.parametrize("name", PLANS)
def test_too_many_ranks_are_told_how_many_work(name, num_ranks):
    with pytest.raises(
        ArgumentError, match=rf"{num_ranks} ranks cannot divide .* over 1 to {HEADS} ranks: start fewer"
    ):
        division_of_model(make_shape(name), "auto", num_ranks)
    assert division_of_model(make_shape(name), "auto", HEADS)


def test_one_unit_is_for_one_rank():
    assert division_of_model(Mlp(), plan_of(1), 1)
    with pytest.raises(ArgumentError, match="2 ranks cannot divide"):
        division_of_model(Mlp(), plan_of(1), 2)


REFUSED = {
    "unknown name": (Mlp, "gpt3", "unknown plan 'gpt3'. Pass 'auto', 'gpt2', 'llama', 'bert', or a plan of your own."),
    "no known layer": (Mlp, "auto", "no layer of Mlp has a name of a known plan. .* its layers are up, down."),
    "another plan": (Llama, "bert", r"plan='bert': no layer of Llama .* layers\.\*\.self_attn\.q_proj"),
    "a typing error": (Mlp, {**plan_of(), "dwn": TensorSplit("rows")}, "matches the pattern 'dwn' .* like it: down"),
    "units": (Mlp, plan_of(7), "'up' has 64 output features, no multiple of the 7 units of the plan; 4 or 8 would fit"),
    "stacked": (Mlp, plan_of(stacked=3), "'up' has 64 output features, which are not 3 stacked matrices of equal size"),
    "stacked head": (Mlp, {"up": TensorSplit("head", stacked=2)}, "'up': stacked=2 is not for 'head'.*Leave it out"),
    "added": (
        lambda: nn.ModuleDict({"norm": nn.Sequential(nn.ReLU(), nn.RMSNorm(4))}),
        {"norm": TensorSplit("added")},
        "'norm', .* contains the layer of '1.weight', .* Give its layers in the plan instead, such as \"norm.1\"",
    ),
    "no config": (Mlp, plan_of("heads"), "divides 'up' by 'heads', which is no number in model.config"),
    "pair": (Mlp, plan_of(32, 4), r"the 64 input features of 'down' in 4 units, but no layer .* \(up\)"),
    "no rows": (Mlp, {"up": TensorSplit("columns")}, "of 'up', but no layer of rows beside it takes them"),
    "no columns": (Mlp, {"down": TensorSplit("rows")}, r"no layer of columns beside it .* \(there is none\)"),
    "kind": (Bert, {"LayerNorm": TensorSplit("rows")}, "is a LayerNorm; it must be an nn.Linear or a Conv1D"),
    "embedding": (Mlp, {"up": TensorSplit("embedding")}, "'up', .* is a Linear; it must be an nn.Embedding"),
    "attributes": (
        Mlp,
        {"up": TensorSplit("columns", attributes=("heads",)), "down": TensorSplit("rows")},
        "changes 'heads' beside 'up', but a Mlp has no such number",
    ),
    "tied": (
        SHAPES["gpt2"],
        {"lm_head": TensorSplit("head")},
        "'lm_head.weight' is the same parameter as 'wte.weight', but the plan divides them differently",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_said(case):
    make_model, plan, text = REFUSED[case]
    with pytest.raises(ArgumentError, match=text):
        division_of_model(make_model(), plan, 3)


def test_a_sparse_embedding_is_refused():
    model = nn.ModuleDict({"words": nn.Embedding(9, WIDTH, sparse=True)})
    with pytest.raises(ArgumentError, match="'words': an embedding with sparse=True"):
        division_of_model(model, {"words": TensorSplit("embedding")}, 2)
