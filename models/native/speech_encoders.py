"""Encoders of items, whose modules have the names of transformers, as programs of the native library: of speech, and of
the texts that encoder-decoders read. What is before the layers is computed clip by clip, so that the bits of a clip
depend on no other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.nn import functional

from .encoders import CROSSED, TextEncoder
from .layers import MOONSHINE, Layer
from .library import ACTIVATIONS, Ending
from .panels import PANEL, Panels
from .parts import (
    CausalConvolution,
    PackedConvolution,
    PackedDistances,
    is_known,
    norm_of,
    pack_linears,
    plain,
    turned,
    unknown_turns,
)
from .program import MULTIPLE, Attention, Normed, Places, Program

STREAMED = frozenset({"nemotron_asr_streaming", "nemotron3_5_asr"})
CONFORMERS = STREAMED | {"parakeet_ctc", "parakeet_rnnt", "parakeet_tdt", "cohere_asr", "canary"}
MODEL_TYPES = CONFORMERS | {"moonshine", "moonshine_streaming", "bart", "mbart", "pegasus", "t5", "mt5"}
"""Model types of configurations whose encoders this module knows."""

_ROWS = (9, 40)  # of made-up clips
_KERNELS = (((3, 3), (2, 2)), ((1, 1), (1, 1)))  # of convolutions over spectra, with their steps
_SPECTRA = 16  # rows whose spectra are convolved together: more do not stay in the caches
Payload = Mapping[str, Tensor]
Stem = Callable[[Tensor], Tensor]
"""Runs `SpeechEncoder.stem_program` for some rows."""


def known_encoder(module: Any) -> SpeechEncoder | str:
    """Returns the encoder ``module`` of transformers as the library computes it, or the reason why it does not."""
    names = {type(layer).__name__ for layer in getattr(module, "layers", getattr(module, "block", ()))}
    if len(names) != 1 or names - _KINDS.keys():
        return f"the layers of its encoder are {', '.join(sorted(names)) or 'none'}; known: {', '.join(_KINDS)}"
    encoder = _KINDS[names.pop()](module)
    return encoder.unknown() or encoder


@frozen(eq=False)
class SpeechEncoder:
    """One of transformers' encoders of speech, ``module``, or another encoder of items."""

    module: Any

    @property
    def linears(self) -> list[tuple[Any, tuple[str, ...]]]:
        """The module and the names of the linear layers that each packed matrix of the layers joins."""
        raise NotImplementedError

    @property
    def activation(self) -> str:
        """The name of the activation of the feed-forward parts."""
        config = self.module.config
        return str(getattr(config, "encoder_hidden_act", None) or config.hidden_act)

    def unknown(self) -> str | None:
        """Returns the reason why the encoder cannot be a program; ``None``: it can."""
        if not all(is_known(getattr(parent, name)) for parent, names in self.linears for name in names):
            return "the linear layers of its encoder are not torch's"
        if self.activation not in ACTIVATIONS:
            return f"the activation of its encoder is {self.activation}; known: {', '.join(ACTIVATIONS)}"
        if self.module.config.hidden_size % MULTIPLE:
            return f"the width of its encoder is {self.module.config.hidden_size}; known: multiples of {MULTIPLE}"
        own = self.module.layers[0].self_attn
        fewer = own.q_proj.out_features != own.k_proj.out_features
        return "its encoder has fewer heads of keys than of queries" if fewer else unknown_turns(self.module)

    def pack(self, positions: int, *, int8: bool = False) -> None:
        """Replaces the linear layers by packed matrices, one after the other, and what else the library computes.

        Args:
            positions: the most rows of a clip.
        """
        self.pack_rest(positions, int8=int8)
        for parent, names in self.linears:
            pack_linears(parent, names, int8=int8)

    def pack_rest(self, positions: int, *, int8: bool) -> None:
        """Does the part of `pack` that concerns other parts than the linear layers of the layers."""
        raise NotImplementedError

    def embed(self, payload: Payload, stem: Stem) -> Tensor:
        """Returns the input of `program`, [rows, width], for one clip; or tokens [rows]."""
        raise NotImplementedError

    def stem_program(self) -> Program | None:
        """Writes the program of the largest product in front of `program`; ``None``: there is none."""
        raise NotImplementedError

    def program(self, positions: int) -> Program:
        """Writes the program of the encoder, which must be packed, for clips of up to ``positions`` rows. The program
        ends with the encoder output."""
        raise NotImplementedError

    def clip(self, rows: int) -> Payload:
        """Returns a made-up clip of about as many rows."""
        raise NotImplementedError

    def clips(self) -> list[Payload]:
        """Returns made-up clips of different lengths."""
        return list(map(self.clip, _ROWS))


def _wave(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.03).sin().view(shape)


@frozen(eq=False)
class MoonshineEncoder(SpeechEncoder):
    """Moonshine's (Jeffries et al. 2024). Torch computes the first convolution. The second one is the stem, and the
    third one part of the program."""

    stem_activation, ending, last_norm = "gelu", Ending.ACTIVATED, "layer_norm"
    computed, packed = ("conv2", "conv3"), PackedConvolution  # the convolutions that the library computes

    @property
    def linears(self) -> list[tuple[Any, tuple[str, ...]]]:
        return [one for layer in self.module.layers for one in Layer.of(layer, MOONSHINE).matrices]

    @property
    def convolutions(self) -> tuple[Any, Any]:
        """The convolutions that the library computes."""
        first, second = map(self.module.get_submodule, self.computed)
        return first, second

    def pack_rest(self, positions: int, *, int8: bool) -> None:  # noqa: ARG002
        for path, convolution in zip(self.computed, self.convolutions, strict=True):
            self.module.set_submodule(path, self.packed(convolution, int8=int8))

    def embed(self, payload: Payload, stem: Stem) -> Tensor:
        first, second = self.convolutions
        found: Tensor = second.windows(stem(first.windows(self._begun(payload["input_values"]))))
        return found

    def _begun(self, samples: Tensor) -> Tensor:
        """Returns the rows that the first of `convolutions` reads."""
        own, first = self.module, self.module.conv1
        windows = samples.unfold(0, *first.kernel_size, *first.stride)
        hidden: Tensor = own.groupnorm(functional.linear(windows, first.weight[:, 0]).tanh_().T[None])[0].T
        return hidden

    def stem_program(self) -> Program:
        program, panels = Program(), self.convolutions[0].linear.panels()
        windows, values = program.buffer(panels.inputs), program.buffer(panels.outputs)
        program.linear(windows, values, panels, Ending.ACTIVATED, activation=ACTIVATIONS[self.stem_activation])
        return program

    def program(self, positions: int) -> Program:
        program, encoder = Program(), self.module
        layers = [Layer.of(layer, MOONSHINE, ahead=True) for layer in encoder.layers]
        convolution = self.convolutions[1].linear.panels()
        windows, buffers = program.buffer(convolution.inputs), layers[0].buffers(program)
        program.linear(windows, buffers[0], convolution, self.ending, activation=ACTIVATIONS[self.stem_activation])
        for layer, attention in zip(layers, self._attentions(program, positions), strict=True):
            layer.write(program, buffers, attention, ACTIVATIONS[self.activation])
        last = program.buffer(convolution.outputs)
        program.norm(buffers[0], last, norm_of(encoder.get_submodule(self.last_norm)), wanted=True)
        return program

    def _attentions(self, program: Program, positions: int) -> Iterable[Attention]:
        """Returns the attention of each layer."""
        own, turns = self.module.layers[0].self_attn, turned(program, self.module, positions)
        return [_attention(own, paired=True, **turns)] * len(self.module.layers)

    def clip(self, rows: int) -> Payload:
        return {"input_values": _wave(511 + 384 * rows)}


@frozen(eq=False)
class StreamingMoonshineEncoder(MoonshineEncoder):
    """Moonshine streaming's, whose rows see a window and know no positions. Torch computes what is before the
    convolutions. The first one is the stem, and the second one part of the program."""

    stem_activation, ending, last_norm = "silu", Ending.STORE, "final_norm"
    computed, packed = ("embedder.conv1", "embedder.conv2"), CausalConvolution

    def _begun(self, samples: Tensor) -> Tensor:
        own = self.module.embedder
        return functional.silu(own.linear(own.comp(own.cmvn(samples.view(-1, own.frame_len)))))

    def _attentions(self, program: Program, positions: int) -> Iterable[Attention]:  # noqa: ARG002
        for layer, (left, right) in zip(self.module.layers, self.module.config.sliding_windows, strict=True):
            yield _attention(layer.self_attn, window=left, ahead=max(right - 1, 0))

    def clip(self, rows: int) -> Payload:
        return {"input_values": _wave(4 * self.module.embedder.frame_len * rows)}


@frozen(eq=False)
class ConformerEncoder(SpeechEncoder):
    """FastConformer's (Rekesh et al. 2023). A layer has half a feed-forward part, attention with relative positions
    (Dai et al. 2019), a convolution of each channel, and the other half. Torch computes the convolutions over spectra.
    The product after them is the stem."""

    @property
    def linears(self) -> list[tuple[Any, tuple[str, ...]]]:
        found: list[tuple[Any, tuple[str, ...]]] = [(self.module.subsampling, ("linear",))]
        for layer in self.module.layers:
            found += [(layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.self_attn, ("o_proj",))]
            for feed in (layer.feed_forward1, layer.feed_forward2):
                found += [(feed, ("linear1",)), (feed, ("linear2",))]
        return found

    def unknown(self) -> str | None:
        width = self.module.config.hidden_size
        if width % PANEL:
            return f"the width of its encoder is {width}; known: multiples of {PANEL}"
        for layer in self.module.subsampling.layers:
            if isinstance(layer, nn.Conv2d) and (layer.kernel_size, layer.stride) not in _KERNELS:
                return f"its spectra have kernels {layer.kernel_size} by steps of {layer.stride}; known: {_KERNELS}"
        return SpeechEncoder.unknown(self)

    def pack_rest(self, positions: int, *, int8: bool) -> None:
        last = torch.channels_last  # in which torch's convolutions of channels are twice as fast
        for layer in self.module.subsampling.layers:
            if isinstance(layer, nn.Conv2d):
                weight = torch.empty_like(layer.weight, memory_format=last).copy_(layer.weight.detach())
                layer.weight = nn.Parameter(weight, requires_grad=False)
        config = self.module.config  # torch computes a row that is masked, too
        shape = 1, min(positions + 1, config.max_position_embeddings), config.hidden_size
        rows = torch.empty(shape, dtype=self.module.subsampling.linear.weight.dtype)
        far = self.module.encode_positions(rows)[0]
        for layer in self.module.layers:
            own, convolution = layer.self_attn, layer.conv
            with torch.no_grad():
                outputs = own.relative_k_proj(far)
            content = own.bias_u.detach()  # added to all queries, and taken away where only positions are read
            before = torch.zeros_like(content).flatten() if own.q_proj.bias is None else own.q_proj.bias.detach()
            own.q_proj.bias = nn.Parameter(before + content.flatten(), requires_grad=False)
            own.bias_v = nn.Parameter(own.bias_v.detach() - content, requires_grad=False)
            own.bias_u = nn.Parameter(torch.zeros_like(content), requires_grad=False)
            own.relative_k_proj = PackedDistances(outputs, len(own.bias_u))
            for name in ("pointwise_conv1", "pointwise_conv2"):
                setattr(convolution, name, PackedConvolution(getattr(convolution, name), int8=int8))

    def embed(self, payload: Payload, stem: Stem) -> Tensor:
        features = payload["input_features"]
        if "attention_mask" in payload:
            features = features[: int(payload["attention_mask"].sum())]
        return stem(torch.cat(list(self._spectra(features))))

    def _spectra(self, features: Tensor) -> Iterator[Tensor]:
        """Yields the inputs of the stem, some rows at a time: so what lies between two convolutions, which is much
        larger than the audio, stays in the caches. Each convolution halves the number of frames, and its kernel begins
        one frame before."""
        layers = list(self.module.subsampling.layers)
        halvings = sum(isinstance(one, nn.Conv2d) and one.stride == (2, 2) for one in layers)
        rows = -(-len(features) // 2**halvings)
        for start in range(0, rows, _SPECTRA):
            stop = min(start + _SPECTRA, rows)
            first, end = (start << halvings) - 2**halvings + 1, stop << halvings
            hidden = features[max(first, 0) : end][None, None]
            for layer in layers:
                if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
                    padded = functional.pad(hidden, (0, 0, int(start == 0), int(stop == rows)))
                    hidden = functional.conv2d(padded, layer.weight, layer.bias, 2, (0, 1), 1, layer.groups)
                else:
                    hidden = layer(hidden)
            yield hidden[0].transpose(0, 1).flatten(1)

    def stem_program(self) -> Program:
        program, panels, scale = Program(), self.module.subsampling.linear.panels(), float(self.module.input_scale)
        windows, rows = program.buffer(panels.inputs), program.buffer(panels.outputs)
        program.linear(windows, rows, panels, Ending.STORE, scale=scale)
        return program

    def program(self, positions: int) -> Program:  # noqa: ARG002  (vectors of distances are packed)
        program, layers, width = self._begun(), list(self.module.layers), self.module.config.hidden_size
        own, feed = layers[0].self_attn, layers[0].feed_forward1
        hidden, inner = program.buffer(width), program.buffer(feed.linear1.out_features)
        split, attended = program.buffer(own.q_proj.panels().outputs), program.buffer(own.o_proj.in_features)
        gated, convolved, last = (program.buffer(width) for _ in range(3))
        of = torch.arange(own.relative_k_proj.count, dtype=torch.int32)
        for layer in layers:
            own, part = layer.self_attn, layer.conv
            self._feed(program, hidden, inner, layer.feed_forward1, norm_of(layer.norm_feed_forward1))
            program.linear(hidden, split, own.q_proj.panels(), Ending.STORE, norm=norm_of(layer.norm_self_att))
            program.attend_all(split, attended, _by_distance(own, of, window=self.window, ahead=0))
            program.linear(attended, hidden, own.o_proj.panels(), Ending.ADD)
            widen, narrow = part.pointwise_conv1.linear.panels(), part.pointwise_conv2.linear.panels()
            norm, sigmoid = norm_of(layer.norm_conv), ACTIVATIONS["sigmoid"]
            program.linear(hidden, gated, widen, Ending.GATED_BY, norm=norm, activation=sigmoid)
            self._convolve(program, gated, convolved, part)
            program.linear(convolved, hidden, narrow, Ending.ADD)
            self._feed(program, hidden, inner, layer.feed_forward2, norm_of(layer.norm_feed_forward2))
            if layer is not layers[-1]:
                program.norm(hidden, hidden, norm_of(layer.norm_out))
        program.norm(hidden, last, norm_of(layers[-1].norm_out), wanted=True)
        return program

    @property
    def window(self) -> int:
        """The `Attention.window` of the layers."""
        return 0

    def _begun(self) -> Program:
        """Returns a program without operations."""
        return Program()

    def _convolve(self, program: Program, source: int, to: int, part: Any) -> None:
        """Adds the convolution of each channel, its norm and its activation."""
        taps, shift = _folded(part.depthwise_conv, part.norm)
        activation = ACTIVATIONS[self.activation]
        program.convolve(source, to, taps, shift, before=part.padding, activation=activation)

    def _feed(self, program: Program, hidden: int, inner: int, feed: Any, norm: Normed) -> None:
        """Adds half of a feed-forward part."""
        activation = ACTIVATIONS[self.activation]
        program.linear(hidden, inner, feed.linear1.panels(), Ending.ACTIVATED, norm=norm, activation=activation)
        program.linear(inner, hidden, feed.linear2.panels(), Ending.ADD, scale=0.5)

    def clip(self, rows: int) -> Payload:
        config = self.module.config
        frames = config.subsampling_factor * rows
        return {
            "input_features": _wave(frames, config.num_mel_bins),
            "attention_mask": torch.ones(frames, dtype=torch.bool),
        }


@define(eq=False)
class Tails:
    """The ends of the inputs of convolutions over spectra, after a part of an audio."""

    ends: dict[str, Tensor] = field(factory=dict, repr=False)

    def update(self, hidden: Tensor, key: str, convolution: Any) -> Tensor:
        """Returns ``hidden`` [1, channels, hops, bands] after the end of the part before, or after silence."""
        silence = hidden.new_zeros(*hidden.shape[:2], convolution.left_pad_init, hidden.shape[3])
        joined = torch.cat((self.ends.get(key, silence), hidden), 2)
        self.ends[key] = joined[:, :, joined.shape[2] - convolution.left_pad :].clone()
        return joined


@frozen(eq=False)
class StreamingConformerEncoder(ConformerEncoder):
    """Nemotron's, whose rows see their block and some blocks before. It hears on where it was: the state of an audio
    has keys and values of the blocks before, and the inputs of the convolutions."""

    @property
    def block(self) -> int:
        """The number of rows of a block."""
        return int(self.module.config.default_num_lookahead_tokens) + 1

    @property
    def window(self) -> int:
        return int(self.module.config.sliding_window - 1) // self.block * self.block + 1

    def _begun(self) -> Program:
        return Program(kept=max(self.window, self.module.config.conv_kernel_size) - 1, block=self.block)

    def _convolve(self, program: Program, source: int, to: int, part: Any) -> None:
        own = part.depthwise_conv
        taps, shift = plain(own.weight[:, 0].T), torch.zeros(own.out_channels, dtype=torch.float32)
        shift = shift if own.bias is None else plain(own.bias)
        program.convolve(source, to, taps, shift, before=own.left_pad, activation=None)
        program.norm(to, to, norm_of(part.norm), activation=ACTIVATIONS[self.activation])

    def embed(self, payload: Payload, stem: Stem) -> Tensor:
        features = payload["input_features"]
        return self.hear_on(features[: int(payload["attention_mask"].sum())], None, stem)

    def hear_on(self, features: Tensor, tails: Tails | None, stem: Stem) -> Tensor:
        """Returns what `embed` returns, for whole blocks of an audio after the part with these ``tails``; ``None``: for
        a whole audio."""
        own = self.module.subsampling
        hidden: Tensor = own.act_fn(own.conv_in(features[None, None], padding_cache=tails))
        for layer in own.layers:
            hidden = own.act_fn(layer(hidden, None, padding_cache=tails)[0])
        return stem(hidden[0].transpose(0, 1).flatten(1))

    def clip(self, rows: int) -> Payload:
        return {**ConformerEncoder.clip(self, rows), "num_lookahead_tokens": torch.tensor(self.block - 1)}


def _attention(own: Any, **others: Any) -> Attention:
    return Attention.plain(own.q_proj.out_features // own.head_dim, own.head_dim, float(own.scaling), **others)


def _by_distance(own: Any, of: Tensor, **others: Any) -> Attention:
    """Returns attention in which each distance has a vector. A score has the product of a query and that vector, and
    the product of a number for each head and the vector."""
    vectors = own.relative_k_proj.vectors  # [heads, panels, size, 32]
    heads, panels, size, _ = vectors.shape
    keys = Panels(heads * panels * PANEL, size, vectors.view(heads * panels, size, PANEL), None)
    numbers = torch.einsum("hs,hpsi->hpi", own.bias_v.float(), vectors).flatten(1)[:, : len(of)] * own.scaling
    places = Places(of=of, keys=keys, queries=None)
    return _attention(own, distances=plain(numbers), places=places, **others)


def _folded(convolution: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Returns the taps [rows, channels] and the shift of a convolution of each channel with its batch norm."""
    gain = plain(norm.weight) * torch.rsqrt(norm.running_var.float() + norm.eps)
    bias = 0.0 if convolution.bias is None else convolution.bias.detach()
    taps = convolution.weight.detach()[:, 0] * gain[:, None]
    return plain(taps.T), plain((bias - norm.running_mean) * gain + norm.bias.detach())


@frozen(eq=False)
class TextReader(SpeechEncoder):
    """The encoder of an encoder-decoder that reads texts, as `TextEncoder` writes it."""

    def unknown(self) -> str | None:
        return TextEncoder(self.module).unknown()

    def pack(self, positions: int, *, int8: bool = False) -> None:  # noqa: ARG002
        TextEncoder(self.module).pack(int8=int8)

    def embed(self, payload: Payload, stem: Stem) -> Tensor:  # noqa: ARG002
        return payload["input_ids"]

    def stem_program(self) -> None:
        return None

    def program(self, positions: int) -> Program:
        return TextEncoder(self.module).program(positions)

    def clip(self, rows: int) -> Payload:
        return {"input_ids": torch.arange(rows) * 7919 % self.module.config.vocab_size}


_KINDS: dict[str, Callable[[Any], SpeechEncoder]] = {
    **dict.fromkeys(CROSSED, TextReader),
    "MoonshineEncoderLayer": MoonshineEncoder,
    "MoonshineStreamingEncoderLayer": StreamingMoonshineEncoder,
    "ParakeetEncoderBlock": ConformerEncoder,
    "NemotronAsrStreamingEncoderBlock": StreamingConformerEncoder,
}
