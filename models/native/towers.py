"""Towers: encoders of images and audio within language models, whose modules have the names of transformers. Their
layers are programs of the native library.

Transformers' own module calls the layers, and computes what is before and behind them, item by item, so that the bits
of an item depend on no other one. Its tiles or windows of audio stand side by side in a call. As images have any size,
a program is written for each call. So its table of rotary positions, in one dimension or two, is what transformers'
module computes for the rows of the call, and memory for rows is taken for the time of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..memory.rows import Rows
from .layers import MOONSHINE, WHISPER, Layer, Paths
from .library import ACTIVATIONS, Library
from .parts import is_known
from .program import MULTIPLE, Attention, Program
from .runner import Runner

MODEL_TYPES = {
    *("qwen2_vl", "qwen2_5_vl", "llava", "llava_next", "llava_onevision", "gemma3", "idefics3", "smolvlm"),
    *("qwen2_audio", "voxtral", "audioflamingo3", "moss_transcribe_diarize", "glmasr", "qwen3_asr"),
}
"""Model types of configurations whose towers this module knows."""

_NAMES = ("visual", "vision_tower", "vision_model", "audio_tower")
_WINDOWED = "Qwen2_5_VLVisionBlock"  # most layers attend within windows of the image
_TUPLED = "Qwen3ASRAudioEncoderLayer"  # a layer returns a tuple
_FLAT = {"Qwen2VLVisionBlock", _WINDOWED, _TUPLED}  # they read the rows of all chunks in two dimensions
_FILLED = {"Qwen2AudioEncoderLayer", "AudioFlamingo3EncoderLayer"}  # what fills up a window is masked, and cut off
_SIGLIP: Paths = (
    *("self_attn.q_proj k_proj v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
    *("layer_norm1", "layer_norm2"),
)
_KINDS: dict[str, Paths] = {
    **dict.fromkeys(("CLIPEncoderLayer", "SiglipEncoderLayer", "Idefics3EncoderLayer", "SmolVLMEncoderLayer"), _SIGLIP),
    **dict.fromkeys(("Qwen2AudioEncoderLayer", "VoxtralEncoderLayer", "AudioFlamingo3EncoderLayer"), WHISPER),
    **dict.fromkeys(("MossTranscribeDiarizeAudioLayer", _TUPLED), WHISPER),
    "GlmAsrEncoderLayer": MOONSHINE,
    "Qwen2VLVisionBlock": ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1", "norm2"),
    _WINDOWED: ("attn.qkv", "attn.proj", "mlp.gate_proj up_proj", "mlp.down_proj", "norm1", "norm2"),
}
_ROWS = 1024  # of several tiles or windows in a call
_TRIED = (9, 40)  # rows of made-up chunks


def unknown_config(config: Any) -> str | None:
    """Returns the reason why the tower of a language model cannot be a program, as far as its configuration tells;
    ``None``: it can."""
    own, read = getattr(config, "audio_config", None) or config.vision_config, _read_by(config)
    activation, width, heads = _activation(own), getattr(own, "embed_dim", own.hidden_size), own.num_attention_heads
    if not isinstance(read, int) or read == 0:
        return f"its language model reads the layers {read} of its encoder; known: one"
    if 0 in getattr(own, "fullatt_block_indexes", ()):
        return "the first layer of its encoder attends to the whole image; known: to windows"
    if activation not in ACTIVATIONS:
        return f"the activation of its encoder is {activation}; known: {', '.join(ACTIVATIONS)}"
    if width % MULTIPLE:
        return f"the width of its encoder is {width}; known: multiples of {MULTIPLE}"
    fewer = getattr(own, "num_key_value_heads", heads) != heads
    return "its encoder has fewer heads of keys than of queries" if fewer else None


def _read_by(config: Any) -> Any:
    return getattr(config, "vision_feature_layer", -1)  # LLaVA's language model may read another layer than the last


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_act", None) or config.activation_function)


def known_tower(module: Any) -> Tower | str:
    """Returns the tower of a whole model as the library computes it, or the reason why it does not."""
    model = getattr(module, "model", module)
    tower: Any = next((getattr(model, name) for name in _NAMES if hasattr(model, name)), None)
    holder = getattr(tower, "encoder", tower)
    layers = list(getattr(holder, "blocks", getattr(holder, "layers", ())))
    names = {type(layer).__name__ for layer in layers}
    if len(names) != 1 or names - _KINDS.keys():
        return f"the layers of its encoder are {', '.join(sorted(names)) or 'none'}; known: {', '.join(_KINDS)}"
    if why_not := unknown_config(model.config):
        return why_not
    kind, read = names.pop(), _read_by(model.config)
    parts = [Layer.of(layer, _KINDS[kind], ahead=True) for layer in layers]
    if not all(is_known(linear) for part in parts for linear in part.linears):
        return "the linear layers of its encoder are not torch's"
    return Tower(kind, tower, layers, parts, read if read >= 0 else len(layers) + 1 + read)


@frozen(eq=False)
class Tower:
    """The tower ``module`` with its ``layers`` of a ``kind``, and their ``parts``. The first ``count`` are computed."""

    kind: str
    module: Any
    layers: Sequence[Any]
    parts: Sequence[Layer]
    count: int

    @property
    def packed(self) -> bool:
        """True if the library can compute the layers."""
        return hasattr(self.parts[0].linears[0], "panels")

    def pack(self, *, int8: bool = False) -> None:
        """Replaces the linear layers by packed matrices, one after the other."""
        for part in self.parts:
            part.pack(int8=int8)

    def program(self, turns: tuple[Tensor, Tensor] | None) -> Program:
        """Writes the program of the layers, which must be packed. What it computes stays in the first buffer.

        Args:
            turns: cosines and sines for each row of the call, [rows, half]; ``None``: rows are not turned.
        """
        program, first = Program(), self.parts[0]
        buffers, size, inputs = first.buffers(program), first.matrices[0][0].head_dim, first.panels()[1].inputs
        program.buffer(0)
        program.turns += [] if turns is None else [turns]
        for index, part in enumerate(self.parts[: self.count]):
            told = {"turned": 0 if turns is None else 2 * turns[0].shape[1], "by_chunk": not self._is_whole(index)}
            attention = Attention.plain(inputs // size, size, size**-0.5, **told)
            part.write(program, buffers, attention, ACTIVATIONS[_activation(self.module.config)])
        return program

    def _is_whole(self, index: int) -> bool:
        """True if rows of layer ``index`` attend to all of their image, false for their window alone."""
        return self.kind != _WINDOWED or index in self.module.fullatt_block_indexes

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Lets the library compute the layers within the block: the first one all of them, and the others nothing."""
        for layer in self.layers:
            layer.forward = self._compute if layer is self.layers[0] else self._returned
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def _returned(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden,) if self.kind == _TUPLED else hidden

    def _compute(self, hidden: Tensor, told: Tensor | None = None, **others: Any) -> Any:
        """Computes all layers for ``hidden`` [chunks, rows, width], or [rows, width] of chunks that ``cu_seqlens``
        tells. Rows that are masked are not computed."""
        given = [one for one in (told, others.get("attention_mask"), others.get("cu_seqlens")) if one is not None]
        flat, shown = hidden.flatten(0, -2), torch.ones(hidden.shape[:-1], dtype=torch.bool)
        if given and self.kind not in _FLAT:
            shown = given[0][:, 0, 0] == (0.0 if given[0].is_floating_point() else True)
        assert self.kind in _FILLED or bool(shown.all()), "masked rows may be read, but are not computed"
        lengths = given[0].diff().tolist() if self.kind in _FLAT else shown.sum(-1).tolist()
        rows, turns, joined = flat[shown.flatten()], None, self.kind == _WINDOWED
        if (positions := others.get("position_embeddings")) is not None:
            halves = [one.flatten(0, -2)[:, : one.shape[-1] // 2] for one in positions]
            cosines, sines = (half.repeat(len(rows) // len(half), 1) for half in halves)  # for each window
            turns = cosines, sines
        chunks = [(length, int(joined and place > 0), 0, 0) for place, length in enumerate(lengths)]
        most = len(rows) if joined else max(*lengths, min(len(rows), _ROWS))
        library, threads = Library.load(), torch.get_num_threads()
        assert library is not None, "a tower was packed without the library"
        runner = Runner.open(library, self.program(turns), None, rows=most, positions=len(rows), threads=threads)
        try:
            runner.step(rows, Rows(positions=range(len(rows)), chunks=chunks, tables=(), wanted=()))
        finally:
            runner.release()
        found = flat.clone()
        found[shown.flatten()] = rows
        return self._returned(found.view(hidden.shape))

    def tried(self, *, natively: bool = False) -> list[Tensor]:
        """Returns what the layers compute of made-up rows, by transformers or by the library."""
        if natively:
            with self.computed():
                return self.tried()
        count, width, size = sum(_TRIED), self.parts[0].linears[0].in_features, self.parts[0].matrices[0][0].head_dim
        hidden = torch.arange(count * width, dtype=torch.float32).mul(0.03).sin().view(1, count, width)
        angles, flat = hidden[..., : size // 2].repeat(1, 1, 2), self.kind in _FLAT
        hidden, angles = (hidden[0], angles[0]) if flat else (hidden, angles)
        turned = hasattr(self.module, "rotary_pos_emb") or hasattr(self.module, "rotary_emb")
        given = {"position_embeddings": (angles.cos(), angles.sin())} if turned else {}
        for index, layer in enumerate(self.layers[: self.count]):
            ends = (0, count) if self.kind == _WINDOWED and self._is_whole(index) else (0, _TRIED[0], count)
            told = {"cu_seqlens": torch.tensor(ends)} if flat else {"attention_mask": None}
            found = layer(hidden, **told, **given)
            hidden = found[0] if self.kind == _TUPLED else found
        return [hidden.flatten(0, -2)]
