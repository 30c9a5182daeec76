"""Reads a Whisper checkpoint in transformers' layout: where it lies, what it is, its weights and its special tokens.

Errors tell apart: no such folder, no checkpoint in it, a checkpoint without weights, another architecture, damaged or
incomplete files. torch and transformers are imported where they are first needed: the light checks work without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen, mutable

from ..core.errors import CheckpointError, UnsupportedModel
from ..core.model import WhisperTokens

if TYPE_CHECKING:
    from torch import Tensor

    from .features import FeatureSettings
    from .whisper import Activation, WhisperShape

ARCHITECTURES = ("WhisperForConditionalGeneration", "WhisperModel")
"""The architectures with an adapter, as config.json names them."""

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARDS = ("*.json", "*.txt", "model.safetensors", "model-*-of-*.safetensors")
_ENGLISH_ONLY_VOCABULARY = 51_864


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `CheckpointError` when it cannot be read as one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download or save the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; a checkpoint's settings are a JSON object")
    return value


def _read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def resolve(model: str | Path) -> Path:
    """The folder of ``model``: itself, or the local copy of a hub id, downloaded where needed.

    Raises:
        CheckpointError: nothing is there, or the hub cannot be reached and has left no copy here.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file; allowed: a checkpoint's folder or a hub id such as 'openai/whisper-tiny'"
        )
    if isinstance(model, Path) or not _may_be_hub_id(model):
        raise CheckpointError(
            f"there is no folder {folder}; allowed: a checkpoint's folder or a hub id such as 'openai/whisper-tiny'"
        )
    return _from_hub(model)


def _may_be_hub_id(model: str) -> bool:
    return bool(model) and model.count("/") <= 1 and not model.startswith((".", "/", "~")) and "\\" not in model


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))

    try:
        folder = fetch(*_SHARDS)
        if not any((folder / weights).is_file() for weights in _WEIGHTS[:2]):
            folder = fetch("pytorch_model*.bin", "pytorch_model.bin.index.json")
    except Exception as error:  # the hub's client raises many kinds: wrapped, not hidden
        raise CheckpointError(
            f"there is no folder {name!r}, and it could not be had from the hub: {type(error).__name__}: {error}; "
            "check the name and the network, or give the folder of a downloaded checkpoint"
        ) from error
    return folder


def check_architecture(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint that has an adapter. Needs neither torch nor transformers.

    Raises:
        CheckpointError: no config.json.
        UnsupportedModel: of another architecture.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json, so it is no checkpoint; give a folder as save_pretrained writes it"
        )
    config = read_json(path)
    found = config.get("architectures") or []
    if config.get("model_type") != "whisper" or not (not found or set(found) & set(ARCHITECTURES)):
        raise UnsupportedModel(
            f"{folder} is of model_type {config.get('model_type')!r}, architectures {found}; "
            f"allowed: model_type 'whisper', architectures {' or '.join(ARCHITECTURES)}"
        )
    return config


def find_weights(folder: Path) -> tuple[Path, ...]:
    """The weight files of a checkpoint, each shard once, safetensors before pickles.

    Raises:
        CheckpointError: there are none, or a shard that the index names is missing.
    """
    for name in _WEIGHTS:
        path = folder / name
        if path.is_file():
            files = _shards(path) if name.endswith(".index.json") else (path,)
            break
    else:
        raise CheckpointError(f"{folder} has a config.json but no weights; allowed: {', '.join(_WEIGHTS)}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks the shards {', '.join(missing)}, which {path.name} names; download them again"
        )
    return files


def _shards(index: Path) -> tuple[Path, ...]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{index} has no weight_map; download or save the checkpoint again")
    return tuple(index.parent / name for name in sorted(set(mapping.values())))


@mutable(eq=False)
class WeightFiles:
    """The tensors of a checkpoint by name, without the leading ``model.``; each is read when it is asked for.

    ``fingerprint`` grows with every tensor read: a sample of each, enough that two trainings of one model differ.
    """

    folder: Path
    _sources: dict[str, tuple[Any, str]] = field(repr=False)  # short name: open file or mapping, full name
    _digest: Any = field(init=False, factory=hashlib.sha256, repr=False)

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Opens every shard; raises `CheckpointError` when one cannot be read."""
        sources: dict[str, tuple[Any, str]] = {}
        for path in find_weights(folder):
            shard = _open_shard(path)
            for name in shard.keys():  # noqa: SIM118 - an open safetensors file is no mapping
                sources[name.removeprefix("model.")] = (shard, name)
        return cls(folder, sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor in its stored dtype, on the CPU.

        Raises:
            CheckpointError: it is missing, of another shape, or cannot be read.
        """
        if name not in self._sources:
            raise CheckpointError(
                f"{self.folder} has no weight {name!r} among its {len(self._sources)}; the checkpoint is incomplete"
            )
        shard, full_name = self._sources[name]
        tensor: Tensor = shard[full_name] if isinstance(shard, dict) else _read_tensor(self.folder, shard, full_name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"weight {name!r} has shape {tuple(tensor.shape)}; config.json asks for {shape}")
        self._digest.update(f"{name}{shape}{tensor.dtype}".encode())
        flat = tensor.flatten()
        self._digest.update(flat[:: max(1, len(flat) // 256)].float().numpy().tobytes())
        return tensor

    @property
    def fingerprint(self) -> str:
        """A hash of the tensors read so far."""
        return str(self._digest.hexdigest())


def _open_shard(path: Path) -> Any:
    """An open safetensors file, or a pickle's mapping of tensors."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; download or save the checkpoint again") from error
    import torch

    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # a damaged archive raises many kinds: wrapped, not hidden
        raise CheckpointError(f"{path} cannot be read: {error}; save the checkpoint again, as safetensors") from error


def _read_tensor(folder: Path, shard: Any, name: str) -> Tensor:
    from safetensors import SafetensorError

    try:
        tensor: Tensor = shard.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weight {name!r} of {folder} cannot be read: {error}") from error
    return tensor


@frozen(kw_only=True)
class Checkpoint:
    """What a checkpoint's files say, apart from the weights."""

    folder: Path
    shape: WhisperShape
    encoder_inner: int
    decoder_inner: int
    activation: Activation = field(repr=False)
    tied: bool  # the head is the token embedding
    features: FeatureSettings
    tokens: WhisperTokens
    eos_token_ids: tuple[int, ...]
    suppress_token_ids: tuple[int, ...]
    begin_suppress_token_ids: tuple[int, ...]
    architecture: str
    tokenizer: Any = field(repr=False, eq=False)

    def identity(self, fingerprint: str, dtype: str) -> str:
        """A hash of all that an encoder output depends on beside the samples."""
        settings = {**self.features.to_dict(), "shape": repr(self.shape), "weights": fingerprint, "dtype": dtype}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads everything but the weights of the checkpoint in ``folder``.

    Raises:
        CheckpointError: a file is missing or damaged, or two of them disagree.
        UnsupportedModel: an architecture, or an activation function, without an adapter.
    """
    plain = check_architecture(folder)
    find_weights(folder)
    config = _load(folder, "config.json", "WhisperConfig")
    shape = _shape(config)
    features = _features(folder, shape)
    generation = _read_optional_json(folder / "generation_config.json")
    tokenizer = _load(folder, "tokenizer.json", "AutoTokenizer")
    settings = _Settings(folder=folder, generation=generation, config=config, tokenizer=tokenizer)
    return Checkpoint(
        folder=folder,
        shape=shape,
        encoder_inner=config.encoder_ffn_dim,
        decoder_inner=config.decoder_ffn_dim,
        activation=_activation(config.activation_function),
        tied=config.tie_word_embeddings,
        features=features,
        tokens=settings.whisper_tokens(),
        eos_token_ids=settings.ids("eos_token_id"),
        suppress_token_ids=settings.ids("suppress_tokens"),
        begin_suppress_token_ids=settings.ids("begin_suppress_tokens"),
        architecture=(plain.get("architectures") or ARCHITECTURES)[0],
        tokenizer=tokenizer,
    )


def _load(folder: Path, file: str, loader: str) -> Any:
    """What transformers' ``loader`` makes of ``folder``."""
    import transformers

    try:
        return getattr(transformers, loader).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds: wrapped, not hidden
        raise CheckpointError(
            f"{folder / file} or a file beside it cannot be used: {type(error).__name__}: {error}"
        ) from error


def _shape(config: Any) -> WhisperShape:
    from .whisper import WhisperShape

    for heads in (config.encoder_attention_heads, config.decoder_attention_heads):
        if config.d_model % heads:
            raise CheckpointError(
                f"config.json has d_model={config.d_model} and {heads} heads; the heads must divide d_model"
            )
    return WhisperShape(
        width=config.d_model,
        encoder_layers=config.encoder_layers,
        encoder_heads=config.encoder_attention_heads,
        decoder_layers=config.decoder_layers,
        decoder_heads=config.decoder_attention_heads,
        mels=config.num_mel_bins,
        embeddings=config.max_source_positions,
        positions=config.max_target_positions,
        vocabulary=config.vocab_size,
    )


def _activation(name: str) -> Activation:
    from torch.nn import functional
    from transformers.activations import ACT2FN

    if name == "gelu":
        return functional.gelu
    try:
        activation: Activation = ACT2FN[name]
    except KeyError:
        raise UnsupportedModel(f"activation_function={name!r}; allowed: {', '.join(sorted(ACT2FN))}") from None
    return activation


def _features(folder: Path, shape: WhisperShape) -> FeatureSettings:
    """The feature extractor's settings: from its own file, from the processor's, or else from the model's sizes."""
    from .features import FeatureSettings

    written = _read_optional_json(folder / "preprocessor_config.json")
    written = written or _read_optional_json(folder / "processor_config.json").get("feature_extractor", {})
    settings = FeatureSettings.from_dict({"feature_size": shape.mels, **written})
    if settings.feature_size != shape.mels or settings.frames != shape.frames:
        raise CheckpointError(
            f"the feature extractor of {folder} makes {settings.feature_size} mel bands by {settings.frames} frames; "
            f"config.json asks for {shape.mels} by {shape.frames}"
        )
    return settings


@frozen(kw_only=True)
class _Settings:
    """Special tokens: generation_config.json first, then config.json, then the tokenizer's vocabulary."""

    folder: Path
    generation: Mapping[str, Any]
    config: Any
    tokenizer: Any

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of token ids, or one; -1 and ``None`` stand for none."""
        value = self.generation[name] if name in self.generation else getattr(self.config, name, None)
        values = value if isinstance(value, (list, tuple)) else [value]
        return tuple(int(token) for token in values if token is not None and token >= 0)

    def token(self, *texts: str) -> int | None:
        """The id of the first of ``texts`` that the vocabulary has."""
        vocabulary = self.tokenizer.get_vocab()
        return next((int(vocabulary[text]) for text in texts if text in vocabulary), None)

    def required(self, name: str, *texts: str) -> int:
        found = self.ids(name)
        token = found[0] if found else self.token(*texts)
        if token is None:
            raise CheckpointError(f"{self.folder} has neither {name} in generation_config.json nor a token {texts[0]}")
        return token

    def whisper_tokens(self) -> WhisperTokens:
        no_timestamps = self.required("no_timestamps_token_id", "<|notimestamps|>")
        previous = self.ids("prev_sot_token_id")
        return WhisperTokens(
            start_id=self.required("decoder_start_token_id", "<|startoftranscript|>"),
            no_timestamps_id=no_timestamps,
            timestamp_begin_id=no_timestamps + 1,
            previous_id=previous[0] if previous else self.token("<|startofprev|>"),
            no_speech_id=self.token("<|nospeech|>", "<|nocaptions|>"),
            language_ids=self._languages(),
            task_ids=self._tasks(),
            max_initial_timestamp=self.generation.get("max_initial_timestamp_index", None if self.generation else 50),
        )

    @property
    def _multilingual(self) -> bool:
        known = self.generation.get("is_multilingual")
        return bool(known) if known is not None else self.config.vocab_size != _ENGLISH_ONLY_VOCABULARY

    def _languages(self) -> dict[str, int]:
        if "lang_to_id" in self.generation:
            return {str(key)[2:-2]: int(token) for key, token in self.generation["lang_to_id"].items()}
        if not self._multilingual:
            return {}
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        found = {code: self.token(f"<|{code}|>") for code in LANGUAGES}
        return {code: token for code, token in found.items() if token is not None}

    def _tasks(self) -> dict[str, int]:
        if "task_to_id" in self.generation:
            return {str(key): int(token) for key, token in self.generation["task_to_id"].items()}
        if not self._multilingual:
            return {}
        found = {task: self.token(f"<|{task}|>") for task in ("transcribe", "translate")}
        return {task: token for task, token in found.items() if token is not None}
