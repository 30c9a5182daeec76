"""What llama.cpp's converter makes of models whose weights it changes by more than their names, as its classes
(``modify_tensors`` of conversion/*.py) document it. Weights stay float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import gguf
import torch

from .gguf_files import add_words, settings_of

Parts = Iterator[tuple[str, Any]]


def named(model: Any, changes: Mapping[str, str] = {}) -> Parts:
    """The weights by the names in checkpoints that the converter reads."""
    for name, weight in model.state_dict().items():
        theirs = reduce(lambda text, change: text.replace(*change), changes.items(), name)
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield theirs, weight


def bert(model: Any) -> Parts:
    """``BertModel``: without the pooler."""
    return ((name, weight) for name, weight in named(model) if "pooler" not in name)


def nomic_bert(model: Any) -> Parts:
    """``NomicBertModel``: a checkpoint with one matrix for queries, keys and values, and norms by number."""
    names = {"layers.": "encoder.layers.", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"}
    names |= {"self_attn.o_proj": "attn.out_proj", "up_proj": "fc11", "gate_proj": "fc12", "down_proj": "fc2"}
    names |= {"embeddings.LayerNorm": "emb_ln"}
    weights = dict(named(model, names))
    for name in [name for name in weights if ".q_proj." in name]:
        several = [weights.pop(name.replace("q_proj", one)) for one in ("q_proj", "k_proj", "v_proj")]
        weights[name.replace("self_attn.q_proj", "attn.Wqkv")] = torch.cat(several)
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
) -> Path:
    """Writes ``parts``: weights by the names that the package ``gguf`` has names for, or by its own (``blk. ...``)."""
    writer = gguf.GGUFWriter(path, architecture)
    settings_of(writer, model.config)
    more(writer, model.config)
    add_words(writer, **words)
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    for name, weight in parts:
        found = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, weight.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
