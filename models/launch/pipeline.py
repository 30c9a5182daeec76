"""A decoder whose layers are on several devices, one stage after the other.

The embedding and the encoders of images or audio are on the first device, the last norm and the head on the last. Each
layer's pages are on the device of the layer. The modules are transformers' own. During a call, and only then, their
``forward`` is wrapped by a function that moves the arguments to the module's device.

accelerate's `dispatch_model` moves arguments too, but with hooks that stay in the modules and hold the arguments in
closures. torch's forward pre-hooks are not used either. Their frames hold the arguments in closures, so an error keeps
the arguments alive, see `core.frames`. ::

    first device    embedding, rotary, layer 0 .. layer 3 --+
                                                            | hidden states, positions' embeddings and the like,
    last device                      layer 4 .. layer 7  <--+ each moved once a call
                                     norm, head -> logits

A step runs through the stages one after the other. The purpose is to run models that do not fit on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from ...core.errors import InvalidRequest, UnsupportedModel
from ...core.plan import Chunk
from ..attention.paged import PagedStep
from ..memory.kv import PagedKV
from ..memory.module import TransformerModel, forwards
from ..memory.rows import Rows


@frozen(kw_only=True)
class Stage:
    """The layers ``first .. stop - 1``, which are on ``device``."""

    device: torch.device
    first: int
    stop: int


def cut(layers: int, devices: Sequence[torch.device]) -> tuple[Stage, ...]:
    """Cuts the layers into as many stages as there are devices, evenly.

    Raises:
        InvalidRequest: there are fewer layers than devices.
    """
    count = len(devices)
    if count > layers:
        raise InvalidRequest(f"{count} devices are given; allowed: up to {layers}, since the model has {layers} layers")
    borders = [layers * index // count for index in range(count + 1)]
    return tuple(
        Stage(device=device, first=borders[index], stop=borders[index + 1]) for index, device in enumerate(devices)
    )


@frozen(kw_only=True, eq=False)
class Places:
    """The devices for the parts of a module."""

    stages: tuple[Stage, ...]
    layers: str  # name of the list of layers
    last: tuple[str, ...]  # names of the modules after the layers
    before: tuple[str, ...]  # names of the modules before the layers

    @classmethod
    def find(
        cls, module: nn.Module, language: nn.Module, stages: tuple[Stage, ...], head: nn.Module | None = None
    ) -> Places:
        """Finds the places. ``language`` is a part of ``module``, and so is its ``head``, if it is not in ``language``;
        the other parts encode. Raises `UnsupportedModel` if ``language`` has no list of its layers."""
        layers, decoding = find_layers(module, language, stages[-1].stop), {*language.modules(), head}
        before: list[str] = []
        last: list[str] = []
        for parent, inner in _ancestors(layers):
            siblings = list(module.get_submodule(parent).named_children())
            place = [name for name, _ in siblings].index(inner)
            for index, (name, sibling) in enumerate(siblings):
                if index != place and next(sibling.parameters(), None) is not None:
                    (last if index > place and sibling in decoding else before).append(f"{parent}.{name}".lstrip("."))
        return cls(stages=stages, layers=layers, last=tuple(last), before=tuple(before))

    def device(self, name: str) -> torch.device:
        """Returns the device of the module ``name``."""
        if name.startswith(f"{self.layers}."):
            index = int(name.removeprefix(f"{self.layers}.").split(".")[0])
            return next(stage.device for stage in self.stages if index < stage.stop)
        behind = any(name == each or name.startswith(f"{each}.") for each in self.last)
        return self.stages[-1 if behind else 0].device


def find_layers(module: nn.Module, language: nn.Module, count: int) -> str:
    """Returns the name in ``module`` of the list of ``count`` layers. The list is in ``language``, a part of
    ``module``.

    Raises:
        UnsupportedModel: there is no such list, or there are several.
    """
    inside = {id(each) for each in language.modules()}
    found: list[str] = [name for name, each in module.named_modules() if id(each) in inside and _is_layers(each, count)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{type(module).__name__} has {len(found)} lists of {count} numbered layers; several devices and "
            "compile=True need exactly one list, as in the decoders of transformers"
        )
    return found[0]


def _is_layers(module: nn.Module, count: int) -> bool:
    """True if ``module`` is a list of ``count`` layers, each with an attention that knows the number of its layer."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(
            {each.layer_idx for each in layer.modules() if hasattr(each, "layer_idx")} == {index}
            for index, layer in enumerate(module)
        )
    )


def _ancestors(name: str) -> Iterator[tuple[str, str]]:
    """Yields the ancestors of ``name``, the nearest first, each with the child through which it leads to ``name``."""
    while name:
        parent, _, inner = name.rpartition(".")
        yield parent, inner
        name = parent


@define(eq=False)
class StagedKV:
    """The `PagedKV` of several stages, each for the layers of its stage. A page number names one page in each."""

    parts: tuple[PagedKV, ...] = field(repr=False)

    def another(self, *, pages: int, page_size: int) -> StagedKV:
        """Returns a new pool, as `PagedKV.another` does."""
        return StagedKV(tuple(part.another(pages=pages, page_size=page_size) for part in self.parts))

    @property
    def pages(self) -> int:
        """Number of pages that sequences can own."""
        return self.parts[0].pages

    @property
    def page_size(self) -> int:
        """Number of positions of a page."""
        return self.parts[0].page_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored KV."""
        return self.parts[0].dtype

    def enter(self, chunks: Sequence[Chunk]) -> None:
        """Zeroes pages, as `PagedKV.enter` does."""
        for part in self.parts:
            part.enter(chunks)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, as `PagedKV.copy` does."""
        for part in self.parts:
            part.copy(pairs)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the pools."""
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def release(self) -> None:
        """Forgets the pools."""
        for part in self.parts:
            part.release()


_Moved = dict[tuple[int, torch.device], tuple[Tensor, Tensor]]
"""The tensors that were moved in a call, by identity and device. Each entry has the tensor, which is kept so that no
other tensor gets its identity, and the moved copy."""


@frozen(kw_only=True, eq=False)
class Pipeline:
    """A placed model at work."""

    stages: tuple[Stage, ...]
    _modules: tuple[tuple[nn.Module, torch.device], ...] = field(repr=False)  # modules whose arguments must be moved

    @classmethod
    def of(cls, model: TransformerModel, places: Places) -> Pipeline:
        """Returns the pipeline for ``model``, whose parts are already on their devices."""
        layers = [f"{places.layers}.{index}" for index in range(places.stages[0].stop, places.stages[-1].stop)]
        names = (*places.before, *layers, *places.last)
        return cls(
            stages=places.stages,
            modules=tuple((model.module.get_submodule(name), places.device(name)) for name in names),
        )

    @property
    def answers_on(self) -> torch.device:
        """The device of logits and last hidden states."""
        return self.stages[-1].device

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """Makes the model callable within the block."""
        moved: _Moved = {}
        instead: list[tuple[nn.Module, Callable[..., Any]]] = []
        for module, device in self._modules:  # no comprehension here: it would be a closure
            instead.append((module, partial(_forward, moved, device, module.forward)))
        try:
            with forwards(instead):
                yield
        finally:
            moved.clear()

    def step(self, paged: StagedKV, rows: Rows) -> StagedStep:
        """Returns the attention of a step with ``rows``."""
        return StagedStep(self.stages, tuple(map(PagedStep, paged.parts, repeat(rows))))


def _forward(moved: _Moved, device: torch.device, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``forward`` with its arguments moved to ``device``."""
    return forward(*_on(device, args, moved), **_on(device, kwargs, moved))


def _on(device: torch.device, value: Any, moved: _Moved) -> Any:
    """Returns ``value`` with its tensors on ``device``. Each tensor is moved once a call."""
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        key = id(value), device
        if key not in moved:
            moved[key] = value, value.to(device)
        return moved[key][1]
    if type(value) in {tuple, list}:
        return type(value)(map(_on, repeat(device), value, repeat(moved)))  # no comprehension: a closure
    if type(value) is dict:
        return dict(zip(value, map(_on, repeat(device), value.values(), repeat(moved)), strict=True))
    return value


@frozen(eq=False)
class StagedStep:
    """The attention of one step. Each layer uses the `PagedStep` of its stage."""

    stages: tuple[Stage, ...]
    steps: tuple[PagedStep, ...]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        """Attends as `PagedStep.attend` does."""
        index = next(index for index, stage in enumerate(self.stages) if layer < stage.stop)
        return self.steps[index].attend(layer - self.stages[index].first, queries, keys, values, **options)
