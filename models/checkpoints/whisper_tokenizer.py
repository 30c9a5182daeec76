"""Whisper's tokenizer without transformers, whose import takes more than a second."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define, field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ...core.errors import CheckpointError
from .gguf_tokenizer import GgufTokenizer
from .settings import read_json

_CLASSES = frozenset({None, "WhisperTokenizer", "WhisperTokenizerFast"})
_BESIDE = ("tokenizer_config", "special_tokens_map", "added_tokens")
_EXTRA = frozenset({"additional_special_tokens", "extra_special_tokens"})
_TIMESTAMP = re.compile(r"<\|(\d+\.\d+)\|>")
_PLAIN = {"add_special_tokens": False}
_CLEAN = {"skip_special_tokens": True}


@define(eq=False, slots=False)
class WhisperTokenizer:
    """A tokenizer with the methods that the engine uses, made from tokenizer.json alone. For all other attributes
    transformers' tokenizer is made when it is first needed.
    """

    _backend: Tokenizer = field(repr=False)
    _make: Callable[[], Any] = field(repr=False)  # makes transformers' tokenizer

    @classmethod
    def read(cls, folder: Path, make: Callable[[], Any]) -> WhisperTokenizer | None:
        """Reads the tokenizer in ``folder``. ``None``: the files are damaged, which transformers will report, or need
        something that this class does not support.

        Args:
            make: makes transformers' tokenizer.
        """
        try:
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
            plain = _is_plain(backend) and _agrees(backend, folder)
        except Exception:  # noqa: BLE001  (the package has no class of its own; transformers reports what is wrong)
            return None
        backend.no_padding()  # as transformers does for every text
        backend.no_truncation()
        return cls(backend, make) if plain else None

    @classmethod
    def of(cls, backend: Tokenizer) -> WhisperTokenizer:
        """Returns the tokenizer for one that has been read. transformers' own is made of that, too."""
        backend.no_padding()
        backend.no_truncation()

        def make() -> Any:
            from .turns import TURNS

            with TURNS.turn():
                from transformers import WhisperTokenizer as Theirs

                return Theirs(tokenizer_object=backend)

        return cls(backend, make)

    @cached_property
    def whole(self) -> Any:
        """transformers' tokenizer for the same files. Raises `CheckpointError` if the files have changed."""
        made = self._make()
        if made.get_vocab() != self.get_vocab():
            raise CheckpointError("the tokenizer's files have changed since the model was opened; open it again")
        return made

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The fast tokenizer, under the name that it has in transformers."""
        return self._backend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Calls transformers' tokenizer."""
        return self.whole(*texts, **options)

    def get_vocab(self) -> dict[str, int]:
        """Returns all tokens with their ids."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: Any, **options: Any) -> list[int]:
        """Returns the token ids of ``text``."""
        if options != _PLAIN or not isinstance(text, str):
            return list(self.whole.encode(text, **options))
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Returns the text of ``token_ids``."""
        if options != _CLEAN or not isinstance(token_ids, Sequence):
            return self.whole.decode(token_ids, **options)
        text = self._backend.decode(self._without_prompt(list(token_ids)), skip_special_tokens=True)
        return _TIMESTAMP.sub("", text)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Returns the name of ``token`` in the vocabulary."""
        return self._backend.id_to_token(token)

    def _without_prompt(self, token_ids: list[int]) -> list[int]:
        """Returns ``token_ids`` without the text that was given as a prompt, since it was not spoken."""
        previous, start = map(self._backend.token_to_id, ("<|startofprev|>", "<|startoftranscript|>"))
        if not token_ids or previous is None or token_ids[0] != previous:
            return token_ids
        return token_ids[token_ids.index(start) :] if start in token_ids else []


def whole_tokenizer(tokenizer: Any) -> Any:
    """Returns transformers' tokenizer for the same files as ``tokenizer``."""
    return tokenizer.whole if isinstance(tokenizer, WhisperTokenizer | GgufTokenizer) else tokenizer


def _is_plain(backend: Tokenizer) -> bool:
    """True if ``backend`` is the same tokenizer that transformers would make from its vocabulary and merges."""
    model, before = backend.model, backend.pre_tokenizer
    return (
        isinstance(model, models.BPE)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        and not (model.fuse_unk or model.byte_fallback or model.ignore_merges)
        and backend.normalizer is None
        and isinstance(backend.decoder, decoders.ByteLevel)
        and isinstance(before, pre_tokenizers.ByteLevel)
        and not before.add_prefix_space
        and before.use_regex
    )


def _agrees(backend: Tokenizer, folder: Path) -> bool:
    """True if the files beside tokenizer.json neither add to the tokenizer nor change it."""
    paths = [folder / f"{name}.json" for name in _BESIDE]
    config, named, added = (read_json(path) if path.is_file() else {} for path in paths)
    if config.get("tokenizer_class") not in _CLASSES or config.get("add_prefix_space") or "auto_map" in config:
        return False
    known = {(token.content, id_, token.special) for id_, token in backend.get_added_tokens_decoder().items()}
    told = config.get("added_tokens_decoder") or {}
    special = {text for text, _, special in known if special}
    return (
        {(token["content"], int(id_), bool(token.get("special"))) for id_, token in told.items()} <= known
        and set(added.items()) <= {(text, id_) for text, id_, _ in known}
        and {*_named(config), *_named(named)} <= special
    )


def _named(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the texts of the special tokens in ``settings``. A token there is a text, or an object with its
    content.
    """
    for name, value in settings.items():
        extra = value if name in _EXTRA and value else ()
        tokens = [value] if name.endswith("_token") else extra.values() if isinstance(extra, dict) else extra
        for token in tokens:
            if isinstance(token, str | dict):  # others are flags, which say what is put around a text
                yield token["content"] if isinstance(token, dict) else token
