"""The pages on text, images, audio and vectors are true: their code runs, and prints what they say."""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from triolet import Engine, EngineConfig, Engines
from triolet.testing import make_checkpoint

DOCS = Path(__file__).resolve().parents[2] / "docs"
FEATURES = DOCS / "features.md"
FEATURE_MODELS = {"Qwen/Qwen3-0.6B": "qwen3", "Qwen/Qwen2-VL-2B-Instruct": "qwen2_vl", "BAAI/bge-small-en-v1.5": "bert"}
PAGES = {  # the engines that each page names, and how many pieces of code it has
    "text": ({"engine": "qwen3"}, 5),
    "vision": ({"engine": "qwen2_vl"}, 4),
    "audio-language": ({"engine": "qwen2_audio"}, 3),
    "encoder-decoders": ({"writer": "bart", "listener": "moonshine"}, 3),
    "pooling": ({"engine": "bert", "reranker": "bert_reranker", "classifier": "bert_classifier"}, 3),
}


def blocks(page: str) -> list[tuple[str, str]]:
    """Code, and what it prints."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pages name lies in the current folder."""
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0)
    for name in ("cat", "dog", "bird"):
        Image.fromarray(noise.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(f"{name}.png")
        soundfile.write(f"{name}.wav", noise.normal(0, 0.1, 8000), 16_000)


@pytest.mark.parametrize("page", PAGES)
async def test_every_piece_of_code_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    (setup, _), *pieces = blocks(page)
    engines, count = PAGES[page]
    assert len(pieces) == count
    printed: list[str] = []

    def note(*values: object) -> None:
        printed.append(" ".join(map(str, values)) + "\n")

    names: dict[str, Any] = {"print": note}
    exec(compile(setup, page, "exec"), names)
    config = EngineConfig(device="cpu", dtype="float32", threads=1, verify=True)
    async with AsyncExitStack() as stack:
        for name, family in engines.items():
            assert isinstance(names[name], Engine)  # of a real model, which is not opened here
            engine = Engine(make_checkpoint(family, tmp_path / family), config=config)
            names[name] = await stack.enter_async_context(engine)
        for code, expected in pieces:
            printed.clear()
            running = eval(compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.iscoroutine(running):
                await running
            assert "".join(printed) == expected, code


def collect(printed: list[object], *values: object, **_: object) -> None:
    """In the place of ``print``."""
    printed.extend(values)


async def test_the_pieces_of_the_features_run_on_the_models_that_they_name(tmp_path: Path) -> None:
    """Each prints something; what, depends on the model."""
    pieces = re.findall(r"^```python\n(.*?)^```", FEATURES.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(pieces) == 4
    for code in pieces:
        named = [model for model in FEATURE_MODELS if f'"{model}"' in code]
        assert named, code
        for model in named:
            folder = make_checkpoint(FEATURE_MODELS[model], tmp_path / model)
            code = code.replace(f'"{model}"', repr(str(folder)))  # noqa: PLW2901
        printed: list[object] = []
        names: dict[str, Any] = {"print": partial(collect, printed), "Engine": Engine, "Engines": Engines}
        await eval(compile(code, "features.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        assert printed, code


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_and_file_that_a_page_names_exists(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    table = text.partition("\n## Settings\n")[2].partition("\n## ")[0]
    settings = {
        name for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE) for name in row.split(", ")
    }
    assert settings <= {f"`{name}`" for name in ("EngineConfig", *EngineConfig.__annotations__)}
    assert settings or page == "audio-language"  # which points to the table of images
    named = re.findall(r"`(tests/[\w./]+)`", text)
    assert named
    assert [name for name in named if not (DOCS.parent / name).exists()] == []
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#\w+)?\)", text) if "://" not in link]
    assert [link for link in links if not (DOCS / link).exists()] == []
