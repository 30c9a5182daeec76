"""A chat template that the caller gives: it takes the place of the checkpoint's, for prompts and for tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve
from transformers import AutoTokenizer

from triolet import Engine, EngineConfig, InvalidRequest, ToolFormat, demo
from triolet.models.blueprints.estimate import estimate

from ..checkpoints.families import make_checkpoint
from .tool_templates import HERMES

CONFIG = EngineConfig(device="cpu", dtype="float32", threads=1, chat_template=HERMES)


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
async def test_prompts_and_the_format_of_tool_calls_are_those_of_the_given_template(
    family: str, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(family, tmp_path))
    tokenizer.response_template = {"fields": 3}  # cannot be read: nobody may try
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor, as older checkpoints have it"}')
    async with Engine(tmp_path, config=CONFIG) as engine:
        assert engine.model.preparer is not None
        assert engine.model.preparer.render([{"role": "user", "content": "hi"}]) == "<|user|>hi<|assistant|>"
        assert ToolFormat.of(engine.model).name == "hermes"


@pytest.mark.parametrize(
    ("family", "template", "message"),
    [
        ("llama", "{% if x %}\n{{ y }", "line 2 of chat_template: "),
        ("llama", "{{ x }}\n\n{{ x | nothing }}", "line 3 of chat_template: No filter named 'nothing'"),
        ("demo", HERMES, r"chat_template is given for .*, which has no conversations"),
        ("bart", HERMES, r"chat_template is given for .*, which has no conversations"),
        ("bert", HERMES, r"chat_template is given for .*, which has no conversations"),
    ],
)
def test_a_template_that_cannot_be_read_or_used_is_refused(
    family: str, template: str, message: str, made: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        estimate(demo.checkpoint() if family == "demo" else made(family), evolve(CONFIG, chat_template=template))


def test_the_name_of_a_file_is_not_a_template() -> None:
    with pytest.raises(InvalidRequest, match=r"chat_template='a\.jinja'; allowed: the text of a Jinja"):
        EngineConfig(chat_template="a.jinja")
