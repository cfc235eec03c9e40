"""Two small models with the distributed tests of Transformers: a dense one, and one with experts."""

from __future__ import annotations

import unittest
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .test_expert_parallel_mixin import ExpertParallelTesterMixin
from .test_fsdp_mixin import FSDPTesterMixin
from .test_tensor_parallel_mixin import TensorParallelTesterMixin

SHAPE = {
    **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}


class Model:
    """A kind of model, as the tests ask for it."""

    def __init__(self, config: type[Any], model: type[Any], **options: Any) -> None:
        self.config, self.causal_lm_class, self.options = config, model, options

    def get_config(self) -> Any:
        return self.config(**SHAPE, **self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return self.get_config(), {}


class Qwen3Test(TensorParallelTesterMixin, FSDPTesterMixin, unittest.TestCase):
    all_model_classes = (Qwen3ForCausalLM,)
    model_tester = Model(Qwen3Config, Qwen3ForCausalLM)


class Qwen3MoeTest(TensorParallelTesterMixin, ExpertParallelTesterMixin, FSDPTesterMixin, unittest.TestCase):
    all_model_classes = (Qwen3MoeForCausalLM,)
    model_tester = Model(Qwen3MoeConfig, Qwen3MoeForCausalLM, **EXPERTS)
