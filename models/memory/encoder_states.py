"""The states of encoders that hear audio piece by piece, between two pieces."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from attrs import define, field
from torch import Tensor

MOST_STATES = 16  # live sessions whose encoders go on where they were; others hear an utterance again


@define(eq=False)
class EncoderState:
    """The state of a causal encoder after a piece of an audio, in the caches of transformers: keys and values of its
    layers, and the ends of the inputs of its convolutions."""

    past_key_values: Any
    padding_cache: Any

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns all tensors of the state."""
        found = [getattr(layer, name, None) for layer in self.past_key_values.layers for name in ("keys", "values")]
        padding = self.padding_cache
        found += getattr(padding, "padding_cache", ()) or [layer.cache for layer in padding.layers.values()]
        return tuple(tensor for tensor in found if isinstance(tensor, Tensor))


@define(eq=False)
class EncoderStates:
    """The states of several audios, each by the key of the last item that was heard. A state only saves work: without
    it, the audio is heard again from its beginning. So the ones that were used last are kept, up to `MOST_STATES`."""

    _kept: OrderedDict[str, EncoderState] = field(init=False, factory=OrderedDict, repr=False)

    def take(self, key: str) -> EncoderState | None:
        """Hands the state out, which may then be changed; ``None``: it is not known any more."""
        return self._kept.pop(key, None)

    def keep(self, key: str, state: EncoderState) -> None:
        """Keeps the state after item ``key``. Keys and values are copied, since they are parts of larger tensors."""
        for layer in state.past_key_values.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        self._kept[key] = state
        while len(self._kept) > MOST_STATES:
            self._kept.popitem(last=False)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors of all states."""
        return tuple(tensor for state in self._kept.values() for tensor in state.tensors())

    def release(self) -> None:
        """Forgets everything."""
        self._kept.clear()
