"""Tiny decoders for tests of the native library, one of each kind, and what is fed to them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from triolet.models.architectures.layer_sizes import layer_sizes
from triolet.models.memory.rows import Rows
from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.runner import Runner

from .fed import MOST_ROWS, PAGES, VOCABULARY, Fed, Told, loaded, opened, packed

POSITIONS = 1_200
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": POSITIONS}
KINDS = ["sliding_attention", "full_attention"]
EVEN = {"num_attention_heads": 3}  # as many heads of keys
PADS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
ASKED = {"num_experts_per_tok": 3}  # experts of a row
LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 14,
    "v_head_dim": 21,
    "num_key_value_heads": 3,
    **EVEN,
}
ROUTED = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
KEPT = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])  # what pages and slots hold
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, **HEADS, attention_bias=True),
    "mistral": MistralConfig(**SHAPE, **HEADS, sliding_window=21),
    "far window": MistralConfig(**SHAPE, **HEADS, sliding_window=700),
    "qwen2": Qwen2Config(**SHAPE, **{**HEADS, "head_dim": 32, "num_attention_heads": 4}, tie_word_embeddings=True),
    "heads of 12": LlamaConfig(**SHAPE, **{**HEADS, "head_dim": 12}),
    "heads of 40": MistralConfig(**SHAPE, **{**HEADS, "head_dim": 40}, sliding_window=21),
    "norms of heads of 20": Qwen3Config(**SHAPE, **{**HEADS, "head_dim": 20}),
    "qwen3": Qwen3Config(**SHAPE, **{**HEADS, "num_key_value_heads": 6}),
    "gemma2": Gemma2Config(**SHAPE, **HEADS, sliding_window=21, final_logit_softcapping=9.0, query_pre_attn_scalar=9),
    "gemma3": Gemma3TextConfig(**SHAPE, **HEADS, sliding_window=21, sliding_window_pattern=2),
    "phi3": Phi3Config(
        **{**SHAPE, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3},
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    ),
    "smollm3": SmolLM3Config(**SHAPE, **HEADS, no_rope_layers=[1, 0], pad_token_id=0),
    "gemma": GemmaConfig(**SHAPE, **HEADS),
    "helium": HeliumConfig(**SHAPE, **{**HEADS, "head_dim": 8}, pad_token_id=0),
    "seed": SeedOssConfig(**SHAPE, **HEADS, **PADS, attention_bias=True),
    "ernie": Ernie4_5Config(**SHAPE, **HEADS, **PADS, use_bias=True),
    "ministral3": Ministral3Config(
        **SHAPE,
        **HEADS,
        **PADS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 128,
        },
    ),
    "granite": GraniteConfig(
        **SHAPE,
        **HEADS,
        **PADS,
        embedding_multiplier=6.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    ),
    "olmo2": Olmo2Config(**SHAPE, **HEADS, **PADS),
    "olmo3": Olmo3Config(**SHAPE, **HEADS, **PADS, sliding_window=21, layer_types=KINDS),
    "exaone4": Exaone4Config(**SHAPE, **HEADS, **PADS, sliding_window=21, layer_types=KINDS),
    "glm": GlmConfig(**SHAPE, **HEADS, **PADS, attention_bias=True),
    "glm4": Glm4Config(**SHAPE, **HEADS, **PADS),
    "starcoder2": Starcoder2Config(**SHAPE, **HEADS, **PADS, sliding_window=21, use_bias=True),
    "cohere": CohereConfig(**SHAPE, **HEADS, **PADS, logit_scale=0.3, attention_bias=True),
    "cohere2": Cohere2Config(**SHAPE, **HEADS, **PADS, logit_scale=0.3, sliding_window=21, layer_types=KINDS),
    "phi": PhiConfig(**SHAPE, **HEADS, **PADS),
    "neox": GPTNeoXConfig(**SHAPE, **EVEN, **PADS, max_position_embeddings=POSITIONS),
    "neox, one after the other": GPTNeoXConfig(
        **SHAPE, **EVEN, **PADS, max_position_embeddings=POSITIONS, use_parallel_residual=False, hidden_act="relu"
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=3, n_positions=POSITIONS),
    "mixtral": MixtralConfig(**SHAPE, **HEADS, num_local_experts=5),
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE, **HEADS, **ASKED, num_experts=40, moe_intermediate_size=32, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, **HEADS, num_experts=70, num_experts_per_tok=1, moe_intermediate_size=64, mlp_only_layers=[1]
    ),
    "olmoe": OlmoeConfig(**SHAPE, **EVEN, **PADS, **ASKED, num_experts=9, max_position_embeddings=POSITIONS),
    "granitemoeshared": GraniteMoeSharedConfig(
        **SHAPE,
        **HEADS,
        **PADS,
        **ASKED,
        num_local_experts=6,
        shared_intermediate_size=64,
        embedding_multiplier=6.0,
        residual_multiplier=0.7,
        logits_scaling=2.5,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **SHAPE, **HEADS, **PADS, moe_k=3, moe_num_experts=7, moe_intermediate_size=32, moe_layer_start_index=1
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE,
        **HEADS,
        **PADS,
        **ASKED,
        n_routed_experts=7,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        use_qk_norm=True,
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE, **HEADS, **PADS, **ASKED, num_local_experts=7, sliding_window=21, swiglu_limit=0.7, layer_types=KINDS
    ),
    "deepseek_v2": DeepseekV2Config(
        **SHAPE,
        **LATENT,
        **PADS,
        **ASKED,
        **ROUTED,
        n_routed_experts=7,
        q_lora_rank=None,
        topk_method="greedy",
        max_position_embeddings=POSITIONS,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE,
        **LATENT,
        **PADS,
        **ASKED,
        **ROUTED,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        q_lora_rank=32,
        max_position_embeddings=POSITIONS,
    ),
    "opt": OPTConfig(
        **{**SHAPE, **PADS}, **EVEN, ffn_dim=70, max_position_embeddings=POSITIONS, word_embed_proj_dim=48
    ),
}
ALIKE = {
    "gemma",
    "helium",
    "seed",
    "ernie",
    "olmo3",
    "exaone4",
    "glm",
    "glm4",
    "starcoder2",
    "cohere2",
    "phi",
    "neox",
    "opt",
}
ALIKE |= {"neox, one after the other", "gpt2", "qwen3_moe", "olmoe", "granitemoeshared", "ernie4_5_moe"}
ALIKE |= {"glm4_moe", "deepseek_v2"}
"""Families whose operations others have, too: the best level is enough."""
LEVELS = [(name, level) for name in CONFIGS for level in ([0] if name in ALIKE else [1, 3, 4])]


@functools.cache
def module(name: str) -> Any:
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.inference_mode():
        for parameter in made.parameters():
            parameter.mul_(4.0).add_(0.02)  # biases and gains are zero and one
    return made


def windows(name: str) -> list[int | None]:
    """Of each layer, as transformers' attention is asked for them."""
    config = CONFIGS[name]
    shared = config.sliding_window if isinstance(config, (MistralConfig, Starcoder2Config)) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if shared else "full_attention"] * 2
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def decoder_of(name: str) -> CausalDecoder:
    made = copy.deepcopy(module(name))
    return CausalDecoder(made, made, windows(name))


class DecoderFed(Fed):
    """A model that was opened, and what it answered: logits of each position."""

    def __init__(
        self,
        name: str,
        *,
        page_size: int = 16,
        threads: int = 2,
        level: int = 0,
        most_rows: int = MOST_ROWS,
        int8: bool = False,
        kept: torch.dtype = torch.float32,
        again: bool = False,
    ) -> None:
        self.page_size = page_size
        sizes = [(PAGES, page_size, layer.numbers) for layer in layer_sizes(Path(), CONFIGS[name])]
        self.pages = [torch.full(size, float("nan"), dtype=kept) for size in sizes]
        decoder = packed(decoder_of, module(name), name, int8=int8, again=again)
        self.module, self.program = decoder.module, decoder.program(POSITIONS)
        options = {"rows": most_rows, "positions": POSITIONS, "threads": threads, "level": level}
        self.runner = Runner.open(loaded(), self.program, self.pages, **options)

    def feed(self, parts: Sequence[tuple[Told, int, int]], states: Sequence[Tensor] = ()) -> list[Tensor]:
        """Logits of each part's rows: positions ``start`` to ``stop`` of a sequence."""
        tokens = [token for one, start, stop in parts for token in one.tokens[start:stop]]
        placed = isinstance(self.module.config, (GPT2Config, OPTConfig))  # its positions are looked up, too
        inputs = tokens if placed else self.module.get_input_embeddings()(torch.tensor(tokens))
        tables: list[int] = []
        chunks = []
        for one, start, stop in parts:
            chunks.append((stop - start, len(tables), 0, 0))
            tables += one.pages[: -(-stop // self.page_size)]
        positions = [position for _, start, stop in parts for position in range(start, stop)]
        rows = Rows(positions=positions, chunks=chunks, tables=tables, wanted=range(len(tokens)))
        return list(self.runner.step(inputs, rows).split([stop - start for _, start, stop in parts]))


fed = functools.partial(opened, DecoderFed)


@functools.cache
def expected_of(tokens: tuple[int, ...], name: str) -> Tensor:
    """Logits of all tokens, by transformers."""
    logits: Tensor = module(name)(torch.tensor([tokens])).logits
    return logits[0]
