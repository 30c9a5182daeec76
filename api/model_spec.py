"""`ModelSpec`: the description of one of several models, from which its engines are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from attrs import evolve, field, frozen

from ..core import log_lines
from ..core.checks import Check, Refused, by, checked, flag, instance, nearest_names, settle, several
from ..core.config import EngineConfig
from ..core.errors import CheckpointError, ModelTooLarge
from ..core.plan import DeviceMemory
from .adapting import with_adapters
from .engine import Engine


def _name(value: Any, kinds: tuple[type, ...] = (str,)) -> Any:
    if not isinstance(value, kinds) or not str(value).strip():
        raise Refused
    return value


def _folders(value: Any) -> Mapping[str, str | Path]:
    if not isinstance(value, Mapping) or not all(isinstance(folder, str | Path) for folder in value.values()):
        raise Refused
    return MappingProxyType(dict(value))


@nearest_names({})
@frozen
class ModelSpec:
    """The description of one model of `Engines`.

    Args:
        model: a folder with a transformers checkpoint, or a hub id.
        config: the engine's settings.
        aliases: other names of the model.
        preload: start to load the model when the block is entered. Entering does not wait for the load.
        adapters: folders of LoRA adapters by their names, which are loaded with the model. Each name is a name of the
            model, too. If the settings have no room for adapters, there is room for these.

    Raises:
        InvalidRequest: a value has another type.
    """

    model: str | Path = field(
        metadata=by(
            Check(partial(_name, kinds=(str, Path)), "a folder with a checkpoint, or a hub id, as a text or a Path")
        )
    )
    config: EngineConfig = field(
        factory=EngineConfig, kw_only=True, metadata=by(instance(EngineConfig, "EngineConfig(...), or leave it out"))
    )
    aliases: tuple[str, ...] = checked((), several(_name, 1_000, "a tuple of names"), kw_only=True)
    preload: bool = checked(False, flag(), kw_only=True)
    adapters: Mapping[str, str | Path] = field(
        factory=dict, kw_only=True, hash=False, metadata=by(Check(_folders, "a mapping of names to folders"))
    )
    _parts: tuple[Callable[[], Engine], int] | None = field(default=None, init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        settle(self)

    @classmethod
    def from_parts(
        cls, make_engine: Callable[[], Engine], needs: int, *, aliases: tuple[str, ...] = (), preload: bool = False
    ) -> Self:
        """Returns a model whose engines are made by ``make_engine``, as for the simulation in `triolet_testing`.

        Args:
            make_engine: makes an engine; it is called for each load.
            needs: the estimate of the bytes that an engine needs.
        """
        spec = cls("parts of its maker's", aliases=aliases, preload=preload)
        object.__setattr__(spec, "_parts", (make_engine, needs))
        return spec

    def new_engine(self) -> Engine:
        """Returns a new engine of the model, which is not entered yet."""
        config = with_adapters(self.config, [Path(folder) for folder in self.adapters.values()])
        return Engine(self.model, config=config) if self._parts is None else self._parts[0]()

    @property
    def known_needs(self) -> DeviceMemory | None:
        """The memory that an engine will hold; ``None``: it is not known without reading files."""
        return None if self._parts is None else DeviceMemory(device="", by_owner={"parts": self._parts[1]})

    @property
    def is_here(self) -> bool:
        """True if the checkpoint is on this machine: a folder, or in the hub's cache."""
        from ..models.checkpoints.files import is_here

        return self._parts is None and is_here(self.model)

    @property
    def abilities(self) -> tuple[str, ...] | None:
        """The things that the model seems to do, by its files: ``transcribe`` (with ``words``), ``chat`` or nothing.
        ``None``: they are not on this machine, or cannot be read. A loaded model says it for certain."""
        from ..models.checkpoints.files import converses, folder_here, read_config
        from ..models.speech.names import MODEL_TYPES

        try:
            folder = folder_here(self.model) if self._parts is None else None
            if folder is None:
                return None
            kind = read_config(folder).get("model_type")
            if str(kind) in MODEL_TYPES:
                return ("transcribe", "words") if kind == "whisper" else ("transcribe",)
            return ("chat",) if self.config.chat_template is not None or converses(folder) else ()
        except CheckpointError:  # a load tells it
            return None

    def needs(self) -> DeviceMemory:
        """Estimates the memory that an engine will hold. Reads the checkpoint's files, and may download them.

        Raises:
            CheckpointError: there is no checkpoint, or it cannot be read.
            InvalidRequest: the settings do not fit the checkpoint.
        """
        from ..models.machine.openmp import prepare_openmp

        prepare_openmp()
        from ..models.blueprints.estimate import estimate
        from ..models.checkpoints.settings import adapter_bytes

        folders = [Path(folder) for folder in self.adapters.values()]
        found = estimate(self.model, with_adapters(self.config, folders))
        loaded = {"loaded_adapters": sum(map(adapter_bytes, folders))} if folders else {}
        return evolve(found, by_owner={**found.by_owner, **loaded})


def check_fits(name: str, needs: DeviceMemory, budget: int | None, what: str) -> None:
    """Raises `ModelTooLarge` if the model ``name``, which ``what``, as in "was loaded and needs", takes more than the
    ``budget`` of all models."""
    if budget is not None and needs.total > budget:
        raise ModelTooLarge(
            f"the model {name!r} {what} {log_lines.owners(needs)}; allowed: memory_budget={budget}, "
            f"{log_lines.mebibytes(budget)}, for all models together. Give a larger memory_budget, or have the model "
            "take less: by a smaller max_positions, by kv_dtype='bfloat16', or by quantization='int8'"
        )


def counted_memory(engine: Engine) -> DeviceMemory:
    """Returns the bytes of an open engine that count against the budget: all bytes that the engine holds, and all that
    encoder outputs may take."""
    model, held = engine.model, engine.statistics().device
    if not (model.encoder_bytes or model.diarizer is not None or (model.preparer is not None and model.preparer.media)):
        return held
    outputs = max(held.by_owner.get("encoder_outputs", 0), engine.inside.config.encoder_cache_bytes)
    return evolve(held, by_owner={**held.by_owner, "encoder_outputs": outputs})
