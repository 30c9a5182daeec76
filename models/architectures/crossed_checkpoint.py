"""Reads the checkpoint of an encoder-decoder besides Whisper, except the weights: its architecture, sizes and special
tokens, and the rules that its generation_config sets for every text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import CheckpointError, UnsupportedModel
from ...core.model import GenerationRules
from ..checkpoints.files import file_stamps, find_weights, read_config
from ..checkpoints.loading import load_part, read_tokenizer
from ..checkpoints.modules import ModuleCheckpoint
from ..checkpoints.settings import Settings
from .crossed import CrossedFamily, find_crossed_family
from .text import read_transformers_config

_REFUSED: dict[
    str, tuple[object, ...]
] = {  # unsupported settings of generation_config that change even greedy texts, with values that change nothing
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "sequence_bias": (None, {}),
    "watermarking_config": (None,),
}
_THE_CALLERS = {  # settings that a request chooses, and the defaults of `SamplingParams`
    "do_sample": (None, False),
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1.0),
}


@frozen(kw_only=True)
class CrossedCheckpoint(ModuleCheckpoint):
    """The facts in an encoder-decoder's files, apart from the weights."""

    family: CrossedFamily = field(repr=False)
    start_id: int  # decoder_start_token_id
    rules: GenerationRules
    allowed: str = field(
        default="encoder-decoders whose decoder layers have causal attention to their own tokens and plain attention "
        "to the encoder's output",
        repr=False,
    )


def is_crossed(folder: Path) -> bool:
    """True if the checkpoint in ``folder`` is an encoder-decoder with a `CrossedFamily`, judged by its architecture.
    Raises `CheckpointError` if there is no checkpoint."""
    config = read_config(folder)
    family = find_crossed_family(config.get("model_type"))
    return family is not None and config.get("architectures") == [family.loader]


def read_crossed_checkpoint(folder: Path) -> CrossedCheckpoint:
    """Reads everything but the weights of the checkpoint in ``folder``, for which `is_crossed` is true.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModel: the checkpoint asks for something that the engine does not do.
    """
    plain = Settings(folder / "config.json", read_config(folder))
    family = find_crossed_family(plain.get("model_type"))
    assert family is not None, "only checkpoints with a family are read"
    stamps = file_stamps(folder)
    config = read_transformers_config(folder, plain)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{folder} has quantized weights; allowed: float weights, as they were trained")
    find_weights(folder)
    generation = _generation(folder, config)
    shape = family.shape(folder, config)
    tokens = _Tokens(folder=folder, generation=generation, vocabulary=shape.vocabulary)
    _check_generation(folder, generation)
    return CrossedCheckpoint(
        folder=folder,
        architecture=family.loader,
        family=family,
        config=config,
        shape=shape,
        tokenizer=read_tokenizer(folder),
        start_id=tokens.start(),
        eos_token_ids=tokens.several("eos_token_id"),
        suppress_token_ids=(*tokens.several("suppress_tokens"), *tokens.bad_words()),
        begin_suppress_token_ids=tokens.several("begin_suppress_tokens"),
        rules=GenerationRules(
            forced_first=tokens.one("forced_bos_token_id"),
            forced_last=tokens.one("forced_eos_token_id"),
            no_repeat_ngram=generation.no_repeat_ngram_size or 0,
            min_length=generation.min_length or 0,
            min_new_tokens=generation.min_new_tokens or 0,
        ),
        stamps=stamps,
    )


def _generation(folder: Path, config: Any) -> Any:
    """Returns transformers' GenerationConfig, read from its own file or, in older checkpoints, from config.json."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return load_part("GenerationConfig", folder)
    return GenerationConfig.from_model_config(config)


@frozen(kw_only=True)
class _Tokens:
    """Reads special tokens, each of which must be in the vocabulary."""

    folder: Path
    generation: Any
    vocabulary: int

    def several(self, name: str) -> tuple[int, ...]:
        value = getattr(self.generation, name)
        found = [] if value is None else value if isinstance(value, list | tuple) else [value]
        for token in found:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocabulary:
                raise CheckpointError(
                    f"{self.folder} has {name}={value!r} in its generation settings; allowed: token ids from 0 to "
                    f"{self.vocabulary - 1}, the vocabulary of config.json"
                )
        return tuple(found)

    def one(self, name: str) -> int | None:
        found = self.several(name)
        if len(found) > 1:  # several forced tokens: one for each beam group or language, unknown which
            raise UnsupportedModel(f"{self.folder} has {name}={list(found)}; allowed: one token")
        return found[0] if found else None

    def bad_words(self) -> tuple[int, ...]:
        """The tokens of bad_words_ids, in which every word must be a single token."""
        words = self.generation.bad_words_ids or []
        if any(len(word) != 1 for word in words):
            raise UnsupportedModel(
                f"{self.folder} has bad_words_ids={words!r} in its generation settings; allowed: words of one token"
            )
        ends = self.several("eos_token_id")  # `generate` never suppresses these
        return tuple(token for word in words for token in word if token not in ends)

    def start(self) -> int:
        """The token that `generate` would begin with: decoder_start_token_id, or else bos_token_id."""
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = self.one(name)
            if token is not None:
                return token
        raise UnsupportedModel(
            f"{self.folder} has neither decoder_start_token_id nor bos_token_id in its generation settings; allowed: "
            "the token that the decoder begins with"
        )


def _check_generation(folder: Path, generation: Any) -> None:
    """Refuses unsupported settings, and logs settings that each request must choose itself."""
    asked = {name: getattr(generation, name, None) for name in (*_REFUSED, *_THE_CALLERS)}
    refused = [f"{name}={asked[name]!r}" for name, nothing in _REFUSED.items() if asked[name] not in nothing]
    if refused:
        raise UnsupportedModel(
            f"generation_config.json of {folder} asks for {', '.join(refused)}; allowed: forced_bos_token_id, "
            "forced_eos_token_id, min_length, no_repeat_ngram_size, suppressed tokens. Remove the other settings if "
            "texts may differ from those of transformers"
        )
    left = [f"{name}={asked[name]!r}" for name, nothing in _THE_CALLERS.items() if asked[name] not in nothing]
    if left:
        logging.getLogger(__name__).warning(
            "generation_config.json of %s has %s, which is not used: SamplingParams say it for each request",
            folder,
            ", ".join(left),
        )
