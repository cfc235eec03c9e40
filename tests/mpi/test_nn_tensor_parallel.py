"""To a user of tensor_parallel: on 1 to 4 ranks the numbers of one process, and one allreduce after each pair."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.transformer_shapes import HEADS, SHAPES, Llama, generate, make_shape, some_tokens
from torch import nn
from torch.nn import functional

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine
from torchmpi.errors import ArgumentError, ReplicaError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usefixtures("world")]
TIGHT = {"rtol": 1e-4, "atol": 1e-5}


def backward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return logits.detach()


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of the complete model: those of a model of which they are the weights."""
    copied = copy.deepcopy(model)
    for parameter, own in zip(copied.parameters(), model.parameters(), strict=True):
        parameter.data = own.grad
    return mpinn.full_state_dict(copied, root=None)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_are_those_of_one_process(agree, name):
    whole = make_shape(name)
    divided = mpinn.tensor_parallel(copy.deepcopy(whole), name)
    tokens = some_tokens()
    agree.close(backward(divided, tokens), backward(whole, tokens), "logits", **TIGHT)
    gradients = whole_gradients(divided)
    for parameter_name, parameter in whole.named_parameters():
        agree.close(gradients[parameter_name], parameter.grad, parameter_name, **TIGHT)
    copied = copy.deepcopy(divided)
    agree.equal(copied(tokens), divided(tokens), "of a copy")
    mpinn.check_with_allreduce(divided)
    counts = mpi.allgather(torch.tensor([sum(p.numel() for p in divided.parameters())]))
    most = sum(p.numel() for p in whole.parameters())
    agree(mpi.size() == 1 or bool((counts < 0.8 * most).all()), f"{counts} of {most} numbers")


@pytest.mark.ranks(2, 3)
def test_a_head_with_units_that_are_shared_unevenly(agree):
    """One unit of 3 features more than ranks: the parts are not those of single features."""
    torch.manual_seed(3)
    whole = nn.ModuleDict({"head": nn.Linear(6, 3 * (mpi.size() + 1))})
    divided = mpinn.tensor_parallel(copy.deepcopy(whole), {"head": mpinn.TensorSplit("head", mpi.size() + 1)})
    x = torch.randn(2, 6)
    outputs = [model["head"](x) for model in (divided, whole)]
    for output in outputs:
        output.square().sum().backward()
    agree.close(outputs[0], outputs[1], **TIGHT)
    agree.close(whole_gradients(divided)["head.weight"], whole["head"].weight.grad, **TIGHT)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_tokens_are_those_of_one_process(agree, name):
    whole = make_shape(name)
    expected = generate(whole, some_tokens(), 8)
    agree.equal(generate(mpinn.tensor_parallel(whole), some_tokens(), 8), expected)


@pytest.mark.ranks(2)
def test_each_pair_of_layers_costs_one_allreduce(agree):
    """Also in backward, although three layers take the input of the attention: they share one node of the graph."""
    blocks = 2
    model, tokens = mpinn.tensor_parallel(make_shape("gpt2"), "gpt2"), some_tokens()
    llama = mpinn.tensor_parallel(make_shape("llama"), "llama")

    def calls() -> tuple[int, int]:
        found = mpi.metrics()["calls"]["world"]
        return tuple(found.get(each, {"calls": 0})["calls"] for each in ("allreduce", "allgather"))

    counts = []
    for each in (model, llama):
        backward(each, tokens)  # with the comparisons of the first pass
        begin = calls()
        logits = each(tokens)
        middle = calls()
        logits.sum().backward()
        counts.append(
            [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in ((begin, middle), (middle, calls()))]
        )
    # The comparison of tokens, the embedding and the head have one call each; in backward, the head has one, and the
    # norm of heads in each block of this Llama.
    agree.equal(counts[0], [(2 * blocks + 2, 1), (2 * blocks + 1, 0)])
    agree.equal(counts[1], [(2 * blocks + 2, 1), (3 * blocks + 1, 0)])


@pytest.mark.ranks(2, 4)
def test_groups_with_data_of_their_own_train_like_one_process(agree):
    """Groups of two ranks divide a model, and the groups average their gradients."""
    level = mpi.push_communicator(mpi.rank() // 2)
    mpi.set_communicator(0)
    group, num_groups = mpi.rank() // 2, mpi.size() // 2
    whole = make_shape("llama")
    divided = mpinn.tensor_parallel(copy.deepcopy(whole), comm=level)
    results = []
    for model, first, step in ((whole, 0, 1), (divided, group, num_groups)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for seed in range(3):
            optimizer.zero_grad()
            batch = torch.cat([some_tokens(seed), some_tokens(seed + 10)])
            backward(model, batch[first::step])
            if model is divided:
                mpinn.synchronize_gradients(model)
            optimizer.step()
        results.append(model(some_tokens()).detach())
    mpinn.check_with_allreduce(divided)
    agree.close(results[1], results[0], **TIGHT)


@pytest.mark.ranks(1, 3)
def test_complete_weights_are_saved_and_loaded(agree, tmp_path):
    whole = make_shape("gpt2")
    divided = mpinn.tensor_parallel(copy.deepcopy(whole))
    of_root, everywhere = mpinn.full_state_dict(divided, root=mpi.size() - 1), mpinn.full_state_dict(divided, root=None)
    agree.equal(list(everywhere), list(whole.state_dict()))
    agree.equal(len(of_root), len(everywhere) if mpi.rank() == mpi.size() - 1 else 0)
    for name, tensor in whole.state_dict().items():
        agree.equal(everywhere[name], tensor, name)
    agree(everywhere["wte.weight"] is everywhere["lm_head.weight"], "a parameter of two layers is one tensor")

    expected = divided(some_tokens())
    with torch.device("meta"):
        empty = SHAPES["gpt2"]()
    empty = mpinn.tensor_parallel(empty)
    agree.raises(ArgumentError, lambda: mpinn.load_full_state_dict(empty, {}), "Only the model has wte.weight")
    for model in (empty, mpinn.tensor_parallel(make_shape("gpt2"))):
        mpinn.load_full_state_dict(model, {name: each for name, each in everywhere.items() if name != "wte.weight"})
        agree.equal(model(some_tokens()), expected)
        agree(model.wte.weight is model.lm_head.weight, "one parameter")
        agree(mpinn.sharding_of(model.wte.weight), "a shard")
    wrong = {**everywhere, "h.0.mlp.c_fc.bias": torch.ones(3)}
    agree.raises(ArgumentError, lambda: mpinn.load_full_state_dict(empty, wrong), "shape [3] in the source, and [13]")
    missing = tmp_path / "none" if mpi.rank() == 0 else everywhere
    agree.raises(ArgumentError, lambda: mpinn.load_full_state_dict(empty, missing), "rank 0: ", "there is no file")


@pytest.mark.ranks(3)
def test_of_a_file_each_rank_reads_its_part(agree, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = make_shape("llama")
    folder = mpi.broadcast_object(str(tmp_path))
    names = list(whole.state_dict())
    parts = {f"part{index}.safetensors": names[index::2] for index in range(2)}
    if mpi.rank() == 0:
        for file, own in parts.items():
            safetensors.save_file({name: whole.state_dict()[name] for name in own}, f"{folder}/{file}")
        with open(f"{folder}/model.safetensors.index.json", "w") as index:
            listed = ", ".join(f'"{name}": "{file}"' for file, own in parts.items() for name in own)
            index.write(f'{{"weight_map": {{{listed}}}}}')
    mpi.barrier()
    with torch.device("meta"):
        empty = Llama()
    mpinn.load_full_state_dict(mpinn.tensor_parallel(empty), folder)
    agree.close(empty(some_tokens()), whole(some_tokens()), **TIGHT)
    tied, path = mpinn.tensor_parallel(make_shape("gpt2")), f"{folder}/tied.safetensors"
    if state := mpinn.full_state_dict(tied):  # on rank 0, as in its example
        once = {id(tensor): name for name, tensor in state.items()}
        safetensors.save_file({name: state[name] for name in once.values()}, path)
    mpi.barrier()
    with torch.device("meta"):
        other = SHAPES["gpt2"]()
    mpinn.load_full_state_dict(mpinn.tensor_parallel(other), path)
    agree.equal(other(some_tokens()), tied(some_tokens()))
    broken = make_shape("llama")
    mpinn.tensor_parallel(broken)
    text = __file__
    agree.raises(ArgumentError, lambda: mpinn.load_full_state_dict(broken, text), "no file of safetensors")


@pytest.mark.ranks(3)
def test_what_cannot_be_divided_is_refused_on_all_ranks_before_the_first_step(agree):
    one_head = {
        "self_attn.[qkv]_proj": mpinn.TensorSplit("columns", 1),
        "self_attn.o_proj": mpinn.TensorSplit("rows", 1),
    }
    model = make_shape("llama")
    before = [parameter.shape for parameter in model.parameters()]
    words = "cannot divide 'layers.0.self_attn.q_proj', which has 1 part", "Divide the model over 1 rank:"
    agree.raises(ArgumentError, lambda: mpinn.tensor_parallel(model, one_head), *words)
    agree.equal([parameter.shape for parameter in model.parameters()], before)

    last = mpi.size() - 1
    plan = "gpt2" if mpi.rank() == last else "llama"
    words = f"rank {last}: tensor_parallel: plan='gpt2'", "no layer of Llama has a name of that plan", "layers.*.mlp"
    agree.raises(ArgumentError, lambda: mpinn.tensor_parallel(model, plan), *words)
    for units, text in ((2 * HEADS, "divides the model in another way than rank 0"), (3, "no multiple of the 3 units")):
        model.config.num_key_value_heads = units if mpi.rank() == last else HEADS
        agree.raises(ArgumentError, lambda: mpinn.tensor_parallel(model), f"rank {last}", text)
    model.config.num_key_value_heads = HEADS
    mpinn.tensor_parallel(model)
    agree.raises(ArgumentError, lambda: mpinn.tensor_parallel(model), "divided already")
    agree.raises(ArgumentError, lambda: mpinn.TensorSplit("diagonal"), "kind='diagonal'", "columns")  # type: ignore[arg-type]
    turned = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mpinn.synchronize_parameters(turned)
    mpinn.tensor_parallel(turned, {"0": mpinn.TensorSplit("rows"), "1": mpinn.TensorSplit("columns")})
    words = "divided in rows", "but got 4. The plan must divide"
    agree.raises(ArgumentError, lambda: turned(torch.ones(2, 4)), *words)


@pytest.mark.ranks(2, 3)
def test_a_rank_with_another_model_or_batch_is_named(agree):
    last = mpi.size() - 1
    model = make_shape("llama")
    other = Llama(num_blocks=1) if mpi.rank() == last else model
    agree.raises(ReplicaError, lambda: mpinn.tensor_parallel(other), "on rank 0, but", f"on rank {last}")
    whole, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        other.norm.weight[0] += mpi.rank() == last
    words = "'norm.weight': ", f"rank {last} differs" if mpi.size() > 2 else "all ranks differ"
    agree.raises(ReplicaError, lambda: mpinn.tensor_parallel(other), *words)
    divided = mpinn.tensor_parallel(model)
    for tokens in (some_tokens(), some_tokens().repeat(1, 4)):  # few, and many
        agree.close(divided(tokens), whole(tokens), **TIGHT)
        others = tokens + (mpi.rank() == last)
        agree.raises(ArgumentError, partial(divided, others), "passed different tokens")
    agree.raises(ArgumentError, lambda: divided(torch.full((1, 2), 99)), "an embedding of 23 entries", "from 99 to 99")


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.k(other) + self.v(other))


@pytest.mark.ranks(2)
def test_cross_attention_keeps_no_input_and_has_the_dtype_of_linear(agree):
    torch.manual_seed(3)
    whole = Cross()
    plan = {"[qkv]": mpinn.TensorSplit("columns"), "o": mpinn.TensorSplit("rows")}
    divided = mpinn.tensor_parallel(copy.deepcopy(whole), plan)
    gradients, results = [], []
    for model in (divided, whole):
        x, other = (
            torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in (1, 2)
        )
        model(x, other).square().sum().backward()
        gradients.append((x.grad, other.grad))
        known = weakref.ref(other)
        del other
        agree(known() is None, "freed after backward")
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(x, x))
    for mine, expected in zip(*gradients, strict=True):
        agree.close(mine, expected, **TIGHT)
    agree.equal(results[0].dtype, results[1].dtype)
    agree.close(results[0], results[1], rtol=0.05, atol=0.05)


@pytest.mark.ranks(2)
def test_a_checkpoint_of_an_engine_has_the_complete_weights_and_momentum(agree, tmp_path):
    """Also of the bias of BERT's head, which has two names: a complete model continues where a divided one stopped."""
    path = Path(mpi.broadcast_object(str(tmp_path)), "checkpoint")

    def train(network: nn.Module, num_updates: int, **options: object) -> nn.Module:
        engine = AllReduceSGDEngine(progress=False)
        if not options:
            engine.hooks.on_update.append(lambda state: state.t == 2 and engine.save_checkpoint(path))
        engine.train(
            network=network,
            criterion=lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
            iterator=[(some_tokens(seed), some_tokens(seed + 1)) for seed in range(num_updates)],
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
            max_epochs=1,
            **options,
        )
        return network

    expected = mpinn.full_state_dict(train(mpinn.tensor_parallel(make_shape("bert")), 4), root=None)
    whole = train(SHAPES["bert"](), 4, resume=path)
    divided = mpinn.full_state_dict(train(mpinn.tensor_parallel(make_shape("bert")), 4, resume=path), root=None)
    for name, tensor in expected.items():
        agree.equal(divided[name], tensor, name)
        agree.close(whole.state_dict()[name], tensor, name, **TIGHT)
