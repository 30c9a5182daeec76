"""Encoder-decoders of transformers as a `Network`: the modules compute, and our attention reads pages and slots.

The encoder is transformers' own, including its attention. One call of the decoder feeds all chunks of a step, flattened
into rows. The call passes a dummy encoder output of one row, since our attention function reads the slot of each row's
sequence instead (`triolet.models.attention.cross_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ...core.errors import UnsupportedModel
from ...core.request import EncoderItem
from ..architectures.crossed_family import CrossedFamily, Forward, told
from ..attention.cross_attention import CROSSED, CrossCall, WriteCall, register_crossed
from ..attention.layers import PagedCall, Witness
from ..attention.paged import PagedStep
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.module import TransformerModel, forwards
from ..memory.rows import Rows
from ..memory.slots import CrossStep
from ..native.runner import Runner
from .item_encoder import ItemEncoder
from .network import CrossedNetwork, Feed


@frozen(kw_only=True, eq=False)
class EncoderDecoderNetwork(CrossedNetwork):
    """An encoder-decoder of transformers as a network. A witness observes the decoder's layers: it is called with every
    request that a layer makes to our attention.

    ``native`` computes steps, and ``crossing`` the contents of slots; ``None``: the module computes them.
    """

    model: TransformerModel
    family: CrossedFamily
    items: ItemEncoder
    hidden: int  # numbers of one embedding in an encoder output
    crossing: Runner | None = None
    witness: Witness | None = None
    cross_witness: Witness | None = None
    _crossing: tuple[Any, ...] = field(init=False, repr=False)  # the cross-attention modules, one for each layer

    @_crossing.default
    def _find(self) -> tuple[Any, ...]:
        """Finds the cross-attention modules. Raises `UnsupportedModel` unless there is one for each layer."""
        found = [module for name, module in self.decoder.named_modules() if name.endswith(f".{self.family.crossing}")]
        layers = [getattr(module, "layer_idx", None) for module in found]
        if layers != list(range(self.cross.layers)):
            raise UnsupportedModel(
                f"{type(self.decoder).__name__} of transformers has cross-attention in layers {layers}; allowed: in "
                f"each of its {self.cross.layers} layers"
            )
        return tuple(found)

    @property
    def decoder(self) -> Any:
        """The module that uses our attention."""
        return self.model.module.get_decoder()

    def attach(self, implementation: str | None = None) -> None:
        """Sets the decoder's attention to ours, or to another ``implementation``."""
        if implementation is None:
            register_crossed()
        self.decoder.set_attn_implementation(implementation or CROSSED)

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        return self.items.encode(jobs)

    def write_cross(self, slot: int, output: Tensor) -> None:
        """Writes the keys and values that each cross-attention module computes from ``output``. Each module is called
        with one dummy row.
        """
        self.cross.begin(slot, len(output))
        output = self.family.projected(self.model.module, output)
        if self.native is not None and self.crossing is not None:
            crossing, output = self.crossing, output.float().contiguous()
            self.cross.write_all(slot, output, lambda rows: crossing.step(rows, Rows.all_of(len(rows))))
            return
        call = WriteCall(cross=self.cross, slot=slot)
        row = output.new_zeros(1, 1, output.shape[-1])
        for module in self._crossing:
            module(hidden_states=row, triolet=call, **{self.family.states: output[None]})

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs) -> Tensor:
        if self.native is not None:
            return self.native.step(*self.fed(feeds, wanted, outputs))
        self.paged.enter([feed.part for feed in feeds])
        fed, rows = self.fed(feeds, wanted)
        tokens = torch.tensor(fed).to(self.device)
        positions = torch.tensor(rows.positions).to(self.device)
        chosen = torch.tensor(rows.wanted, dtype=torch.long).to(self.device)
        distances = self.family.distances(self.model.module, self.positions)
        call = PagedCall(step=PagedStep(self.paged, rows, distances), witness=self.witness)
        cross_call = CrossCall(step=CrossStep.of(self.cross, rows), witness=self.cross_witness)
        with forwards(self._instead(positions, distances, chosen, call, cross_call)):
            # a dummy that the cross-attention modules project; some fail without one
            row = torch.zeros(1, 1, self.hidden, dtype=self.paged.dtype, device=self.device)
            answer = self.model.module(
                encoder_outputs=self.encoder_output(row), decoder_input_ids=tokens[None], use_cache=False
            )
        logits: Tensor = answer.logits[0].float().contiguous()
        return logits

    def _instead(
        self, positions: Tensor, distances: Tensor | None, rows: Tensor, call: PagedCall, cross_call: CrossCall
    ) -> list[Forward]:
        """Returns the calls that replace the modules' own in a step. The decoder then returns only the wanted ``rows``,
        so that no other logits are computed."""
        given: dict[nn.Module, Callable[..., Any]] = dict(self.family.instead(self.model.module, positions, distances))
        decoder = self.decoder
        given[decoder] = partial(_keep, given.get(decoder, decoder.forward), rows, call)
        given.update((module, partial(told, module.forward, {"triolet": cross_call})) for module in self._crossing)
        return list(given.items())

    def encoder_output(self, hidden: Tensor) -> Any:
        """Wraps ``hidden`` [1, embeddings, hidden] in the form that the module accepts."""
        from transformers.modeling_outputs import BaseModelOutput

        output: Any = BaseModelOutput(last_hidden_state=hidden)
        output.attention_mask = None  # some encoders add this
        return output


def _keep(forward: Callable[..., Any], rows: Tensor, call: PagedCall, *args: Any, **kwargs: Any) -> Any:
    """Calls the decoder's ``forward`` with the argument that our attention reads, and keeps only ``rows`` of the last
    hidden states.
    """
    output = forward(*args, **{**kwargs, "triolet": call})
    output.last_hidden_state = output.last_hidden_state[:, rows]
    return output
