"""Small models with the layers, names and attributes of GPT-2, Llama and BERT in Transformers, which CI has in one
environment only. No number of features or heads is divisible by 2, 3 or 4."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, HEADS, HEAD, INNER, LENGTH = 23, 5, 4, 13, 32
WIDTH = HEADS * HEAD


class Conv1D(nn.Module):
    """A linear layer with a weight of shape (in, out), as in Transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], self.nf)


def attend(q: Tensor, k: Tensor, v: Tensor, cache: list[Tensor] | None, is_causal: bool = True) -> Tensor:
    """Attention over features [batch, time, heads * HEAD], with the keys and values of earlier calls."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    is_first = not cache
    if cache is not None:
        k, v = (torch.cat([old, new], 2) for old, new in zip(cache, (k, v), strict=True)) if cache else (k, v)
        cache[:] = k, v
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    result = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal and is_first)
    return result.transpose(1, 2).flatten(2)


class GPT2Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split_size, self.num_heads = WIDTH, HEADS
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        assert self.split_size == self.num_heads * HEAD
        return self.c_proj(attend(q, k, v, cache))


class GPT2MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(INNER, WIDTH), Conv1D(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = GPT2Attention(), GPT2MLP()

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """The embedding is the weight of the head too."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(GPT2Block() for _ in range(num_blocks)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        start = caches[0][0].shape[2] if caches and caches[0] else 0
        x = self.wte(tokens) + self.wpe.weight[start : start + tokens.shape[1]]
        for index, block in enumerate(self.h):
            x = block(x, caches[index] if caches else None)
        return self.lm_head(self.ln_f(x))


class LlamaAttention(nn.Module):
    """Two heads of queries for one of keys and values; a norm of each head, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm = nn.RMSNorm(HEAD)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, HEAD))).flatten(-2)
        return self.o_proj(attend(q, self.k_proj(x), self.v_proj(x), cache))


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_key_value_heads=HEADS)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers, self.norm = nn.ModuleList(LlamaBlock() for _ in range(num_blocks)), nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, caches[index] if caches else None)
        return self.lm_head(self.norm(x))


class BertSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.all_head_size = HEADS, WIDTH
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        attended = attend(self.query(x), self.key(x), self.value(x), None, is_causal=False)
        assert attended.shape[-1] == self.all_head_size == self.num_attention_heads * HEAD
        return attended


class BertOutput(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": BertSelf(), "output": BertOutput(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)})
        self.output = BertOutput(INNER)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class BertHead(nn.Module):
    """The bias has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


class Bert(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)})
        self.layers, self.predictions = nn.ModuleList(BertLayer() for _ in range(num_blocks)), BertHead()
        self.predictions.decoder.weight = self.embeddings["word_embeddings"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings["word_embeddings"](tokens)
        for layer in self.layers:
            x = layer(x)
        return self.predictions(x)


SHAPES: dict[str, type[nn.Module]] = {"gpt2": GPT2, "llama": Llama, "bert": Bert}


def make_shape(name: str) -> nn.Module:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(3)
    return SHAPES[name]()


def some_tokens(seed: int = 5) -> Tensor:
    """Return tokens [2, 7], the same on every rank."""
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def generate(model: nn.Module, prompt: Tensor, num_tokens: int) -> Tensor:
    """Append the likeliest tokens, with a cache of keys and values."""
    caches: list[list[Tensor]] = [[] for _ in range(2)]
    tokens, new = [prompt], prompt
    for _ in range(num_tokens):
        new = model(new, caches)[:, -1].argmax(-1, keepdim=True)
        tokens.append(new)
    return torch.cat(tokens, 1)
