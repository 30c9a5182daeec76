"""A trial before anything is promised: a few tokens through the module as transformers runs it, and as the engine does:
a decoder by our attention, in chunks and side by side; an encoder with prompts filled up to one length. A model that
computes something else with us than without, or cannot be run, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from attrs import define, evolve, field
from torch import Tensor

from ...core.errors import InvalidRequest, UnsupportedModel
from ...core.plan import Chunk, SequenceStart
from ...core.request import LogitRules, Pooling, SamplingParams
from ..architectures.text import TextCheckpoint
from ..attention.layers import LayerRequest
from ..launch.pipeline import StagedKV
from ..linear.modules import exactly
from ..memory.kv import PagedKV
from ..native.runner import Runner
from ..networks.causal import CausalNetwork
from ..networks.encoder import EncoderNetwork
from ..networks.network import Feed, Record

_LENGTHS = (11, 5)  # of a decoder's two prompts; the first is read in two chunks
LONGEST = max(_LENGTHS)
_SIMILAR = (17, 13)  # of an encoder's: they share a batch, and the second is filled up
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}  # of the largest number
_OF_INT8 = 0.1  # where inputs are quantized, one between two values may be rounded to either


class Nothing:
    """No encoder outputs."""

    def get(self, key: str) -> Tensor:
        raise AssertionError(f"{key!r} is read in a trial of text")


def try_out(
    network: CausalNetwork,
    checkpoint: TextCheckpoint,
    dtype: torch.dtype,
    open_native: Callable[[PagedKV], Runner] | None = None,
) -> None:
    """Compares, and refuses the model or attaches our attention to it.

    Args:
        dtype: what the module computes in.
        open_native: opens the native library over other pages; ``None``: the module computes. Where the network's pages
            are of another dtype, it is tried with both: pages of ``dtype`` show that the library computes the model,
            the others that their format costs no more than its bits.

    Raises:
        UnsupportedModel: a layer asks attention for what we do not do, or the numbers differ.
    """
    prompts = _prompts(checkpoint, _LENGTHS)
    compiled, kept = network.compiled, network.paged.dtype
    network = evolve(network, compiled=None, graphs=None, native=None)
    with refused(partial(_refusal, checkpoint)), exactly(network.language):
        if not network.language._can_set_attn_implementation():
            raise _refusal(checkpoint, "does not let its attention be replaced")
        network.attach("eager")  # transformers' exact one
        expected = list(map(partial(_reference, network), prompts))  # no comprehension: a closure, see `core.frames`
        witness = _Witness(checkpoint)
        network.attach()
        paged = _pages(network.paged, dtype)
        found = _run(evolve(network, paged=paged, witness=witness), prompts, witness)
    for told, ours in zip(expected, found, strict=True):
        _compare(told, ours, checkpoint, dtype, "with the engine's attention than with its own")
    if open_native is not None:
        for stored in dict.fromkeys((dtype, kept)):
            own = paged if stored == dtype else _pages(network.paged, stored)
            with _opened(open_native, own) as native, refused(partial(_refusal, checkpoint)):
                found, int8 = _run(evolve(network, paged=own, native=native), prompts, witness=None), native.in_int8
            for told, ours in zip(expected, found, strict=True):
                _compare(told, ours, checkpoint, stored, by_library(stored, dtype), int8=int8)
    if compiled is None:
        return
    found = _compile(evolve(network, paged=paged, compiled=compiled), prompts)
    for told, ours in zip(expected, found, strict=True):
        _compare(told, ours, checkpoint, dtype, "with compiled layers than with its own")


def by_library(stored: torch.dtype, dtype: torch.dtype) -> str:
    """How the native library computes with keys and values in ``stored``, for a message."""
    held = "" if stored == dtype else f" with keys and values in {str(stored).removeprefix('torch.')}"
    return f"by the native library{held} than by transformers"


def _pages(paged: PagedKV | StagedKV, dtype: torch.dtype) -> PagedKV | StagedKV:
    """A page for each prompt."""
    if isinstance(paged, PagedKV):
        return paged.another(pages=len(_LENGTHS), page_size=LONGEST, dtype=dtype)
    return paged.another(pages=len(_LENGTHS), page_size=LONGEST)


@contextmanager
def _opened(open_native: Callable[[PagedKV], Runner], paged: PagedKV | StagedKV) -> Iterator[Runner]:
    assert isinstance(paged, PagedKV), "the library reads pages of one device"
    runner = open_native(paged)
    try:
        yield runner
    finally:
        runner.release()


def _compile(network: CausalNetwork, prompts: list[list[int]]) -> list[Tensor]:
    """Each last row, by compiled layers. The code for all numbers of rows is made here.

    Raises:
        InvalidRequest: torch cannot compile here.
    """
    from torch._dynamo.exc import TorchDynamoException

    network.attach()
    records = [_record(number, prompt) for number, prompt in enumerate(prompts)]
    for record in records:
        network.start(record)
    feeds = [_feed(record, 0, len(record.tokens)) for record in records]
    try:
        _last(network, feeds)
        _last(network, feeds[1:])
        return [_last(network, [_feed(record, len(record.tokens) - 1, 1)])[0] for record in records]
    except TorchDynamoException as error:
        raise InvalidRequest(
            f"compile=True, but torch.compile fails here: {type(error).__name__}: {error}; use compile=False, or "
            "install what it needs (a C++ compiler on the CPU)"
        ) from error


def try_out_encoder(network: EncoderNetwork, checkpoint: TextCheckpoint, dtype: torch.dtype) -> None:
    """Compares prompts that share a batch with each of them alone: what fills the shorter one up is masked, but some
    architectures mix it in all the same (by convolutions, Fourier transforms or pooling).

    Raises:
        UnsupportedModel: it cannot be run, or the numbers differ.
    """
    prompts = _prompts(checkpoint, _SIMILAR)
    with refused(partial(_refusal, checkpoint)), exactly(network.model.module):
        expected = [_mean(network, prompt) for prompt in prompts]
        records = [_record(number, prompt, Pooling(kind="mean")) for number, prompt in enumerate(prompts)]
        found = network.vectors([_feed(record, 0, len(record.tokens)) for record in records], Nothing())
    for told, ours in zip(expected, found, strict=True):
        _compare(told, torch.tensor(ours), checkpoint, dtype, "for a prompt that is read beside a longer one")


def _mean(network: EncoderNetwork, prompt: list[int]) -> Tensor:
    """The mean of one prompt's last hidden states, by transformers alone."""
    hidden: Tensor = network.model.module.base_model(torch.tensor([prompt], device=network.device)).last_hidden_state
    return hidden[0].float().mean(0).cpu()


@contextmanager
def refused(refusal: Callable[[str], UnsupportedModel]) -> Iterator[None]:
    """Turns a module's errors into a ``refusal`` of the checkpoint. Errors of memory and of the device pass."""
    try:
        yield
    except (UnsupportedModel, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # modules raise many kinds: wrapped, not hidden
        if "DefaultCPUAllocator" in str(error):  # torch has no class of its own for it
            raise
        raise refusal(f"cannot be run ({type(error).__name__}: {error})") from error


def _prompts(checkpoint: TextCheckpoint, lengths: Sequence[int]) -> list[list[int]]:
    """Tokens from all over the vocabulary, but none that stands for an item."""
    special = {getattr(checkpoint.config, name, None) for name in vars(checkpoint.config) if name.endswith("token_id")}
    special |= set(checkpoint.tokenizer.all_special_ids)
    size = checkpoint.shape.vocabulary
    plain = (token for step in range(7 * size) if (token := (step * 7919 + 13) % size) not in special)
    return [[next(plain, 0) for _ in range(min(length, checkpoint.shape.positions))] for length in lengths]


def _reference(network: CausalNetwork, prompt: list[int]) -> Tensor:
    """The last position's row, by transformers alone."""
    tokens = torch.tensor([prompt], device=network.device)
    module = network.model.module if network.generates else network.model.module.base_model
    positions = torch.arange(len(prompt), device=network.device)[None]
    with network.crossing():
        answer = module(tokens, position_ids=positions, use_cache=False)
    last: Tensor = (answer.logits if network.generates else answer.last_hidden_state)[0, -1].float()
    return last


def _run(network: CausalNetwork, prompts: list[list[int]], witness: _Witness | None) -> list[Tensor]:
    """The same by our attention: the first prompt's beginning beside the second, then its rest."""
    records = [_record(number, prompt) for number, prompt in enumerate(prompts)]
    for record in records:
        network.start(record)
    cut = max(1, len(prompts[0]) - 4)
    beginning = _last(network, [_feed(records[0], 0, cut), _feed(records[1], 0, len(prompts[1]))])
    if witness is not None:
        witness.check()
    if cut == len(prompts[0]):
        return beginning
    return [_last(network, [_feed(records[0], cut, len(prompts[0]) - cut)])[0], beginning[1]]


def _last(network: CausalNetwork, feeds: list[Feed]) -> list[Tensor]:
    """The last row of each chunk."""
    wanted = [(index, feed.part.length - 1) for index, feed in enumerate(feeds)]
    return list(network.rows(feeds, wanted, Nothing()))


def _record(number: int, prompt: list[int], pooling: Pooling | None = None) -> Record:
    start = SequenceStart(
        sequence_id=number,
        token_ids=tuple(prompt),
        prompt_length=len(prompt),
        sampling=SamplingParams(),
        rules=LogitRules(),
        probe=None,
        pooling=pooling,
    )
    return Record(start, list(prompt))


def _feed(record: Record, start: int, length: int) -> Feed:
    number = record.start.sequence_id
    part = Chunk(sequence_id=number, start=start, length=length, page_table=(number,), cross_slot=None, samples=False)
    return Feed(part=part, record=record)


@define(eq=False)
class _Witness:
    """Each layer is to ask once in a step, for what the KV was laid out for."""

    checkpoint: TextCheckpoint
    layers: list[int] = field(init=False, factory=list)

    def hear(self, request: LayerRequest) -> None:
        shape = self.checkpoint.shape
        if request.layer in self.layers or not request.layer < shape.layers:
            raise _refusal(
                self.checkpoint,
                f"has {shape.layers} layers by config.json, but attention is asked by layer {request.layer} after the "
                f"layers {self.layers}",
            )
        self.layers.append(request.layer)
        sizes = (request.kv_heads, request.head_dim, request.value_dim)
        if sizes != (shape.kv_heads, shape.head_dim, shape.head_dim):
            raise _refusal(
                self.checkpoint,
                f"has a layer {request.layer} with keys and values of {request.kv_heads} heads by {request.head_dim} "
                f"and {request.value_dim}, where config.json tells {shape.kv_heads} by {shape.head_dim}",
            )
        if request.window != shape.windows[request.layer]:
            raise _refusal(
                self.checkpoint,
                f"has a layer {request.layer} with a window of {request.window} positions, where config.json tells "
                f"{shape.windows[request.layer]}",
            )

    def check(self) -> None:
        """A step is over: all layers have asked, or somebody else mixes the positions."""
        silent = sorted(set(range(self.checkpoint.shape.layers)) - set(self.layers))
        if silent:
            raise _refusal(self.checkpoint, f"asks for no attention in its layers {', '.join(map(str, silent))}")
        self.layers.clear()


def _compare(
    expected: Tensor, found: Tensor, checkpoint: TextCheckpoint, dtype: torch.dtype, how: str, *, int8: bool = False
) -> None:
    largest = float(expected.abs().max())
    apart = float((expected - found).abs().max())
    tolerance = _OF_INT8 if int8 else TOLERANCE[dtype]
    if not apart <= tolerance * max(largest, 1e-6):
        raise _refusal(
            checkpoint,
            f"computes other numbers {how} ({apart:.3g} apart, the largest is {largest:.3g})",
        )


def _refusal(checkpoint: TextCheckpoint, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{checkpoint.architecture} in {checkpoint.folder} {reason}; allowed: decoders with one kind of causal "
        "attention, full or within a sliding window, in every layer, and encoders that do not see what is masked"
    )
