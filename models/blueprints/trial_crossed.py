"""The trial of an encoder-decoder, before anything is promised: the decoder by its own attention, and by ours in chunks
and side by side, over encoder outputs of two lengths. A model that computes something else with us is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from attrs import define, evolve, field
from torch import Tensor

from ...core.errors import UnsupportedModel
from ...core.plan import Chunk, SequenceStart
from ...core.request import LogitRules, SamplingParams
from ..architectures.crossed_checkpoint import CrossedCheckpoint
from ..attention.layers import LayerRequest
from ..memory.kv import PagedKV
from ..memory.slots import CrossKV
from ..native.runner import Runner
from ..networks.encoder_decoder import EncoderDecoderNetwork
from ..networks.network import Feed, Record
from .trial import TOLERANCE, Nothing, by_library, refused

_LENGTHS = (11, 6)  # of the decoder's two prompts; the first is read in two chunks
LONGEST = max(_LENGTHS)
_EMBEDDINGS = (9, 7)  # of their encoder outputs: near enough to be attended together


def try_out_crossed(
    network: EncoderDecoderNetwork,
    checkpoint: CrossedCheckpoint,
    dtype: torch.dtype,
    open_native: Callable[[PagedKV, CrossKV], Runner] | None = None,
) -> None:
    """Compares, and refuses the model or attaches our attention to it.

    Args:
        dtype: what the module computes in.
        open_native: opens the native library over other pages and slots, see `trial.try_out`; ``None``: the module
            computes.

    Raises:
        UnsupportedModel: a layer asks attention for what we do not do, or the numbers differ.
    """
    prompts = list(map(partial(_prompt, checkpoint), _LENGTHS))
    outputs = list(map(partial(_output, network, dtype), _EMBEDDINGS))
    own, crossed, kept = _Witness(checkpoint), _Witness(checkpoint), network.paged.dtype
    trial = evolve(_over(network, dtype), native=None, witness=own, cross_witness=crossed)
    with refused(partial(_refusal, checkpoint)):
        if not network.decoder._can_set_attn_implementation():
            raise _refusal(checkpoint, "does not let its attention be replaced")
        network.attach("eager")  # transformers' exact one
        expected = list(map(partial(_reference, network), prompts, outputs))
        network.attach()
        found = _run(trial, prompts, outputs, [own, crossed])
    _compare(expected, found, checkpoint, dtype, "with the engine's attention than with its own")
    if open_native is None:
        return
    for stored in dict.fromkeys((dtype, kept)):
        other = trial if stored == dtype else _over(network, stored)
        runner = open_native(other.paged, other.cross)
        try:
            with refused(partial(_refusal, checkpoint)):
                found = _run(evolve(other, native=runner), prompts, outputs)
        finally:
            runner.release()
        _compare(expected, found, checkpoint, stored, by_library(stored, dtype))


def _over(network: EncoderDecoderNetwork, dtype: torch.dtype) -> EncoderDecoderNetwork:
    """The network over a page and a slot for each prompt."""
    paged = network.paged.another(pages=len(_LENGTHS), page_size=LONGEST, dtype=dtype)
    return evolve(network, paged=paged, cross=network.cross.another(len(_LENGTHS), dtype))


def _prompt(checkpoint: CrossedCheckpoint, length: int) -> list[int]:
    size = checkpoint.shape.vocabulary
    return [(step * 7919 + 13 * length) % size for step in range(min(length, checkpoint.shape.positions))]


def _output(network: EncoderDecoderNetwork, dtype: torch.dtype, length: int) -> Tensor:
    """An encoder output as there may be one, of ``length`` rows."""
    length = min(length, network.cross.embeddings)
    numbers = torch.arange(length * network.hidden, device=network.device).float()
    return numbers.mul(0.7).sin().view(length, -1).to(dtype)


def _reference(network: EncoderDecoderNetwork, prompt: list[int], output: Tensor) -> Tensor:
    """The last position's logits, by transformers alone."""
    tokens = torch.tensor([prompt], device=network.device)
    answer = network.model.module(
        encoder_outputs=network.encoder_output(output[None]), decoder_input_ids=tokens, use_cache=False
    )
    last: Tensor = answer.logits[0, -1].float()
    return last


def _run(
    trial: EncoderDecoderNetwork, prompts: list[list[int]], outputs: list[Tensor], witnesses: Sequence[_Witness] = ()
) -> list[Tensor]:
    """The same as the engine computes it: the first prompt's beginning beside the second, then its rest."""
    for slot, output in enumerate(outputs):
        trial.write_cross(slot, output)
    records = list(map(_record, range(len(prompts)), prompts))
    for record in records:
        trial.start(record)
    cut = max(1, len(prompts[0]) - 4)
    beginning = _last(trial, [_feed(records[0], 0, cut), _feed(records[1], 0, len(prompts[1]))])
    for witness in witnesses:
        witness.check()
    if cut == len(prompts[0]):
        return beginning
    return [_last(trial, [_feed(records[0], cut, len(prompts[0]) - cut)])[0], beginning[1]]


def _compare(
    expected: list[Tensor], found: list[Tensor], checkpoint: CrossedCheckpoint, dtype: torch.dtype, how: str
) -> None:
    for own, ours in zip(expected, found, strict=True):
        largest, apart = float(own.abs().max()), float((own - ours).abs().max())
        if not apart <= TOLERANCE[dtype] * max(largest, 1e-6):
            raise _refusal(
                checkpoint, f"computes other numbers {how} ({apart:.3g} apart, the largest is {largest:.3g})"
            )


def _last(network: EncoderDecoderNetwork, feeds: list[Feed]) -> list[Tensor]:
    """The last row of each chunk."""
    wanted = [(index, feed.part.length - 1) for index, feed in enumerate(feeds)]
    return list(network.logits(feeds, wanted, Nothing()))


def _record(number: int, prompt: list[int]) -> Record:
    start = SequenceStart(
        sequence_id=number,
        token_ids=tuple(prompt),
        prompt_length=len(prompt),
        sampling=SamplingParams(),
        rules=LogitRules(),
        probe=None,
    )
    return Record(start, list(prompt))


def _feed(record: Record, start: int, length: int) -> Feed:
    number = record.start.sequence_id
    part = Chunk(sequence_id=number, start=start, length=length, page_table=(number,), cross_slot=number, samples=False)
    return Feed(part=part, record=record)


@define(eq=False)
class _Witness:
    """Each layer is to ask once in a step, for what the KV was laid out for."""

    checkpoint: CrossedCheckpoint
    layers: list[int] = field(init=False, factory=list)

    def hear(self, request: LayerRequest) -> None:
        shape = self.checkpoint.shape
        self.layers.append(request.layer)
        sizes = (request.kv_heads, request.head_dim, request.value_dim)
        if sizes != (shape.kv_heads, shape.head_dim, shape.head_dim):
            raise _refusal(
                self.checkpoint,
                f"has a layer {request.layer} with keys and values of {request.kv_heads} heads by {request.head_dim} "
                f"and {request.value_dim}, where config.json tells {shape.kv_heads} by {shape.head_dim}",
            )
        if request.window is not None:
            raise _refusal(self.checkpoint, f"has a layer {request.layer} with a window of {request.window} positions")

    def check(self) -> None:
        """A step is over: all layers have asked, each once, or somebody else mixes the positions."""
        if sorted(self.layers) != list(range(self.checkpoint.shape.layers)):
            raise _refusal(
                self.checkpoint,
                f"has {self.checkpoint.shape.layers} layers by config.json, but attention is asked by the layers "
                f"{self.layers}",
            )
        self.layers.clear()


def _refusal(checkpoint: CrossedCheckpoint, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{checkpoint.architecture} in {checkpoint.folder} {reason}; allowed: encoder-decoders whose decoder layers "
        "have causal attention to their own tokens and plain attention to the encoder's output"
    )
