"""To a user of Transformers: stock models that tensor_parallel has divided compute and generate as undivided ones."""

from __future__ import annotations

import copy

import pytest
import torch

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError

transformers = pytest.importorskip("transformers", reason="install the extra examples")
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2), pytest.mark.usefixtures("world")]
VOCABULARY, WIDTH, INNER = 103, 40, 61
"""Five heads, and an odd number of features, are shared unevenly."""


def bert() -> torch.nn.Module:
    from transformers.models.bert import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": INNER}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def gpt2() -> torch.nn.Module:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 5, "n_inner": INNER}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **tokens))


def llama() -> torch.nn.Module:
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": INNER}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, num_attention_heads=10, num_key_value_heads=5))


@pytest.mark.parametrize("make_model", [bert, gpt2, llama])
def test_stock_models(agree, tmp_path, make_model):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    whole = make_model().eval()
    divided = mpinn.tensor_parallel(copy.deepcopy(whole))
    tokens = torch.randint(3, VOCABULARY, (2, 7))
    results = [model(tokens, labels=tokens) for model in (whole, divided)]
    for result in results:
        result.loss.backward()
    agree.close(results[1].logits, results[0].logits, "logits", rtol=1e-4, atol=1e-5)
    norms = [mpinn.clip_grad_norm_(model, 1e9) for model in (whole, divided)]
    agree.close(norms[1], norms[0], "norm of the gradient", rtol=1e-4, atol=1e-5)
    if make_model is not bert:
        expected = whole.generate(tokens, max_new_tokens=8, do_sample=False)
        agree.equal(divided.generate(tokens, max_new_tokens=8, do_sample=False), expected)
    state = mpinn.full_state_dict(divided, root=None)
    for name, tensor in whole.state_dict().items():
        agree.equal(state[name], tensor, name)
    agree.raises(
        ArgumentError, lambda: divided.save_pretrained(tmp_path), "save_pretrained would save this rank's parts"
    )
    copy.deepcopy(divided).save_pretrained(tmp_path, state_dict=dict(state))  # it removes names
    loaded = type(whole).from_pretrained(tmp_path)
    for name, tensor in loaded.state_dict().items():
        agree.equal(tensor, whole.state_dict()[name], name)
    with torch.no_grad():
        divided.get_input_embeddings().weight.zero_()
    mpinn.load_full_state_dict(divided, tmp_path)
    agree.close(divided(tokens).logits, results[0].logits, "loaded", rtol=1e-4, atol=1e-5)
    agree.equal(mpi.allreduce(sum(each.numel() for each in divided.parameters())) < 1.9 * whole.num_parameters(), True)
