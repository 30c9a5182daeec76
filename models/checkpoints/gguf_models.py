"""Tells what a GGUF file is in transformers: gives back the configuration and the names of weights that transformers
has. `gguf_tensors` undoes what llama.cpp's converter does to the weights.

What differs between architectures are the rows of `ARCHITECTURES`. What the file says and no row reads is refused where
it would change the computation.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from attrs import frozen

from ...core.errors import CheckpointError, UnsupportedModel
from .gguf_architectures import ARCHITECTURES, Architecture
from .gguf_file import GgufFile
from .gguf_names import LEAVES, pairs
from .gguf_settings import Told, rope
from .gguf_speech import SPEECH

_SIZES = pairs(
    "context_length=max_position_embeddings embedding_length=hidden_size attention.head_count=num_attention_heads"
)
_MORE_SIZES = pairs(
    "feed_forward_length=intermediate_size attention.key_length=head_dim attention.sliding_window=sliding_window "
    "expert_count=num_experts expert_used_count=num_experts_per_tok expert_feed_forward_length=moe_intermediate_size "
    "expert_shared_feed_forward_length=shared_expert_intermediate_size shortconv.l_cache=conv_L_cache"
)
_FLAGS = pairs(  # whether a layer has a tensor
    "attention_bias=attn_q.bias use_qkv_bias=attn_q.bias use_bias=attn_q.bias mlp_bias=ffn_up.bias "
    "use_qk_norm=attn_q_norm.weight conv_bias=shortconv.conv.bias"
)
_CHANGING = (  # settings that change what is computed
    *("attention.scale", "residual_scale", "embedding_scale", "logit_scale", "attention.clamp_kqv", "swin_norm"),
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "attention.max_alibi_bias"),
    *("expert_weights_scale", "attention.temperature_scale", "rope.scaling.attn_factor", "leading_dense_block_count"),
    *("rope.scaling.yarn_log_multiplier", "expert_group_count", "moe_every_n_layers", "attention.causal"),
)
_PLAIN = {"expert_group_count": 1}  # which changes nothing
_WHOLE = pairs(
    "token_embd.weight=model.embed_tokens.weight output.weight=lm_head.weight output_norm.weight=model.norm.weight "
    "output_norm.bias=model.norm.bias"
)
_SPECIAL = {f"{one}_token_id": f"{one}_token_id" for one in ("bos", "eos")} | {"pad_token_id": "padding_token_id"}
_BLOCK = re.compile(r"blk\.(\d+)\.([\w.]+?)(\.(?:weight|bias))?")
_TABLES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_POOLINGS = ("none", "mean", "cls", "lasttoken")  # by number; 4 ranks
_RANKS = 4
_SHARED = "attention.shared_kv_layers"


def architecture_of(file: GgufFile) -> Architecture:
    """Returns what is known of a file's architecture. Raises `UnsupportedModel` if nothing is."""
    name = file.settings.get("general.architecture")
    if name not in ARCHITECTURES:
        told = (file.settings.get(f"general.{one}repo_url") for one in ("base_model.0.", ""))  # the last may be its own
        raise UnsupportedModel(
            f"{file.path} has the architecture {name!r}; allowed: {', '.join(ARCHITECTURES)}; in files of "
            f"transcribe.cpp {', '.join(SPEECH)}. Give the checkpoint that it was converted from "
            f"({next(filter(None, told), 'on the hub usually the same name without -GGUF')})"
        )
    return ARCHITECTURES[name]


def name_of(file: GgufFile, tensor: str) -> str | None:
    """Returns the name of a tensor in transformers' model, with signs as in `ARCHITECTURES`. ``None``: it is a table
    that the configuration has, or a part that is not used.

    Raises:
        UnsupportedModel: the model has no such tensor.
    """
    if tensor.startswith("cls.") and architecture_of(file).encodes:  # the head of a model that fills gaps
        return None
    kind, parts = architecture_of(file), _BLOCK.fullmatch(tensor)
    if tensor in _TABLES or (tensor == "output.weight" and pooling_of(file)):
        return None
    if parts is not None and not _is_used(Told(file), int(parts[1]), parts[2]):
        return None
    leaf, suffix = (parts[2], parts[3] or "") if parts else ("", "")
    own = kind.names.get(f"{leaf}{suffix}" if parts else tensor) or (None if parts else _WHOLE.get(tensor))
    if own is None and (plain := kind.names.get(leaf) or LEAVES.get(leaf)) is not None:
        split = plain.partition("@")
        own = "|".join(f"{one}{suffix}" for one in split[0].split("|")) + "".join(split[1:])
    if own is None:
        raise UnsupportedModel(
            f"{file.path} has the tensor {tensor}, which {kind.loader} of transformers does not have; give the "
            "checkpoint that it was converted from"
        )
    return "|".join(f"{kind.layers}.{parts[1]}.{one}" for one in own.split("|")) if parts else own


def _is_used(told: Told, layer: int, leaf: str) -> bool:
    """Tells whether a tensor is used: not of layers for draft tokens, nor keys where those of earlier layers are."""
    shared = told.wholes({_SHARED: _SHARED}).get(_SHARED, 0)
    return layer < told.layers - shared * (leaf in {"attn_k", "attn_v", "attn_k_norm"})


def heads_of(file: GgufFile, tensor: str) -> int:
    """Returns how many heads' rows a tensor has in the order of llama.cpp; 0: its rows are in transformers' order."""
    parts, told = _BLOCK.fullmatch(tensor), Told(file)
    if parts is None or parts[2] not in {"attn_q", "attn_k"} or not architecture_of(file).turned:
        return 0
    kv = parts[2] == "attn_k" and told.get("attention.head_count_kv") is not None
    return told.whole("attention.head_count_kv" if kv else "attention.head_count")


def shares_of(file: GgufFile, several: int) -> list[int]:
    """Returns the shares that matrices have of the rows of one; of queries, keys and values as many as their heads."""
    told = Told(file)
    if several != len("qkv"):
        return [1] * several
    heads = told.whole("attention.head_count")
    kv = heads if told.get("attention.head_count_kv") is None else told.whole("attention.head_count_kv")
    return [heads, kv, kv]


def delta_heads(file: GgufFile) -> DeltaHeads | None:
    """Returns the heads of a model with delta rules; ``None``: it has none."""
    told = Told(file)
    if "linear_attn." not in "".join(architecture_of(file).names.values()):
        return None
    keys, values = told.whole("ssm.group_count"), told.whole("ssm.time_step_rank")
    inner, size = told.whole("ssm.inner_size"), told.whole("ssm.state_size")
    if values % keys or inner % values:
        raise told.bad("ssm.time_step_rank", values, f"a multiple of {keys} that divides {inner}")
    return DeltaHeads(keys, values, size, inner // values, tiled=told.architecture != "qwen3next")


@frozen
class DeltaHeads:
    """The heads of layers with delta rules. Several heads of values share a key."""

    keys: int
    values: int
    of_keys: int  # numbers of a head
    of_values: int
    tiled: bool  # the file has the first head of each key, then the second of each, and so on

    def moved(self, size: int, first: int = 0) -> np.ndarray[Any, Any]:
        """Returns which of the file's rows each row is, of heads with ``size`` rows behind ``first`` others."""
        each = self.values // self.keys
        rows = np.arange(self.values * size).reshape(each, self.keys, size).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(first), first + rows])

    def together(self) -> np.ndarray[Any, Any]:
        """Returns which row of queries, keys, values and gates each is where those of a key lie together."""
        sizes = [self.keys * self.of_keys] * 2 + [self.values * self.of_values] * 2
        parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        return np.concatenate([one.reshape(self.keys, -1) for one in parts], 1).reshape(-1)


def pooling_of(file: GgufFile) -> str | None:
    """Returns how the vector of a text is made, by sentence-transformers' name; ``None``: the model was not converted
    for vectors.

    Raises:
        CheckpointError: the setting is damaged.
        UnsupportedModel: the model ranks texts, or reads them in another way than its architecture.
    """
    kind, told = architecture_of(file), Told(file)
    if told.get("attention.causal") is False and not kind.encodes:
        raise UnsupportedModel(
            f"{file.path} ({told.architecture}) has attention.causal=False: in a model of vectors positions see all "
            f"others, in {kind.loader} of transformers they do not; give the checkpoint that it was converted from"
        )
    number = None if told.get("pooling_type") is None else told.whole("pooling_type", least=0)
    if number == _RANKS or told.has("cls.output.weight"):
        raise UnsupportedModel(
            f"{file.path} ranks texts (pooling_type={number}); allowed: models that generate texts, or give vectors. "
            "Give the checkpoint that it was converted from"
        )
    if number is not None and number > _RANKS:
        raise told.bad("pooling_type", number, "0 to 4")
    return _POOLINGS[number] if number else None


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns config.json for the model in a file.

    Raises:
        CheckpointError: a setting is missing or damaged.
        UnsupportedModel: the architecture is not known, or a setting asks for more than is known of it.
    """
    kind, told = architecture_of(file), Told(file)
    pooling_of(file)
    told.get("attention.causal")  # which is known now
    made: dict[str, Any] = {"model_type": kind.model_type, "architectures": [kind.loader]}
    made |= {theirs: told.whole(name, least=int(kind.attends)) for name, theirs in _SIZES.items()}
    sizes = {**_MORE_SIZES, **kind.sizes}
    made |= told.wholes(
        {name: own for name, own in sizes.items() if not (kind.by_layer and name == "feed_forward_length")}
    )
    made["num_hidden_layers"] = told.layers
    blocks = [found for name in file.tensors if (found := _BLOCK.fullmatch(name))]
    numbers, leaves = {int(one[1]) for one in blocks}, {f"{one[2]}{one[3] or ''}" for one in blocks}
    leaves |= {"attn_q.bias"} if "attn_qkv.bias" in leaves else set()
    if len(numbers) != told.whole("block_count") or max(numbers) >= len(numbers):
        raise told.bad("block_count", told.whole("block_count"), f"{len(numbers)}, as many as it has layers")
    if not told.has("token_embd.weight"):
        raise CheckpointError(f"{file.path} has no token_embd.weight; download it again")
    kv = not kind.by_layer and told.get("attention.head_count_kv") is not None
    made |= {
        "num_key_value_heads": told.whole("attention.head_count_kv") if kv else made["num_attention_heads"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not told.has("output.weight"),
        "rope_parameters": rope(told, partial=kind.partial) if kind.attends else None,
        **{name: tensor in leaves for name, tensor in _FLAGS.items()},
        **{name: told.flag(name) for name in ("use_parallel_residual",) if told.get(name) is not None},
        **{theirs: file.settings.get(f"tokenizer.ggml.{name}") for theirs, name in _SPECIAL.items()},
    }
    needed = {name for name in kind.reals if name.startswith("attention.layer_norm")}
    made |= {
        theirs: told.real(name) for name, theirs in kind.reals.items() if name in needed or told.get(name) is not None
    }
    made |= kind.more(told)
    left = [name for name in _CHANGING if name not in told.read and told.get(name) not in {None, _PLAIN.get(name)}]
    if left:
        raise UnsupportedModel(
            f"{file.path} ({kind.model_type}) has {', '.join(left)}, which no model of transformers of this kind has; "
            "give the checkpoint that it was converted from"
        )
    return made
