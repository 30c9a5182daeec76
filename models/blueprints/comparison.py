"""The comparison with transformers before an engine opens: a few tokens run through the module by transformers and by
the engine. A decoder runs with our attention, in chunks and with two prompts side by side; an encoder runs with two
prompts in one step. A model is refused if the numbers differ, or if it cannot be run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from ...core.errors import CheckpointError, UnsupportedModel
from ...core.plan import Chunk, SequenceStart
from ...core.request import LogitRules, Pooling, SamplingParams
from ..architectures.text_checkpoint import TextCheckpoint
from ..attention.layers import LayerRequest
from ..checkpoints.loading import untried
from ..checkpoints.modules import ModuleCheckpoint
from ..checkpoints.turns import TURNS
from ..linear.modules import exactly
from ..memory.encoder_outputs import EncoderOutputs
from ..native.recurrent import KINDS, DeltaNet
from ..native.runner import Runner
from ..networks.causal import CausalNetwork
from ..networks.encoder import EncoderNetwork
from ..networks.encoder_decoder import EncoderDecoderNetwork
from ..networks.network import Feed, Record

_LENGTHS = (11, 5)  # lengths of a decoder's two prompts; the first is read in two chunks
LONGEST = max(_LENGTHS)
_EMBEDDINGS = (9, 7)  # of the encoder outputs that they read: similar enough to share a call
_SIMILAR = (17, 13)  # lengths of an encoder's prompts: torch pads the second one
LONGEST_TEXT = max(_SIMILAR)
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}  # relative to the largest number
_TOLERANCE_OF_INT8 = 0.1  # a quantized input between two values may be rounded to either

_THEIRS = "by transformers itself from tokens alone, with the sizes in config.json"
_OURS = "with the engine's attention"
_LIBRARYS = "by the native library"

ComparedNetwork = CausalNetwork | EncoderDecoderNetwork


def compare_decoder(
    network: ComparedNetwork,
    checkpoint: ModuleCheckpoint,
    dtype: torch.dtype,
    open_native: Callable[[Any], Runner] | None = None,
) -> None:
    """Compares a decoder, and refuses the model or attaches our attention to it. Experts are compared once more when
    all are equally likely. Otherwise rounding may decide in int8 which expert a row asks for, so a row may differ. So
    it may behind a delta rule: its outputs are normalized, and where a query finds almost nothing in a state, rounding
    decides about the sign of what it finds.

    Args:
        dtype: the dtype that the module computes in.
        open_native: opens the native library over the pages and slots of a network; ``None``: the module computes. If
            the network's pages have another dtype, the library is compared twice. Pages of ``dtype`` show that it
            computes the model correctly. The network's pages show that their format loses no more than its rounding
            explains.

    Raises:
        UnsupportedModel: a layer asks attention for something that we do not do, or the numbers differ.
    """
    routers = [one for one in network.decoder.modules() if "packed" in one._buffers and "weight" in one._parameters]
    delta = any(KINDS.get(type(one).__name__) is DeltaNet for one in network.decoder.modules())
    _compare_decoder(network, checkpoint, dtype, open_native, some=delta or bool(routers))
    if not routers:
        return
    weights = [weight for one in routers for weight in (one.weight, one.packed)]
    kept = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            weight.zero_()
        _compare_decoder(network, checkpoint, dtype, open_native, some=delta)
    finally:
        for weight, own in zip(weights, kept, strict=True):
            weight.copy_(own)


def _compare_decoder(
    network: ComparedNetwork,
    checkpoint: ModuleCheckpoint,
    dtype: torch.dtype,
    open_native: Callable[[Any], Runner] | None,
    *,
    some: bool = False,
) -> None:
    prompts, outputs = _prompts(checkpoint, _LENGTHS), _outputs(network, dtype)
    kept = network.paged.dtype
    own, witnesses = _over(network, dtype), [_Witness(checkpoint)]
    if isinstance(own, CausalNetwork):
        witnessed: ComparedNetwork = evolve(own, witness=witnesses[0].hear)
    else:
        witnesses.append(_Witness(checkpoint))
        witnessed = evolve(own, witness=witnesses[0].hear, cross_witness=witnesses[1].hear)
    module, refusal, recurrent = own.model.module, partial(refusal_of, checkpoint), checkpoint.shape.recurrent
    with exactly(own.decoder):
        if not own.decoder._can_set_attn_implementation() and not recurrent:
            raise refusal_of(checkpoint, "does not let the engine replace its attention")
        with refused(refusal, module, _THEIRS):
            own.attach("eager")  # transformers' exact implementation
            expected = list(map(_reference, repeat(own), prompts, outputs))  # no comprehension, see `core.tracebacks`
        _check_numbers(module, expected, checkpoint)
        if not recurrent:  # torch computes no recurrent layers
            own.attach()
            with refused(refusal, module, _OURS):
                found = _read(witnessed, prompts, outputs, witnesses)
            _compare(expected, found, checkpoint, dtype, "with the engine's attention than with its own")
    for stored in dict.fromkeys((dtype, kept)):
        if open_native is None:
            break
        over = own if stored == dtype else _over(network, stored)
        with _opened(open_native, over) as native, refused(refusal, module, _LIBRARYS):
            found, int8 = _read(evolve(over, native=native), prompts, outputs), native.in_int8
        held = "" if stored == dtype else f" with keys and values in {str(stored).removeprefix('torch.')}"
        how = f"by the native library{held} than by transformers"
        widest = max(dtype, stored, key=_TOLERANCE.__getitem__)
        _compare(expected, found, checkpoint, widest, how, int8=int8, some=some and int8)


def compare_encoder(network: EncoderNetwork, checkpoint: TextCheckpoint, dtype: torch.dtype) -> None:
    """Compares the results of two prompts in one step with those of each prompt alone, as transformers computes them.
    Where torch computes, the padding of the shorter prompt is masked, but some architectures mix it in all the same (by
    convolutions, Fourier transforms or pooling).

    Raises:
        UnsupportedModel: the model cannot be run, or the numbers differ.
    """
    prompts = _prompts(checkpoint, _SIMILAR)
    module, refusal = network.model.module, partial(refusal_of, checkpoint)
    with exactly(module):
        with refused(refusal, module, _THEIRS):
            expected = list(map(_mean, repeat(network), prompts))
        _check_numbers(module, expected, checkpoint)
        records = [_record(number, prompt, Pooling(kind="mean")) for number, prompt in enumerate(prompts)]
        with refused(refusal, module, "beside a longer text"):
            found = network.vectors([_feed(record, 0, len(record.tokens)) for record in records], EncoderOutputs())
    native = network.native
    how = (
        "for a prompt that is read beside a longer one"
        if native is None
        else "by the native library than by transformers"
    )
    int8 = native is not None and native.in_int8
    _compare(expected, list(map(torch.tensor, found)), checkpoint, dtype, how, int8=int8)


def compare_items(
    module: nn.Module,
    theirs: Callable[[], list[Tensor]],
    ours: Callable[[], list[Tensor]],
    checkpoint: ModuleCheckpoint,
    dtype: torch.dtype,
    *,
    int8: bool,
) -> None:
    """Compares what transformers makes of clips, or of rows within a tower, with what the native library makes of them.

    Raises:
        UnsupportedModel: the module cannot be run, or the numbers differ.
    """
    refusal = partial(refusal_of, checkpoint)
    with exactly(module):
        with refused(refusal, module, "by transformers itself"):
            expected = theirs()
        _check_numbers(module, expected, checkpoint)
        with refused(refusal, module, _LIBRARYS):
            found = ours()
    _compare(expected, found, checkpoint, dtype, "by the native library than by transformers", int8=int8)


def _over(network: ComparedNetwork, dtype: torch.dtype) -> ComparedNetwork:
    """Returns the network as torch alone computes it, with one page and one slot for each prompt."""
    paged = network.paged.another(pages=len(_LENGTHS), page_size=LONGEST, dtype=dtype)
    if isinstance(network, CausalNetwork):
        states = None if network.states is None else network.states.another(len(_LENGTHS))
        return evolve(network, paged=paged, states=states, graphs=None, native=None)
    return evolve(network, paged=paged, cross=network.cross.another(len(_LENGTHS), dtype), native=None)


@contextmanager
def _opened(open_native: Callable[[Any], Runner], network: ComparedNetwork) -> Iterator[Runner]:
    runner = open_native(network)
    try:
        yield runner
    finally:
        runner.release()


@contextmanager
def refused(refusal: Callable[[str], UnsupportedModel], module: nn.Module, by: str) -> Iterator[None]:
    """Turns the errors of a ``module`` into a ``refusal`` that names the class of the layer, and says ``by`` what it is
    computed. The error itself is the refusal's cause. Errors of files, memory or the device pass unchanged.
    Transformers does not advise other packages meanwhile: its own functions of recurrent layers are for the comparison
    alone."""
    with TURNS.quiet():
        try:
            yield
        except (CheckpointError, UnsupportedModel, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # modules raise many kinds: wrapped, not hidden
            if "DefaultCPUAllocator" in str(error):  # torch has no class of its own for this error
                raise
            raise refusal(f"cannot be computed {by}: its {_failing(module, error)} fails{untried()}") from error


def _failing(module: nn.Module, error: Exception) -> str:
    """Returns the class of the innermost part of ``module`` in which ``error`` was raised. Classes of torch are too
    common to tell a part. No locals are read: frames would keep them."""
    kinds = {type(part).__name__ for part in module.modules() if not type(part).__module__.startswith("torch.")}
    called = [frame.f_code.co_qualname.partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in reversed(called) if name in kinds), type(module).__name__)


def _prompts(checkpoint: ModuleCheckpoint, lengths: Sequence[int]) -> list[list[int]]:
    """Returns prompts with tokens from all over the vocabulary, but without multimodal placeholders."""
    config = checkpoint.config
    special = {getattr(config, name) for name in vars(config) if name.endswith(("token_id", "token_index"))}
    special |= set(checkpoint.tokenizer.all_special_ids)
    size = checkpoint.shape.vocabulary
    plain = (token for step in range(7 * size) if (token := (step * 7919 + 13) % size) not in special)
    return [[next(plain, 0) for _ in range(min(length, checkpoint.shape.positions))] for length in lengths]


def _outputs(network: ComparedNetwork, dtype: torch.dtype) -> list[Tensor]:
    """Returns a made-up encoder output for each prompt, or an empty tensor if the model has no cross-attention."""
    if isinstance(network, CausalNetwork):
        return [torch.empty(0)] * len(_LENGTHS)
    lengths = [min(length, network.cross.embeddings) for length in _EMBEDDINGS]
    rows = [torch.arange(length * network.hidden, device=network.device).float() for length in lengths]
    return [row.mul(0.7).sin().view(length, -1).to(dtype) for row, length in zip(rows, lengths, strict=True)]


def _reference(network: ComparedNetwork, prompt: list[int], output: Tensor) -> Tensor:
    """Returns the row of the last position, computed by transformers alone."""
    tokens, module = torch.tensor([prompt], device=network.device), network.model.module
    if isinstance(network, EncoderDecoderNetwork):
        read = network.encoder_output(output[None].clone())  # some decoders add positions to it in place
        last: Tensor = module(encoder_outputs=read, decoder_input_ids=tokens, use_cache=False).logits
        return last[0, -1].float()
    reader: Any = module if network.family is None else network.family.as_text(module)
    positions = torch.arange(len(prompt), device=network.device)[None]
    told: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    asked = {"logits_to_keep": slice(-1, None)} if network.keeps and reader is module else {}
    answer = reader(tokens, **told, **asked) if network.generates else reader.base_model(tokens, **told)
    last = answer.logits if network.generates else answer.last_hidden_state
    return last[0, -1].float()


def _mean(network: EncoderNetwork, prompt: list[int]) -> Tensor:
    """Returns the mean of one prompt's last hidden states, computed by transformers alone."""
    hidden: Tensor = network.model.module.base_model(torch.tensor([prompt], device=network.device)).last_hidden_state
    return hidden[0].float().mean(0).cpu()


def _read(
    network: ComparedNetwork, prompts: list[list[int]], outputs: list[Tensor], witnesses: Sequence[_Witness] = ()
) -> list[Tensor]:
    """Returns the row of each prompt's last position, computed by the engine: first the beginning of the first prompt
    beside the second prompt, then the rest of the first."""
    if isinstance(network, EncoderDecoderNetwork):
        for slot, output in enumerate(outputs):
            network.write_cross(slot, output)
    first, second = _started(network, prompts)
    if isinstance(network, CausalNetwork) and network.states is not None:
        for state in range(len(prompts)):
            network.states.begin(state)
    cut = max(1, len(first.tokens) - 4)
    beginning = _last(network, [_feed(first, 0, cut), _feed(second, 0, len(second.tokens))])
    for witness in witnesses:
        witness.check()
    if cut == len(first.tokens):
        return beginning
    return [_last(network, [_feed(first, cut, len(first.tokens) - cut)])[0], beginning[1]]


def _started(network: ComparedNetwork, prompts: list[list[int]]) -> list[Record]:
    records = list(map(_record, range(len(prompts)), prompts))
    for record in records:
        network.start(record)
    return records


def _last(network: ComparedNetwork, feeds: list[Feed]) -> list[Tensor]:
    """Returns the last row of each chunk."""
    wanted = [(index, feed.part.length - 1) for index, feed in enumerate(feeds)]
    rows = network.rows if isinstance(network, CausalNetwork) else network.logits
    return list(rows(feeds, wanted, EncoderOutputs()))


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
    places: dict[str, Any] = {"page_table": (number,), "cross_slot": number, "states": (number,)}
    part = Chunk(sequence_id=number, start=start, length=length, samples=False, **places)
    return Feed(part=part, record=record)


@define(eq=False)
class _Witness:
    """Checks that each layer calls attention once in a step, with the sizes and window that the KV was allocated
    for."""

    checkpoint: ModuleCheckpoint
    layers: list[int] = field(init=False, factory=list)

    def hear(self, request: LayerRequest) -> None:
        shape = self.checkpoint.shape
        if request.layer in self.layers or not request.layer < shape.layers:
            raise refusal_of(
                self.checkpoint,
                f"has {shape.layers} layers by config.json, but layer {request.layer} asks for attention after the "
                f"layers {self.layers}",
            )
        self.layers.append(request.layer)
        own = shape.kv[request.layer]
        sizes = {"kv_heads": own.heads, "head_dim": own.size, "value_dim": own.value_size}
        for name, written in {**sizes, "window": shape.windows[request.layer]}.items():
            if (asked := getattr(request, name)) != written:
                told = f"has a layer {request.layer} with {name}={asked}, but config.json says {written}"
                raise refusal_of(self.checkpoint, told)

    def check(self) -> None:
        """Refuses the model if some layer did not call attention in the step. Something else mixes the positions
        then.
        """
        silent = sorted(set(range(self.checkpoint.shape.layers)) - set(self.layers))
        if silent:
            raise refusal_of(self.checkpoint, f"does not ask for attention in its layers {', '.join(map(str, silent))}")
        self.layers.clear()


def _check_numbers(module: nn.Module, expected: list[Tensor], checkpoint: ModuleCheckpoint) -> None:
    """Refuses the model if its own results are no numbers, and names the weights that are to blame."""
    if all(bool(row.isfinite().all()) for row in expected):
        return
    named = ((name, weight) for name, weight in module.state_dict().items() if weight.is_floating_point())
    wrong = next((name.replace(".packed", ".weight") for name, weight in named if not weight.isfinite().all()), None)
    where = "computes values that are NaN or infinite" if wrong is None else f"has NaN or infinite values in {wrong}"
    raise refusal_of(checkpoint, f"{where}; copy or convert the weights again, or try another dtype")


def _compare(
    expected: list[Tensor],
    found: list[Tensor],
    checkpoint: ModuleCheckpoint,
    dtype: torch.dtype,
    how: str,
    *,
    int8: bool = False,
    some: bool = False,
) -> None:
    """Refuses the model if a row differs; where ``some`` rows may, if all do."""
    wrong = list[str]()
    for theirs, ours in zip(expected, found, strict=True):
        largest, apart = float(theirs.abs().max()), float((theirs - ours).abs().max())
        if not apart <= (_TOLERANCE_OF_INT8 if int8 else _TOLERANCE[dtype]) * max(largest, 1e-6):
            wrong.append(f"computes other numbers {how} ({apart:.3g} apart, the largest is {largest:.3g})")
    if len(wrong) > (len(expected) - 1 if some else 0):
        raise refusal_of(checkpoint, wrong[0])


def refusal_of(checkpoint: ModuleCheckpoint, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{checkpoint.architecture} in {checkpoint.place} {reason}; allowed: {checkpoint.allowed}")
