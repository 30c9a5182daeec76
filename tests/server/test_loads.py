"""A server loads several models at once, whoever asks for them and however often."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio

from ..checkpoints.families import make_checkpoint
from .served import Served, served

pytestmark = pytest.mark.real_time

ASK = {"prompt": "the cat", "max_tokens": 4, "temperature": 0.0}
MODELS = ("gemma2", "smollm2", "gemma2 again", "llava")


def test_models_that_are_asked_for_at_once_answer_as_one_after_the_other(tmp_path: Path) -> None:
    """Without preload; then all at once, after they were unloaded as idle ones are; then as `--preload` loads them.
    Gemma's and SmolLM2's heads are their token embeddings."""
    folders = {name: str(make_checkpoint(name.split()[0], tmp_path / name)) for name in MODELS}

    def ask(service: Served, name: str) -> object:
        status, found = service.post("/v1/completions", {**ASK, "model": name})
        return status, [choice["text"] for choice in found.get("choices", [found])]

    with served(folders) as service, ThreadPoolExecutor(len(MODELS)) as clients:
        engines = service.server.engines

        async def all_of_them(act: str) -> None:
            async with trio.open_nursery() as nursery:
                for name in MODELS:
                    nursery.start_soon(getattr(engines, act), name)

        first = list(clients.map(lambda name: ask(service, name), MODELS))
        trio.from_thread.run(all_of_them, "unload", trio_token=service.token)
        again = list(clients.map(lambda name: ask(service, name), MODELS))
        trio.from_thread.run(all_of_them, "unload", trio_token=service.token)
        trio.from_thread.run(all_of_them, "load", trio_token=service.token)
        alone = [ask(service, name) for name in MODELS]
        assert first == again == alone
        assert all(status == 200 for status, _ in alone), alone
