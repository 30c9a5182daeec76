"""Whisper as a folder of CTranslate2, which faster-whisper's users have: ``model.bin``, ``config.json``, and the
tokenizer's or the vocabulary's file. It is read as it is; settings that transformers' files would have are made here.

Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import UnsupportedModel
from ...core.languages import LANGUAGES
from .ctranslate2_file import MODEL, ModelFile
from .settings import FileSettings, is_integer, read_json
from .tokens import ENGLISH_ONLY

_SPEC = "WhisperSpec"
_SETTINGS = {"decoder/activation": 3, "decoder/pre_norm": 1, "decoder/alibi": 0}  # those of every Whisper; 3 is GELU
WORDS = "decoder/embeddings/weight"
"""The token embedding, which is often the head, too."""


@frozen
class Converted:
    """A Whisper that CTranslate2's converter has written."""

    folder: Path
    file: ModelFile = field(repr=False)
    told: FileSettings = field(repr=False)  # config.json, which has no sizes

    @classmethod
    def open(cls, folder: Path) -> Converted:
        """Reads everything but values.

        Raises:
            CheckpointError: a file is missing or damaged.
            UnsupportedModel: the model is not Whisper.
        """
        file = ModelFile.read(folder / MODEL)
        if file.spec != _SPEC:
            raise UnsupportedModel(
                f"{folder} has a {file.spec} of CTranslate2; allowed of its models: {_SPEC}. Give the checkpoint that "
                "it was converted from"
            )
        for name, usual in _SETTINGS.items():
            if name in file.variables and file.variables[name].whole != usual:
                raise UnsupportedModel(f"{file.path} has another {name} than Whisper; allowed: {usual}")
        path = folder / "config.json"
        return cls(folder, file, FileSettings(path, read_json(path)))

    @property
    def quantized(self) -> bool:
        """True if matrices are in int8."""
        return self.file.variable(WORDS, 2).kind == "I8"

    def config(self) -> dict[str, Any]:
        """Returns the settings that config.json has in transformers' layout."""
        sizes: dict[str, Any] = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
        sizes["vocab_size"], width = self.file.variable(WORDS, 2).shape
        sizes["d_model"], sizes["num_mel_bins"] = width, self.file.variable("encoder/conv1/weight", 3).shape[1]
        for side, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
            sizes[positions] = self.file.variable(f"{side}/position_encodings/encodings", 2).shape[0]
            sizes[f"{side}_ffn_dim"] = self.file.variable(f"{side}/layer_0/ffn/linear_0/weight", 2).shape[0]
            layers = {name.split("/")[1] for name in self.file.variables if name.startswith(f"{side}/layer_")}
            sizes[f"{side}_layers"] = len(layers - {"layer_norm"})
            heads = self.file.variables.get(f"{side}/num_heads")
            sizes[f"{side}_attention_heads"] = width // 64 if heads is None else heads.whole
        return sizes

    def generation(self, vocabulary: Mapping[str, int]) -> FileSettings:
        """Returns the settings that generation_config.json has in transformers' layout. Tokens that have a name are
        found by it, but a model may know fewer languages than its ``vocabulary``."""
        made: dict[str, Any] = {"max_initial_timestamp_index": 50}  # a second, as in faster-whisper
        same = {"suppress_tokens": "suppress_ids", "begin_suppress_tokens": "suppress_ids_begin"}
        for name, theirs in {**same, "alignment_heads": "alignment_heads"}.items():
            if self.told.get(theirs) is not None:
                made[name] = self.told.get(theirs)
        if self.file.variable(WORDS, 2).shape[0] == ENGLISH_ONLY:  # whose tokenizer may name languages, too
            made["is_multilingual"] = False
        languages = self.told.get("lang_ids")
        if languages:
            if not isinstance(languages, list) or not all(map(is_integer, languages)):
                raise self.told.bad("lang_ids", "a list of token ids")
            named = {f"<|{language}|>" for language in LANGUAGES} & vocabulary.keys()
            known = {text: vocabulary[text] for text in sorted(named) if vocabulary[text] in languages}
            made |= {"lang_to_id": known} if known else {}
        return FileSettings(self.told.path, made)
