"""`WhisperBlueprint`: what is found out once about a model and its device, and what is built from it."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from attrs import evolve, frozen

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ..architectures.crossed_checkpoint import CrossedCheckpoint
from ..architectures.text import TextCheckpoint
from ..checkpoints.whisper import Checkpoint, WeightFiles
from ..launch.pipeline import StagedKV
from ..machine.devices import find_kv_dtype
from ..memory.budget import Budget, KVSizes
from ..memory.kv import PagedKV
from ..memory.module import ModuleFiles, TransformerModel
from ..memory.resources import AnyHolder
from ..memory.slots import CrossKV
from ..native.library import MOST_THREADS, Library
from ..networks.features import LogMel
from ..networks.network import Aligner, Network
from ..networks.whisper import WhisperModel

NATIVE_ROWS = 256
"""Of one call of the native library: what is between its operations stays in the caches."""

AnyModel = WhisperModel | TransformerModel


class Own(Protocol):
    """`ResourceStack.own`."""

    def __call__(self, owner: str, holder: AnyHolder, /) -> AnyHolder:
        """Takes over ``holder``, and returns it."""


@frozen(kw_only=True, eq=False)
class Parts:
    """The parts of an open executor's model, each owned. ``None``: this kind of model has none."""

    network: Network
    model: AnyModel
    log_mel: LogMel | None
    paged: PagedKV | StagedKV | None
    cross: CrossKV | None
    aligner: Aligner | None = None


class Blueprint(Protocol):
    """`TorchExecutor.open` makes it once. `open` and `wake` build the model from it. It holds no tensor."""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The stages' devices; empty on one device."""

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""

    @property
    def fingerprint(self) -> str:
        """A hash that tells weights apart, once they are read."""

    @property
    def checkpoint(self) -> Checkpoint | CrossedCheckpoint | TextCheckpoint:
        """What its files say."""

    def files(self) -> WeightFiles | ModuleFiles:
        """Its weights, to be loaded. Raises `CheckpointError` when they cannot be read."""

    def load(self, files: Any) -> AnyModel:
        """The model, with weights of `files`."""

    def place(self, model: Any, *, copied: bool = False) -> AnyModel:
        """``model`` on the device, or the devices: tensors that are there already are shared, unless they are to be
        ``copied``."""

    @property
    def sizes(self) -> KVSizes:
        """The units of its keys and values."""

    def take(self, own: Own, model: Any) -> Parts:
        """Takes all that the loaded ``model`` needs beside its weights, each thing in the name of its owner."""

    def hasten(self, network: Network, own: Own) -> Network:
        """``network`` with what makes it faster and refers to all the rest, so is taken after it and released
        before."""

    def prove(self, network: Network) -> None:
        """Raises `UnsupportedModel` where the loaded model is not what was thought."""

    def describe(self, name: str) -> ModelDescription:
        """What the engine must know."""


def not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the native library computes no model there, whatever the model; ``None``: it can."""
    if device.type != "cpu":
        return f"it runs on {device}"
    if dtype != torch.float32:
        return f"it computes in {str(dtype).removeprefix('torch.')}; known: float32"
    return "the package was installed without a compiler" if Library.load() is None else None


def check_kv_dtype(config: EngineConfig, dtype: torch.dtype, why_not: str | None) -> None:
    """Raises `InvalidRequest` where torch computes a model whose keys and values are to be held in another dtype.

    Args:
        why_not: as of `tell_way`.
    """
    if why_not is None or not config.decodes or find_kv_dtype(config.kv_dtype, dtype) == dtype:
        return
    own = str(dtype).removeprefix("torch.")
    raise InvalidRequest(
        f"kv_dtype={config.kv_dtype!r}, but the native library does not compute the model: {why_not}; allowed: what it "
        f"computes in, {own!r}, or 'auto'. Use kv_dtype='auto'"
    )


def tell_way(architecture: str, why_not: str | None, threads: int) -> None:
    """Logs how a model is computed.

    Args:
        why_not: why the native library does not compute it; ``None``: it does.
    """
    log = logging.getLogger("triolet")
    if why_not is None:
        log.info("%s runs by the native library, on %d threads", architecture, min(threads, MOST_THREADS))
    else:
        log.info("%s runs by torch's operations, not by the native library: %s", architecture, why_not)


def chosen(budget: Budget | None) -> Budget:
    assert budget is not None, "pages and slots are counted when the weights are loaded"
    return budget


def kept_by(config: EngineConfig, sizes: KVSizes) -> KVSizes:
    """``sizes``, or none where there is no decoder."""
    return sizes if config.decodes else evolve(sizes, page=0, slot=0)


def most_positions(config: EngineConfig, own: int) -> int:
    """The most positions of a sequence; the model has ``own``."""
    return min(own, config.max_positions or own)


def name_devices(blueprint: Blueprint) -> str:
    """As in `ModelDescription.device`: ``"cuda:0"``, or ``"cuda:0, cuda:1"``."""
    return ", ".join(map(str, blueprint.devices or (blueprint.device,)))
