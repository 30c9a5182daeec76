"""GGUF files of tiny models, written by the package ``gguf`` with its own names, as llama.cpp's converter does."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from .checkpoints import classes, random_model
from .words import byte_alphabet

TOKENS = 320
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,)}  # where float16 scales lie
NORMS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
TURNED = {"llama", "smollm3", "granite"}
MEANS = {
    "phi2",
    "cohere2",
    "command-r",
    "stablelm",
    "starcoder2",
    "olmo",
    "jais2",
    "gpt2",
    "gptneox",
    "bert",
    "nomic-bert",
    "jina-bert-v3",
}
RAISED = {"gemma", "gemma2", "gemma3", "nemotron"}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Blocks of any values, with scales that make numbers of about a twentieth."""
    drawn, (values, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Kind[kind]]
    if kind not in _SCALES and kind != "MXFP4":
        return gguf.quants.quantize(drawn.normal(0, 0.05, (rows, width)).astype(np.float32), Kind[kind])
    blocks = drawn.integers(0, 256, (rows * width // values, size), dtype=np.uint8)
    for place in _SCALES.get(kind, ()):
        scale = 0.0002 if kind != "IQ4_NL" else 0.001
        scales = drawn.uniform(0.5, 1.5, (len(blocks), 1)) * scale * (1 if place != 2 else 8)
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = drawn.integers(119, 123, len(blocks))
    return blocks.reshape(rows, -1)


def permuted(weight: Any, heads: int) -> Any:
    """What llama.cpp's converter does to queries and keys (``LlamaModel.permute``)."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def stored_as(architecture: str, name: str, weight: Any, config: Any) -> Any:
    """What the converter makes of a weight, without quantizing it."""
    if architecture in TURNED and ".q_proj." in name:
        return permuted(weight, config.num_attention_heads)
    if architecture in TURNED and ".k_proj." in name:
        return permuted(weight, config.num_key_value_heads)
    return weight + 1 if architecture in RAISED and name.endswith("norm.weight") else weight


def add_words(
    writer: Any,
    *,
    pre: str = "llama-bpe",
    template: str | None = TEMPLATE,
    pieces: Mapping[str, float] = {},
    merges: Sequence[str] = (),
    own: Sequence[str] = (),
) -> None:
    """Adds a vocabulary: the bytes, two merges, its ``own`` tokens, and others that fill it up; or ``pieces`` with
    scores, of which the first three are unknown, BOS and EOS, and the next 256 bytes; Gemma 4 has ``merges``, too."""
    if pre in {"bert", "t5"}:
        (add_word_pieces if pre == "bert" else add_unigram)(writer)
        return
    texts = ["<pad>", "<s>", "</s>", "<unk>", *byte_alphabet(), "ab", "cd", *own]
    types = [3, 3, 3, 3] + [1] * (len(texts) - 4)
    texts += [f"<own{number}>" for number in range(TOKENS - len(texts))]
    types += [4] * (TOKENS - len(types))
    if pieces:
        texts, types = list(pieces), [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
        writer.add_token_scores(list(pieces.values()))
        writer.add_unk_token_id(0)
        writer.add_token_merges(merges)
    else:
        writer.add_token_merges(["a b", "c d"])
        writer.add_pad_token_id(0)
    writer.add_tokenizer_model("gemma4" if merges else "llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else pre)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)


WORD_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁cat", "s", "▁on", "▁mat", "ting", "▁naive", "▁a", "b")


def add_word_pieces(writer: Any) -> None:
    """Adds a vocabulary of BERT as its converter does: what begins a word is marked, and not what goes on in it."""
    texts = [*WORD_PIECES, *(f"▁w{number}" for number in range(TOKENS - len(WORD_PIECES)))]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("bert-bge")
    writer.add_token_list(texts)
    writer.add_token_types([3] * 4 + [1] * (TOKENS - 4))
    writer.add_token_type_count(2)
    writer.add_unk_token_id(1)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)


UNIGRAM = {"<s>": 0.0, "<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁the": -3.0, "▁cat": -4.0, "s": -5.0, "▁": -2.0}
UNIGRAM |= {"t": -6.0, "h": -6.0, "e": -6.0, "a": -6.0, "c": -6.0, "ca": -7.0, "▁a": -3.5, "ts": -10.5}
UNIGRAM |= {f"<w{number}>": -20.0 for number in range(TOKENS - len(UNIGRAM))}


def letters(*, below: int = 256, place: int = 0, texts: bytes = b"a\0") -> bytes:
    """SentencePiece's table of letters (a trie in an array) that makes an ``a`` of each ``@``."""
    units = np.zeros(768, "<u4")
    units[0], first = below << 10, 256 ^ ord("@")
    units[first] = ord("@") | 1 << 8 | (first ^ 512) << 10
    units[512] = 1 << 31 | place
    return struct.pack("<I", units.nbytes) + units.tobytes() + texts


def add_unigram(writer: Any) -> None:
    """Adds a vocabulary of XLM-R as its converter does."""
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(UNIGRAM))
    writer.add_token_scores(list(UNIGRAM.values()))
    writer.add_token_types([3, 3, 3, 2] + [1] * (TOKENS - 4))
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(letters())
    writer.add_token_type_count(1)
    for name, token in (("bos", 0), ("eos", 2), ("pad", 1)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def settings_of(writer: Any, config: Any) -> None:
    """Adds the settings that the converter writes for all architectures."""
    rope = getattr(config, "rope_parameters", {"rope_theta": None})
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if not writer.arch.startswith("nemotron_h"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    others = {"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "granitehybrid", "deepseek2", "mistral4"}
    others |= {"gemma4", "nomic-bert", "gpt2", "mamba2"}
    if writer.arch not in others:
        writer.add_head_count_kv(config.num_key_value_heads)
    if (base := rope.get("full_attention", rope)["rope_theta"]) is not None:
        writer.add_rope_freq_base(base)
    eps = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon") if writer.arch in MEANS else ()
    eps = ("norm_eps",) if writer.arch in {"nemotron", "modern-bert"} else eps
    for name in eps:
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if not eps:
        writer.add_layer_norm_rms_eps(next(getattr(config, one) for one in NORMS if hasattr(config, one)))


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    *,
    kinds: Mapping[str, str] = {},
    more: Callable[[Any, Any], None] = lambda writer, config: None,
    words: Mapping[str, Any] = {},
) -> Path:
    """Writes ``model``. Its weights become those that the file has.

    Args:
        kinds: for a part of a tensor's name in the file the kind of its blocks, or Q8_0 where rows are too short for
            it; F32 otherwise and for "". The first part that is found counts.
        more: adds what the converter writes for this architecture alone.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    settings_of(writer, config)
    more(writer, config)
    add_words(writer, **words)
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for own, weight in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = own.rpartition(".")
        if ".experts." in own:
            stem, suffix = own, "weight"
        parts = [(stem, weight)]
        if own.endswith("gate_up_proj") and ".experts." in own:
            halves = zip(("gate_proj", "up_proj"), weight.chunk(2, 1), strict=True)
            parts = [(own.replace("gate_up_proj", one), half) for one, half in halves]
        for name, part in parts:
            found = names.get_name(name)
            assert found is not None, name
            _add(writer, f"{found}.{suffix}", architecture, own, part, config, kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(
    writer: Any, name: str, architecture: str, own: str, weight: Any, config: Any, kinds: Mapping[str, str]
) -> None:
    data = stored_as(architecture, own, weight, config)
    data = data[:, 0] if own.endswith("conv.weight") else data
    data = data[0] if own.endswith("shared_expert_gate.weight") else data
    kind = next((kinds[part] for part in kinds if part in name), None)
    if not kind:
        writer.add_tensor(name, data.contiguous().numpy())
        return
    width = data.shape[-1]
    if kind == "F16":
        weight.copy_(weight.half())
        data = stored_as(architecture, own, weight, config)
        writer.add_tensor(name, data.half().contiguous().numpy())
        return
    kind = "Q8_0" if width % gguf.GGML_QUANT_SIZES[Kind[kind]][0] else kind
    blocks = random_blocks(kind, data.numel() // width, width, seed=len(writer.tensors[0]))
    decoded = torch.from_numpy(gguf.quants.dequantize(blocks, Kind[kind])).reshape(data.shape)
    writer.add_tensor(name, blocks.reshape(*data.shape[:-1], -1), raw_dtype=Kind[kind])
    places = (
        stored_as(architecture, own, torch.arange(len(data)), config) if data.dim() > 1 else torch.arange(len(data))
    )
    weight[places] = decoded.to(weight.dtype)


def tiny(config: str, model: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers."""
    made = getattr(classes(), config)(**SIZES | changes)
    return random_model(getattr(classes(), model), made, seed)
