"""Names of tensors and settings of llama.cpp's architectures, told as in `gguf_architectures`."""

from __future__ import annotations

from typing import Final


def pairs(text: str) -> dict[str, str]:
    """Returns ``a=b c=d`` as a mapping."""
    return dict(pair.split("=") for pair in text.split())


LEAVES: Final = pairs(  # of a layer
    "attn_norm=input_layernorm attn_q=self_attn.q_proj attn_k=self_attn.k_proj attn_v=self_attn.v_proj "
    "attn_output=self_attn.o_proj attn_q_norm=self_attn.q_norm attn_k_norm=self_attn.k_norm "
    "ffn_norm=post_attention_layernorm ffn_gate=mlp.gate_proj ffn_up=mlp.up_proj ffn_down=mlp.down_proj"
)
SANDWICHED = pairs(  # norms before and after a part
    "post_attention_norm=post_attention_layernorm ffn_norm=pre_feedforward_layernorm "
    "post_ffw_norm=post_feedforward_layernorm"
)
SECOND = pairs("post_attention_norm=post_attention_layernorm")  # the norm before the MLP, by another name
BY_LAYER = SANDWICHED | pairs(  # embeddings of their own for each layer
    "inp_gate=per_layer_input_gate proj=per_layer_projection post_norm=post_per_layer_input_norm "
    "per_layer_token_embd.weight=model.embed_tokens_per_layer.weight "
    "per_layer_model_proj.weight=model.per_layer_model_projection.weight "
    "per_layer_proj_norm.weight=model.per_layer_projection_norm.weight"
)
BY_LAYER_SIZES = pairs(
    "embedding_length_per_layer_input=hidden_size_per_layer_input attention.shared_kv_layers=num_kv_shared_layers"
)
GEMMA3N = BY_LAYER | pairs(
    "altup_proj.weight=model.altup_projections.{}.weight altup_router=altup.modality_router "
    "altup_unembd_proj.weight=model.altup_unembed_projections.{}.weight altup_router_norm=altup.router_norm "
    "altup_correct_scale.weight=altup.correct_output_scale altup_correct_coef=altup.correction_coefs "
    "altup_predict_coef=altup.prediction_coefs laurel_l=laurel.linear_left laurel_r=laurel.linear_right "
    "laurel_post_norm=laurel.post_laurel_norm"
)
GEMMA4 = BY_LAYER | pairs(
    "layer_output_scale.weight=layer_scalar ffn_gate_inp.scale=router.scale "
    "ffn_gate_inp.weight=router.proj.weight ffn_down_exps.scale=router.per_expert_scale "
    "ffn_down_exps.weight=experts.down_proj ffn_gate_up_exps.weight=experts.gate_up_proj "
    "ffn_gate_exps.weight=experts.gate_up_proj@0 ffn_up_exps.weight=experts.gate_up_proj@1 "
    "pre_ffw_norm_2=pre_feedforward_layernorm_2 post_ffw_norm_1=post_feedforward_layernorm_1 "
    "post_ffw_norm_2=post_feedforward_layernorm_2"
)
EXPERTS = pairs(
    "ffn_gate_inp=mlp.gate ffn_gate_exps=mlp.experts.{}.gate_proj ffn_up_exps=mlp.experts.{}.up_proj "
    "ffn_down_exps=mlp.experts.{}.down_proj ffn_gate_inp_shexp=mlp.shared_expert_gate "
    "ffn_gate_shexp=mlp.shared_expert.gate_proj ffn_up_shexp=mlp.shared_expert.up_proj "
    "ffn_down_shexp=mlp.shared_expert.down_proj"
)
ROUTED = EXPERTS | pairs(  # of DeepSeek and models like it
    "exp_probs_b.bias=mlp.gate.e_score_correction_bias ffn_gate_shexp=mlp.shared_experts.gate_proj "
    "ffn_up_shexp=mlp.shared_experts.up_proj ffn_down_shexp=mlp.shared_experts.down_proj"
)
ERNIE_MOE = ROUTED | pairs("exp_probs_b.bias=mlp.gate.moe_statics.e_score_correction_bias")
ERNIE_MOE_SIZES = pairs(
    "expert_count=moe_num_experts expert_used_count=moe_k interleave_moe_layer_step=moe_layer_interval "
    "leading_dense_block_count=moe_layer_start_index expert_shared_count=moe_num_shared_experts"
)
AFMOE = ROUTED | pairs(
    "attn_gate=self_attn.gate_proj post_attention_norm=post_attention_layernorm ffn_norm=pre_mlp_layernorm "
    "post_ffw_norm=post_mlp_layernorm ffn_gate_inp=mlp.router.gate exp_probs_b.bias=mlp.expert_bias"
)
ROUTED_SIZES = pairs(
    "expert_count=n_routed_experts expert_shared_count=n_shared_experts expert_group_count=n_group "
    "leading_dense_block_count=first_k_dense_replace expert_group_used_count=topk_group"
)
MIXTRAL = pairs(
    "ffn_gate_inp=block_sparse_moe.gate ffn_gate_exps=block_sparse_moe.experts.{}.w1 "
    "ffn_up_exps=block_sparse_moe.experts.{}.w3 ffn_down_exps=block_sparse_moe.experts.{}.w2 "
    "exp_probs_b.bias=block_sparse_moe.e_score_correction_bias"
)
LFM2 = pairs(
    "attn_norm=operator_norm attn_output=self_attn.out_proj attn_q_norm=self_attn.q_layernorm "
    "attn_k_norm=self_attn.k_layernorm ffn_norm=ffn_norm ffn_gate=feed_forward.w1 ffn_up=feed_forward.w3 "
    "ffn_down=feed_forward.w2 token_embd_norm.weight=model.embedding_norm.weight shortconv.conv=conv.conv "
    "output_norm.weight=model.embedding_norm.weight shortconv.in_proj=conv.in_proj shortconv.out_proj=conv.out_proj "
    "ffn_gate_inp=feed_forward.gate ffn_gate_exps=feed_forward.experts.{}.w1 ffn_up_exps=feed_forward.experts.{}.w3 "
    "ffn_down_exps=feed_forward.experts.{}.w2 exp_probs_b.bias=feed_forward.expert_bias"
)
RMS = pairs("attention.layer_norm_rms_epsilon=rms_norm_eps")
RMS_NORM = "attention.layer_norm_rms_epsilon"
MEAN = "attention.layer_norm_epsilon"  # of norms that take the mean off
LFM2_REALS = pairs("attention.layer_norm_rms_epsilon=norm_eps")
GRANITE = pairs(
    "embedding_scale=embedding_multiplier residual_scale=residual_multiplier attention.scale=attention_multiplier "
    "logit_scale=logits_scaling"
)
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
FUSED = pairs("attn_qkv=self_attn.qkv_proj ffn_up=mlp.gate_up_proj")
STARCODER2 = pairs("ffn_up=mlp.c_fc ffn_down=mlp.c_proj")
COHERE = {MEAN: "layer_norm_eps", "logit_scale": "logit_scale"}
BERT = pairs(
    "token_embd.weight=embeddings.word_embeddings.weight position_embd.weight=embeddings.position_embeddings.weight "
    "token_types.weight=embeddings.token_type_embeddings.weight token_embd_norm.weight=embeddings.LayerNorm.weight "
    "token_embd_norm.bias=embeddings.LayerNorm.bias attn_q=attention.self.query attn_k=attention.self.key "
    "attn_v=attention.self.value attn_output=attention.output.dense attn_output_norm=attention.output.LayerNorm "
    "ffn_up=intermediate.dense ffn_down=output.dense layer_output_norm=output.LayerNorm"
)
NOMIC_BERT = BERT | pairs(
    "attn_qkv=self_attn.q_proj|self_attn.k_proj|self_attn.v_proj attn_output=self_attn.o_proj "
    "attn_output_norm=post_attention_layernorm ffn_gate=mlp.gate_proj ffn_up=mlp.up_proj ffn_down=mlp.down_proj "
    "layer_output_norm=post_mlp_layernorm"
)
JINA_BERT = NOMIC_BERT | pairs("ffn_up=mlp.fc1 ffn_down=mlp.fc2")
MODERN_BERT = pairs(
    "token_embd.weight=embeddings.tok_embeddings.weight token_embd_norm.weight=embeddings.norm.weight "
    "output_norm.weight=final_norm.weight attn_norm=attn_norm attn_qkv=attn.Wqkv attn_output=attn.Wo "
    "ffn_norm=mlp_norm ffn_up=mlp.Wi ffn_down=mlp.Wo"
)
GLM = pairs("attn_qkv=self_attn.q_proj|self_attn.k_proj|self_attn.v_proj ffn_up=mlp.gate_up_proj")
GLM4 = pairs("post_attention_norm=post_self_attn_layernorm ffn_up=mlp.gate_up_proj post_ffw_norm=post_mlp_layernorm")
PHI2 = pairs(
    "attn_output=self_attn.dense ffn_up=mlp.fc1 ffn_down=mlp.fc2 output_norm.weight=model.final_layernorm.weight "
    "output_norm.bias=model.final_layernorm.bias output.bias=lm_head.bias"
)
HUNYUAN = pairs("attn_q_norm=self_attn.query_layernorm attn_k_norm=self_attn.key_layernorm")
HUNYUAN_MOE = HUNYUAN | {theirs: own.replace("shared_expert.", "shared_mlp.") for theirs, own in EXPERTS.items()}
HUNYUAN_MOE |= pairs("ffn_gate_inp=mlp.gate.wg")
HUNYUAN_MOE_SIZES = pairs("expert_used_count=moe_topk")
GPT_OSS = SECOND | pairs(
    "attn_sinks.weight=self_attn.sinks ffn_gate_inp=mlp.router ffn_gate_exps.weight=mlp.experts.gate_up_proj@0 "
    "ffn_up_exps.weight=mlp.experts.gate_up_proj@1 ffn_gate_exps.bias=mlp.experts.gate_up_proj_bias@0 "
    "ffn_up_exps.bias=mlp.experts.gate_up_proj_bias@1 ffn_down_exps.weight=mlp.experts.down_proj@0 "
    "ffn_down_exps.bias=mlp.experts.down_proj_bias"
)
LATENT = ROUTED | pairs(
    "attn_q_a=self_attn.q_a_proj attn_q_a_norm=self_attn.q_a_layernorm attn_q_b=self_attn.q_b_proj "
    "attn_kv_a_mqa=self_attn.kv_a_proj_with_mqa attn_kv_a_norm=self_attn.kv_a_layernorm "
    "attn_kv_b=self_attn.kv_b_proj attn_k_b=self_attn.kv_b_proj@0 attn_v_b=self_attn.kv_b_proj@1"
)
APERTUS = pairs("attn_norm=attention_layernorm ffn_norm=feedforward_layernorm")
XIELU = {f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
MISTRAL4 = LATENT | pairs("ffn_gate_up_exps.weight=mlp.experts.gate_up_proj ffn_down_exps.weight=mlp.experts.down_proj")
GPT2 = pairs(
    "token_embd.weight=transformer.wte.weight position_embd.weight=transformer.wpe.weight "
    "output_norm.weight=transformer.ln_f.weight output_norm.bias=transformer.ln_f.bias attn_norm=ln_1 ffn_norm=ln_2 "
    "attn_qkv=attn.c_attn attn_qkv.weight=attn.c_attn.weight@0 attn_output=attn.c_proj "
    "attn_output.weight=attn.c_proj.weight@0 ffn_up=mlp.c_fc ffn_up.weight=mlp.c_fc.weight@0 ffn_down=mlp.c_proj "
    "ffn_down.weight=mlp.c_proj.weight@0"
)
GPT_NEOX = pairs(
    "token_embd.weight=gpt_neox.embed_in.weight output_norm.weight=gpt_neox.final_layer_norm.weight "
    "output_norm.bias=gpt_neox.final_layer_norm.bias attn_qkv=attention.query_key_value attn_output=attention.dense "
    "ffn_up=mlp.dense_h_to_4h ffn_down=mlp.dense_4h_to_h"
)
MAMBA = pairs(  # layers of Mamba 2
    "ssm_in=mamba.in_proj ssm_conv1d=mamba.conv1d ssm_dt.bias=mamba.dt_bias ssm_a=mamba.A_log ssm_d=mamba.D "
    "ssm_norm=mamba.norm ssm_out=mamba.out_proj"
)
MAMBA2 = {theirs: own.replace("mamba.", "mixer.") for theirs, own in MAMBA.items()} | pairs(
    "token_embd.weight=backbone.embeddings.weight output_norm.weight=backbone.norm_f.weight attn_norm=norm"
)
FALCON_H1 = MAMBA | pairs(
    "ffn_norm=pre_ff_layernorm.weight ffn_norm.weight=pre_ff_layernorm.weight "
    "ffn_gate=feed_forward.gate_proj ffn_up=feed_forward.up_proj ffn_down=feed_forward.down_proj "
    "output_norm.weight=model.final_layernorm.weight"
)
GRANITE_MOE = MAMBA | pairs(
    "ffn_gate_inp=block_sparse_moe.router ffn_gate_exps.weight=block_sparse_moe.experts.gate_up_proj@0 "
    "ffn_up_exps.weight=block_sparse_moe.experts.gate_up_proj@1 "
    "ffn_down_exps.weight=block_sparse_moe.experts.down_proj ffn_gate_shexp=shared_mlp.input_linear@0 "
    "ffn_up_shexp=shared_mlp.input_linear@1 "
    "ffn_down_shexp=shared_mlp.output_linear ffn_gate=shared_mlp.input_linear@0 ffn_up=shared_mlp.input_linear@1 "
    "ffn_down=shared_mlp.output_linear"
)
NEMOTRON_H = MAMBA2 | pairs(
    "token_embd.weight=model.embeddings.weight output_norm.weight=model.norm_f.weight "
    "attn_q=mixer.q_proj attn_k=mixer.k_proj attn_v=mixer.v_proj attn_output=mixer.o_proj ffn_up=mixer.up_proj "
    "ffn_down=mixer.down_proj ffn_gate_inp=mixer.gate ffn_up_exps.weight=mixer.experts.up_proj "
    "ffn_down_exps.weight=mixer.experts.down_proj exp_probs_b.bias=mixer.gate.e_score_correction_bias "
    "ffn_up_shexp=mixer.shared_experts.up_proj ffn_down_shexp=mixer.shared_experts.down_proj"
)
DELTA = {**EXPERTS, **SECOND} | pairs(
    "ssm_conv1d=linear_attn.conv1d ssm_dt.bias=linear_attn.dt_bias ssm_a=linear_attn.A_log "
    "ssm_norm=linear_attn.norm ssm_out=linear_attn.out_proj"
)
QWEN3_NEXT = DELTA | pairs(
    "ssm_in=linear_attn.in_proj_qkvz attn_qkv=linear_attn.in_proj_qkvz@0 attn_gate=linear_attn.in_proj_qkvz@1 "
    "ssm_ba=linear_attn.in_proj_ba"
)
QWEN35 = DELTA | pairs(
    "attn_qkv=linear_attn.in_proj_qkv attn_gate=linear_attn.in_proj_z ssm_beta=linear_attn.in_proj_b "
    "ssm_alpha=linear_attn.in_proj_a"
)
DELTA_SIZES = pairs(
    "ssm.conv_kernel=linear_conv_kernel_dim ssm.state_size=linear_key_head_dim ssm.group_count=linear_num_key_heads "
    "ssm.time_step_rank=linear_num_value_heads"
)
