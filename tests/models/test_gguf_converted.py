"""GGUF files of models whose weights llama.cpp's converter changes, or whose layers differ, open as these models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.checkpoints.files import resolve
from triolet.models.checkpoints.gguf_tensors import noted_tensors
from triolet.models.checkpoints.loading import load_module
from triolet.models.checkpoints.settings import read_json
from triolet.models.native.library import Library

from ..checkpoints import gguf_converted as made_by
from ..checkpoints.gguf_converted import llama, named, stacked, write_converted
from ..checkpoints.gguf_files import random_blocks, tiny
from .texts import Job, generate

SMALL = {"hidden_size": 64, "intermediate_size": 96}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2}
GRANITE = {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 2.0}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
DELTA |= {"head_dim": 32, "num_hidden_layers": 4, "linear_conv_kernel_dim": 4}
EARLY = {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5}
EARLY |= {"logits_scaling": 64 / 256}
FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
FACTORS |= {"long_factor": [2.0] * 8, "short_factor": [1.0 + one / 8 for one in range(8)]}
ALL = {"num_key_value_heads": 4}
MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
HALF = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LONG = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16}
NEMOTRON |= {"num_hidden_layers": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tells(*told: Any) -> Any:
    """Calls methods of the writer, given by name, with settings of the configuration, given by name or value."""

    def more(writer: Any, config: Any) -> None:
        for method, value in told:
            found = getattr(config, value, value) if isinstance(value, str) else value
            getattr(writer, f"add_{method}")(found(config) if callable(found) else found)

    return more


HEAD = (("key_length", "head_dim"), ("value_length", "head_dim"))
WINDOW = (
    ("sliding_window", "sliding_window"),
    ("sliding_window_pattern", lambda config: [one == "sliding_attention" for one in config.layer_types]),
)
EXPERTS = (
    ("expert_count", lambda config: getattr(config, "num_local_experts", None) or config.num_experts),
    ("expert_used_count", "num_experts_per_tok"),
)
ROUTING = (
    *(("expert_count", "n_routed_experts"), ("expert_used_count", "num_experts_per_tok")),
    *(("expert_feed_forward_length", "moe_intermediate_size"), ("expert_shared_count", "n_shared_experts")),
    *(("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")),
    *(("expert_weights_norm", "norm_topk_prob"), ("expert_weights_scale", "routed_scaling_factor")),
)
DENSE = ("leading_dense_block_count", "first_k_dense_replace")
SIGMOID = ("expert_gating_func", gguf.ExpertGatingFuncType.SIGMOID)
TURNING = ("rope_dimension_count", lambda config: config.head_dim // 2)
YARNED = (
    ("rope_scaling_type", gguf.RopeScalingType.YARN),
    ("rope_scaling_factor", lambda config: config.rope_parameters["factor"]),
    ("rope_scaling_orig_ctx_len", lambda config: config.rope_parameters["original_max_position_embeddings"]),
)
SCALES = (
    *(("attention_scale", "attention_multiplier"), ("embedding_scale", "embedding_multiplier")),
    *(("residual_scale", "residual_multiplier"), ("logit_scale", "logits_scaling")),
)
KV = (
    "head_count_kv",
    lambda config: [
        config.num_key_value_heads if "attention" in kind and "linear" not in kind else 0 for kind in config.layer_types
    ],
)
SSM = (
    *(("ssm_conv_kernel", "mamba_d_conv"), ("ssm_state_size", "mamba_d_state")),
    *(("ssm_group_count", "mamba_n_groups"), ("ssm_time_step_rank", "mamba_n_heads")),
    ("ssm_inner_size", lambda config: config.mamba_n_heads * config.mamba_d_head),
)
LINEAR = (
    *HEAD,
    *(("ssm_conv_kernel", "linear_conv_kernel_dim"), ("ssm_state_size", "linear_key_head_dim")),
    *(("ssm_group_count", "linear_num_key_heads"), ("ssm_time_step_rank", "linear_num_value_heads")),
    ("ssm_inner_size", lambda config: config.linear_num_value_heads * config.linear_value_head_dim),
    *(("full_attention_interval", 4), ("rope_dimension_count", 8)),
)
SHARED = (
    *EXPERTS,
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
OF_LATENT = (
    *(("head_count_kv", 1), ("rope_dimension_count", "qk_rope_head_dim")),
    *(("q_lora_rank", "q_lora_rank"), ("kv_lora_rank", "kv_lora_rank")),
    ("key_length", lambda config: config.kv_lora_rank + config.qk_rope_head_dim),
    ("value_length", "kv_lora_rank"),
    ("key_length_mla", lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim),
    ("value_length_mla", "v_head_dim"),
)
MIXERS = (
    *(("ssm_conv_kernel", "conv_kernel"), ("ssm_state_size", "ssm_state_size"), ("ssm_group_count", "n_groups")),
    *(("ssm_time_step_rank", "mamba_num_heads"), *HEAD),
    ("ssm_inner_size", lambda config: config.mamba_num_heads * config.mamba_head_dim),
    ("head_count_kv", lambda config: [2 if "full" in one else 0 for one in config.layers_block_type]),
    ("feed_forward_length", lambda config: [96 if one in {"mlp", "moe"} else 0 for one in config.layers_block_type]),
)


def near(config: Any) -> float:
    """The base of positions in layers with windows."""
    return float(config.rope_parameters["sliding_attention"]["rope_theta"])


ALIKE: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 320,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
ALIKE["rope_parameters"] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
}
OF_GEMMA4 = (
    *WINDOW,
    *(("key_length", 32), ("value_length", 32), ("key_length_swa", 16), ("value_length_swa", 16)),
    *(("rope_dimension_count", 32), ("rope_dimension_count_swa", 16), ("rope_freq_base_swa", near)),
    ("shared_kv_layers", "num_kv_shared_layers"),
    ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
    ("final_logit_softcapping", "final_logit_softcapping"),
)
MODELS: dict[str, tuple[str, str, dict[str, Any], Any, Any]] = {
    "gemma3n": (
        *("Gemma3nTextConfig", "Gemma3nForCausalLM"),
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        },
        made_by.gemma3n,
        tells(
            *(
                *HEAD,
                *WINDOW,
                *OF_GEMMA4[-3:],
                ("activation_sparsity_scale", [1.6448536, 1.6448536, -math.inf, -math.inf]),
            ),
            *(("altup_active_idx", "altup_active_idx"), ("altup_num_inputs", "altup_num_inputs")),
        ),
    ),
    "gemma4": (
        *("Gemma4TextConfig", "Gemma4ForCausalLM"),
        {**GEMMA4, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        made_by.gemma4,
        tells(*OF_GEMMA4, ("head_count_kv", 2), ("feed_forward_length", [96, 96, 192, 192])),
    ),
    "gemma4:experts": (
        *("Gemma4TextConfig", "Gemma4ForCausalLM"),
        {**GEMMA4, **FEW, **ALIKE, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2},
        made_by.gemma4,
        tells(
            *(*OF_GEMMA4, ("head_count_kv", [2, 1, 2, 1]), ("expert_count", "num_experts")),
            *(("expert_used_count", "top_k_experts"), ("expert_feed_forward_length", "moe_intermediate_size")),
        ),
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"head_dim": 32}, named, tells(*HEAD)),
    "exaone4": (
        *("Exaone4Config", "Exaone4ForCausalLM"),
        {"sliding_window": 8, "num_hidden_layers": 4},
        *(named, tells(*WINDOW)),
    ),
    "olmo2": (
        *("Olmo3Config", "Olmo3ForCausalLM"),
        {"sliding_window": 8, "num_hidden_layers": 4},
        *(named, tells(*WINDOW)),
    ),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 32}, named, tells(*HEAD)),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16, **HALF}, named, tells(*HEAD, TURNING)),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2},
        stacked,
        tells(*EXPERTS),
    ),
    "phi2": ("PhiConfig", "PhiForCausalLM", HALF, named, tells(("rope_dimension_count", 8))),
    "exaone": ("LlamaConfig", "LlamaForCausalLM", {}, named, tells(("rope_dimension_count", 16))),
    "internlm2": ("LlamaConfig", "LlamaForCausalLM", {}, llama, tells()),
    "minicpm": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**GRANITE, "attention_multiplier": 0.25},
        llama,
        tells(*SCALES[1:]),
    ),
    "minicpm:early": ("GraniteConfig", "GraniteForCausalLM", EARLY, llama, tells()),
    "olmo": (
        "OlmoConfig",
        "OlmoForCausalLM",
        {"clip_qkv": 1.0},
        llama,
        tells(("layer_norm_eps", 1e-5), ("clamp_kqv", 1.0)),
    ),
    "jais2": (
        "Jais2Config",
        "Jais2ForCausalLM",
        {"head_dim": 16},
        named,
        tells(*HEAD, ("rope_dimension_count", "head_dim")),
    ),
    "chatglm": (
        "GlmConfig",
        "GlmForCausalLM",
        {"head_dim": 16, "attention_bias": True, **HALF},
        made_by.glm,
        tells(TURNING),
    ),
    "ernie4_5-moe": (
        *("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "num_hidden_layers": 4,
        }
        | {"moe_layer_interval": 2},
        made_by.ernie_moe,
        tells(
            *(("expert_count", "moe_num_experts"), ("expert_used_count", "moe_k"), SHARED[2]),
            *(("interleave_moe_layer_step", "moe_layer_interval"), ("expert_shared_count", "moe_num_shared_experts")),
            *(("leading_dense_block_count", "moe_layer_start_index"), ("expert_shared_feed_forward_length", 48)),
        ),
    ),
    "hunyuan-moe": (
        *("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
        {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
        stacked,
        tells(*HEAD, *EXPERTS, ("expert_feed_forward_length", "intermediate_size"), ("expert_shared_count", 1)),
    ),
    "exaone-moe": (
        *("ExaoneMoeConfig", "ExaoneMoeForCausalLM"),
        {**MANY, "first_k_dense_replace": 1, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4},
        stacked,
        tells(
            *(*HEAD, *SHARED[:3], *WINDOW, DENSE, SIGMOID, ("expert_shared_count", "num_shared_experts")),
            *(("expert_weights_norm", True), ("expert_weights_scale", "routed_scaling_factor")),
            ("rope_scaling_type", gguf.RopeScalingType.NONE),
        ),
    ),
    "afmoe": (
        *("AfmoeConfig", "AfmoeForCausalLM"),
        {
            **MANY,
            "num_dense_layers": 1,
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "mup_enabled": True,
        }
        | {"route_scale": 2.5},
        lambda model: stacked(model, {"expert_bias": "expert_bias.bias"}),
        tells(
            *(*HEAD, *SHARED[:3], SIGMOID, WINDOW[0], ("expert_shared_count", "num_shared_experts")),
            *(("leading_dense_block_count", "num_dense_layers"), ("expert_weights_norm", True)),
            *(("expert_weights_scale", "route_scale"), ("expert_group_count", 1)),
        ),
    ),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {}, llama, tells()),
    "hunyuan-dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {"head_dim": 16}, named, tells(*HEAD)),
    "mistral3": (
        *("Ministral3Config", "Ministral3ForCausalLM"),
        {"head_dim": 32, "rope_parameters": LONG},
        llama,
        tells(*HEAD, *YARNED, ("rope_scaling_yarn_log_mul", 1.0), ("attn_temperature_scale", 0.1)),
    ),
    "minimax-m2": (
        *("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, **HALF},
        lambda model: stacked(model, {"mlp.e_score": "block_sparse_moe.e_score"}),
        tells(*HEAD, *EXPERTS, TURNING),
    ),
    "gpt-oss": (
        *("GptOssConfig", "GptOssForCausalLM"),
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        made_by.gpt_oss,
        tells(
            *(*HEAD, *EXPERTS, *YARNED, ("sliding_window", "sliding_window")),
            ("expert_feed_forward_length", "intermediate_size"),
        ),
    ),
    "deepseek2:3": (
        *("DeepseekV3Config", "DeepseekV3ForCausalLM"),
        {**ROUTED, **LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        made_by.deepseek2,
        tells(*ROUTING, DENSE, SIGMOID, *OF_LATENT, *YARNED, ("rope_scaling_yarn_log_mul", 0.1)),
    ),
    "deepseek2:2": (
        *("DeepseekV2Config", "DeepseekV2ForCausalLM"),
        {**ROUTED, **LATENT, "n_group": 1, "norm_topk_prob": False, "topk_method": "greedy"},
        made_by.deepseek2,
        tells(*ROUTING[:4], *ROUTING[6:], DENSE, *OF_LATENT),
    ),
    "mistral4": (
        *("Mistral4Config", "Mistral4ForCausalLM"),
        {**ROUTED, **LATENT, "n_group": 1, "rope_parameters": LONG},
        made_by.mistral4,
        tells(
            *(*ROUTING, DENSE, *OF_LATENT, *YARNED, ("rope_scaling_yarn_log_mul", 0.1)),
            ("expert_gating_func", gguf.ExpertGatingFuncType.SOFTMAX),
        ),
    ),
    "minicpm3": (
        *("MiniCPM3Config", "MiniCPM3ForCausalLM"),
        {**LATENT, "v_head_dim": 16, "rope_parameters": FACTORS},
        made_by.minicpm3,
        tells(OF_LATENT[1], *OF_LATENT[2:4], ("key_length", 48)),
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", ALL | {"intermediate_size": 256}, made_by.gpt2, tells()),
    "gptneox": (
        *("GPTNeoXConfig", "GPTNeoXForCausalLM"),
        {**ALL, "hidden_act": "gelu", "use_parallel_residual": True},
        made_by.gpt_neox,
        tells(("rope_dimension_count", 4), ("parallel_residual", True)),
    ),
    "apertus": (
        *("ApertusConfig", "ApertusForCausalLM"),
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        made_by.apertus,
        tells(*((f"xielu_{name}", values) for name, values in made_by.XIELU.items())),
    ),
    "glm4moe": (
        *("Glm4MoeConfig", "Glm4MoeForCausalLM"),
        {**ROUTED, "head_dim": 16, **HALF},
        *(stacked, tells(*HEAD, *ROUTING, DENSE, SIGMOID, TURNING)),
    ),
    "dots1": ("Dots1Config", "Dots1ForCausalLM", ROUTED, stacked, tells(*ROUTING, DENSE)),
    "granitemoe": (
        *("GraniteMoeConfig", "GraniteMoeForCausalLM"),
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
        *(made_by.granite_moe, tells(*SCALES, *EXPERTS)),
    ),
    "granitemoe:shared": (
        *("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        made_by.granite_moe,
        tells(*SCALES, *EXPERTS, ("expert_shared_feed_forward_length", "shared_intermediate_size")),
    ),
    "granitehybrid": (
        *("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
        {
            **GRANITE,
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
        },
        made_by.granite_hybrid,
        tells(
            *(*SCALES, *EXPERTS, *SSM, KV, ("rope_scaling_finetuned", False)),
            ("expert_shared_feed_forward_length", "shared_intermediate_size"),
        ),
    ),
    "mamba2": (
        *("Mamba2Config", "Mamba2ForCausalLM"),
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
        lambda model: made_by.mamba(named(model), 2),
        tells(
            *(("head_count", 0), ("feed_forward_length", 0), MIXERS[0], ("ssm_state_size", "state_size"), MIXERS[2]),
            *(("ssm_time_step_rank", 8), ("ssm_inner_size", 128)),
        ),
    ),
    "falcon-h1": (
        *("FalconH1Config", "FalconH1ForCausalLM"),
        {
            **MAMBA,
            "mamba_d_ssm": 128,
            "head_dim": 16,
            "attention_in_multiplier": 0.9,
            "key_multiplier": 0.5,
            "attention_out_multiplier": 1.2,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "mlp_multipliers": [0.9, 1.1],
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
        *(made_by.falcon_h1, tells(*HEAD, *SSM)),
    ),
    "nemotron_h": (
        *("NemotronHConfig", "NemotronHForCausalLM"),
        {**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
        *(made_by.nemotron_h, tells(*MIXERS, ("rope_dimension_count", 12))),
    ),
    "nemotron_h_moe": (
        *("NemotronHConfig", "NemotronHForCausalLM"),
        {
            **NEMOTRON,
            **ROUTED,
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "moe_shared_expert_intermediate_size": 48,
        },
        made_by.nemotron_h,
        tells(*MIXERS, *ROUTING, ("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size")),
    ),
    "lfm2moe": (
        *("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
        },
        made_by.lfm2_moe,
        tells(
            *(*EXPERTS, KV, SIGMOID, ("expert_feed_forward_length", "moe_intermediate_size")),
            *(("leading_dense_block_count", "num_dense_layers"), ("shortconv_l_cache", "conv_L_cache")),
        ),
    ),
    "qwen3next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA, **FEW}, made_by.delta, tells(*LINEAR, *SHARED)),
    "qwen35": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA, made_by.delta, tells(*LINEAR)),
    "qwen35moe": (
        *("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
        {**DELTA, **FEW},
        *(made_by.delta, tells(*LINEAR, *SHARED)),
    ),
}


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_writes_the_tokens_of_the_model_that_was_converted(name, tmp_path, open_driver):
    """Alone and together. Weights are random."""
    config, model, changes, parts, more = MODELS[name]
    made = tiny(config, model, **SMALL | changes)
    path = write_converted(tmp_path / "m.gguf", name.partition(":")[0], made, parts(made), more=more)
    driver = open_driver(path, dtype="float32")
    jobs = [Job(prompt=tuple(range(4, 4 + length)), max_tokens=8) for length in (3, 17)]
    together = [one.tokens for one in driver.run(*jobs)]
    assert together == [generate(made, job.prompt, job.max_tokens) for job in jobs]
    assert together[1] == driver.run(jobs[1])[0].tokens


def kinds_of(*linears: Any) -> list[set[str]]:
    return [{one.kind for one in linear.sections} for linear in linears]


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("values", ["MXFP4", "Q8_0"])
def test_experts_of_four_bits_stay_in_their_blocks(values, tmp_path, open_driver):
    """gpt-oss has them in MXFP4: gates, and what they gate, in matrices of their own. They may differ in kind."""
    config, model, changes, parts, more = MODELS["gpt-oss"]
    made = tiny(config, model, **SMALL | changes)
    packed: dict[str, Any] = {}
    for layer, one in enumerate(made.model.layers):
        shapes = {"gate": ("MXFP4", 96, 64), "up": (values, 96, 64), "down": ("MXFP4", 64, 96)}
        for seed, (name, (kind, outputs, inputs)) in enumerate(shapes.items()):
            blocks = random_blocks(kind, 4 * outputs, inputs, seed + 3 * layer)
            decoded = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
            decoded = decoded.view(4, outputs, inputs).transpose(1, 2)
            if name == "down":
                one.mlp.experts.down_proj.data[:] = decoded
            else:
                one.mlp.experts.gate_up_proj.data[:, :, name == "up" :: 2] = decoded
            packed[f"blk.{layer}.ffn_{name}_exps.weight"] = kind, blocks.reshape(4, outputs, -1)
    path = write_converted(tmp_path / "m.gguf", "gpt-oss", made, parts(made), more=more, packed=packed)
    found = load_module(model, resolve(path), torch.float32)
    for name, weight in made.model.layers[0].mlp.experts.named_parameters():
        assert torch.equal(getattr(found.model.layers[0].mlp.experts, name), weight)
    driver = open_driver(path, dtype="float32")
    jobs = [Job(prompt=tuple(range(4, 4 + length)), max_tokens=8) for length in (3, 17)]
    together = [one.tokens for one in driver.run(*jobs)]
    assert together == [generate(made, job.prompt, job.max_tokens) for job in jobs]
    assert together[1] == driver.run(jobs[1])[0].tokens
    experts = driver.executor._open.parts.model.module.model.layers[1].mlp.experts
    assert kinds_of(experts.widen, experts.narrow) == [{"MXFP4", values}, {"MXFP4"}]
    settings = EngineConfig(device="cpu", threads=1, dtype="float32")
    thought, held = estimate(resolve(path), settings), driver.executor.memory().by_owner
    assert abs(thought.by_owner["weights"] - ODDS - held["weights"]) < (10_000 if values == "MXFP4" else 40_000)


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize(
    ("name", "leaves", "matrices"),
    [
        (
            *("qwen3next", ("attn_qkv", "attn_gate", "ssm_out", "ssm_ba")),
            ("model.layers.0.linear_attn.in_proj_qkvz", "model.layers.0.linear_attn.out_proj"),
        ),
        (
            *("qwen35", ("attn_qkv", "attn_gate", "ssm_out", "ssm_beta", "ssm_alpha")),
            ("model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.linear_attn.out_proj"),
        ),
        ("gpt2", ("attn_qkv", "ffn_down"), ("transformer.h.1.attn.c_attn", "transformer.h.1.mlp.c_proj")),
    ],
)
def test_rows_and_columns_that_the_converter_moved_stay_in_their_blocks(name, leaves, matrices, tmp_path, open_driver):
    """Rows of one matrix that it made two of, columns that it moved by heads, and rows that were columns."""
    config, model, changes, parts, more = MODELS[name]
    made = tiny(config, model, **SMALL | changes)
    packed, kind = dict[str, Any](), gguf.GGMLQuantizationType.Q8_0
    number = next(one for one, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(number, made.config.num_hidden_layers)
    for own, weight in parts(made):
        found = own if own.startswith("blk.") else str(names.get_name(own, (".weight", ".bias")))
        if any(f".{leaf}.weight" in found for leaf in leaves):
            packed[found] = "Q8_0", gguf.quants.quantize(weight.detach().contiguous().numpy(), kind)
    path = write_converted(tmp_path / "m.gguf", name, made, parts(made), more=more, packed=packed)
    told = load_module(model, resolve(path), torch.float32)
    driver = open_driver(path, dtype="float32")
    job = Job(prompt=tuple(range(4, 21)), max_tokens=8)
    assert driver.run(job)[0].tokens == generate(told, job.prompt, job.max_tokens)
    thought = estimate(resolve(path), EngineConfig(device="cpu", threads=1, dtype="float32")).by_owner["weights"]
    assert abs(thought - ODDS - driver.executor.memory().by_owner["weights"]) < 10_000
    module = driver.executor._open.parts.model.module
    assert kinds_of(*map(module.get_submodule, matrices)) == [{"Q8_0"}] * 2


@pytest.mark.parametrize(
    ("name", "left_out", "told"),
    [
        (
            "granitemoe",
            "ffn_up_exps",
            r"has only blk.0.ffn_gate_exps.weight .* for model.layers.0.*gate_up_proj: not enough",
        ),
        ("deepseek2:3", "attn_k_b", r"has only blk.0.attn_v_b.weight .* for model.layers.0.self_attn.kv_b_proj.weight"),
        ("qwen3next", "attn_gate", r"has only blk.0.attn_qkv.weight .*: 128 rows of 192"),
    ],
)
def test_a_part_that_is_missing_is_named(name, left_out, told, tmp_path):
    config, model, changes, parts, more = MODELS[name]
    made = tiny(config, model, **SMALL | changes)
    path = write_converted(
        tmp_path / "m.gguf", name.partition(":")[0], made, parts(made), more=more, left_out=f"blk.0.{left_out}"
    )
    with pytest.raises(CheckpointError, match=told):
        noted_tensors(resolve(path) / "gguf.json")


def test_heads_that_do_not_share_keys_are_refused(tmp_path):
    """Whose rows could not be put back."""
    config, model, changes, parts, _ = MODELS["qwen35"]
    made = tiny(config, model, **SMALL | changes)
    more = tells(*LINEAR[:4], ("ssm_group_count", 3), *LINEAR[5:])
    path = write_converted(tmp_path / "m.gguf", "qwen35", made, parts(made), more=more)
    with pytest.raises(CheckpointError, match=r"ssm.time_step_rank=4; allowed: a multiple of 3 that divides 64"):
        noted_tensors(resolve(path) / "gguf.json")


def test_rows_that_were_moved_for_pictures_are_refused(tmp_path):
    config, model, changes, parts, more = MODELS["glm4"]
    made = tiny(config, model, **SMALL | changes)

    def told(writer: Any, config: Any) -> None:
        more(writer, config)
        writer.add_rope_dimension_sections([2, 1, 1, 0])

    path = write_converted(tmp_path / "m.gguf", "glm4", made, parts(made), more=told)
    with pytest.raises(UnsupportedModel, match=r"\(glm4\) has rope.dimension_sections"):
        resolve(path)


@pytest.mark.parametrize("pattern", [(), (("sliding_window_pattern", 2),)])
def test_windows_that_are_not_listed_are_those_of_all_layers_but_each_fourth(pattern, tmp_path):
    """As in files of before they were listed; or of all but each n-th. Attention may be said to be causal."""
    config, model, changes, parts, _ = MODELS["exaone4"]
    made = tiny(config, model, **SMALL | changes)
    more = tells(("sliding_window", 8), ("causal_attention", True), *pattern)
    path = write_converted(tmp_path / "m.gguf", "exaone4", made, parts(made), more=more)
    kinds = [one == "full_attention" for one in read_json(resolve(path) / "config.json")["layer_types"]]
    assert kinds == ([False, True] * 2 if pattern else [False] * 3 + [True])


@pytest.mark.parametrize(
    ("window", "far"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        ((("sliding_window", 8),), [5]),
        ((("sliding_window", 8), ("sliding_window_pattern", 3)), [2, 5]),
    ],
)
def test_gemma_has_windows_where_the_file_says_so(window, far, tmp_path):
    made = tiny("Gemma3TextConfig", "Gemma3ForCausalLM", **SMALL, head_dim=16, num_hidden_layers=6)
    path = write_converted(
        tmp_path / "m.gguf", "gemma3", made, made_by.gemma_embedding(made), more=tells(*HEAD, *window)
    )
    kinds = read_json(resolve(path) / "config.json")["layer_types"]
    assert [layer for layer, one in enumerate(kinds) if one == "full_attention"] == far


def test_layers_for_draft_tokens_are_left_out(tmp_path):
    config, model, changes, parts, more = MODELS["glm4moe"]
    made = tiny(config, model, **SMALL | changes)
    drafting = {f"blk.2.{name}.weight": torch.ones(64) for name in ("attn_norm", "nextn.enorm")}

    def told(writer: Any, config: Any) -> None:
        more(writer, config)
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)

    both = [*parts(made), *drafting.items()]
    found = load_module(
        model, resolve(write_converted(tmp_path / "m.gguf", "glm4moe", made, iter(both), more=told)), torch.float32
    )
    assert len(found.model.layers) == 2
    assert torch.equal(found.model.layers[1].input_layernorm.weight, made.model.layers[1].input_layernorm.weight)
