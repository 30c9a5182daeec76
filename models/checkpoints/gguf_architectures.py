"""Tells in a table what llama.cpp's converter makes of each architecture.

The converter names settings and tensors alike for all architectures, so a row of `ARCHITECTURES` says only what
differs. Names of tensors are told as ``theirs=own``. Of an own name

- ``{}`` stands for an expert's number;
- ``a|b``: rows of the tensor are those of several matrices, as many of each;
- ``a@1``: the tensor is the second part of what it is joined to be, by `JOINS` of `gguf_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import field, frozen

from .gguf_settings import Told, rope


def pairs(text: str) -> dict[str, str]:
    """Returns ``a=b c=d`` as a mapping."""
    return dict(pair.split("=") for pair in text.split())


LEAVES: Final = pairs(  # of a layer
    "attn_norm=input_layernorm attn_q=self_attn.q_proj attn_k=self_attn.k_proj attn_v=self_attn.v_proj "
    "attn_output=self_attn.o_proj attn_q_norm=self_attn.q_norm attn_k_norm=self_attn.k_norm "
    "ffn_norm=post_attention_layernorm ffn_gate=mlp.gate_proj ffn_up=mlp.up_proj ffn_down=mlp.down_proj"
)
_SANDWICHED = pairs(  # norms before and after a part
    "post_attention_norm=post_attention_layernorm ffn_norm=pre_feedforward_layernorm "
    "post_ffw_norm=post_feedforward_layernorm"
)
_SECOND = pairs("post_attention_norm=post_attention_layernorm")  # the norm before the MLP, by another name
_EXPERTS = pairs(
    "ffn_gate_inp=mlp.gate ffn_gate_exps=mlp.experts.{}.gate_proj ffn_up_exps=mlp.experts.{}.up_proj "
    "ffn_down_exps=mlp.experts.{}.down_proj ffn_gate_inp_shexp=mlp.shared_expert_gate "
    "ffn_gate_shexp=mlp.shared_expert.gate_proj ffn_up_shexp=mlp.shared_expert.up_proj "
    "ffn_down_shexp=mlp.shared_expert.down_proj"
)
_ROUTED = _EXPERTS | pairs(  # of DeepSeek and models like it
    "exp_probs_b.bias=mlp.gate.e_score_correction_bias ffn_gate_shexp=mlp.shared_experts.gate_proj "
    "ffn_up_shexp=mlp.shared_experts.up_proj ffn_down_shexp=mlp.shared_experts.down_proj"
)
_ROUTED_SIZES = pairs(
    "expert_count=n_routed_experts expert_shared_count=n_shared_experts expert_group_count=n_group "
    "leading_dense_block_count=first_k_dense_replace expert_group_used_count=topk_group"
)
_MIXTRAL = pairs(
    "ffn_gate_inp=block_sparse_moe.gate ffn_gate_exps=block_sparse_moe.experts.{}.w1 "
    "ffn_up_exps=block_sparse_moe.experts.{}.w3 ffn_down_exps=block_sparse_moe.experts.{}.w2 "
    "exp_probs_b.bias=block_sparse_moe.e_score_correction_bias"
)
_LFM2 = pairs(
    "attn_norm=operator_norm attn_output=self_attn.out_proj attn_q_norm=self_attn.q_layernorm "
    "attn_k_norm=self_attn.k_layernorm ffn_norm=ffn_norm ffn_gate=feed_forward.w1 ffn_up=feed_forward.w3 "
    "ffn_down=feed_forward.w2 token_embd_norm.weight=model.embedding_norm.weight shortconv.conv=conv.conv "
    "output_norm.weight=model.embedding_norm.weight shortconv.in_proj=conv.in_proj shortconv.out_proj=conv.out_proj "
    "ffn_gate_inp=feed_forward.gate ffn_gate_exps=feed_forward.experts.{}.w1 ffn_up_exps=feed_forward.experts.{}.w3 "
    "ffn_down_exps=feed_forward.experts.{}.w2 exp_probs_b.bias=feed_forward.expert_bias"
)
_RMS = pairs("attention.layer_norm_rms_epsilon=rms_norm_eps")
_MEAN = "attention.layer_norm_epsilon"  # of norms that take the mean off
_LFM2_REALS = pairs("attention.layer_norm_rms_epsilon=norm_eps")
_GRANITE = pairs(
    "embedding_scale=embedding_multiplier residual_scale=residual_multiplier attention.scale=attention_multiplier "
    "logit_scale=logits_scaling"
)
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_FUSED = pairs("attn_qkv=self_attn.qkv_proj ffn_up=mlp.gate_up_proj")
_STARCODER2 = pairs("ffn_up=mlp.c_fc ffn_down=mlp.c_proj")
_COHERE = {_MEAN: "layer_norm_eps", "logit_scale": "logit_scale"}
_BERT = pairs(
    "token_embd.weight=embeddings.word_embeddings.weight position_embd.weight=embeddings.position_embeddings.weight "
    "token_types.weight=embeddings.token_type_embeddings.weight token_embd_norm.weight=embeddings.LayerNorm.weight "
    "token_embd_norm.bias=embeddings.LayerNorm.bias attn_q=attention.self.query attn_k=attention.self.key "
    "attn_v=attention.self.value attn_output=attention.output.dense attn_output_norm=attention.output.LayerNorm "
    "ffn_up=intermediate.dense ffn_down=output.dense layer_output_norm=output.LayerNorm"
)
_NOMIC_BERT = _BERT | pairs(
    "attn_qkv=self_attn.q_proj|self_attn.k_proj|self_attn.v_proj attn_output=self_attn.o_proj "
    "attn_output_norm=post_attention_layernorm ffn_gate=mlp.gate_proj ffn_up=mlp.up_proj ffn_down=mlp.down_proj "
    "layer_output_norm=post_mlp_layernorm"
)
_OF_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are divided as no other's


def _llama(told: Told) -> dict[str, Any]:
    if not told.get("expert_count"):
        return {}
    named = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    return named | {"num_local_experts": told.whole("expert_count")}


def _gemma2(told: Told) -> dict[str, Any]:
    large = told.whole("block_count") == _OF_27B.get(told.architecture)
    heads = told.whole("attention.head_count")
    return {"query_pre_attn_scalar": told.whole("embedding_length") // heads if large else _head(told)}


def _gemma3(told: Told) -> dict[str, Any]:
    near = {"rope_type": "default", "rope_theta": 10_000.0}
    made = _gemma2(told) | {"rope_parameters": {"full_attention": rope(told), "sliding_attention": near}}
    return made | {"use_bidirectional_attention": told.architecture == "gemma-embedding"}


def _phi3(told: Told) -> dict[str, Any]:
    made = {"original_max_position_embeddings": told.whole("rope.scaling.original_context_length")}
    return made | {"sliding_window": told.get("attention.sliding_window") or None}


def _lfm2(told: Told) -> dict[str, Any]:
    kinds = ["full_attention" if one else "conv" for one in told.each("attention.head_count_kv")]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _bert(told: Told) -> dict[str, Any]:
    kinds = told.file.tensors.get("token_types.weight")
    return {} if kinds is None else {"type_vocab_size": kinds.shape[0]}


def _head(told: Told) -> int:
    return told.whole("attention.key_length")


@frozen
class Architecture:
    """An architecture as llama.cpp has it."""

    model_type: str
    loader: str
    names: Mapping[str, str] = {}  # of tensors, where they differ from `LEAVES`
    reals: Mapping[str, str] = _RMS  # numbers with fractions among its settings
    more: Callable[[Told], dict[str, Any]] = field(default=lambda _: {}, kw_only=True)  # further settings
    sizes: Mapping[str, str] = field(default={}, kw_only=True)  # whole numbers that others do not have
    layers: str = field(default="model.layers", kw_only=True)  # where layers are
    turned: bool = field(default=False, kw_only=True)  # rotary numbers of a head lie in pairs, not in halves
    raised: bool = field(default=False, kw_only=True)  # norms hold one more than the weight
    partial: bool = field(default=False, kw_only=True)  # rotary positions may turn a part of a head

    @property
    def encodes(self) -> bool:
        """True if each position sees all others."""
        return not self.loader.endswith("ForCausalLM")


ARCHITECTURES: Final = {
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
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _LFM2, _LFM2_REALS, more=_lfm2),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", {}, {_MEAN: "layer_norm_eps"}, partial=True),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", _STARCODER2, {_MEAN: "norm_epsilon"}),
    "command-r": Architecture("cohere", "CohereForCausalLM", {}, _COHERE),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", {}, _COHERE),
    "nemotron": Architecture("nemotron", "NemotronForCausalLM", {}, {_MEAN: "norm_eps"}, raised=True, partial=True),
    "bert": Architecture("bert", "BertModel", _BERT, {_MEAN: "layer_norm_eps"}, more=_bert, layers="encoder.layer"),
    "nomic-bert": Architecture(
        *("nomic_bert", "NomicBertModel", _NOMIC_BERT, {_MEAN: "layer_norm_eps"}), more=_bert, layers="layers"
    ),
    "eurobert": Architecture("eurobert", "EuroBertModel"),
    "gemma-embedding": Architecture(
        "gemma3_text", "Gemma3TextModel", _SANDWICHED, _RMS | _CAPS, more=_gemma3, raised=True
    ),
}
