"""Reads a Whisper of whisper.cpp: a file in GGML, such as ``ggml-base.en.bin``. It has sizes, mel filters, the tokens
of texts, and tensors by openai/whisper's names. All else is as in every Whisper: the special tokens, and which tokens
are not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

from ...core.errors import CheckpointError, UnsupportedModel
from .gguf_file import GgufFile, Header, Placed, kind_of, opened, read_split

MAGIC: Final = b"lmgg"
_SIZES: Final = (
    *("vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers"),
    *("max_target_positions", "text_width", "decoder_attention_heads", "decoder_layers", "num_mel_bins", "form"),
)
_LANGUAGES = (  # in the order of their tokens
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
_TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
_SIGNS = '" # ( ) * + / : ; < = > @ [ \\ ] ^ _ ` { | } ~ 「 」 『 』 << >> <<< >>> -- --- -( -[ (\' (" (( )) ((( )))'
_MORE_SIGNS = "[[ ]] {{ }} ♪♪ ♪♪♪"
_NOTES = "♩ ♪ ♫ ♬ ♭ ♮ ♯"  # their first bytes are not written either
_BLOCK = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(\w+?)(?:\.(\w+))?\.(weight|bias)")
_PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
_LAYERS = {"attn": "self_attn", "attn_ln": "self_attn_layer_norm", "mlp_ln": "final_layer_norm"}
_LAYERS |= {"cross_attn": "encoder_attn", "cross_attn_ln": "encoder_attn_layer_norm"}
_OTHERS = {name: name for name in ("encoder.conv1", "encoder.conv2")}
_OTHERS |= {"encoder.ln_post": "encoder.layer_norm", "decoder.ln": "decoder.layer_norm"}
_OTHERS |= {"decoder.token_embedding": "decoder.embed_tokens"}


def read_model(path: Path) -> GgufFile:
    """Reads everything but values of a GGUF file, or of one of whisper.cpp, whose architecture is then `MAGIC`.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModel: a tensor is of a kind that is not read.
    """
    with opened(path, "whisper.cpp") as header:
        if header.size < len(MAGIC) or bytes(header.values("B", len(MAGIC))) != MAGIC:
            return read_split(path)
        numbers = header.values("i", len(_SIZES), "its sizes")
        sizes = dict(zip(_SIZES, numbers, strict=True))
        bands, values = header.values("i", 2, "its mel filters")
        if min(numbers[:-1]) <= 0 or max(numbers) >= 1 << 24 or bands != sizes["num_mel_bins"] or values <= 0:
            header.broken(f"it has the sizes {', '.join(map(str, numbers))} and {bands} bands, which no Whisper has")
        header.values("f", bands * values, "its mel filters")
        tokens = [header.bytes_of(f"token {index}") for index in range(_count(header))]
        end = header.at
        tensors = dict(_tensors(header))
    settings = {"general.architecture": MAGIC, **sizes, "tokens": tokens}
    return GgufFile(path, settings, tensors, ((path, end),))


def _count(header: Header) -> int:
    count: int = header.number("i", "its tokens")
    if not 0 < count <= (header.size - header.at) // 4:
        header.broken(f"it has {count} tokens, more than the file has room for")
    return count


def _tensors(header: Header) -> Iterator[tuple[str, Placed]]:
    """Yields the tensors, each of which stands behind its name, up to the end of the file."""
    names = set[str]()
    while header.at < header.size:
        dimensions, length, number = header.values("i", 3, "a tensor")
        if not 0 < dimensions <= 4:
            header.broken(f"a tensor has {dimensions} dimensions")
        shape = header.values("i", dimensions, "a tensor")[::-1]
        name = header.bytes_of("the name of a tensor", length).decode(errors="replace")
        kind, values, size = kind_of(header.path, name, number)
        if min(shape) <= 0 or shape[-1] % values:
            header.broken(f"tensor {name} of {kind} has the shape {shape}")
        stored = prod(shape) // values * size
        if stored > header.size - header.at:
            header.broken(f"it ends within tensor {name}, which has {stored} bytes")
        if name in names:
            header.broken(f"it has the tensor {name} twice")
        names.add(name)
        yield name, Placed(header.path, header.at, kind, shape)
        header.at += stored


def whisper_name(file: GgufFile, tensor: str) -> str:
    """Returns the name that a tensor has in transformers' Whisper. Raises `UnsupportedModel` if it has none."""
    if (found := _BLOCK.fullmatch(tensor)) is not None:
        side, index, layer, part, leaf = found.groups()
        own = {"0": "fc1", "2": "fc2"}.get(part) if layer == "mlp" else _LAYERS.get(layer)
        own = f"{own}.{_PARTS[part]}" if part in _PARTS and own is not None else own
        if own is not None:
            return f"model.{side}.layers.{index}.{own}.{leaf}"
    stem, _, leaf = tensor.rpartition(".")
    if leaf == "positional_embedding" and stem in {"encoder", "decoder"}:
        return f"model.{stem}.embed_positions.weight"
    if stem in _OTHERS:
        return f"model.{_OTHERS[stem]}.{leaf}"
    raise UnsupportedModel(f"{file.path} has the tensor {tensor}, which Whisper does not have; download it again")


def whisper_texts(file: GgufFile) -> dict[str, str]:
    """Returns the files that a Whisper has in transformers' layout, by name.

    Raises:
        CheckpointError: the vocabulary is damaged, or a tensor is missing.
    """
    sizes = {name: file.settings[name] for name in _SIZES if name not in {"text_width", "form"}}
    texts, tokens = _tokens(file)
    made = whisper_tokenizer(file, tokens)
    inner = {}
    for side in ("encoder", "decoder"):
        if (first := file.tensors.get(f"{side}.blocks.0.mlp.0.weight")) is None:
            raise CheckpointError(f"{file.path} has no {side}.blocks.0.mlp.0.weight; download it again")
        inner[f"{side}_ffn_dim"] = first.shape[0]
    named = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    generation: dict[str, Any] = {"max_initial_timestamp_index": 50, "eos_token_id": texts}
    generation |= {"suppress_tokens": _unspoken(made), "begin_suppress_tokens": [*made.encode(" ").ids, texts]}
    if sizes["vocab_size"] < _MULTILINGUAL:
        generation["is_multilingual"] = False
    return {
        "config.json": json.dumps({**named, **sizes, **inner}),
        "generation_config.json": json.dumps(generation),
        "preprocessor_config.json": json.dumps(
            {"feature_size": sizes["num_mel_bins"], "chunk_length": sizes["max_source_positions"] // _POSITIONS}
        ),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "WhisperTokenizer"}),
        "tokenizer.json": made.to_str(),
    }


def whisper_tokenizer(file: GgufFile, tokens: list[str]) -> Any:
    """Returns the tokenizer of a Whisper's vocabulary. Raises `CheckpointError` if it is damaged."""
    from .ctranslate2_tokenizer import tokenizer_of

    try:
        return tokenizer_of(tokens)
    except Exception as error:  # the package has no class of its own for its errors
        raise CheckpointError(f"the vocabulary of {file.path} is damaged: {error}; download it again") from error


_POSITIONS = 50  # of a second
_MULTILINGUAL = 51_865  # tokens of the smallest model that knows more than English
_END = "<|endoftext|>"


def _tokens(file: GgufFile) -> tuple[int, list[str]]:
    """Returns how many tokens are for texts, and all tokens. Behind those for texts come the end, the beginning,
    languages, tasks and times, one for each position of the encoder."""
    letters = _letters()
    texts = ["".join(letters[byte] for byte in token) for token in file.settings["tokens"]]
    if _END in texts:  # some converters list it
        texts = texts[: texts.index(_END)]
    known, times = _LANGUAGES.split(), file.settings["max_source_positions"] + 1
    languages = file.settings["vocab_size"] - len(texts) - 2 - len(_TASKS) - times
    if not 0 < languages <= len(known):
        raise CheckpointError(
            f"{file.path} has {file.settings['vocab_size']} tokens, {len(texts)} of them for texts and {times} for "
            f"times, so {languages} for languages; allowed: 1 to {len(known)}. Download it again"
        )
    special = [f"<|{name}|>" for name in ("startoftranscript", *known[:languages], *_TASKS)]
    return len(texts), [*texts, _END, *special, *(f"<|{index * 0.02:.2f}|>" for index in range(times))]


def _letters() -> list[str]:
    """Returns the letter for each byte in vocabularies of GPT-2."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _unspoken(tokenizer: Any) -> list[int]:
    """Returns the tokens that openai/whisper does not write: signs that are not spoken, and those of prompts."""

    def encoded(signs: str) -> Iterator[list[int]]:
        return (tokenizer.encode(f"{space}{one}").ids for one in signs.split() for space in ("", " "))

    found = {one[0] for one in encoded(f"{_SIGNS} {_MORE_SIGNS}") if len(one) == 1}
    found |= {one[0] for one in encoded(_NOTES)} | {tokenizer.encode(text).ids[0] for text in (" -", " '")}
    special = ("startoftranscript", *_TASKS[:-1])
    return sorted(found | {tokenizer.token_to_id(f"<|{name}|>") for name in special})
