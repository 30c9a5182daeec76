"""The states of encoders that hear audio piece by piece, between two pieces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from attrs import define, field
from torch import Tensor

MOST_STATES = 16  # live sessions whose encoders go on where they were; others hear an utterance again


@define(eq=False)
class EncoderStates:
    """The states of several audios, each by the key of the last item that was heard: the caches of transformers by the
    names of the encoder's arguments. "past_key_values" has keys and values of its layers, "padding_cache" the ends of
    the inputs of its convolutions. If the native library hears, "rows" has what its program keeps. A state only saves
    work: without it, the audio is heard again from its beginning. So the ones that were used last are kept, up to
    `MOST_STATES`."""

    _kept: OrderedDict[str, Mapping[str, Any]] = field(init=False, factory=OrderedDict, repr=False)

    def take(self, key: str) -> Mapping[str, Any]:
        """Hands the state out, which may then be changed; empty: it is not known any more."""
        return self._kept.pop(key, {})

    def keep(self, key: str, state: Mapping[str, Any]) -> None:
        """Keeps the state after item ``key``. Keys and values are copied, since they are parts of larger tensors."""
        for layer in _layers(state):
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        self._kept[key] = state
        while len(self._kept) > MOST_STATES:
            self._kept.popitem(last=False)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors of all states."""
        found: list[Any] = []
        for state in self._kept.values():
            padding, layers = state["padding_cache"], _layers(state)
            found += [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
            if "rows" in state:
                found += [state["rows"], *padding.ends.values()]
                continue
            found += getattr(padding, "padding_cache", ()) or [layer.cache for layer in padding.layers.values()]
        return tuple(tensor for tensor in found if isinstance(tensor, Tensor))

    def release(self) -> None:
        """Forgets everything."""
        self._kept.clear()


def _layers(state: Mapping[str, Any]) -> Any:
    return state["past_key_values"].layers if "past_key_values" in state else ()
