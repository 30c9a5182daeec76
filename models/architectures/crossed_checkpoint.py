"""Reads the checkpoint of an encoder-decoder besides Whisper, except the weights: its architecture, sizes and special
tokens, and the rules that its generation_config sets for every text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import UnsupportedModel
from ...core.model import GenerationRules
from ..checkpoints.files import file_stamps
from ..checkpoints.loading import load_part, read_tokenizer
from ..checkpoints.modules import ModuleCheckpoint
from ..checkpoints.settings import FileSettings
from .crossed_family import CrossedFamily, find_crossed_family
from .text_checkpoint import check_float_weights, read_transformers_config

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


def read_crossed_checkpoint(plain: FileSettings) -> CrossedCheckpoint | None:
    """Reads everything but the weights of the checkpoint whose config.json is ``plain``; ``None``: it is no
    encoder-decoder with a `CrossedFamily`.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModel: the checkpoint asks for something that the engine does not do.
    """
    folder, family = plain.path.parent, find_crossed_family(plain.get("model_type"))
    if family is None or plain.get("architectures") != [family.loader]:
        return None
    stamps, config = file_stamps(folder), read_transformers_config(plain)
    check_float_weights(plain)
    generation = _generation(folder, config)
    shape = family.shape(folder, config)
    tokens = _Tokens(generation=generation, vocabulary=shape.vocabulary)
    _check_generation(generation)
    return CrossedCheckpoint(
        folder=folder,
        architecture=family.loader,
        family=family,
        config=config,
        shape=shape,
        tokenizer=read_tokenizer(folder, config),
        start_id=tokens.start(),
        eos_token_ids=tokens.several("eos_token_id"),
        suppress_token_ids=(*tokens.several("suppress_tokens"), *tokens.bad_words()),
        begin_suppress_token_ids=tokens.several("begin_suppress_tokens"),
        rules=GenerationRules(
            forced_first=tokens.one("forced_bos_token_id"),
            forced_last=tokens.one("forced_eos_token_id"),
            no_repeat_ngram=generation.get("no_repeat_ngram_size") or 0,
            min_length=generation.get("min_length") or 0,
            min_new_tokens=generation.get("min_new_tokens") or 0,
        ),
        stamps=stamps,
    )


def _generation(folder: Path, config: Any) -> FileSettings:
    """Returns the settings of transformers' GenerationConfig, read from its own file or, in older checkpoints, from
    config.json."""
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if path.is_file():
        return FileSettings(path, vars(load_part("GenerationConfig", folder)))
    return FileSettings(folder / "config.json", vars(GenerationConfig.from_model_config(config)))


@frozen(kw_only=True)
class _Tokens:
    """Reads special tokens, each of which must be in the vocabulary."""

    generation: FileSettings
    vocabulary: int

    def several(self, name: str) -> tuple[int, ...]:
        return self.generation.tokens(name, self.vocabulary)

    def one(self, name: str) -> int | None:
        found = self.several(name)
        if len(found) > 1:  # several forced tokens: one for each beam group or language, unknown which
            raise UnsupportedModel(f"{self.generation.path} has {name}={list(found)}; allowed: one token")
        return found[0] if found else None

    def bad_words(self) -> tuple[int, ...]:
        """The tokens of bad_words_ids, in which every word must be a single token."""
        words = self.generation.get("bad_words_ids") or []
        if any(len(word) != 1 for word in words):
            raise UnsupportedModel(f"{self.generation.path} has bad_words_ids={words!r}; allowed: words of one token")
        ends = self.several("eos_token_id")  # `generate` never suppresses these
        return tuple(token for word in words for token in word if token not in ends)

    def start(self) -> int:
        """The token that `generate` would begin with: decoder_start_token_id, or else bos_token_id."""
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = self.one(name)
            if token is not None:
                return token
        raise UnsupportedModel(
            f"{self.generation.path} has neither decoder_start_token_id nor bos_token_id; allowed: the token that the "
            "decoder begins with"
        )


def _check_generation(generation: FileSettings) -> None:
    """Refuses unsupported settings, and logs settings that each request must choose itself."""
    asked = {name: generation.get(name) for name in (*_REFUSED, *_THE_CALLERS)}
    refused = [f"{name}={asked[name]!r}" for name, nothing in _REFUSED.items() if asked[name] not in nothing]
    if refused:
        raise UnsupportedModel(
            f"{generation.path} asks for {', '.join(refused)}; allowed: forced_bos_token_id, "
            "forced_eos_token_id, min_length, no_repeat_ngram_size, suppressed tokens. Remove the other settings if "
            "texts may differ from those of transformers"
        )
    left = [f"{name}={asked[name]!r}" for name, nothing in _THE_CALLERS.items() if asked[name] not in nothing]
    if left:
        logging.getLogger(__name__).warning(
            "%s has %s, which is not used: SamplingParams say it for each request",
            generation.path,
            ", ".join(left),
        )
