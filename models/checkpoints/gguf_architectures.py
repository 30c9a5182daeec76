"""Tells in a table what llama.cpp's converter makes of each architecture.

The converter names settings and tensors alike for all architectures, so a row of `ARCHITECTURES` says only what
differs. Names of tensors are told as ``theirs=own``. Of an own name

- ``{}`` stands for an expert's number;
- ``a|b``: rows of the tensor are those of several matrices: as many of each, or as many as queries, keys and values
  have heads;
- ``a@1``: the tensor is the second part of what it is joined to be, by `JOINS` of `gguf_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, Final

from attrs import field, frozen

from . import gguf_names as names
from .gguf_names import RMS, pairs
from .gguf_settings import Told, rope

_PATTERN = "attention.sliding_window_pattern"
_SOFTMAX, _SIGMOID = 1, 2  # of the functions that make chances of an expert's scores
_WORDS = "per_layer_token_embd.weight"
_NORMAL = NormalDist()
_OF_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are divided as no other's


def _llama(told: Told) -> dict[str, Any]:
    if not told.get("expert_count"):
        return {}
    named = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    return named | {"num_local_experts": told.whole("expert_count")}


def _gemma2(told: Told) -> dict[str, Any]:
    large = told.whole("block_count") == _OF_27B.get(told.architecture)
    wide = told.whole("embedding_length") // told.whole("attention.head_count")
    return {"query_pre_attn_scalar": wide if large else told.whole("attention.key_length")}


def _turns(told: Told) -> dict[str, Any]:
    """Returns the positions of layers that see all, and of those with windows."""
    near = {"rope_type": "default", "rope_theta": told.real("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": rope(told), "sliding_attention": near}


def _gemma3(told: Told) -> dict[str, Any]:
    kinds = _windows(told, usual=6).get("layer_types", ["full_attention"] * told.layers)
    made = _gemma2(told) | {"rope_parameters": _turns(told), "layer_types": kinds}
    return made | {"use_bidirectional_attention": told.architecture == "gemma-embedding"}


def _gemma3n(told: Told) -> dict[str, Any]:
    """The file has the deviations from the mean that activations must reach, in place of their share."""
    scales = told.each("activation_sparsity_scale")
    if len(scales) < told.layers or not all(isinstance(one, float) for one in scales):
        raise told.bad("activation_sparsity_scale", scales, f"{told.layers} numbers")
    made = _windows(told) | {"rope_parameters": _turns(told), "intermediate_size": told.spread("feed_forward_length")}
    made |= {"laurel_rank": told.rows("blk.0.laurel_l.weight"), "vocab_size_per_layer_input": told.rows(_WORDS)}
    made |= {"num_key_value_heads": told.whole("attention.head_count_kv")}
    return made | {"activation_sparsity_pattern": [round(_NORMAL.cdf(one), 6) for one in scales[: told.layers]]}


def _gemma4(told: Told) -> dict[str, Any]:
    """Layers that see all positions have wider heads, and perhaps fewer of keys. The last layers may have the keys of
    earlier ones, and then a wider MLP."""
    far, near = told.whole("attention.key_length"), told.whole("attention.key_length_swa")
    told.only("rope.dimension_count_swa", near, None)
    made = _windows(told) | {"rope_parameters": _turns(told), "head_dim": near, "global_head_dim": far}
    full = [one == "full_attention" for one in made.get("layer_types", [])]
    kv, wide = (told.spread(name) for name in ("attention.head_count_kv", "feed_forward_length"))
    by_kind = [{one for one, found in zip(kv, full, strict=False) if found == kind} for kind in (False, True)]
    if any(len(one) > 1 for one in by_kind) or len(set(full)) != len(by_kind):
        raise told.bad("attention.head_count_kv", kv, "one number for layers with windows, and one for others")
    made |= {"num_key_value_heads": min(by_kind[0]), "num_global_key_value_heads": min(by_kind[1])}
    made |= {"intermediate_size": wide[0], "use_double_wide_mlp": wide[0] != wide[-1]}
    made |= {"attention_k_eq_v": not told.has(f"blk.{full.index(True)}.attn_v.weight")}
    moe = told.get("expert_count") is not None
    return made | {"vocab_size_per_layer_input": told.rows(_WORDS), "enable_moe_block": moe}


def _phi3(told: Told) -> dict[str, Any]:
    made = {"original_max_position_embeddings": told.whole("rope.scaling.original_context_length")}
    return made | {"sliding_window": told.get("attention.sliding_window") or None}


def _lfm2(told: Told) -> dict[str, Any]:
    kinds = ["full_attention" if one else "conv" for one in told.each("attention.head_count_kv")]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _lfm2_moe(told: Told) -> dict[str, Any]:
    told.only("expert_gating_func", _SIGMOID, None)
    return _lfm2(told) | {"use_expert_bias": any("exp_probs_b" in name for name in told.file.tensors)}


def _windows(told: Told, usual: int = 4, before: int = 1) -> dict[str, Any]:
    """Returns which layers have a window: those that the file lists, or all but each n-th, counted from ``before``."""
    if not told.get("attention.sliding_window"):
        return {"sliding_window": None}
    every = told.get(_PATTERN)
    plain = every is None or isinstance(every, int)
    near = [(one + before) % (every or usual) for one in range(told.layers)] if plain else told.each(_PATTERN)
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in near[: told.layers]]}


def _olmo2(told: Told) -> dict[str, Any]:
    made = _windows(told)
    return made | {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]} if "layer_types" in made else {}


def _glm(told: Told) -> dict[str, Any]:
    return {"head_dim": told.head}


def _glm4(told: Told) -> dict[str, Any]:
    told.only("rope.dimension_sections", None)  # of GLM-4V, whose rows the converter moves
    return {}


def _minicpm(told: Told) -> dict[str, Any]:
    """Granite's layers, with the scores of all others. Early files do not tell factors, which were the same for all."""
    width, made = told.whole("embedding_length"), {"attention_multiplier": told.head**-0.5}
    made |= {"residual_multiplier": told.real("residual_scale", 1.4 * told.layers**-0.5)}
    factors = {"embedding_multiplier": ("embedding_scale", 12.0), "logits_scaling": ("logit_scale", width / 256)}
    return made | {theirs: told.real(*one) for theirs, one in factors.items()}


def _afmoe(told: Told) -> dict[str, Any]:
    told.only("expert_gating_func", _SIGMOID, None)
    told.only("expert_weights_norm", True)
    return _windows(told) | {"mup_enabled": True}


def _mistral3(told: Told) -> dict[str, Any]:
    beta = told.get("attention.temperature_scale")
    if beta is None:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    scale = told.real("rope.scaling.yarn_log_multiplier", 1.0)
    found = {"llama_4_scaling_beta": told.real("attention.temperature_scale"), "mscale": scale, "mscale_all_dim": scale}
    return {"rope_parameters": rope(told) | found}


def _gpt_oss(told: Told) -> dict[str, Any]:
    return {
        "num_local_experts": told.whole("expert_count"),
        "intermediate_size": told.whole("expert_feed_forward_length"),
        "rope_parameters": rope(told) | {"truncate": False},
    }


def _routed(told: Told) -> dict[str, Any]:
    """Returns how experts are chosen: in groups, if the file has them, by scores of a sigmoid unless it is told."""
    softmax = {"deepseek2": (_SOFTMAX, _SIGMOID), "mistral4": (_SOFTMAX,)}
    told.only("expert_gating_func", *softmax.get(told.architecture, (_SIGMOID,)), None)
    dense = 0 if told.get("expert_count") else told.layers
    made: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": dense}
    made |= told.wholes(names.ROUTED_SIZES)
    made |= {"topk_method": "greedy" if made["n_group"] == 1 else "group_limited_greedy"}  # of DeepSeek V2
    made |= {"norm_topk_prob": told.flag("expert_weights_norm")}
    return made | {"routed_scaling_factor": told.real("expert_weights_scale", 1.0)}


def _deepseek2(told: Told) -> dict[str, Any]:
    """Returns the settings of DeepSeek V2, whose scores are a softmax, or of V3 and later ones."""
    corrected = any("exp_probs_b" in name for name in told.file.tensors)
    scored = told.get("expert_gating_func") or (_SIGMOID if corrected or not told.get("expert_count") else _SOFTMAX)
    turning, scale = told.whole("rope.dimension_count"), told.get("rope.scaling.yarn_log_multiplier")
    ends = "" if told.get("attention.key_length_mla") is None else "_mla"
    made = _routed(told) | {
        "num_key_value_heads": told.whole("attention.head_count"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": told.whole(f"attention.key_length{ends}") - turning,
        "v_head_dim": told.whole(f"attention.value_length{ends}"),
        "kv_lora_rank": told.whole("attention.kv_lora_rank"),
        "q_lora_rank": told.whole("attention.q_lora_rank") if told.get("attention.q_lora_rank") else None,
        "head_dim": turning,
        "rope_parameters": rope(told, size=turning),
        "rope_interleave": True,
    }
    if scale is not None:  # the converter writes a tenth of it
        scale = 10.0 * told.real("rope.scaling.yarn_log_multiplier")
        made["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    version = 3 if scored == _SIGMOID else 2
    return made | {"model_type": f"deepseek_v{version}", "architectures": [f"DeepseekV{version}ForCausalLM"]}


def _mistral4(told: Told) -> dict[str, Any]:
    """Files do not say how scores depend on the position, which is the same for all of Mistral 4."""
    made = _deepseek2(told) | {"model_type": "mistral4", "architectures": ["Mistral4ForCausalLM"]}
    made["head_dim"] = made["qk_nope_head_dim"] + made["qk_rope_head_dim"]
    made["rope_parameters"] |= {"llama_4_scaling_beta": told.real("attention.temperature_scale", 0.1)}
    return made


def _minicpm3(told: Told) -> dict[str, Any]:
    """All have the factors of llama.cpp."""
    turning = told.whole("rope.dimension_count")
    made = {"qk_rope_head_dim": turning, "qk_nope_head_dim": told.whole("attention.key_length") - turning}
    made |= {name: told.whole(f"attention.{name}") for name in ("kv_lora_rank", "q_lora_rank")}
    factors = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    return made | factors | {"rope_parameters": rope(told, size=turning)}


def _mamba(told: Told) -> dict[str, Any]:
    """Returns the sizes of layers of Mamba 2."""
    inner, heads = told.whole("ssm.inner_size"), told.whole("ssm.time_step_rank")
    if inner % heads:
        raise told.bad("ssm.inner_size", inner, f"a multiple of {heads}, the heads")
    made = {"d_ssm": inner, "n_heads": heads, "d_head": inner // heads, "d_state": told.whole("ssm.state_size")}
    made |= {"n_groups": told.whole("ssm.group_count"), "d_conv": told.whole("ssm.conv_kernel")}
    leaves = {name.split(".", 2)[-1] for name in told.file.tensors}
    found = {"conv_bias": "ssm_conv1d.bias", "proj_bias": "ssm_in.bias", "rms_norm": "ssm_norm.weight"}
    return made | {name: leaf in leaves for name, leaf in found.items()}


def _mamba2(told: Told) -> dict[str, Any]:
    mamba = _mamba(told)
    made = {"num_heads": mamba["n_heads"], "head_dim": mamba["d_head"], "state_size": mamba["d_state"]}
    made |= {"n_groups": mamba["n_groups"], "conv_kernel": mamba["d_conv"], "use_bias": mamba["proj_bias"]}
    return made | {"use_conv_bias": mamba["conv_bias"], "expand": mamba["d_ssm"] // told.whole("embedding_length")}


def _falcon_h1(told: Told) -> dict[str, Any]:
    """The file's weights are multiplied already."""
    ones = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
    made = {f"mamba_{name}": value for name, value in _mamba(told).items()}
    made |= {f"{name}_multiplier": 1.0 for name in ones}
    return made | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}


def _granite_moe(told: Told) -> dict[str, Any]:
    made: dict[str, Any] = {"num_local_experts": told.whole("expert_count")}
    if told.get("expert_shared_feed_forward_length"):
        named = {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
        made |= named | {"shared_intermediate_size": told.whole("expert_shared_feed_forward_length")}
    return made


def _granite_hybrid(told: Told) -> dict[str, Any]:
    told.only("rope.scaling.finetuned", False)  # Bamba has positions
    shared = told.get("expert_shared_feed_forward_length") or told.whole("feed_forward_length")
    made = {f"mamba_{name}": value for name, value in _mamba(told).items()}
    kinds = ["attention" if one else "mamba" for one in told.each("attention.head_count_kv")]
    made |= {"layer_types": kinds, "position_embedding_type": "nope", "shared_intermediate_size": shared}
    return made | {"num_local_experts": told.whole("expert_count", least=0) if told.get("expert_count") else 0}


def _nemotron_h(told: Told) -> dict[str, Any]:
    mamba, kv, dense = _mamba(told), told.each("attention.head_count_kv"), told.each("feed_forward_length")
    mlp = "moe" if told.get("expert_count") else "mlp"
    both = list(zip(kv, dense, strict=False))[: told.layers]
    kinds = ["attention" if attends else mlp if wide else "mamba" for attends, wide in both]
    made = {"layers_block_type": kinds, "mamba_num_heads": mamba["n_heads"], "mamba_head_dim": mamba["d_head"]}
    made |= {"ssm_state_size": mamba["d_state"], "n_groups": mamba["n_groups"], "conv_kernel": mamba["d_conv"]}
    made |= {"use_conv_bias": mamba["conv_bias"], "mamba_proj_bias": mamba["proj_bias"]}
    if mlp == "moe":
        made |= _routed(told) | {"moe_shared_expert_intermediate_size": told.whole("expert_shared_feed_forward_length")}
    return made


def _delta(told: Told) -> dict[str, Any]:
    inner, heads = told.whole("ssm.inner_size"), told.whole("ssm.time_step_rank")
    every = told.whole("full_attention_interval") if told.get("full_attention_interval") else 4
    kinds = ["linear_attention" if (one + 1) % every else "full_attention" for one in range(told.layers)]
    return {"layer_types": kinds, "linear_value_head_dim": inner // heads, "norm_topk_prob": True}


def _bert(told: Told) -> dict[str, Any]:
    """RoBERTa and XLM-R are BERT here: the rows of positions that they do not use are cut off."""
    tables = {"type_vocab_size": "token_types.weight", "max_position_embeddings": "position_embd.weight"}
    return {size: rows for size, name in tables.items() if (rows := told.rows(name))}


def _modern_bert(told: Told) -> dict[str, Any]:
    made: dict[str, Any] = {"rope_parameters": _turns(told)}
    made |= {"hidden_activation": told.only("hidden_activation", "gelu", "silu", None) or "gelu"}
    windows = _windows(told, usual=3, before=0)
    return made | {"layer_types": windows.get("layer_types", ["full_attention"] * told.layers)}


@frozen
class Architecture:
    """An architecture as llama.cpp has it."""

    model_type: str
    loader: str
    names: Mapping[str, str] = {}  # of tensors, where they differ from `LEAVES`
    reals: Mapping[str, str] = RMS  # numbers with fractions among its settings
    more: Callable[[Told], dict[str, Any]] = field(default=lambda _: {}, kw_only=True)  # further settings
    sizes: Mapping[str, str] = field(default={}, kw_only=True)  # whole numbers that others do not have
    listed: Mapping[str, str] = field(default={}, kw_only=True)  # tensors of one number whose values a setting lists
    layers: str = field(default="model.layers", kw_only=True)  # where layers are
    turned: bool = field(default=False, kw_only=True)  # rotary numbers of a head lie in pairs, not in halves
    raised: bool = field(default=False, kw_only=True)  # norms hold one more than the weight
    attends: bool = field(default=True, kw_only=True)  # layers have attention
    by_layer: bool = field(default=False, kw_only=True)  # `more` tells widths of MLPs and heads of keys, which differ
    partial: bool = field(default=False, kw_only=True)  # rotary positions may turn a part of a head

    @property
    def encodes(self) -> bool:
        """True if each position sees all others."""
        return not self.loader.endswith("ForCausalLM")


_WITH_DELTA: dict[str, Any] = {"more": _delta, "sizes": names.DELTA_SIZES, "raised": True, "partial": True}
ARCHITECTURES: Final = {
    "llama": Architecture("llama", "LlamaForCausalLM", names.MIXTRAL, more=_llama, turned=True),  # and Mistral, Mixtral
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", names.EXPERTS),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", names.EXPERTS, more=lambda _: {"norm_topk_prob": True}
    ),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM"),  # in a text the three positions of a token are one
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", names.EXPERTS, more=lambda _: {"norm_topk_prob": True}
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", raised=True),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", names.SANDWICHED, RMS | names.CAPS, more=_gemma2, raised=True
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", names.SANDWICHED, RMS | names.CAPS, more=_gemma3, raised=True
    ),
    "gemma4": Architecture(
        *("gemma4_text", "Gemma4ForCausalLM", names.GEMMA4, RMS | names.CAPS),
        more=_gemma4,
        sizes=names.BY_LAYER_SIZES | pairs("expert_used_count=top_k_experts"),
        by_layer=True,
    ),
    "gemma3n": Architecture(
        *("gemma3n_text", "Gemma3nForCausalLM", names.GEMMA3N, RMS | names.CAPS),
        more=_gemma3n,
        sizes=names.BY_LAYER_SIZES | pairs("altup.active_idx=altup_active_idx altup.num_inputs=altup_num_inputs"),
        by_layer=True,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", names.FUSED, more=_phi3, partial=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", turned=True),
    "granite": Architecture("granite", "GraniteForCausalLM", {}, RMS | names.GRANITE, turned=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", names.SANDWICHED, more=_olmo2),  # and Olmo 3
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", names.LFM2, names.LFM2_REALS, more=_lfm2),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", {}, {names.MEAN: "layer_norm_eps"}, partial=True),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", names.STARCODER2, {names.MEAN: "norm_epsilon"}),
    "command-r": Architecture("cohere", "CohereForCausalLM", {}, names.COHERE),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", {}, names.COHERE),
    "nemotron": Architecture(
        "nemotron", "NemotronForCausalLM", {}, {names.MEAN: "norm_eps"}, raised=True, partial=True
    ),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", names.SECOND),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", names.SANDWICHED, more=_windows),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", names.GLM4, more=_glm4, partial=True),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", names.EXPERTS, RMS | {"attention.clamp_kqv": "clip_qkv"}),
    "phi2": Architecture("phi", "PhiForCausalLM", names.PHI2, {names.MEAN: "layer_norm_eps"}, partial=True),
    "exaone": Architecture("llama", "LlamaForCausalLM"),
    "internlm2": Architecture("llama", "LlamaForCausalLM", turned=True),
    "minicpm": Architecture("granite", "GraniteForCausalLM", more=_minicpm, turned=True),
    "olmo": Architecture("olmo", "OlmoForCausalLM", {}, {"attention.clamp_kqv": "clip_qkv"}, turned=True),
    "jais2": Architecture("jais2", "Jais2ForCausalLM", {}, {names.MEAN: "layer_norm_eps"}),
    "chatglm": Architecture("glm", "GlmForCausalLM", names.GLM, more=_glm, partial=True),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", names.ERNIE_MOE, sizes=names.ERNIE_MOE_SIZES
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", names.HUNYUAN_MOE, sizes=names.HUNYUAN_MOE_SIZES
    ),
    "exaone-moe": Architecture(
        *("exaone_moe", "ExaoneMoeForCausalLM", names.ROUTED),
        more=lambda told: _routed(told) | _windows(told),
        sizes=pairs("expert_shared_count=num_shared_experts"),
    ),
    "afmoe": Architecture(
        *("afmoe", "AfmoeForCausalLM", names.AFMOE, RMS | pairs("expert_weights_scale=route_scale")),
        more=_afmoe,
        sizes=pairs("expert_shared_count=num_shared_experts leading_dense_block_count=num_dense_layers"),
    ),
    "arcee": Architecture("arcee", "ArceeForCausalLM", turned=True),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", names.HUNYUAN),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", more=_mistral3, turned=True),
    "minimax-m2": Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", names.MIXTRAL, sizes={"expert_count": "num_local_experts"}, partial=True
    ),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", names.GPT_OSS, more=_gpt_oss),
    "deepseek2": Architecture("deepseek_v3", "DeepseekV3ForCausalLM", names.LATENT, more=_deepseek2, partial=True),
    "mistral4": Architecture("mistral4", "Mistral4ForCausalLM", names.MISTRAL4, more=_mistral4, partial=True),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", names.LATENT, more=_minicpm3, partial=True),
    "gpt2": Architecture(
        *("gpt2", "GPT2LMHeadModel", names.GPT2, {names.MEAN: "layer_norm_epsilon"}),
        sizes=pairs("feed_forward_length=n_inner"),
        layers="transformer.h",
    ),
    "gptneox": Architecture(
        *("gpt_neox", "GPTNeoXForCausalLM", names.GPT_NEOX, {names.MEAN: "layer_norm_eps"}),
        layers="gpt_neox.layers",
        partial=True,
    ),
    "apertus": Architecture("apertus", "ApertusForCausalLM", names.APERTUS, listed=names.XIELU),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", names.ROUTED | names.SECOND, more=_routed, partial=True),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", names.ROUTED, more=_routed),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        names.GRANITE_MOE,
        RMS | names.GRANITE,
        more=_granite_moe,
        turned=True,
    ),
    "granitehybrid": Architecture(
        *("granitemoehybrid", "GraniteMoeHybridForCausalLM", names.GRANITE_MOE, RMS | names.GRANITE),
        more=_granite_hybrid,
        turned=True,
    ),
    "mamba2": Architecture(
        *("mamba2", "Mamba2ForCausalLM", names.MAMBA2, {names.RMS_NORM: "layer_norm_epsilon"}),
        more=_mamba2,
        layers="backbone.layers",
        attends=False,
    ),
    "falcon-h1": Architecture("falcon_h1", "FalconH1ForCausalLM", names.FALCON_H1, more=_falcon_h1),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture(
            *("nemotron_h", "NemotronHForCausalLM", names.NEMOTRON_H, {names.RMS_NORM: "layer_norm_epsilon"}),
            more=_nemotron_h,
            partial=True,  # it has no positions; the file tells as many numbers as the width has for each head
        ),
    ),
    "lfm2moe": Architecture(
        *("lfm2_moe", "Lfm2MoeForCausalLM", names.LFM2, names.LFM2_REALS),
        more=_lfm2_moe,
        sizes={"leading_dense_block_count": "num_dense_layers"},
    ),
    "qwen3next": Architecture("qwen3_next", "Qwen3NextForCausalLM", names.QWEN3_NEXT, **_WITH_DELTA),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", names.QWEN35, **_WITH_DELTA),
    "qwen35moe": Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", names.QWEN35, **_WITH_DELTA),
    "bert": Architecture(
        "bert", "BertModel", names.BERT, {names.MEAN: "layer_norm_eps"}, more=_bert, layers="encoder.layer"
    ),
    "nomic-bert": Architecture(
        *("nomic_bert", "NomicBertModel", names.NOMIC_BERT, {names.MEAN: "layer_norm_eps"}), more=_bert, layers="layers"
    ),
    "jina-bert-v3": Architecture(
        *("jina_embeddings_v3", "JinaEmbeddingsV3Model", names.JINA_BERT, {names.MEAN: "layer_norm_eps"}),
        more=_bert,
        layers="layers",
    ),
    "modern-bert": Architecture(
        *("modernbert", "ModernBertModel", names.MODERN_BERT, {names.MEAN: "norm_eps"}),
        more=_modern_bert,
        sizes={"attention.sliding_window": "local_attention"},
        layers="layers",
    ),
    "eurobert": Architecture("eurobert", "EuroBertModel"),
    "gemma-embedding": Architecture(
        "gemma3_text", "Gemma3TextModel", names.SANDWICHED, RMS | names.CAPS, more=_gemma3, raised=True
    ),
}
