"""`Adapting`: the methods of `Engine` for adapters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from attrs import evolve

from ..core.config import EngineConfig
from .hosts.current import Host
from .hosts.trio_engine import TrioEngine


class Adapting:
    """An engine whose model may have adapters (Hu et al. 2021, "LoRA")."""

    inside: TrioEngine

    def _reached(self) -> Host:
        raise NotImplementedError

    async def load_adapter(self, name: str, folder: str | Path) -> None:
        """Loads a LoRA adapter in peft's layout, for requests with ``adapter=name``. Steps wait while the files are
        read. If an adapter of this name is loaded, the new one takes its place for later requests.

        Args:
            name: the name for requests.
            folder: has ``adapter_config.json`` and ``adapter_model.safetensors``, which are not read again.

        Raises:
            CheckpointError: there is no adapter, its files are damaged, or it is of another model. `UnsupportedModel`,
                for another kind of adapter, is a kind of this error.
            InvalidRequest: the engine has ``EngineConfig(adapters=0)``, or an argument has another type.
            EngineClosed: the engine ended meanwhile.
        """
        await self._reached().call(partial(self.inside.load_adapter, name, folder))

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Requests that have it end as they began; later ones are refused.

        Raises:
            UnknownModel: there is no adapter of this name.
        """
        await self._reached().call(partial(self.inside.unload_adapter, name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""
        return self.inside.adapters.names


def with_adapters(config: EngineConfig, folders: Sequence[Path]) -> EngineConfig:
    """Returns the settings with room for the adapters in ``folders``, unless they have room for some already.

    Raises:
        CheckpointError: there is no adapter in one of them.
    """
    if config.adapters or not folders:
        return config
    from ..models.checkpoints.settings import adapter_rank

    return evolve(config, adapters=len(folders), adapter_rank=max(map(adapter_rank, folders)))
