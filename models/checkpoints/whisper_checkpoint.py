"""Reads a Whisper checkpoint in transformers' layout: its sizes, features, weights and special tokens.

Different errors report a missing folder, a folder without a checkpoint, a checkpoint without weights, another
architecture, and damaged or incomplete files. torch and transformers are imported only when they are needed, so the
quick checks work without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen, mutable

from ...core.errors import CheckpointError, UnsupportedModel
from ...core.model import WhisperTokens
from .alignment import AlignmentSettings
from .ctranslate2_tokenizer import read_backend
from .files import file_stamps, find_weights, open_converted, read_config
from .modules import AnyCheckpoint, DecoderShape
from .settings import FileSettings
from .tokens import SpecialTokens
from .whisper_tokenizer import WhisperTokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .stored import MappedTensor, StoredTensor
    from .unread import UnreadTensor

ARCHITECTURES = ("WhisperForConditionalGeneration", "WhisperModel")
"""The architectures with an adapter, as config.json names them."""

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 51_865,
        "num_mel_bins": 80,
        "d_model": 384,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1_536,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1_536,
        "max_source_positions": 1_500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "tie_word_embeddings": True,
        "suppress_tokens": None,
        "begin_suppress_tokens": (220, 50_256),
        "median_filter_width": 7,
    }
)
"""The defaults for settings that config.json may omit, from transformers' `WhisperConfig`."""

_SAMPLE = 256  # sampled values of each piece of a tensor, for the fingerprint


def is_whisper(folder: Path) -> bool:
    """True if the checkpoint in ``folder`` is a Whisper checkpoint. Raises `CheckpointError` if there is no
    checkpoint."""
    return read_config(folder).get("model_type") == "whisper"


def check_architecture(folder: Path) -> dict[str, Any]:
    """Reads config.json of a Whisper checkpoint. Needs neither torch nor transformers.

    Raises:
        CheckpointError: there is no config.json.
        UnsupportedModel: the checkpoint has another architecture.
    """
    config, path = read_config(folder), folder / "config.json"
    found = config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise FileSettings(path, config).bad("architectures", "a list of names")
    if config.get("model_type") != "whisper" or not (not found or set(found) & set(ARCHITECTURES)):
        raise UnsupportedModel(
            f"{folder} is of model_type {config.get('model_type')!r}, architectures {found}; "
            f"allowed: model_type 'whisper', architectures {' or '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{folder} has quantized weights; allowed: float weights, and EngineConfig(quantization='int8') for int8"
        )
    return config


@frozen(kw_only=True)
class WhisperShape:
    """The sizes of a Whisper model."""

    width: int  # d_model
    encoder_layers: int
    encoder_heads: int
    decoder_layers: int
    decoder_heads: int
    mels: int
    embeddings: int  # max_source_positions: rows of the encoder's output
    positions: int  # max_target_positions: decoder positions
    vocabulary: int

    @property
    def frames(self) -> int:
        """The feature frames of one window, twice as many as embeddings, since the second convolution halves them."""
        return 2 * self.embeddings

    @property
    def decoder(self) -> DecoderShape:
        """The sizes of the decoder."""
        return DecoderShape(
            layers=self.decoder_layers,
            kv_heads=self.decoder_heads,
            head_dim=self.width // self.decoder_heads,
            hidden=self.width,
            vocabulary=self.vocabulary,
            positions=self.positions,
            embeddings=self.embeddings,
        )


@frozen(kw_only=True)
class FeatureSettings:
    """The settings of a feature extractor, with the names and defaults of transformers.

    ``dither`` is left out. Its noise differs on every call, so the same audio would have many encodings.
    """

    feature_size: int = 80  # mel bands
    sampling_rate: int = 16_000  # Hz
    hop_length: int = 160  # samples between frames
    chunk_length: int = 30  # seconds of a window
    n_fft: int = 400  # samples of a frame

    @classmethod
    def read(cls, written: FileSettings, *, feature_size: int) -> FeatureSettings:
        """Reads the needed keys of a preprocessor_config.json; all other keys are derived or unused.

        Args:
            feature_size: the default if the file has none.

        Raises:
            CheckpointError: no extractor can work with one of the values.
        """
        least = {"feature_size": 1, "sampling_rate": 1, "hop_length": 1, "chunk_length": 1, "n_fft": 2}
        found = {name: written.whole(name, least=low) for name, low in least.items() if name in written}
        settings = cls(**{"feature_size": feature_size, **found})
        if settings.n_fft > settings.window_samples:
            raise written.bad("n_fft", f"2 to {settings.window_samples}, the samples of a window")
        return settings

    @property
    def window_samples(self) -> int:
        """The number of samples of a whole window."""
        return self.chunk_length * self.sampling_rate

    @property
    def frames(self) -> int:
        """The number of feature frames of a whole window."""
        return self.window_samples // self.hop_length


@mutable(eq=False)
class WeightFiles:
    """The tensors of a checkpoint by name, without the leading ``model.``. Each is read when the caller asks for it.

    ``fingerprint`` changes with every tensor that is read. It hashes a sample of each tensor, enough to tell two
    trainings of the same model apart.
    """

    folder: Path
    _sources: dict[str, StoredTensor | MappedTensor] = field(repr=False)  # by short name
    _digest: Any = field(init=False, factory=hashlib.sha256, repr=False)

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Opens every shard. Raises `CheckpointError` if a shard cannot be read."""
        from .weights import open_weights

        sources: dict[str, StoredTensor | MappedTensor] = {}
        for path in find_weights(folder):
            sources.update((name.removeprefix("model."), stored) for name, stored in open_weights(path).items())
        return cls(folder, sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def get(self, name: str, target: Tensor, *, scale: float = 1.0) -> None:
        """Writes the tensor times ``scale`` to ``target``, in the dtype and on the device of ``target``.

        Raises:
            CheckpointError: the tensor is missing, has another shape, or cannot be read.
        """
        from .stored import fill

        fill(target, self._pieces(name, target), scale)

    def unread(self, name: str, shape: torch.Size, dtype: torch.dtype) -> UnreadTensor | None:
        """Returns a matrix that the file has in blocks, to be packed as it is; ``None``: it has none such."""
        from .unread import UnreadTensor

        source: Any = self._sources.get(name)
        if getattr(source, "block_kind", None) is None or source.shape != tuple(shape):
            return None
        self._digest.update(f"{name}{source.shape}{source.block_kind}".encode())
        for part in source.sample():
            self._digest.update(part.numpy().tobytes())
        made: UnreadTensor = UnreadTensor(shape, dtype, source)
        return made

    def _pieces(self, name: str, target: Tensor) -> Generator[Tensor, None, None]:
        """Returns the values of the tensor, which must have the shape of ``target``."""
        if name not in self._sources:
            raise CheckpointError(
                f"{self.folder} has no weight {name!r} (it has {len(self._sources)} weights); download the "
                "checkpoint again"
            )
        source, shape = self._sources[name], tuple(target.shape)
        if source.shape != shape:
            raise CheckpointError(
                f"weight {name!r} has shape {source.shape}; config.json asks for {shape}. Download both"
            )
        self._digest.update(f"{name}{shape}{source.dtype}".encode())
        return self._sampled(source.pieces())

    def _sampled(self, pieces: Generator[Tensor, None, None]) -> Generator[Tensor, None, None]:
        """Yields ``pieces``, and adds a sample of each to the fingerprint."""
        with closing(pieces):
            for piece in pieces:
                self._digest.update(piece[:: max(1, len(piece) // _SAMPLE)].float().numpy().tobytes())
                yield piece

    @property
    def fingerprint(self) -> str:
        """A hash of the tensors read so far."""
        return str(self._digest.hexdigest())


@frozen(kw_only=True)
class Checkpoint(AnyCheckpoint):
    """The facts in the files of a Whisper checkpoint, apart from the weights."""

    shape: WhisperShape
    encoder_inner: int
    decoder_inner: int
    activation: str  # the name of the activation function
    tied: bool  # the head is the token embedding unless the weights have a head
    features: FeatureSettings
    tokens: WhisperTokens
    alignment: AlignmentSettings
    quantized: bool = False  # matrices are in int8 in the file

    def identity(self, fingerprint: str, dtype: str) -> str:
        """Returns a hash of all that an encoder output depends on, except the samples."""
        settings = {**asdict(self.features), "shape": repr(self.shape), "weights": fingerprint, "dtype": dtype}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads everything but the weights of the checkpoint in ``folder``.

    Raises:
        CheckpointError: a file is missing or damaged, or two of them disagree.
        UnsupportedModel: the architecture or the activation function has no adapter.
    """
    plain = FileSettings(folder / "config.json", check_architecture(folder))
    stamps = file_stamps(folder)
    find_weights(folder)
    config = FileSettings(plain.path, {**_DEFAULTS, **plain.values})
    shape = _shape(config)
    features = _features(folder, shape)
    converted = open_converted(folder)
    tokenizer = _find_tokenizer(folder) if converted is None else WhisperTokenizer.of(read_backend(folder))
    if converted is None:
        generation = FileSettings.read_if_there(folder / "generation_config.json")
    else:
        generation = converted.generation(tokenizer.get_vocab())
    _check_tokenizer(folder, tokenizer, shape.vocabulary)
    tokens = SpecialTokens(
        config=plain,
        defaults=config,
        generation=generation,
        tokenizer=tokenizer,
        vocabulary=shape.vocabulary,
    )
    return Checkpoint(
        folder=folder,
        shape=shape,
        encoder_inner=config.whole("encoder_ffn_dim"),
        decoder_inner=config.whole("decoder_ffn_dim"),
        activation=_activation(config),
        tied=config.flag("tie_word_embeddings") is not False,
        features=features,
        tokens=tokens.whisper_tokens(),
        eos_token_ids=tokens.eos_token_ids(),
        suppress_token_ids=tokens.suppressed("suppress_tokens"),
        begin_suppress_token_ids=tokens.suppressed("begin_suppress_tokens"),
        alignment=AlignmentSettings.read(generation, config, layers=shape.decoder_layers, heads=shape.decoder_heads),
        architecture=(plain.get("architectures") or ARCHITECTURES)[0],
        tokenizer=tokenizer,
        stamps=stamps,
        quantized=converted is not None and converted.quantized,
    )


def _find_tokenizer(folder: Path) -> Any:
    make = partial(_read_tokenizer, folder)
    return WhisperTokenizer.read(folder, make) or make()


def _read_tokenizer(folder: Path) -> Any:
    """Returns transformers' tokenizer for ``folder``. The two lists that it was made from, 20 MB of strings, are
    dropped. Only `save_vocabulary`, which writes vocab.json, needs them.
    """
    from .loading import read_tokenizer

    tokenizer = read_tokenizer(folder)
    for name in ("_vocab", "_merges"):
        vars(tokenizer).pop(name, None)
    return tokenizer


def _check_tokenizer(folder: Path, tokenizer: Any, vocabulary: int) -> None:
    """Refuses a tokenizer that lacks many of the model's tokens, since transformers makes an empty tokenizer if its
    files are missing. Checkpoints may have a few more tokens than their tokenizer."""
    known = sum(token < vocabulary for token in tokenizer.get_vocab().values())
    if known < vocabulary // 2:
        raise CheckpointError(
            f"the tokenizer of {folder} knows only {known} of the {vocabulary} tokens that the model writes; put the "
            "checkpoint's own tokenizer.json (or vocab.json and merges.txt) beside its config.json"
        )


def _shape(config: FileSettings) -> WhisperShape:
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
                f"{config.path} has d_model={shape.width} and {heads} heads; allowed: a number of heads that "
                "divides d_model"
            )
    return shape


def _activation(config: FileSettings) -> str:
    name = config.get("activation_function")
    if not isinstance(name, str):
        raise config.bad("activation_function", "a name")
    if name == "gelu":  # in every Whisper except in tests; the import below takes two seconds
        return name
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UnsupportedModel(f"activation_function={name!r}; allowed: {', '.join(sorted(ACT2FN))}")
    return name


def _features(folder: Path, shape: WhisperShape) -> FeatureSettings:
    """Reads the feature extractor's settings from its own file, else from the processor's file, else derives them from
    the model's sizes."""
    written = FileSettings.read_if_there(folder / "preprocessor_config.json")
    if written is None or not written.values:
        processor = FileSettings.read_if_there(folder / "processor_config.json")
        there = processor is not None and "feature_extractor" in processor
        written = FileSettings(processor.path, processor.table("feature_extractor")) if processor and there else None
    settings = FeatureSettings.read(written or FileSettings(folder / "config.json", {}), feature_size=shape.mels)
    if settings.feature_size != shape.mels or settings.frames != shape.frames:
        raise CheckpointError(
            f"the feature extractor of {folder} makes {settings.feature_size} mel bands by {settings.frames} frames; "
            f"config.json asks for {shape.mels} by {shape.frames}; download the checkpoint again"
        )
    return settings
