"""What llama.cpp's converter makes of models whose weights it changes by more than their names, as its classes
(``modify_tensors`` of conversion/*.py) document it. Weights stay float32."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import gguf
import torch

from .gguf_files import add_words, permuted, settings_of

XIELU = {"alpha_p": [0.25, 0.5], "alpha_n": [0.75, -0.5], "beta": [0.5, 0.5], "eps": [-1e-6, -1e-6]}
Parts = Iterator[tuple[str, Any]]


def named(model: Any, changes: Mapping[str, str] = {}) -> Parts:
    """The weights by the names in checkpoints that the converter reads."""
    for name, weight in model.state_dict().items():
        theirs = reduce(lambda text, change: text.replace(*change), changes.items(), name)
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield theirs, weight


def block_of(name: str) -> str:
    """The block of a weight; empty: it is in none."""
    found = re.search(r"layers\.(\d+)\.", name)
    return "" if found is None else f"blk.{found[1]}"


def bert(model: Any) -> Parts:
    """``BertModel``: without the pooler."""
    return ((name, weight) for name, weight in named(model) if "pooler" not in name)


def roberta(model: Any) -> Parts:
    """``XLMRobertaModel``: without the rows of positions for padding."""
    before = model.config.pad_token_id + 1
    return ((name, weight[before:] if "position_emb" in name else weight) for name, weight in bert(model))


def jina_bert(model: Any) -> Parts:
    """``XLMRobertaModel`` with adapters, which are files of their own."""
    names = {"post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2", "self_attn.o_proj": "mixer.out_proj"}
    names |= {"layers.": "encoder.layers.", "embeddings.LayerNorm": "emb_ln"}
    return fused({name: one for name, one in named(model, names) if "pooler" not in name}, "mixer")


def modern_bert(model: Any) -> Parts:
    """``ModernBertModel``; with the head of ``ModernBertForMaskedLM``, which makes no vectors."""
    yield from named(model)
    yield "head.dense.weight", torch.zeros(64, 64)


def nomic_bert(model: Any) -> Parts:
    """``NomicBertModel``: a checkpoint with one matrix for queries, keys and values, and norms by number."""
    names = {"layers.": "encoder.layers.", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"}
    names |= {"self_attn.o_proj": "attn.out_proj", "up_proj": "fc11", "gate_proj": "fc12", "down_proj": "fc2"}
    names |= {"embeddings.LayerNorm": "emb_ln"}
    return fused(dict(named(model, names)), "attn")


def fused(weights: dict[str, Any], part: str) -> Parts:
    """The weights with one matrix for queries, keys and values."""
    for name in [name for name in weights if ".q_proj." in name]:
        several = [weights.pop(name.replace("q_proj", one)) for one in ("q_proj", "k_proj", "v_proj")]
        weights[name.replace("self_attn.q_proj", f"{part}.Wqkv")] = torch.cat(several)
    return iter(weights.items())


def gemma_embedding(model: Any) -> Parts:
    """``EmbeddingGemma``: norms hold one more."""
    return ((name, weight + 1 if name.endswith("norm.weight") else weight) for name, weight in named(model))


def write_converted(
    path: Path,
    architecture: str,
    model: Any,
    parts: Parts,
    *,
    more: Callable[[Any, Any], None] = lambda writer, config: None,
    words: Mapping[str, Any] = {},
    packed: Mapping[str, tuple[str, Any]] = {},
    left_out: str = "blk.-",
) -> Path:
    """Writes ``parts``: weights by the names that the package ``gguf`` has names for, or by its own (``blk. ...``).

    Args:
        packed: blocks of a kind in place of the weights of their names.
        left_out: how names begin that are not written.
    """
    writer = gguf.GGUFWriter(path, architecture)
    settings_of(writer, model.config)
    more(writer, model.config)
    add_words(writer, **words)
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    for name, weight in parts:
        found = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        if found in packed:
            kind, blocks = packed[found]
            writer.add_tensor(found, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif not found.startswith(left_out):
            writer.add_tensor(found, weight.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(model: Any, changes: Mapping[str, str] = {}) -> Parts:
    """``Qwen2MoeModel`` and others: experts are stacked, gates apart from what they gate."""
    for name, weight in named(model, changes):
        if name.endswith("experts.gate_up_proj"):
            gate, up = weight.chunk(2, 1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), weight


def turned(model: Any, parts: Parts) -> Parts:
    """``LlamaModel.permute``."""
    config = model.config
    for name, weight in parts:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        found = next((count for part, count in heads.items() if f"self_attn.{part}." in name), 0)
        yield name, permuted(weight, found) if found else weight


def llama(model: Any) -> Parts:
    return turned(model, named(model))


def glm(model: Any) -> Parts:
    """``ChatGLMModel``: a checkpoint with one matrix for queries, keys and values."""
    weights = dict(named(model))
    for name in [name for name in weights if ".q_proj." in name]:
        several = [weights.pop(name.replace("q_proj", one)) for one in ("q_proj", "k_proj", "v_proj")]
        weights[f"{block_of(name)}.attn_qkv.{name.rpartition('.')[-1]}"] = torch.cat(several)
    return iter(weights.items())


def gpt_oss(model: Any) -> Parts:
    """``GptOssModel``: outputs of experts are rows, gates are each second one of them."""
    for name, weight in named(model):
        stem, _, leaf = name.rpartition(".")
        if leaf.startswith("gate_up_proj"):
            made, suffix = (weight, "bias") if leaf.endswith("bias") else (weight.transpose(1, 2), "weight")
            yield f"{stem}.gate_proj.{suffix}", made[:, ::2]
            yield f"{stem}.up_proj.{suffix}", made[:, 1::2]
        elif leaf.startswith("down_proj"):
            made, suffix = (weight, "bias") if leaf.endswith("bias") else (weight.transpose(1, 2), "weight")
            yield f"{stem}.down_proj.{suffix}", made
        else:
            yield name.replace("sinks", "sinks.weight"), weight


def gemma3n(model: Any) -> Parts:
    """``Gemma3NModel``: matrices of the other inputs are stacked."""
    weights = dict(named(model))
    for name, theirs in (("projections", "proj"), ("unembed_projections", "unembd_proj")):
        several = [weights.pop(f"model.altup_{name}.{one}.weight") for one in range(3)]
        weights[f"altup_{theirs}.weight"] = torch.stack(several)
    return ((f"{name}.weight" if name.endswith("_scale") else name, weight) for name, weight in weights.items())


def gemma4(model: Any) -> Parts:
    """``Gemma4Model``."""
    places = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    for name, weight in named(model):
        place = next((f"{block_of(name)}.{theirs}" for own, theirs in places.items() if name.endswith(own)), None)
        yield place or (name if name.endswith(".weight") else f"{name}.weight"), weight
    attention = model.model.layers[0].self_attn
    for layer in range(len(model.model.layers) - model.config.num_kv_shared_layers, len(model.model.layers)):
        yield f"blk.{layer}.attn_k.weight", torch.ones_like(attention.k_proj.weight)  # checkpoints have them
    half = model.model.layers[-1].self_attn.head_dim // 2
    yield "rope_freqs.weight", torch.tensor([1.0] * (half // 4) + [1e30] * (half - half // 4))


def deepseek2(model: Any, parts: Parts | None = None) -> Parts:
    """``DeepseekV2Model``: what makes keys is apart from what makes values, and turned over."""
    config = model.config
    for name, weight in parts or stacked(model):
        if name.endswith("kv_b_proj.weight"):
            heads = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        else:
            yield name, weight


def apertus(model: Any) -> Parts:
    """``ApertusModel``: numbers of activations are settings, here those of `XIELU`."""
    for number, layer in enumerate(model.model.layers):
        for name, values in XIELU.items():
            getattr(layer.mlp.act_fn, name).data.fill_(values[number])
    return ((name, weight) for name, weight in named(model) if "act_fn" not in name)


def ernie_moe(model: Any) -> Parts:
    """``Ernie4_5MoeModel``. Dimensions of 1 are left out."""
    for name, weight in stacked(model, {"mlp.gate.moe_statics": "mlp.moe_statics"}):
        yield name, weight.squeeze(0) if "moe_statics" in name else weight


def minicpm3(model: Any) -> Parts:
    """``MiniCPM3Model``."""
    yield from named(model)
    for length in ("long", "short"):
        yield f"rope_factors_{length}.weight", torch.tensor(model.config.rope_parameters[f"{length}_factor"])


def mistral4(model: Any) -> Parts:
    """``Mistral4Model``: gates of experts stay with what they gate."""
    for name, weight in deepseek2(model, named(model)):
        yield f"{name}.weight" if name.endswith(("gate_up_proj", "experts.down_proj")) else name, weight


def gpt2(model: Any) -> Parts:
    """``GPT2Model``: its linear layers have inputs as rows."""
    for name, weight in named(model):
        yield name, weight.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else weight


def gpt_neox(model: Any) -> Parts:
    """``GPTNeoXModel``: queries of all heads, keys of all, values of all."""
    heads = model.config.num_attention_heads
    for name, weight in named(model):
        moved = (
            weight.view(heads, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)
            if "query" in name
            else weight
        )
        yield name, moved


def mamba(parts: Parts, groups: int) -> Parts:
    """``Mamba2Model``: decays as they are used; a group of norms in a row."""
    for name, weight in parts:
        block, leaf = block_of(name), name.split(".mamba.")[-1].split(".mixer.")[-1]
        if leaf == "dt_bias":
            yield f"{block}.ssm_dt.bias", weight
        elif leaf == "A_log":
            yield f"{block}.ssm_a", -weight.exp()[:, None]
        elif leaf == "D":
            yield f"{block}.ssm_d", weight[:, None]
        elif leaf == "conv1d.weight":
            yield name, weight[:, 0]
        elif leaf == "norm.weight" and (".mamba." in name or ".mixer." in name):
            yield name, weight.view(groups, -1)
        else:
            yield name, weight


def granite_moe(model: Any) -> Parts:
    """``GraniteMoeModel``: gates of experts are apart from what they gate."""
    for name, weight in turned(model, named(model)):
        block = block_of(name)
        if name.endswith(("experts.gate_up_proj", "shared_mlp.input_linear.weight")):
            end = "exps" if "experts" in name else "shexp"
            end = "" if end == "shexp" and not model.config.num_local_experts else f"_{end}"
            gate, up = weight.chunk(2, weight.dim() - 2)
            yield f"{block}.ffn_gate{end}.weight", gate
            yield f"{block}.ffn_up{end}.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{block}.ffn_down_exps.weight", weight
        elif name.endswith("shared_mlp.output_linear.weight") and not model.config.num_local_experts:
            yield f"{block}.ffn_down.weight", weight
        else:
            yield name.replace("router.weight", "router.layer.weight"), weight


def granite_hybrid(model: Any) -> Parts:
    return mamba(granite_moe(model), model.config.mamba_n_groups)


def falcon_h1(model: Any) -> Parts:
    """``FalconH1Model``: what is computed is multiplied already."""
    config = model.config
    inside, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = [inside, inside, states, states, config.mamba_n_heads]
    parts = torch.cat([torch.full((size,), one) for size, one in zip(sizes, config.ssm_multipliers, strict=True)])
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        **dict.fromkeys(("q_proj", "v_proj"), config.attention_in_multiplier),
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * parts[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    for name, weight in mamba(named(model), config.mamba_n_groups):
        factor = next((one for part, one in factors.items() if f"{part}.weight" in name), None)
        yield name, weight if factor is None else weight * factor


def nemotron_h(model: Any) -> Parts:
    """``NemotronHModel``, which reads checkpoints with another name of the model."""
    parts = {"model.layers": "backbone.layers", "model.": "backbone."}
    for name, weight in mamba(named(model, parts), model.config.n_groups):
        block = block_of(name)
        if name.endswith(("experts.up_proj", "experts.down_proj")):
            yield f"{block}.ffn_{name.rsplit('.')[-1].split('_')[0]}_exps.weight", weight
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), weight


def lfm2_moe(model: Any) -> Parts:
    """``LFM2MoeModel``."""
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, weight in stacked(model):
        theirs = name.replace("expert_bias", "expert_bias.bias")
        if ".experts." in theirs:
            part = theirs.split(".")[-2]
            theirs = theirs.removeprefix("model.").replace(part, names[part])
        yield theirs, weight[:, 0] if theirs.endswith("conv.conv.weight") else weight


def delta(model: Any) -> Parts:
    """``Qwen3NextModel`` and, from grouped to tiled heads of values, ``_LinearAttentionVReorderBase``."""
    config, tiled = model.config, "qwen3_5" in model.config.model_type
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    of_keys, of_values, each = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    inside = 2 * keys * of_keys

    def moved(weight: Any, size: int = of_values) -> Any:
        return (
            weight.view(keys, each, size, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape) if tiled else weight
        )

    for name, weight in stacked(model):
        block, leaf = block_of(name), name.split(".linear_attn.")[-1]
        if leaf == "in_proj_qkvz.weight":
            rows = weight.view(keys, -1, weight.shape[1])
            parts = rows.split([of_keys, of_keys, each * of_values, each * of_values], 1)
            query, key, value, gate = (one.reshape(-1, weight.shape[1]) for one in parts)
            yield f"{block}.attn_qkv.weight", torch.cat([query, key, value])
            yield f"{block}.attn_gate.weight", gate
        elif leaf == "dt_bias":
            yield f"{block}.ssm_dt.bias", moved(weight, 1)
        elif leaf == "A_log":
            yield f"{block}.ssm_a", -moved(weight, 1).exp()
        elif leaf in {"in_proj_qkv.weight", "conv1d.weight"}:
            rows = weight.squeeze(1)
            yield name, torch.cat([rows[:inside], moved(rows[inside:])])
        elif leaf == "in_proj_z.weight":
            yield name, moved(weight)
        elif leaf in {"in_proj_a.weight", "in_proj_b.weight"}:
            yield name, moved(weight, 1)
        elif leaf == "out_proj.weight":
            yield name, moved(weight.T).T
        elif name.endswith("norm.weight") and leaf != "norm.weight":
            yield name, weight + 1
        else:
            yield name, weight.squeeze(0) if leaf.endswith("shared_expert_gate.weight") else weight
