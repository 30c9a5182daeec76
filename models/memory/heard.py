"""The memory of encoders that hear audio piece by piece, between two pieces."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from attrs import define, field
from torch import Tensor


@define(eq=False)
class Memory:
    """The memory that a causal encoder has of one audio, in the caches of transformers: keys and values of its layers,
    and the ends of the inputs of its convolutions."""

    past_key_values: Any
    padding_cache: Any

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns everything that is remembered."""
        found = [getattr(layer, name, None) for layer in self.past_key_values.layers for name in ("keys", "values")]
        found += [layer.cache for layer in self.padding_cache.layers.values()]
        return tuple(tensor for tensor in found if isinstance(tensor, Tensor))


@define(eq=False)
class Memories:
    """The memories of several audios, each by the key of the last item that was heard. A memory only saves work:
    without it, the audio is heard again from its beginning. So the ones that were used last are kept, up to ``most``.
    """

    most: int
    _kept: OrderedDict[str, Memory] = field(init=False, factory=OrderedDict, repr=False)

    def take(self, key: str) -> Memory | None:
        """Hands the memory out, which may then be changed; ``None``: it is not known any more."""
        return self._kept.pop(key, None)

    def keep(self, key: str, memory: Memory) -> None:
        """Keeps the memory of the audio up to item ``key``. Keys and values are copied, since they are parts of larger
        tensors."""
        for layer in memory.past_key_values.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        self._kept[key] = memory
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors of all memories."""
        return tuple(tensor for memory in self._kept.values() for tensor in memory.tensors())

    def release(self) -> None:
        """Forgets everything."""
        self._kept.clear()
