"""An engine of paper for `triolet generate` and `triolet embed`."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio

from triolet.api.outputs.results import Delta, Usage
from triolet.core.config import EngineConfig
from triolet.core.errors import TrioletError
from triolet.core.request import FinishReason


class PaperPreparer:
    """The preparer of a model with a chat template that reads ``media``."""

    def __init__(self, media: set[str], *, converses: bool = True) -> None:
        self.media = frozenset(media)
        self.converses = converses

    def with_items(self, prompt: str, count: int) -> str:
        return "<item>" * count + prompt


class PaperEngine:
    """Says ``pieces``, texts or whole deltas; an error among them is raised. ``None`` presses ^C."""

    def __init__(
        self,
        *pieces: str | Delta | TrioletError | None,
        media: Sequence[str] = (),
        converses: bool = True,
        opening: TrioletError | None = None,
        reason: FinishReason = FinishReason.STOP,
    ) -> None:
        self.pieces = pieces
        self.reason = reason
        self.opening = opening
        self.model = SimpleNamespace(name="paper", preparer=PaperPreparer(set(media), converses=converses))
        self.configs: list[tuple[str, EngineConfig]] = []
        self.asked: dict[str, Any] = {}
        self.embedded: list[tuple[str, ...]] = []
        self.given = 0
        self.closed = False

    def __call__(self, model: str, config: EngineConfig) -> PaperEngine:
        self.configs.append((model, config))
        return self

    async def __aenter__(self) -> PaperEngine:
        if self.opening:
            raise self.opening
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    @asynccontextmanager
    async def stream(self, **asked: Any) -> AsyncIterator[AsyncIterator[Delta]]:
        self.asked = asked
        async with aclosing(self._deltas()) as deltas:
            yield deltas

    async def _deltas(self) -> AsyncIterator[Delta]:
        for piece in self.pieces:
            await trio.lowlevel.checkpoint()
            if piece is None:
                signal.raise_signal(signal.SIGINT)
                await trio.sleep_forever()
            elif isinstance(piece, TrioletError):
                raise piece
            else:
                self.given += 1
                yield piece if isinstance(piece, Delta) else Delta(text=piece, token_ids=(self.given,))
        usage = Usage(prompt_tokens=3, completion_tokens=self.given)
        yield Delta(text="", token_ids=(), finish_reason=self.reason, usage=usage)

    async def embed(self, texts: Sequence[str], *, pooling: str | None, normalize: bool | None) -> Any:
        await trio.lowlevel.checkpoint()
        self.embedded.append(tuple(texts))
        self.asked = {"pooling": pooling, "normalize": normalize}
        return np.array([[len(text), 0.1] for text in texts], np.float32)
