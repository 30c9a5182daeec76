"""A checkpoint's special tokens, from generation_config.json, else from config.json, else from the tokenizer's
vocabulary.

A token that the model indexes or waits for must be in its vocabulary. If it is not, `CheckpointError` is raised here,
not in the middle of a step. A suppressed token outside the vocabulary has no effect, as in transformers. For example,
the default of ``begin_suppress_tokens`` in config.json has a token that small vocabularies lack.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from attrs import define

from ...core.errors import CheckpointError
from ...core.languages import LANGUAGES
from ...core.model import WhisperTokens
from .settings import FileSettings, is_integer

ENGLISH_ONLY = 51_864
"""The vocabulary of checkpoints that know no other language."""
_MAX_INITIAL_TIMESTAMP = 50  # in checkpoints older than generation_config.json


@define(kw_only=True, slots=False)
class SpecialTokens:
    """Finds the special tokens of one checkpoint.

    Args:
        config: config.json as it is written.
        defaults: config.json with transformers' defaults.
        generation: generation_config.json; ``None``: the checkpoint has none.
        tokenizer: transformers' tokenizer, or one with the same methods.
        vocabulary: the number of tokens that the model knows.
    """

    config: FileSettings
    defaults: FileSettings
    generation: FileSettings | None
    tokenizer: Any
    vocabulary: int

    def whisper_tokens(self) -> WhisperTokens:
        """Returns all tokens of Whisper that have a name. Raises `CheckpointError` if one is missing or outside the
        vocabulary."""
        no_timestamps = self.required("no_timestamps_token_id", "<|notimestamps|>")
        begin = self._within(no_timestamps + 1, "<|0.00|>, which is no_timestamps_token_id + 1,")
        return WhisperTokens(
            start_id=self.required("decoder_start_token_id", "<|startoftranscript|>"),
            no_timestamps_id=no_timestamps,
            timestamp_begin_id=begin,
            previous_id=self.optional("prev_sot_token_id", "<|startofprev|>"),
            no_speech_id=self._by_text("<|nospeech|>", "<|nocaptions|>"),
            language_ids={text.strip("<|>"): token for text, token in self._table("lang_to_id", LANGUAGES).items()},
            task_ids=self._table("task_to_id", ("transcribe", "translate")),
            max_initial_timestamp=self._max_initial_timestamp(),
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: one or more."""
        name, text = "eos_token_id", "<|endoftext|>"
        written = self._written(name)
        if written is None:
            return (self.required(name, text),)
        value = written.get(name)
        values = value if isinstance(value, list) else [value]
        if not values:
            raise written.bad(name, "a token id, or a list with one or more")
        return tuple(self._within(token, f"{name} of {written.path}") for token in values)

    def suppressed(self, name: str) -> tuple[int, ...]:
        """Returns the tokens of ``suppress_tokens`` or ``begin_suppress_tokens`` that are in the vocabulary.
        config.json is read only if there is no generation_config.json."""
        settings = self.defaults if self.generation is None else self.generation
        return settings.tokens(name, self.vocabulary, cut=True)

    def required(self, name: str, text: str) -> int:
        """Returns the token that the setting ``name`` has, or else the vocabulary's token ``text``."""
        token = self.optional(name, text)
        if token is None:
            raise CheckpointError(
                f"{self.config.path.parent} has neither {name} in generation_config.json or config.json nor a token "
                f"{text} in its tokenizer; save the checkpoint again with one of them"
            )
        return token

    def optional(self, name: str, text: str) -> int | None:
        """Returns the same token as `required`; ``None``: there is no such token."""
        written = self._written(name)
        if written is None:
            return self._by_text(text)
        return self._within(written.get(name), f"{name} of {written.path}")

    def _written(self, name: str) -> FileSettings | None:
        """Returns the first file that has a value for ``name``."""
        files = (self.generation, self.config)
        return next((file for file in files if file is not None and file.get(name) is not None), None)

    def _by_text(self, *texts: str) -> int | None:
        """Returns the id of the first of ``texts`` that the tokenizer knows."""
        text = next((text for text in texts if text in self._texts), None)
        return None if text is None else self._within(self._texts[text], f"{text} of the tokenizer")

    @cached_property
    def _texts(self) -> dict[str, int]:
        texts: dict[str, int] = self.tokenizer.get_vocab()
        return texts

    def _within(self, token: Any, what: str) -> int:
        if not is_integer(token) or not 0 <= token < self.vocabulary:
            raise CheckpointError(
                f"{what} is {token!r}; allowed: a token id from 0 to {self.vocabulary - 1}, the vocabulary "
                f"(vocab_size={self.vocabulary}) of {self.config.path}. Download the checkpoint again: its files are "
                "damaged or belong to different checkpoints"
            )
        return int(token)

    def _max_initial_timestamp(self) -> int | None:
        name = "max_initial_timestamp_index"
        if self.generation is None:
            return _MAX_INITIAL_TIMESTAMP
        return None if self.generation.get(name) is None else self.generation.whole(name, least=0)

    @property
    def _multilingual(self) -> bool:
        """Returns ``is_multilingual``. If it is not set, a language table or the vocabulary's size decides."""
        known = None if self.generation is None else self.generation.flag("is_multilingual")
        if known is not None:
            return known
        listed = self.generation is not None and "lang_to_id" in self.generation
        return listed or self.vocabulary != ENGLISH_ONLY

    def _table(self, name: str, texts: Iterable[str]) -> dict[str, int]:
        """Returns tokens by name: those of the setting, or else those of ``texts`` that the tokenizer knows. Empty if
        the checkpoint is English-only."""
        if not self._multilingual:
            return {}
        if self.generation is not None and name in self.generation:
            what = f"of {name} of {self.generation.path}"
            return {text: self._within(token, f"{text} {what}") for text, token in self.generation.table(name).items()}
        found = {text: self._by_text(f"<|{text}|>") for text in texts}
        return {text: token for text, token in found.items() if token is not None}
