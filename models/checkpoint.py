"""Reads a Whisper checkpoint in transformers' layout: where it lies, what it is, its weights and its special tokens.

Errors tell apart: no such folder, no checkpoint in it, a checkpoint without weights, another architecture, damaged or
incomplete files. torch and transformers are imported where they are first needed: the light checks work without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen, mutable

from ..core.errors import CheckpointError, UnsupportedModel
from ..core.model import WhisperTokens
from .settings import Settings, read_json
from .tokens import SpecialTokens

if TYPE_CHECKING:
    from torch import Tensor

    from .features import FeatureSettings
    from .stored import MappedTensor, StoredTensor
    from .whisper import Activation, WhisperShape

ARCHITECTURES = ("WhisperForConditionalGeneration", "WhisperModel")
"""The architectures with an adapter, as config.json names them."""

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "normalizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "1_Pooling/config.json",
)
_SAMPLE = 256  # values of each piece of a tensor that the fingerprint is made of
_SHARDS = ("*.json", "*.txt", "model.safetensors", "model-*-of-*.safetensors")


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


def is_whisper(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` is of Whisper. Raises `CheckpointError` when there is none."""
    return _read_config(folder).get("model_type") == "whisper"


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file():  # beside a model it would be left out, and nobody told
        raise UnsupportedModel(
            f"{folder} holds an adapter (adapter_config.json), which is not applied; allowed: whole models. Merge it "
            "into its model (merge_and_unload of peft) and save that"
        )
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json, so it is no checkpoint; give a folder as save_pretrained writes it"
        )
    return read_json(path)


def check_architecture(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint of Whisper. Needs neither torch nor transformers.

    Raises:
        CheckpointError: no config.json.
        UnsupportedModel: of another architecture.
    """
    config, path = _read_config(folder), folder / "config.json"
    found = config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise Settings(path, config).bad("architectures", "a list of names")
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
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise CheckpointError(f"{index} has no weight_map of file names; download or save the checkpoint again")
    return tuple(index.parent / name for name in sorted(set(mapping.values())))


def is_mapped(folder: Path) -> bool:
    """True if the weights of the checkpoint are pickles, which torch maps: they are views of a file that may change.
    Raises `CheckpointError` as `find_weights` does."""
    return find_weights(folder)[0].suffix != ".safetensors"


@mutable(eq=False)
class WeightFiles:
    """The tensors of a checkpoint by name, without the leading ``model.``; each is read when it is asked for.

    ``fingerprint`` grows with every tensor read: a sample of each, enough that two trainings of one model differ.
    """

    folder: Path
    _sources: dict[str, StoredTensor | MappedTensor] = field(repr=False)  # by short name
    _digest: Any = field(init=False, factory=hashlib.sha256, repr=False)

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Opens every shard; raises `CheckpointError` when one cannot be read."""
        from .stored import open_weights

        sources: dict[str, StoredTensor | MappedTensor] = {}
        for path in find_weights(folder):
            sources.update((name.removeprefix("model."), stored) for name, stored in open_weights(path).items())
        return cls(folder, sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def get(self, name: str, target: Tensor, *, scale: float = 1.0) -> None:
        """Writes the tensor times ``scale`` to ``target``, in its dtype and on its device.

        Raises:
            CheckpointError: it is missing, of another shape, or cannot be read.
        """
        from .stored import fill

        if name not in self._sources:
            raise CheckpointError(
                f"{self.folder} has no weight {name!r} among its {len(self._sources)}; the checkpoint is incomplete"
            )
        source, shape = self._sources[name], tuple(target.shape)
        if source.shape != shape:
            raise CheckpointError(f"weight {name!r} has shape {source.shape}; config.json asks for {shape}")
        self._digest.update(f"{name}{shape}{source.dtype}".encode())
        fill(target, self._sampled(source.pieces()), scale)

    def _sampled(self, pieces: Generator[Tensor, None, None]) -> Generator[Tensor, None, None]:
        """The pieces, of which the fingerprint takes notice."""
        with closing(pieces):
            for piece in pieces:
                self._digest.update(piece[:: max(1, len(piece) // _SAMPLE)].float().numpy().tobytes())
                yield piece

    @property
    def fingerprint(self) -> str:
        """A hash of the tensors read so far."""
        return str(self._digest.hexdigest())


@frozen(kw_only=True)
class Checkpoint:
    """What a checkpoint's files say, apart from the weights."""

    folder: Path
    shape: WhisperShape
    encoder_inner: int
    decoder_inner: int
    activation: Activation = field(repr=False)
    tied: bool  # the head is the token embedding where the weights have none of its own
    features: FeatureSettings
    tokens: WhisperTokens
    eos_token_ids: tuple[int, ...]
    suppress_token_ids: tuple[int, ...]
    begin_suppress_token_ids: tuple[int, ...]
    architecture: str
    tokenizer: Any = field(repr=False, eq=False)
    stamps: Mapping[str, str] = field(repr=False)  # a hash of each file that all this was read from

    def changed_files(self) -> tuple[str, ...]:
        """The files beside the weights that are not what they were when this was read."""
        return changed_files(self.folder, self.stamps)

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
    plain = Settings(folder / "config.json", check_architecture(folder))
    stamps = file_stamps(folder)
    find_weights(folder)
    config = Settings(plain.path, _load(folder, "config.json", "WhisperConfig").to_dict())
    shape = _shape(config)
    features = _features(folder, shape)
    tokenizer = _lighter(_load(folder, "tokenizer.json", "AutoTokenizer"))
    tokens = SpecialTokens(
        config=plain,
        defaults=config,
        generation=Settings.read_if_there(folder / "generation_config.json"),
        tokenizer=tokenizer,
        vocabulary=shape.vocabulary,
    )
    return Checkpoint(
        folder=folder,
        shape=shape,
        encoder_inner=config.whole("encoder_ffn_dim"),
        decoder_inner=config.whole("decoder_ffn_dim"),
        activation=_activation(config.get("activation_function")),
        tied=config.flag("tie_word_embeddings") is not False,
        features=features,
        tokens=tokens.whisper_tokens(),
        eos_token_ids=tokens.eos_token_ids(),
        suppress_token_ids=tokens.suppressed("suppress_tokens"),
        begin_suppress_token_ids=tokens.suppressed("begin_suppress_tokens"),
        architecture=(plain.get("architectures") or ARCHITECTURES)[0],
        tokenizer=tokenizer,
        stamps=stamps,
    )


def file_stamps(folder: Path) -> dict[str, str]:
    """A hash of each settings file there is in ``folder``."""
    names = [name for name in _SETTINGS if (folder / name).is_file()]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def changed_files(folder: Path, stamps: Mapping[str, str]) -> tuple[str, ...]:
    """The settings files that are not what they were when ``stamps`` were taken."""
    now = file_stamps(folder)
    return tuple(name for name in _SETTINGS if now.get(name) != stamps.get(name))


def _load(folder: Path, file: str, loader: str) -> Any:
    """What transformers' ``loader`` makes of ``folder``."""
    import transformers

    try:
        return getattr(transformers, loader).from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds: wrapped, not hidden
        raise CheckpointError(
            f"{folder / file} or a file beside it cannot be used: {type(error).__name__}: {error}"
        ) from error


def _lighter(tokenizer: Any) -> Any:
    """``tokenizer`` without the two lists that transformers' Whisper made it of, 20 MB of strings. They are kept for
    `save_vocabulary` alone, which writes vocab.json; `save_pretrained` writes tokenizer.json and does without."""
    for name in ("_vocab", "_merges"):
        vars(tokenizer).pop(name, None)
    return tokenizer


def _shape(config: Settings) -> WhisperShape:
    from .whisper import WhisperShape

    shape = WhisperShape(
        width=config.whole("d_model"),
        encoder_layers=config.whole("encoder_layers"),
        encoder_heads=config.whole("encoder_attention_heads"),
        decoder_layers=config.whole("decoder_layers"),
        decoder_heads=config.whole("decoder_attention_heads"),
        mels=config.whole("num_mel_bins"),
        embeddings=config.whole("max_source_positions"),
        positions=config.whole("max_target_positions"),
        vocabulary=config.whole("vocab_size"),
    )
    for heads in (shape.encoder_heads, shape.decoder_heads):
        if shape.width % heads:
            raise CheckpointError(
                f"{config.path} has d_model={shape.width} and {heads} heads; the heads must divide d_model"
            )
    return shape


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

    written = Settings.read_if_there(folder / "preprocessor_config.json")
    if written is None or not written.values:
        processor = Settings.read_if_there(folder / "processor_config.json")
        there = processor is not None and "feature_extractor" in processor
        written = Settings(processor.path, processor.table("feature_extractor")) if processor and there else None
    settings = FeatureSettings.read(written or Settings(folder / "config.json", {}), feature_size=shape.mels)
    if settings.feature_size != shape.mels or settings.frames != shape.frames:
        raise CheckpointError(
            f"the feature extractor of {folder} makes {settings.feature_size} mel bands by {settings.frames} frames; "
            f"config.json asks for {shape.mels} by {shape.frames}"
        )
    return settings
