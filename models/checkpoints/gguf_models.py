"""Tells what llama.cpp's converter makes of each architecture: gives back the configuration and the names of weights
that transformers has. `gguf_tensors` undoes what it does to the weights.

The converter names settings and tensors alike for all architectures, so a row of `_ARCHITECTURES` says only what
differs. What the file says and no row reads is refused where it would change the computation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from attrs import define, field, frozen

from ...core.errors import CheckpointError, UnsupportedModel
from .gguf_file import GgufFile


def _pairs(text: str) -> dict[str, str]:
    """Returns ``a=b c=d`` as a mapping."""
    return dict(pair.split("=") for pair in text.split())


_SIZES = _pairs(
    "context_length=max_position_embeddings embedding_length=hidden_size block_count=num_hidden_layers "
    "attention.head_count=num_attention_heads"
)
_MORE_SIZES = _pairs(
    "feed_forward_length=intermediate_size attention.key_length=head_dim attention.sliding_window=sliding_window "
    "expert_count=num_experts expert_used_count=num_experts_per_tok expert_feed_forward_length=moe_intermediate_size "
    "expert_shared_feed_forward_length=shared_expert_intermediate_size shortconv.l_cache=conv_L_cache"
)
_FLAGS = _pairs(  # whether the first layer has a tensor
    "attention_bias=attn_q.bias use_qkv_bias=attn_q.bias use_bias=attn_q.bias mlp_bias=ffn_up.bias "
    "use_qk_norm=attn_q_norm.weight conv_bias=shortconv.conv.bias"
)
_CHANGING = (  # settings that change what is computed
    *("attention.scale", "residual_scale", "embedding_scale", "logit_scale", "attention.clamp_kqv", "swin_norm"),
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "attention.max_alibi_bias"),
    *("expert_weights_scale", "attention.temperature_scale", "rope.scaling.attn_factor", "leading_dense_block_count"),
)
_WHOLE = _pairs(
    "token_embd.weight=model.embed_tokens.weight output.weight=lm_head.weight output_norm.weight=model.norm.weight "
    "output_norm.bias=model.norm.bias"
)
_LEAVES = _pairs(
    "attn_norm=input_layernorm attn_q=self_attn.q_proj attn_k=self_attn.k_proj attn_v=self_attn.v_proj "
    "attn_output=self_attn.o_proj attn_q_norm=self_attn.q_norm attn_k_norm=self_attn.k_norm "
    "ffn_norm=post_attention_layernorm ffn_gate=mlp.gate_proj ffn_up=mlp.up_proj ffn_down=mlp.down_proj"
)
_SANDWICHED = _pairs(  # norms before and after a part
    "post_attention_norm=post_attention_layernorm ffn_norm=pre_feedforward_layernorm "
    "post_ffw_norm=post_feedforward_layernorm"
)
_EXPERTS = _pairs(
    "ffn_gate_inp=mlp.gate ffn_gate_exps=mlp.experts.{}.gate_proj ffn_up_exps=mlp.experts.{}.up_proj "
    "ffn_down_exps=mlp.experts.{}.down_proj ffn_gate_inp_shexp=mlp.shared_expert_gate "
    "ffn_gate_shexp=mlp.shared_expert.gate_proj ffn_up_shexp=mlp.shared_expert.up_proj "
    "ffn_down_shexp=mlp.shared_expert.down_proj"
)
_MIXTRAL = _pairs(
    "ffn_gate_inp=block_sparse_moe.gate ffn_gate_exps=block_sparse_moe.experts.{}.w1 "
    "ffn_up_exps=block_sparse_moe.experts.{}.w3 ffn_down_exps=block_sparse_moe.experts.{}.w2"
)
_LFM2 = _pairs(
    "attn_norm=operator_norm attn_output=self_attn.out_proj attn_q_norm=self_attn.q_layernorm "
    "attn_k_norm=self_attn.k_layernorm ffn_norm=ffn_norm ffn_gate=feed_forward.w1 ffn_up=feed_forward.w3 "
    "ffn_down=feed_forward.w2 token_embd_norm.weight=model.embedding_norm.weight shortconv.conv=conv.conv "
    "output_norm.weight=model.embedding_norm.weight shortconv.in_proj=conv.in_proj shortconv.out_proj=conv.out_proj"
)
_RMS = _pairs("attention.layer_norm_rms_epsilon=rms_norm_eps")
_MEAN = "attention.layer_norm_epsilon"  # of norms that take the mean off
_GRANITE = _pairs(
    "embedding_scale=embedding_multiplier residual_scale=residual_multiplier attention.scale=attention_multiplier "
    "logit_scale=logits_scaling"
)
_SPECIAL = {f"{one}_token_id": f"{one}_token_id" for one in ("bos", "eos")} | {"pad_token_id": "padding_token_id"}
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_TABLES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OF_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are divided as no other's


@define(eq=False)
class _Told:
    """The settings of a file's architecture."""

    file: GgufFile
    read: set[str] = field(factory=set, init=False)

    def get(self, name: str) -> Any:
        self.read.add(name)
        return self.file.settings.get(f"{self.file.settings['general.architecture']}.{name}")

    def whole(self, name: str, *, least: int = 1) -> int:
        """Returns a size. One that is told for each layer is the same for all."""
        value = self.get(name)
        if value is not None and not isinstance(value, int):
            values = set(self.each(name))
            if len(values) != 1:
                raise UnsupportedModel(f"{self.file.path} has layers that differ in {name}; allowed: one for all")
            (value,) = values
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 32:
            raise self.bad(name, value, f"a whole number, {least} or more")
        return value

    def each(self, name: str) -> list[Any]:
        return self.file.listed(f"{self.file.settings['general.architecture']}.{name}")

    def real(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self.bad(name, value, "a number")
        return float(str(np.float32(value)))  # the shortest number that was stored so

    def bad(self, name: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path} has {name}={value!r}; allowed: {allowed}. Download the file again")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def tensor(self, name: str) -> list[float]:
        """Returns the values of a small tensor."""
        at = self.file.tensors[name]
        if at.kind != "F32" or len(at.shape) > 1:
            raise self.bad(name, f"{at.kind} {at.shape}", "a row of F32")
        return [float(str(value)) for value in np.fromfile(at.path, "<f4", at.shape[0], offset=at.begin)]


def _llama(told: _Told) -> dict[str, Any]:
    if not told.get("expert_count"):
        return {}
    named = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    return named | {"num_local_experts": told.whole("expert_count")}


def _gemma2(told: _Told) -> dict[str, Any]:
    heads, architecture = told.whole("attention.head_count"), told.file.settings["general.architecture"]
    large = told.whole("block_count") == _OF_27B[architecture]
    size = told.whole("embedding_length") // heads if large else told.whole("attention.key_length")
    return {"query_pre_attn_scalar": size}


def _gemma3(told: _Told) -> dict[str, Any]:
    near = {"rope_type": "default", "rope_theta": 10_000.0}
    return _gemma2(told) | {"rope_parameters": {"full_attention": _rope(told), "sliding_attention": near}}


def _phi3(told: _Told) -> dict[str, Any]:
    made = {"original_max_position_embeddings": told.whole("rope.scaling.original_context_length")}
    return made | {"sliding_window": told.get("attention.sliding_window") or None}


def _lfm2(told: _Told) -> dict[str, Any]:
    heads = told.each("attention.head_count_kv")
    kinds = ["full_attention" if one else "conv" for one in heads]
    return {"layer_types": kinds, "num_key_value_heads": max(heads, default=0), "block_auto_adjust_ff_dim": False}


@frozen
class Architecture:
    """An architecture as llama.cpp has it."""

    model_type: str
    loader: str
    names: Mapping[str, str] = {}  # of tensors, where they differ from `_LEAVES`
    reals: Mapping[str, str] = _RMS  # numbers with fractions among its settings
    more: Callable[[_Told], dict[str, Any]] = field(default=lambda _: {}, kw_only=True)  # further settings
    turned: bool = field(default=False, kw_only=True)  # rotary numbers of a head lie in pairs, not in halves
    raised: bool = field(default=False, kw_only=True)  # norms hold one more than the weight
    partial: bool = field(default=False, kw_only=True)  # rotary positions may turn a part of a head


_FUSED = _pairs("attn_qkv=self_attn.qkv_proj ffn_up=mlp.gate_up_proj")
_STARCODER2 = _pairs("ffn_up=mlp.c_fc ffn_down=mlp.c_proj")
_COHERE = {_MEAN: "layer_norm_eps", "logit_scale": "logit_scale"}
_ARCHITECTURES: Final = {
    "llama": Architecture("llama", "LlamaForCausalLM", _MIXTRAL, more=_llama, turned=True),  # and Mistral, Mixtral
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _EXPERTS),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS, more=lambda _: {"norm_topk_prob": True}),
    "gemma": Architecture("gemma", "GemmaForCausalLM", raised=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _SANDWICHED, _RMS | _CAPS, more=_gemma2, raised=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _SANDWICHED, _RMS | _CAPS, more=_gemma3, raised=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED, more=_phi3, partial=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", turned=True),
    "granite": Architecture("granite", "GraniteForCausalLM", {}, _RMS | _GRANITE, turned=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _SANDWICHED),
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", _LFM2, {"attention.layer_norm_rms_epsilon": "norm_eps"}, more=_lfm2
    ),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", {}, {_MEAN: "layer_norm_eps"}, partial=True),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", _STARCODER2, {_MEAN: "norm_epsilon"}),
    "command-r": Architecture("cohere", "CohereForCausalLM", {}, _COHERE),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", {}, _COHERE),
    "nemotron": Architecture("nemotron", "NemotronForCausalLM", {}, {_MEAN: "norm_eps"}, raised=True, partial=True),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Returns what is known of a file's architecture. Raises `UnsupportedModel` if nothing is."""
    name = file.settings.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} has the architecture {name!r}; allowed: {', '.join(_ARCHITECTURES)}. Give the checkpoint "
            "that it was converted from (on the hub usually the same name without -GGUF)"
        )
    return _ARCHITECTURES[name]


def name_of(file: GgufFile, tensor: str) -> str | None:
    """Returns the name of a tensor in transformers' model; with ``{}`` in the place of an expert's number. ``None``: it
    is a table that the configuration has.

    Raises:
        UnsupportedModel: the model has no such tensor.
    """
    kind, parts = architecture_of(file), _BLOCK.fullmatch(tensor)
    leaf = None if parts is None else kind.names.get(parts[2]) or _LEAVES.get(parts[2])
    own = kind.names.get(tensor) or _WHOLE.get(tensor)
    if tensor not in _TABLES and leaf is None and own is None:
        raise UnsupportedModel(
            f"{file.path} has the tensor {tensor}, which {kind.loader} of transformers does not have; give the "
            "checkpoint that it was converted from"
        )
    return own if parts is None or leaf is None else f"model.layers.{parts[1]}.{leaf}.{parts[3]}"


def heads_of(file: GgufFile, tensor: str) -> int:
    """Returns how many heads' rows a tensor has in the order of llama.cpp; 0: its rows are in transformers' order."""
    parts, told = _BLOCK.fullmatch(tensor), _Told(file)
    if parts is None or parts[2] not in {"attn_q", "attn_k"} or not architecture_of(file).turned:
        return 0
    kv = parts[2] == "attn_k" and told.get("attention.head_count_kv") is not None
    return told.whole("attention.head_count_kv" if kv else "attention.head_count")


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns config.json for the model in a file.

    Raises:
        CheckpointError: a setting is missing or damaged.
        UnsupportedModel: the architecture is not known, or a setting asks for more than is known of it.
    """
    kind, told = architecture_of(file), _Told(file)
    made: dict[str, Any] = {"model_type": kind.model_type, "architectures": [kind.loader]}
    made |= {theirs: told.whole(name) for name, theirs in _SIZES.items()}
    made |= {theirs: told.whole(name, least=0) for name, theirs in _MORE_SIZES.items() if told.get(name) is not None}
    blocks = {int(found[1]) for name in file.tensors if (found := _BLOCK.fullmatch(name))}
    if len(blocks) != made["num_hidden_layers"] or max(blocks) >= len(blocks):
        raise told.bad("block_count", made["num_hidden_layers"], f"{len(blocks)}, as many as it has layers")
    if not told.has("token_embd.weight"):
        raise CheckpointError(f"{file.path} has no token_embd.weight; download it again")
    kv = told.get("attention.head_count_kv") is not None and kind.model_type != "lfm2"
    made |= {
        "num_key_value_heads": told.whole("attention.head_count_kv") if kv else made["num_attention_heads"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not told.has("output.weight"),
        "rope_parameters": _rope(told),
        **{name: told.has(f"blk.0.{tensor}") for name, tensor in _FLAGS.items()},
        **{name: told.get(name) for name in ("use_parallel_residual",) if told.get(name) is not None},
        **{theirs: file.settings.get(f"tokenizer.ggml.{name}") for theirs, name in _SPECIAL.items()},
    }
    needed = {name for name in kind.reals if name.startswith("attention.layer_norm")}
    made |= {
        theirs: told.real(name) for name, theirs in kind.reals.items() if name in needed or told.get(name) is not None
    }
    made |= kind.more(told)
    if not isinstance(made.get("use_parallel_residual", False), bool):
        raise told.bad("use_parallel_residual", made["use_parallel_residual"], "true or false")
    left = [name for name in _CHANGING if name not in told.read and told.get(name) is not None]
    if left:
        raise UnsupportedModel(
            f"{file.path} ({kind.model_type}) has {', '.join(left)}, which no model of transformers of this kind has; "
            "give the checkpoint that it was converted from"
        )
    return made


def _rope(told: _Told) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": told.real("rope.freq_base", 10_000.0), "rope_type": "default"}
    if rope["rope_theta"] <= 0.0:
        raise told.bad("rope.freq_base", rope["rope_theta"], "a number above 0")
    size = told.get("attention.key_length") or told.whole("embedding_length") // told.whole("attention.head_count")
    turning = size if told.get("rope.dimension_count") is None else told.whole("rope.dimension_count", least=0) or size
    if turning != size and not architecture_of(told.file).partial:
        raise told.bad("rope.dimension_count", turning, f"{size}, the numbers of a head")
    if architecture_of(told.file).partial:
        rope["partial_rotary_factor"] = turning / size
    kind = told.get("rope.scaling.type")
    if told.has("rope_factors_long.weight"):
        told.get("rope.scaling.attn_factor")  # follows from the lengths
        factors = {f"{one}_factor": told.tensor(f"rope_factors_{one}.weight") for one in ("long", "short")}
        length = told.whole("rope.scaling.original_context_length")
        return rope | {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}
    if told.has("rope_freqs.weight"):
        return rope | _llama3(told, rope["rope_theta"], turning)
    if kind in {None, "none"}:
        return rope
    if kind not in {"linear", "yarn"}:
        raise UnsupportedModel(f"{told.file.path} has positions of type {kind!r}; allowed: linear and yarn")
    rope |= {"rope_type": kind, "factor": told.real("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = told.whole("rope.scaling.original_context_length")
    return rope


def _llama3(told: _Told, base: float, size: int) -> dict[str, Any]:
    """Returns the settings that explain the factors of Llama 3.1's positions. The file has the factors alone."""
    factors = np.asarray(told.tensor("rope_freqs.weight"))
    if len(factors) != size // 2:
        raise told.bad("rope_freqs.weight", factors.shape, f"{size // 2} numbers")
    if (factors == 1.0).all():
        return {}
    factor, (low, high, length) = float(factors.max()), _LLAMA3.values()
    waves = 2 * math.pi * base ** (np.arange(0, size, 2) / size)
    smooth = np.clip((length / waves - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        raise UnsupportedModel(
            f"{told.file.path} has factors of positions (rope_freqs.weight) that are not Llama 3.1's; give the "
            "checkpoint that it was converted from"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
