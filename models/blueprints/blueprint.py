"""`Blueprint`: the facts that are found once about a model and its device. The model is built from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from ...core import log_lines
from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.model import Kind, LayerKV, ModelDescription
from ..architectures.items import ItemSettings
from ..checkpoints.files import is_mapped
from ..checkpoints.lengths import lengths_of
from ..checkpoints.modules import DecoderShape, ModuleCheckpoint
from ..checkpoints.unread import fingerprint_of, read_all
from ..checkpoints.whisper_checkpoint import Checkpoint, WeightFiles
from ..machine.devices import find_kv_dtype
from ..memory.allocator import trim
from ..memory.budget import Available, Budget, KVSizes
from ..memory.encoder_states import MOST_STATES
from ..memory.frame_states import FrameSlots, FrameStates
from ..memory.kv import PagedKV
from ..memory.module import ModuleFiles, TransformerModel
from ..memory.recurrent_states import RecurrentStates
from ..memory.slots import CrossKV
from ..native.adapters import AdapterSlots
from ..native.crossed_decoder import CrossedDecoder
from ..native.decoders import CausalDecoder
from ..native.encoders import TextEncoder
from ..native.library import MOST_THREADS, Library
from ..native.program import Program
from ..native.runner import Runner
from ..native.speech_encoders import SpeechEncoder, TextReader, known_encoder
from ..networks.causal import CausalNetwork
from ..networks.encoder import EncoderNetwork
from ..networks.encoder_decoder import EncoderDecoderNetwork
from ..networks.item_encoder import ItemEncoder
from ..networks.network import Network
from ..networks.whisper_network import WhisperAligner
from ..speech.known import with_speech
from .comparison import LONGEST, compare_decoder, compare_items
from .passed import PassedComparisons, comparison_key

NATIVE_ROWS = 256
"""The most rows in one call of the native library, few enough that results between operations stay in the caches."""

_STEPS = 3  # the most rows of an encoder's stem for each row of its layers

AnyPages = PagedKV | FrameStates


Own = Callable[[str, Any], Any]
"""`ResourceStack.own`."""


@frozen(kw_only=True, eq=False)
class Parts:
    """The parts of an open executor's model, each with an owner. ``None``: this kind of model has no such part."""

    network: Network
    model: TransformerModel
    paged: AnyPages | None = None
    cross: CrossKV | FrameSlots | None = None
    states: RecurrentStates | None = None
    aligner: WhisperAligner | None = None
    adapters: AdapterSlots | None = None


@frozen(kw_only=True, eq=False)
class DraftParts:
    """The parts of a draft head.

    Args:
        runner: its program.
        paged: its keys and values, in pages with the numbers of the model's pages; or these, if it reads the model's.
        norm: the norm behind the model's last layer.
        found: returns the token and the hidden state of a choice, as `Assistant.found` does. ``None``: the head has
            keys and values of its own, and chooses among the first tokens of the vocabulary.
    """

    runner: Runner
    paged: PagedKV
    norm: Callable[[Tensor], Tensor]
    found: Callable[[int, Any], tuple[int, Any]] | None = None


@frozen(kw_only=True, eq=False)
class Blueprint:
    """The plan by which `TorchExecutor.open` and `TorchExecutor.wake` build the model. `open` makes it, once. It holds
    no tensor.
    """

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype  # the dtype that the model computes in
    checkpoint: Checkpoint | ModuleCheckpoint
    state_numbers: int = 0  # of a recurrent state; known, as the budget is, when the weights are loaded
    adapter_bytes: int = 0  # of the slots of adapters; known as early
    has_head: bool = False  # a draft head proposes tokens; known as early
    drafts: LayerKV | None = None  # the draft head's keys and values, if it has its own; known as early
    budget: Budget | None = None
    fingerprint: str = ""  # of the weights, once they have been read

    @property
    def decoder(self) -> DecoderShape:
        """The sizes of the decoder."""
        shape = self.checkpoint.shape
        return shape if isinstance(shape, DecoderShape) else shape.decoder

    @property
    def positions(self) -> int:
        """The most positions of a sequence."""
        own = self.decoder.positions if self.budget is None else min(self.decoder.positions, self.budget.positions)
        return min(own, self.config.max_positions or own)

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype that keys and values are held in."""
        return find_kv_dtype(self.config.kv_dtype, self.dtype)

    @property
    def dtype_name(self) -> str:
        """The dtype as in `ModelDescription.dtype`: ``"float32"``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kind(self) -> Kind:
        """The kind of the model."""
        return Kind.ENCODER_DECODER

    @property
    def keeps_kv(self) -> bool:
        """False if the model reads each prompt whole, in one step."""
        return True

    @property
    def sizes(self) -> KVSizes:
        """The sizes of the model's pages and slots, in bytes, and how many positions they hold."""
        shape = self.decoder
        size = self.kv_dtype.itemsize * self.keeps_kv
        return KVSizes(
            page=sum(layer.numbers for layer in shape.kv) * size * self.config.page_size,
            slot=shape.layers * 2 * shape.kv_heads * shape.head_dim * size * shape.embeddings,
            positions=self.positions,
            page_size=self.config.page_size,
            state=RecurrentStates.bytes_of(self.state_numbers),
            draft=0 if self.drafts is None else self.drafts.numbers * size * self.config.page_size,
        )

    @property
    def state_bytes(self) -> int:
        """The most bytes of the states of an encoder that hears audio piece by piece."""
        return 0

    @property
    def chosen(self) -> Budget:
        """The chosen numbers of pages and slots."""
        assert self.budget is not None, "pages and slots are counted when the weights are loaded"
        return self.budget

    def measured(self, model: Any) -> Self:  # noqa: ARG002
        """Returns the blueprint with the sizes that the loaded ``model`` shows."""
        return self

    def sized(self, weights: int, measure: Callable[..., Available] = Available.of) -> Self:
        """Returns the blueprint with the numbers of pages and slots that fit beside ``weights`` bytes and adapters in
        the memory that ``measure`` finds. Numbers that were chosen before stay.

        Raises:
            DeviceOutOfMemory: there is not enough room for one sequence.
        """
        if self.budget is not None:
            return self
        return evolve(
            self, budget=Budget.choose(self.config, self.sizes, measure(self.device, weights, self.adapter_bytes))
        )

    def not_native(self) -> str | None:
        """The reason why torch computes the model, as far as it is known before the weights are read. ``None``: the
        native library may compute it."""
        if self.device.type != "cpu":
            return f"it runs on {self.device}"
        if self.dtype == torch.float16:
            return "it computes in float16; known: float32 and bfloat16"
        return "the package was installed without a compiler" if Library.load() is None else None

    def not_native_part(self, part: str) -> str | None:
        """The reason why torch computes a part that the native library computes in float32 alone, as `not_native`."""
        if self.dtype != torch.float32:
            return f"{part} computes in {self.dtype_name}; known: float32"
        return Blueprint.not_native(self)

    def check_formats(self, why_not: str | None) -> None:
        """Raises `InvalidRequest` if torch computes the model, but its keys and values are to be held in another dtype,
        or its linear layers in 4 bits.

        Args:
            why_not: the reason why the native library does not compute the model; ``None``: the library computes it.
        """
        asked, allowed = f"kv_dtype={self.config.kv_dtype!r}", f"kv_dtype={self.dtype_name!r} or 'auto'"
        if self.config.quantization == "int4":
            asked, allowed = "quantization='int4'", "quantization='int8', or None"
        elif self.kv_dtype == self.dtype:
            return
        if why_not is not None:
            raise InvalidRequest(
                f"{asked}, but the native library does not compute the model: {why_not}; allowed: {allowed}"
            )

    def context(self) -> str:
        """A sentence that says how many positions a sequence has, and how to get more if memory is the limit."""
        own, page, name = self.decoder.positions, self.sizes.page, self.checkpoint.architecture
        if self.config.max_positions or self.positions == own:
            return f"{name} has a context of {self.positions} positions"
        whole = -(-own // self.config.page_size) * page
        return (
            f"{name} has a context of {self.positions} positions, of {own} that it could have: keys and values have "
            f"{log_lines.mebibytes(self.chosen.pages * page)}, about as much as the weights, and no more than a "
            f"quarter of the free memory. max_positions={own} would take {log_lines.mebibytes(whole)} for them"
        )

    def log_way(self, why_not: object, part: str = "") -> None:
        """Logs whether the native library or torch computes the model, or a ``part`` of it. A text is the reason for
        torch."""
        log, name = logging.getLogger("triolet"), part + self.checkpoint.architecture
        if not isinstance(why_not, str):
            log.info("%s runs by the native library, on %d threads", name, min(torch.get_num_threads(), MOST_THREADS))
        else:
            log.info("%s runs by torch's operations, not by the native library: %s", name, why_not)

    def files(self) -> WeightFiles | ModuleFiles:
        """Opens the weights, to be loaded later. Raises `CheckpointError` if they cannot be read."""
        raise NotImplementedError

    def load(self, files: Any) -> TransformerModel:
        """Loads the model with the weights that `files` returned."""
        raise NotImplementedError

    def take(self, own: Own, model: Any) -> Parts:
        """Allocates all that the loaded ``model`` needs besides its weights, each part under the name of its owner."""
        raise NotImplementedError

    def hasten(self, network: Network, own: Own) -> Network:  # noqa: ARG002
        """Returns ``network`` with the parts that make it faster. These refer to all other parts, so they are allocated
        last and released first."""
        return network

    def take_drafts(self, parts: Parts, own: Own) -> DraftParts | None:  # noqa: ARG002
        """Allocates what the checkpoint's draft head needs besides its weights, after all that `take` and `hasten`
        return; ``None``: it has no draft head that the native library computes."""
        return None

    def prove(self, network: Network) -> None:
        """Raises `UnsupportedModel` if the loaded model does not compute as expected."""

    @property
    def identity(self) -> str:
        """The hash of all that KV and encoder outputs depend on, except tokens, pixels and samples."""
        raise NotImplementedError

    def facts(self) -> Mapping[str, Any]:
        """Returns the fields of the model's description that only its kind sets."""
        raise NotImplementedError

    def with_speech(self, description: ModelDescription) -> ModelDescription:
        """Returns ``description`` with the speech model; unchanged if the model does not transcribe."""
        raise NotImplementedError

    def describe(self, name: str) -> ModelDescription:
        """Returns the facts about the model that the engine needs."""
        shape, checkpoint, embedding = self.decoder, self.checkpoint, self.decoder.hidden * self.dtype.itemsize
        common: dict[str, Any] = {
            "architecture": checkpoint.architecture,
            "device": str(self.device),
            "dtype": self.dtype_name,
            "kind": self.kind,
            "vocabulary_size": shape.vocabulary,
            "max_positions": self.positions,
            "eos_token_ids": checkpoint.eos_token_ids,
            "suppress_token_ids": checkpoint.suppress_token_ids,
            "begin_suppress_token_ids": checkpoint.begin_suppress_token_ids,
            "page_size": self.config.page_size,
            "pages": self.chosen.pages,
            "cross_slots": self.chosen.slots,
            "states": self.chosen.states,
            "encoder_embeddings": shape.embeddings,
            "encoder_bytes": shape.embeddings * embedding,
            "sampling_rate": 0,
            "window_samples": 0,
            "processor_identity": self.identity,
            "tokenizer": checkpoint.tokenizer,
            "lengths": lengths_of(checkpoint.tokenizer),
        }
        return self.with_speech(ModelDescription(name=name, **{**common, **self.facts()}))

    def allocate_pages(self) -> PagedKV:
        """Allocates the pages."""
        return PagedKV.allocate(
            layers=self.decoder.kv,
            pages=self.chosen.pages,
            page_size=self.config.page_size,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def allocate_states(self) -> RecurrentStates:
        """Allocates the recurrent states."""
        return RecurrentStates.allocate(states=self.chosen.states, numbers=self.state_numbers)

    def allocate_slots(self) -> CrossKV:
        """Allocates the cross-attention slots."""
        shape = self.decoder
        return CrossKV.allocate(
            layers=shape.layers,
            slots=self.chosen.slots,
            heads=shape.kv_heads,
            embeddings=shape.embeddings,
            head_dim=shape.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def open_runner(
        self,
        program: Program,
        paged: PagedKV | None = None,
        cross: CrossKV | None = None,
        *,
        rows: int = NATIVE_ROWS,
        positions: int = 0,
        states: int = 1,
    ) -> Runner:
        """Opens the native library for ``program``, over pages and slots. ``positions`` is the largest number of
        positions of a sequence; 0: as many as the pages allow, or ``rows``."""
        library = Library.load()
        assert library is not None, "a model was packed without the library"
        pages = None if paged is None else list(paged.parts())
        slots = None if cross is None else cross.tensors()[0]
        if not positions:
            positions = rows if paged is None else max(LONGEST, self.positions)  # a comparison needs LONGEST
        threads = torch.get_num_threads()
        sizes = {"rows": rows, "positions": positions, "states": states}
        return Runner.open(library, program, pages, slots, threads=threads, **sizes)


@frozen(kw_only=True, eq=False)
class ModuleBlueprint(Blueprint):
    """The blueprint of a module of transformers."""

    checkpoint: ModuleCheckpoint

    @property
    def identity(self) -> str:
        quantized = f", {self.config.quantization}" if self.config.quantization else ""
        return self.checkpoint.identity(self.fingerprint, self.dtype_name + quantized)

    def with_speech(self, description: ModelDescription) -> ModelDescription:
        return with_speech(description, self.checkpoint, self.config.encoder_cache_bytes)

    def files(self) -> ModuleFiles:
        return ModuleFiles()

    def load(self, files: ModuleFiles) -> TransformerModel:
        """Reads the module, changes it, and places it on the device. The decoder's weights are put in the native
        library's order if the library computes the model, and quantized if the configuration asks for it. The module
        keeps no view of a mapped file, since the file may change. The fingerprint is that of the weights as they were
        read.
        """
        model = TransformerModel(self.read().eval())
        files.fingerprint = fingerprint_of(model.module)
        decoder = self.native_decoder(model.module)
        why_not = decoder if isinstance(decoder, str) else None
        self.check_formats(why_not)
        evolve(self, fingerprint=files.fingerprint).pack(model.module, decoder if why_not is None else None)
        read_all(model.module)
        model.move(self.device, copied=is_mapped(self.checkpoint.folder))
        if why_not is None:
            model.gather()
        return model

    def read(self) -> nn.Module:
        """Reads the module, on the CPU."""
        raise NotImplementedError

    def find_decoder(self, module: nn.Module) -> CausalDecoder | CrossedDecoder | TextEncoder:
        """Returns the decoder in ``module``, or the encoder of texts, as the native library needs it."""
        raise NotImplementedError

    def items_after(self, start_id: int) -> ItemSettings:
        """Returns the settings of a preparer for an encoder output behind the token ``start_id``."""
        shape = self.checkpoint.shape
        return ItemSettings(
            start_id=start_id,
            identity=self.identity,
            embedding_bytes=shape.hidden * self.dtype.itemsize,
            most_embeddings=shape.embeddings,
        )

    def native_decoder(self, module: nn.Module) -> Any:
        """Returns the decoder that the native library computes, or the reason, as text, why the library does not
        compute it."""
        if why_not := self.not_native():
            return why_not
        decoder = self.find_decoder(module)
        return decoder.unknown() or decoder

    def native_speech(self, module: nn.Module) -> SpeechEncoder | str:
        """Returns the encoder of speech that the native library computes, or the reason why the library does not
        compute it."""
        if why_not := Blueprint.not_native(self):
            return why_not
        checkpoint: Any = self.checkpoint
        return known_encoder(checkpoint.family.encoder(module))

    def hasten_items(self, items: ItemEncoder, own: Own) -> ItemEncoder:
        """Returns ``items`` with the native library, if the library computes the encoder."""
        encoder, rows = self.native_speech(items.model.module), self.checkpoint.shape.embeddings
        self.log_way(encoder, "the encoder of ")
        if isinstance(encoder, str):
            return items
        written = encoder.stem_program()
        stem = None if written is None else own("native", self.open_runner(written, positions=_STEPS * rows))
        runner = self.open_runner(encoder.program(rows), rows=rows, states=MOST_STATES)
        return evolve(items, native=own("native", runner), stem=stem)

    def compare_clips(self, items: ItemEncoder) -> None:
        """Compares an encoder of items with transformers' own, unless it has passed before. Of texts in int8 or 16
        bits, the means are compared, as `compare_encoder` does."""
        module, family, encoder = items.model.module, items.family, self.native_speech(items.model.module)
        if isinstance(encoder, str):
            return
        clips = encoder.clips()
        exact = self.dtype == torch.float32 and self.config.quantization is None
        means = isinstance(encoder, TextReader) and not exact  # single rows magnify what is rounded

        def of(found: Sequence[Tensor]) -> list[Tensor]:
            return [rows.float().mean(0) for rows in found] if means else list(found)

        theirs = lambda: of([family.encode(module, [clip])[0] for clip in clips])  # noqa: E731
        self.compare_items(module, theirs, lambda: of(items.encode_all(clips)))

    def compare_items(
        self,
        module: nn.Module,
        theirs: Callable[[], list[Tensor]],
        ours: Callable[[], list[Tensor]],
        part: str = "items",
    ) -> None:
        """Compares what transformers and the native library compute of a part, unless it has passed before."""
        int8 = self.config.quantization is not None
        compare = partial(compare_items, module, theirs, ours, self.checkpoint, self.dtype, int8=int8)
        self.compare_once(compare, part)

    def pack(self, module: nn.Module, decoder: Any) -> None:  # noqa: ARG002
        """Packs the weights of ``decoder``; ``None``: torch computes the module, and nothing is packed."""
        if decoder is not None:
            decoder.pack()

    def open_native(self, decoder: Any, network: Any) -> Runner:
        """Opens the native library for a packed ``decoder``, over the pages and slots of ``network``."""
        raise NotImplementedError

    def hasten(self, network: Network, own: Own) -> Network:
        if not isinstance(network, CausalNetwork | EncoderDecoderNetwork | EncoderNetwork):
            return network
        decoder = self.native_decoder(network.model.module)
        self.log_way(decoder)
        if isinstance(decoder, str):
            return network
        return evolve(network, native=own("native", self.open_native(decoder, network)))

    def compare(self, network: CausalNetwork | EncoderDecoderNetwork) -> None:
        """Compares a decoder with transformers' own, unless it has passed before."""
        decoder = self.native_decoder(network.model.module)
        native = None if isinstance(decoder, str) else partial(self.open_native, decoder)
        self.compare_once(partial(compare_decoder, network, self.checkpoint, self.dtype, native), native is not None)

    def compare_once(self, compare: Any, *computed: object) -> None:
        """Calls ``compare`` unless this model has passed it before. ``computed`` has further values on which the
        outcome depends.
        """
        PassedComparisons.of_user().once(self._key(*computed), compare)
        trim()  # a comparison leaves much behind

    def has_passed(self, *computed: object) -> bool:
        """Returns whether `compare_once` would call nothing."""
        return PassedComparisons.of_user().has(self._key(*computed))

    def _key(self, *computed: object) -> str:
        settings = (self.config.quantization, self.kv_dtype, *computed)
        return comparison_key(self.checkpoint.stamps, self.fingerprint, self.device, self.dtype, *settings)
