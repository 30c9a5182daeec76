"""The blueprint of decoder-only and pooling models."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from attrs import evolve, frozen
from torch import nn

from ...core.errors import InvalidRequest
from ...core.model import Kind, LayerKV, ModelDescription
from ..architectures.assistants import AssistantFiles
from ..architectures.prompts import MediaPreparer, TextPreparer
from ..architectures.text_checkpoint import TextCheckpoint
from ..attention.graphs import GraphManager, find_recorder
from ..checkpoints.draft_weights import read_draft_weights
from ..checkpoints.loading import load_module, text_alone
from ..linear.modules import quantize_modules
from ..linear.rounded import round_matrices
from ..linear.stored import adopt_quantized
from ..memory.encoder_states import MOST_STATES, EncoderStates
from ..memory.kv import PagedKV
from ..native.adapters import AdapterSlots, no_adapters
from ..native.assistant import Assistant
from ..native.decoders import CausalDecoder
from ..native.draft_head import DraftHead, DraftLayers, make_draft_head
from ..native.encoders import TextEncoder
from ..native.runner import Runner
from ..native.towers import Tower, known_tower
from ..networks.causal import CausalDecode, CausalNetwork
from ..networks.encoder import EncoderNetwork
from ..networks.item_encoder import ItemEncoder
from ..networks.network import Network
from .blueprint import NATIVE_ROWS, DraftParts, ModuleBlueprint, Own, Parts
from .comparison import LONGEST, LONGEST_TEXT, compare_encoder, refusal_of, refused

_CHANGES_VECTORS = (
    "quantization='int4' changes the vectors and scores of %s more than 'int8' does: of the texts on the card of "
    "all-MiniLM-L6-v2, 82 percent keep their nearest text, and with 'int8' 97 percent"
)
_TOGETHER = 1120
"""The most rows that see each other in one call of the native library."""

_DRAFT_HEAD = "draft_head"
"""The name of a `DraftLayers` in a module."""

CHAINS = 32
"""The most rows of a call of the native library for an assistant, which reads one row of a sequence."""


@frozen(kw_only=True, eq=False)
class TextBlueprint(ModuleBlueprint):
    """The blueprint of decoder-only and pooling models."""

    checkpoint: TextCheckpoint
    assistant: AssistantFiles | None = None  # the model that the configuration names to propose draft tokens

    @property
    def kind(self) -> Kind:
        return self.checkpoint.kind

    @property
    def keeps_kv(self) -> bool:
        return self.checkpoint.causal

    @property
    def state_bytes(self) -> int:
        family = self.checkpoint.family
        return 0 if family is None else MOST_STATES * family.state_bytes(self.checkpoint.config, self.dtype)

    def read(self) -> nn.Module:
        checkpoint, folder = self.checkpoint, self.checkpoint.folder
        if checkpoint.family is not None:
            module = checkpoint.family.load(folder, self.dtype)
            self._read_drafts(module)
            return module
        lazily = self.not_native() is None
        module = load_module(checkpoint.loader, folder, self.dtype, spare="pooler", lazily=lazily)
        if checkpoint.quantized:
            adopt_quantized(module, self.dtype)
        module = text_alone(module)
        if not checkpoint.quantized or self.assistant is not None:
            self._read_drafts(module)
        return module

    def pack(self, module: nn.Module, decoder: CausalDecoder | TextEncoder | None) -> None:
        int8, tower = self.config.quantization is not None, self._tower(module)
        if self.config.quantization == "int4":
            if self.kind is Kind.POOLING:
                logging.getLogger("triolet").warning(_CHANGES_VECTORS, self.checkpoint.architecture)
            round_matrices(self._language(module))
        if not isinstance(tower, str):
            tower.pack(int8=int8)
        drafts = getattr(module, _DRAFT_HEAD, None)
        if drafts is not None and (why_not := self._no_drafts(drafts, decoder)):
            self.log_drafts(why_not)
            delattr(module, _DRAFT_HEAD)
        if isinstance(decoder, CausalDecoder):
            with refused(partial(refusal_of, self.checkpoint), module, "expert by expert"):
                answers = decoder.pack(int8=int8, answering=not self.has_passed("experts"))
            if answers:
                self.compare_items(module, partial(list, answers), decoder.answers, "experts")
            if isinstance(drafts := getattr(module, _DRAFT_HEAD, None), DraftLayers):
                drafts.pack(int8=int8)
        elif decoder is not None:
            decoder.pack(int8=int8)
        elif int8:
            quantize_modules(module, self._language(module))

    @property
    def wants_drafts(self) -> bool:
        """True if draft tokens are wanted."""
        return self.kind is Kind.DECODER and self.config.speculation_for(self.kind, str(self.device)) is not None

    @property
    def draft_layer(self) -> LayerKV | None:
        """The keys and values of the layer that a draft head has; ``None``: the model has no layer like it."""
        kinds = list(getattr(self.checkpoint.config.get_text_config(), "layer_types", None) or ())
        return self.decoder.kv[kinds.index("full_attention")] if "full_attention" in kinds else None

    def check_drafts(self) -> None:
        """Raises `InvalidRequest` if a draft head is named that cannot be used, as far as it is known before the
        weights are read."""
        reason = self.not_native()
        if reason is None and not self.wants_drafts:
            reason = "no draft tokens are wanted (speculation and graphs)"
        if reason is not None:
            raise self._no_assistant(reason)

    def _no_assistant(self, reason: str) -> InvalidRequest:
        return InvalidRequest(
            f"draft_head={self.config.draft_head!r} is given, but {reason}; allowed: models that the native "
            "library computes on the CPU, with speculation. Leave draft_head out"
        )

    def _read_drafts(self, module: Any) -> None:
        """Adds a draft head to ``module``: the one that is named, or the checkpoint's if draft tokens are wanted."""
        if self.assistant is not None:
            folder, config = self.assistant.folder, self.assistant.config()
            own = Assistant(module, self._language(module), config, self.assistant.sources).to(self.dtype)
            own.fill(read_draft_weights(folder, self.dtype, prefix=""), folder)
            setattr(module, _DRAFT_HEAD, own.eval())
            return
        if not self.wants_drafts:
            return
        stored = read_draft_weights(self.checkpoint.folder, self.dtype)
        if not stored:
            return
        head = make_draft_head(module, self._language(module), stored)
        if isinstance(head, str):
            self.log_drafts(head)
        else:
            setattr(module, _DRAFT_HEAD, head)

    def _no_drafts(self, head: DraftLayers, decoder: CausalDecoder | TextEncoder | None) -> str | None:
        """Returns the reason why the draft head is not used; ``None``: it is.

        Raises:
            InvalidRequest: it is one that the configuration names.
        """
        computed = isinstance(decoder, CausalDecoder)
        why_not = head.unknown() if computed else "the native library does not compute the model"
        if why_not is not None and self.assistant is not None:
            raise self._no_assistant(why_not)
        return why_not

    def log_drafts(self, why_not: str) -> None:
        """Logs why a checkpoint's draft head proposes nothing."""
        told = "the draft head of %s proposes no tokens, but the text does: %s"
        logging.getLogger("triolet").debug(told, self.checkpoint.architecture, why_not)

    def take_drafts(self, parts: Parts, own: Own) -> DraftParts | None:
        module, network, most = parts.model.module, parts.network, max(LONGEST, self.positions)
        head: DraftLayers | None = getattr(module, _DRAFT_HEAD, None)
        if head is None or network.native is None:
            return None
        base: Any = self._language(module).base_model
        told: dict[str, Any] = {"norm": lambda rows: base.norm(rows.to(self.dtype))}
        if isinstance(head, Assistant):
            assert isinstance(parts.paged, PagedKV), "an assistant reads the model's keys and values"
            runner = self.open_runner(head.program(network.native.program, most), parts.paged, rows=CHAINS)
            return DraftParts(runner=own("native", runner), paged=parts.paged, found=head.found, **told)
        assert isinstance(head, DraftHead), "all others are assistants"
        assert self.drafts is not None, "a draft head has keys and values"
        sizes = {"pages": self.chosen.pages, "page_size": self.config.page_size}
        paged = PagedKV.allocate(layers=(self.drafts,), **sizes, dtype=self.kv_dtype, device=self.device)
        runner = self.open_runner(head.program(most), own("draft_kv", paged))
        return DraftParts(runner=own("native", runner), paged=paged, **told)

    def check_formats(self, why_not: str | None) -> None:
        if self.keeps_kv or self.kv_dtype == self.dtype:
            super().check_formats(why_not)
            return
        raise InvalidRequest(
            f"kv_dtype={self.config.kv_dtype!r}, but {self.checkpoint.architecture} is an encoder, which keeps no keys "
            f"and values; allowed: kv_dtype={self.dtype_name!r} or 'auto'"
        )

    def not_native(self) -> str | None:
        if find_recorder(self.config.graphs, self.device) is not None:
            return f"graphs={self.config.graphs!r}"
        if (rows := self.checkpoint.together) > _TOGETHER:
            return f"{rows} rows of an image see each other; known: up to {_TOGETHER}"
        return super().not_native()

    def find_decoder(self, module: nn.Module) -> CausalDecoder | TextEncoder:
        if not self.checkpoint.causal:
            return TextEncoder(module)
        return CausalDecoder(module, self._language(module), self.checkpoint.shape.windows, self.deeper)

    @property
    def deeper(self) -> int:
        """The number of layers to whose outputs items add something."""
        family = self.checkpoint.family
        return 0 if family is None else family.deeper(self.checkpoint.config)

    def _tower(self, module: nn.Module) -> Tower | str:
        """Returns the encoder of images or audio that the native library computes, or the reason why it does not."""
        if self.checkpoint.family is None:
            return "it reads text alone"
        return self.not_native_part("its encoder") or known_tower(module)

    def _language(self, module: nn.Module) -> nn.Module:
        """Returns the part of ``module`` that decodes text. Its other parts, which encode, are small."""
        family = self.checkpoint.family
        return module if family is None else family.text(module)

    def measured(self, model: Any) -> Self:
        head = getattr(model.module, _DRAFT_HEAD, None)
        known = evolve(
            self, has_head=head is not None, drafts=self.draft_layer if isinstance(head, DraftHead) else None
        )
        if self.config.adapters and self.checkpoint.causal:
            slots = self._slots(model.module, device="meta")
            known = evolve(known, adapter_bytes=sum(tensor.nbytes for tensor in slots.tensors()))
        if not self.checkpoint.shape.recurrent:
            return known
        decoder = self.native_decoder(model.module)
        if isinstance(decoder, str):
            told = f"has recurrent layers, which only the native library computes, and it does not: {decoder}"
            raise refusal_of(self.checkpoint, told)
        return evolve(known, state_numbers=decoder.program(LONGEST).state)

    def take(self, own: Own, model: Any) -> Parts:
        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        if not checkpoint.causal:
            pads = (checkpoint.config.get_text_config().pad_token_id, checkpoint.tokenizer.pad_token_id, 0)
            encoder = EncoderNetwork(
                model=model,
                positions=shape.positions,
                pad=next(pad for pad in pads if pad is not None),
                classifies=bool(checkpoint.labels),
                device=self.device,
            )
            return Parts(network=encoder, model=model)
        items: ItemEncoder | None = None
        if checkpoint.family is not None:
            states = own("encoder_states", EncoderStates()) if self.state_bytes else None
            items = ItemEncoder(model=model, family=checkpoint.family, states=states)
        paged = own("self_kv", self.allocate_pages())
        states = own("recurrent_states", self.allocate_states()) if self.state_numbers else None
        adapters = own("adapters", self._slots(model.module)) if self.config.adapters else None
        network = CausalNetwork(
            model=model,
            paged=paged,
            positions=shape.positions,
            device=self.device,
            generates=checkpoint.kind is Kind.DECODER,
            states=states,
            classifies=bool(checkpoint.labels),
            family=checkpoint.family,
            encoder=items,
            adapters=adapters,
        )
        network.attach()
        return Parts(network=network, model=model, paged=paged, states=states, adapters=adapters)

    def _slots(self, module: nn.Module, device: str = "cpu") -> AdapterSlots:
        """Allocates the slots of adapters, as `AdapterSlots.allocate` does."""
        decoder = self.native_decoder(module)
        if isinstance(decoder, str):
            told = f"the native library does not compute it: {decoder}"
            raise no_adapters(self.checkpoint.architecture, self.config.adapters, told)
        sizes: dict[str, Any] = {"slots": self.config.adapters, "rank": self.config.adapter_rank, "device": device}
        return AdapterSlots.allocate(decoder.adapted(), **sizes)

    def hasten(self, network: Network, own: Own) -> Network:
        network = super().hasten(network, own)
        if isinstance(network, CausalNetwork) and self.checkpoint.family is not None:
            self.log_way(self._tower(network.model.module), "the encoder of ")
        if not isinstance(network, CausalNetwork) or network.native is not None:
            return network
        recorder = find_recorder(self.config.graphs, self.device)
        if recorder is None or not network.generates:
            return network
        shape = self.checkpoint.shape
        graphs = GraphManager(
            decode=CausalDecode.of(network),
            recorder=recorder,
            paged=network.paged,
            max_running=self.config.max_running,
            positions=shape.positions,
            vocabulary=shape.vocabulary,
        )
        return evolve(network, graphs=own("graphs", graphs))

    @property
    def native_rows(self) -> int:
        """The most rows of a call of the native library for a decoder: at least those that see each other."""
        return max(NATIVE_ROWS, self.checkpoint.together)

    @property
    def text_rows(self) -> int:
        """The most rows of a call of the native library for an encoder: at least those of the longest text."""
        return max(NATIVE_ROWS, self.text_positions)

    @property
    def text_positions(self) -> int:
        """The most positions of a text that an encoder reads."""
        most = max(LONGEST_TEXT, self.positions)  # for comparisons
        return min(most, self.decoder.positions, max(LONGEST_TEXT, self.config.max_step_tokens))

    def open_native(self, decoder: CausalDecoder | TextEncoder, network: CausalNetwork | EncoderNetwork) -> Runner:
        if isinstance(network, EncoderNetwork):
            program, counted = decoder.program(self.text_positions), self.text_positions
            most = counted if program.uncounted is None else counted + 1
            return self.open_runner(program, rows=self.text_rows, positions=most)
        assert isinstance(decoder, CausalDecoder), "a causal network has a decoder"
        program = decoder.program(max(LONGEST, self.positions), network.adapters)  # for comparisons
        return self.open_runner(program, network.paged, rows=self.native_rows)

    def prove(self, network: Network) -> None:
        if isinstance(network, EncoderNetwork):
            compare = partial(compare_encoder, network, self.checkpoint, self.dtype)
            self.compare_once(compare, network.native is not None)
        if self.checkpoint.family is not None:  # else imported for the first image
            importlib.import_module("torch._dynamo")
        if isinstance(network, CausalNetwork):
            self.compare(network)
            if not isinstance(tower := self._tower(network.model.module), str):
                self.compare_items(tower.module, tower.tried, partial(tower.tried, natively=True))
            if network.graphs is not None:
                network.graphs.prove()

    def facts(self) -> Mapping[str, Any]:
        checkpoint, preparer, aligner = self.checkpoint, self._preparer(), None
        if checkpoint.kind is Kind.ALIGNER and checkpoint.family is not None and isinstance(preparer, MediaPreparer):
            aligner = checkpoint.family.aligner(checkpoint.folder, checkpoint.config, preparer)
        return {
            "sampling_rate": preparer.sampling_rate if isinstance(preparer, MediaPreparer) else 0,
            "preparer": preparer,
            "whole_prompts": not checkpoint.causal,
            "default_pooling": checkpoint.default_pooling,
            "labels": checkpoint.labels,
            "aligner": aligner,
            "has_draft_head": self.has_head,
        }

    def with_speech(self, description: ModelDescription) -> ModelDescription:
        return description if description.aligner is not None else super().with_speech(description)

    def _preparer(self) -> TextPreparer:
        checkpoint = self.checkpoint
        if checkpoint.family is None:
            return TextPreparer.of(checkpoint.tokenizer, getattr(checkpoint.config, "type_vocab_size", 0))
        preparer = checkpoint.family.preparer(
            checkpoint.folder,
            checkpoint.tokenizer,
            checkpoint.config,
            identity=self.identity,
            hidden=checkpoint.shape.hidden,
            dtype=self.dtype,
        )
        given = self.config.chat_template
        return preparer if given is None else evolve(preparer, chat_template=given)
