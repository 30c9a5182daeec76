"""Tiny configurations of any model type that transformers has, drawn from its own classes.

A configuration keeps its defaults, but for sizes: those have the same names nearly everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoints import HIDDEN, LAYERS, POSITIONS, random_model, special_ids
from .words import LLAMA

_SIZES: Mapping[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_dense_layers"), 1),
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": POSITIONS,
    "sliding_window": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_FACTORS = {  # settings that change nothing by default
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "routed_scaling_factor": 1.5,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
}
_CHOSEN = ("sliding_window", "q_lora_rank", "num_key_value_heads")  # a default of ``None`` is a choice of the model
_KINDS = ("layer_types", "mlp_layer_types")
_ROTARY = dict.fromkeys(("sliding_attention", "full_attention"), (("rope_type", "default"), ("rope_theta", 1e4)))
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
}
_SPACE = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 8}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
_SHORT = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
_OTHERS: Mapping[str, Mapping[str, Any]] = {  # where a default is not what checkpoints have
    "cohere_compass_text": {
        "layer_types": list(_ROTARY),
        "rope_parameters": {layer: dict(rope) for layer, rope in _ROTARY.items()},
    },
    "embedding_gemma2_text": {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 16,
        "embedding_dim": 40,
        "sliding_window": 6,
    },
    "bamba": {**_SPACE, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_SPACE,
        "mamba_d_ssm": 96,
        "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.6],
        "mlp_multipliers": [0.7, 1.4],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "lm_head_multiplier": 0.4,
    },
    "granitemoehybrid": {**_SPACE, **_HYBRID, "shared_intermediate_size": 64},
    "lfm2": {**_SHORT, "block_multiple_of": 32},
    "lfm2_moe": _SHORT,
    "mamba2": {"num_heads": 6, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": {
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 40,
        "layer_types": ["linear_attention", "mlp", "full_attention", "moe"],
    },
    "olmo_hybrid": {**_DELTA, **_HYBRID},
    "qwen3_5_moe_text": {**_DELTA, **_HYBRID},
    "qwen3_5_text": {**_DELTA, **_HYBRID},
    "qwen3_next": {**_DELTA, **_HYBRID},
    "longcat_flash": {"head_dim": 4},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": POSITIONS / 16,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        }
    },
}


def tiny_config(kind: str) -> Any:
    """Returns a small configuration of the model type ``kind``. It has a layer of each type that the default has."""
    from transformers import CONFIG_MAPPING

    made, tokenizer = CONFIG_MAPPING[kind], LLAMA.make()
    plain = made()
    told = plain.to_dict()
    sizes = {name: value for name, value in {**_SIZES, **_FACTORS}.items() if name in told}
    sizes = {name: value for name, value in sizes.items() if name not in _CHOSEN or told[name] is not None}
    if "kv_lora_rank" in sizes:  # a head's width is a sum
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = 4
    aliases = getattr(made, "attribute_map", {})
    computed = [name for name in _KINDS if isinstance(getattr(made, aliases.get(name, name), None), property)]
    types = {name: list(dict.fromkeys(getattr(plain, name, None) or ())) for name in _KINDS if name not in computed}
    count = max(LAYERS, *map(len, types.values()))
    for name, found in types.items():
        if found:
            sizes[name] = (found * count)[:count]
            sizes["num_hidden_layers"] = count
    ids = {**special_ids(tokenizer), "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    return made(**{**sizes, **ids, **_OTHERS.get(kind, {})})


def draw_model(kind: str) -> Any:
    """Returns a model of the configuration with random weights. Experts matter, and what is added to choose them."""
    import torch
    import transformers

    config = tiny_config(kind)
    maps: Any = transformers.models.auto.modeling_auto
    named = maps.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or maps.MODEL_MAPPING_NAMES[kind]
    writes = getattr(transformers, named.replace("Model", "ForCausalLM"), None)  # not all are in the first mapping
    model = random_model(writes or getattr(transformers, named), config, 0)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            learned = weight.dim() == 3 and isinstance(weight, torch.nn.Parameter)  # Falcon-H1 has factors, too
            if learned or name.endswith(("correction_bias", "expert_bias")):
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    return model


def write_config(kind: str, folder: Path) -> Path:
    """Writes the configuration of ``kind`` to ``folder``, with a tokenizer and without weights."""
    import transformers

    maps: Any = transformers.models.auto.modeling_auto
    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "TEXT_TO_WAVEFORM")
    found = [getattr(maps, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in names] + [maps.MODEL_MAPPING_NAMES]
    named = next(names[kind] for names in found if kind in names)
    config = transformers.CONFIG_MAPPING[kind](**_OTHERS.get(kind, {}))
    config.architectures = [named if isinstance(named, str) else named[0]]
    config.save_pretrained(folder)
    LLAMA.make().save_pretrained(folder)
    return folder
