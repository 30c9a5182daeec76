"""Adapters over HTTP: an adapter's name is a model's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triolet import EngineConfig, InvalidRequest, ModelSpec
from triolet.server.command import adapters_of

from ..checkpoints.adapters import linears_of, merged, save_adapter, tokens_of
from ..checkpoints.families import make_checkpoint
from .served import served

pytestmark = pytest.mark.real_time

PROMPT = [5, 6, 7, 8, 9]


def test_an_adapter_is_asked_by_its_name_as_a_model_is(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "model")
    adapter = save_adapter(tmp_path / "tone", linears_of(tmp_path / "model"), seed=1, rank=3)
    config = EngineConfig(device="cpu", max_positions=64)
    spec = ModelSpec(tmp_path / "model", config=config, adapters={"tone": adapter})
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    with served({"chat": spec}) as server:
        for name, own in (("chat", None), ("tone", adapter)):
            status, answer = server.post("/v1/completions", {"model": name, **body})
            assert (status, answer["model"]) == (200, name)
            assert answer["choices"][0]["token_ids"] == tokens_of(merged(tmp_path / "model", own), PROMPT, 6)
        said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        plain, adapted = (
            server.post("/v1/chat/completions", {"model": name, **said})[1]["choices"][0]["message"]
            for name in ("chat", "tone")
        )
        assert plain != adapted
        listed = json.loads(server.get("/v1/models")[1])["data"]
        assert [(one["id"], one["state"]) for one in listed] == [("chat", "ready"), ("tone", "ready")]
        assert json.loads(server.get("/v1/models/tone")[1])["id"] == "tone"
        status, answer = server.post("/v1/completions", {"model": "other", **body})
        assert status == 404
        assert "allowed: chat, tone" in answer["error"]["message"]


def test_the_options_name_adapters_and_their_models() -> None:
    assert adapters_of(("tone=a/b", "other=c=d"), ["chat"]) == {"chat": {"tone": "a/b", "other": "c=d"}}
    assert adapters_of(("chat=tone=a/b",), ["chat", "speech"]) == {"chat": {"tone": "a/b"}, "speech": {}}
    for wrong in (("tone",), ("=a",), ("tone=",), ("tone=a", "tone=b")):
        with pytest.raises(InvalidRequest, match="allowed: NAME=FOLDER, each name once"):
            adapters_of(wrong, ["chat"])
    with pytest.raises(InvalidRequest, match="allowed: MODEL=NAME=FOLDER, each name once"):
        adapters_of(("tone=a",), ["chat", "speech"])
