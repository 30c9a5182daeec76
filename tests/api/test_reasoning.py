"""Reasoning through the whole engine: which templates mark it, and what a tiny decoder with random weights writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
from tokenizers import AddedToken

from triolet import Completion, Engine, EngineConfig, FinishReason, InvalidRequest, Speculation, Structure
from triolet.api.inputs.prompts import read_query
from triolet.api.inputs.reasoning import options_of, reasoning_of, with_budget
from triolet.core.reasoning import Reasoning, Stage
from triolet.core.request import SamplingParams
from triolet.models.architectures.conversations import render

from ..checkpoints.words import QWEN
from . import reasoning_templates as published
from .tool_templates import TEMPLATES, make_tool_checkpoint

ASK = [{"role": "user", "content": "What do <think> and [THINK] mean? <think>"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return QWEN.make()


def rendered(tokenizer: Any, template: str, messages: Any, **options: Any) -> tuple[str, Any]:
    prompt = render(tokenizer, messages, template=template, options=options)
    return prompt, reasoning_of(template, tokenizer, prompt, messages, options, calls=False)


@pytest.mark.parametrize(
    ("name", "opening", "stage", "effort_none"),
    [
        ("QWEN3", "<think>", Stage.UNDECIDED, None),
        ("QWQ", "<think>", Stage.OPENED, Stage.OPENED),
        ("SMOLLM3", "<think>", Stage.UNDECIDED, None),
        ("DEEPSEEK_R1", "<think>", Stage.OPENED, Stage.OPENED),
        ("DEEPSEEK_V31", "<think>", None, None),
        ("MAGISTRAL", "[THINK]", Stage.UNDECIDED, Stage.UNDECIDED),
        ("GLM", "<think>", Stage.UNDECIDED, None),
        ("GRANITE", "<think>", Stage.UNDECIDED, Stage.UNDECIDED),
        ("GRANITE_32", "Here is my thought process:", Stage.UNDECIDED, Stage.UNDECIDED),
        ("GEMMA4", "<|channel>thought\n", None, None),
        ("GPT_OSS", "<|channel|>analysis<|message|>", Stage.UNDECIDED, Stage.UNDECIDED),
        ("SEED", "<seed:think>", Stage.UNDECIDED, Stage.REASONS),
        ("COHERE", "<|START_THINKING|>", Stage.UNDECIDED, Stage.UNDECIDED),
        ("EXAONE", "<thought>", Stage.OPENED, Stage.OPENED),
        ("PLAIN", None, None, None),
    ],
)
def test_a_template_says_by_its_marks_and_its_end_whether_the_model_reasons(
    tokenizer: Any, name: str, opening: str | None, stage: Stage | None, effort_none: Stage | None
) -> None:
    """A user may write about marks. Where a template has no switch, the budget is nothing."""
    template = getattr(published, name)
    _, usual = rendered(tokenizer, template, ASK)
    assert (None if usual is None else usual.stage) == stage
    _, off = rendered(tokenizer, template, ASK, **options_of(template, SamplingParams(reasoning_effort="none"), {}))
    assert (None if off is None else off.stage) == effort_none
    none = with_budget(off, SamplingParams(reasoning_effort="none"), template, {}, 100)
    assert none is None or none.budget == 0
    asked = SamplingParams(reasoning_effort="high")
    prompt, on = rendered(tokenizer, template, ASK, **options_of(template, asked, {}))
    assert (None if on is None else on.opening) == opening
    high = with_budget(on, asked, template, {}, 100)
    assert high is None or high.budget == (None if name == "GPT_OSS" else 80), "gpt-oss reads the effort"
    assert ("Reasoning: high" in prompt) is (name == "GPT_OSS")


@pytest.mark.parametrize(
    ("name", "last", "end", "stage"),
    [
        ("QWEN3", {"content": "It is"}, "</think>\n\nIt is", None),
        ("QWEN3", {"content": "", "reasoning_content": "Well"}, "<think>\nWell", Stage.REASONS),
        ("QWEN3", {"content": "It is", "reasoning_content": "Well"}, "<think>\nWell\n</think>\n\nIt is", None),
        ("DEEPSEEK_R1", {"content": "<think>\nWell"}, "<｜Assistant｜><think>\nWell", Stage.REASONS),
        ("DEEPSEEK_R1", {"content": "<think>"}, "<｜Assistant｜><think>", Stage.OPENED),
        ("QWQ", {"content": "Well, <think> is a mark</think>\n\nIt"}, "</think>\n\nIt", None),
        ("GLM", {"content": "", "reasoning_content": "Well"}, "<think>Well", Stage.REASONS),
        ("SEED", {"content": [{"type": "text", "text": "It is"}]}, "It is", None),
    ],
)
def test_an_answer_goes_on_where_the_last_message_ends(
    tokenizer: Any, name: str, last: dict[str, Any], end: str, stage: Stage | None
) -> None:
    template, messages = getattr(published, name), [*ASK, {"role": "assistant", **last}]
    if not isinstance(last["content"], str):
        template = template.replace("message.content | trim", "message.content[0].text | trim")
        messages = [{**message, "content": [{"type": "text", "text": "a"}]} for message in messages[:-1]] + messages[
            -1:
        ]
    prompt, found = rendered(tokenizer, template, messages, continue_final_message=True)
    assert prompt.endswith(end)
    assert (None if found is None else found.stage) == stage


def test_a_template_that_reads_no_reasoning_does_not_go_on_with_it(tokenizer: Any) -> None:
    last = {"role": "assistant", "content": "", "reasoning_content": "Well"}
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        rendered(tokenizer, published.SMOLLM3, [*ASK, last], continue_final_message=True)


def test_what_the_caller_tells_the_template_counts_more_than_the_effort() -> None:
    given = {"enable_thinking": True, "other": 1}
    none, low = SamplingParams(reasoning_effort="none"), SamplingParams(reasoning_effort="low")
    assert options_of(published.QWEN3, none, given) == given
    assert options_of(published.QWEN3, SamplingParams(), {}) == {}
    assert options_of(published.DEEPSEEK_V31, low, {}) == {"thinking": True}
    assert options_of("{% broken", low, {}) == {}
    budget = SamplingParams(max_reasoning_tokens=512, reasoning_effort="none")
    assert options_of(published.SEED, budget, {}) == {"thinking_budget": 512}
    assert options_of(published.SEED, none, {}) == {"thinking_budget": 0}
    assert options_of(published.SEED, budget, {"thinking_budget": 1}) == {"thinking_budget": 1}
    marks = Reasoning("<think>", "</think>", closing_ids=(1, 2))
    for told, budget in (({"enable_thinking": True}, None), ({"enable_thinking": False}, 0), ({"other": 1}, 0)):
        found = with_budget(marks, none, published.QWEN3, told, 100)
        assert found is not None
        assert found.budget == budget


@pytest.mark.parametrize(
    ("words", "effort", "told"),
    [
        (("none", "high"), "low", "high"),
        (("none", "high"), "none", "none"),
        (("low", "medium", "high"), "max", "high"),
        (("low", "medium", "high"), "none", "low"),
        (("medium",), "high", "high"),  # gpt-oss writes any word
    ],
)
def test_an_effort_is_told_in_a_word_that_the_template_knows(words: tuple[str, ...], effort: str, told: str) -> None:
    template = "".join(f"{{% if reasoning_effort == '{word}' %}}{{% endif %}}" for word in words)
    assert options_of(template, SamplingParams(reasoning_effort=effort), {}) == {"reasoning_effort": told}


@pytest.mark.parametrize(("most", "budget"), [(100, 95), (40, 37), (4, 1), (3, 0), (1, 0)])
def test_the_share_of_an_effort_leaves_room_for_the_mark_and_a_token(most: int, budget: int) -> None:
    marks = Reasoning("<think>", "</think>", closing_ids=(1, 2))
    found = with_budget(marks, SamplingParams(reasoning_effort="xhigh"), published.QWEN3, {}, most)
    assert found is not None
    assert found.budget == budget


def test_a_budget_that_leaves_no_room_for_an_answer_is_refused() -> None:
    marks, template = Reasoning("<think>", "</think>", closing_ids=(1, 2)), published.QWEN3
    for budget, most in ((16, 16), (20, 16), (1, 1)):
        asked = SamplingParams(max_reasoning_tokens=budget, max_tokens=most)
        with pytest.raises(
            InvalidRequest, match=rf"max_reasoning_tokens={budget} with max_tokens={most}.*up to {most - 1}"
        ):
            with_budget(marks, asked, template, {}, most)
        assert with_budget(None, asked, template, {}, most) is None, "a model that does not reason"
    found = with_budget(marks, SamplingParams(max_reasoning_tokens=100), template, {}, 50)
    assert found is not None
    assert found.budget == 100, "max_tokens is the model's own"


def test_marks_that_the_tokenizer_cannot_write_are_none() -> None:
    class Deaf:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [0]

        def decode(self, tokens: Any, *, skip_special_tokens: bool) -> str:
            return "?"

    assert reasoning_of(published.QWEN3, Deaf(), "", ASK, {}, calls=False) is None


# -- a model -----------------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "verify": True}
KINDS: dict[str, tuple[str, tuple[str, ...], bool]] = {  # of marks: a template, their tokens, whether these are special
    "tokens": (published.QWEN3, ("<think>", "</think>"), False),
    "special": (published.MAGISTRAL, ("[THINK]", "[/THINK]"), True),
    "text": (published.DEEPSEEK_R1, (), False),
    "undecided": (published.GLM, (), False),
    "channels": (published.GPT_OSS, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"), True),
}
GO_ON = {"continue_final_message": True}
BEGUN: dict[str, dict[str, Any]] = {  # conversations that end within reasoning
    "tokens": {"messages": [*ASK, {"role": "assistant", "reasoning_content": "Well"}], "template_options": GO_ON},
    "special": {"messages": [*ASK, {"role": "assistant", "content": "[THINK]Well"}], "template_options": GO_ON},
    "text": {"messages": ASK},
}
CHOICE = Structure.choice(["yes", "no"])
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny decoder for each kind of marks."""
    made = {}
    for name, (template, marks, special) in KINDS.items():
        tokens = [AddedToken(mark, special=special, normalized=False) for mark in marks]
        given = (tokens, ()) if special else ((), tokens)
        made[name] = make_tool_checkpoint(tmp_path_factory.mktemp(name), template, *given)
    return made


def ids(engine: Engine, text: str) -> tuple[int, ...]:
    return tuple(engine.model.tokenizer.encode(text, add_special_tokens=False))


async def streamed(engine: Engine, **asked: Any) -> tuple[str, str, tuple[int, ...], int, FinishReason | None]:
    thought, text, tokens, before = "", "", list[int](), 0
    async with engine.stream(**asked) as deltas:
        async for delta in deltas:
            assert not (delta.reasoning and text), "reasoning comes before the answer"
            before += delta.reasoning_tokens
            assert before >= len(tokens) or not delta.reasoning_tokens, "so do its tokens"
            thought, text, tokens = thought + delta.reasoning, text + delta.text, [*tokens, *delta.token_ids]
    assert delta.usage is not None
    assert delta.usage.reasoning_tokens == before
    return thought, text, tuple(tokens), before, delta.finish_reason


def told(one: Completion) -> tuple[str, str, tuple[int, ...], int, FinishReason]:
    return one.reasoning, one.text, one.token_ids, one.usage.reasoning_tokens, one.finish_reason


@pytest.mark.parametrize("kind", BEGUN)
async def test_reasoning_ends_by_its_budget_and_the_structure_holds_from_there_on(
    folders: dict[str, Path], kind: str
) -> None:
    """Whole, as a stream, and where tokens are read as they come."""
    async with Engine(folders[kind], config=EngineConfig(**CONFIG)) as engine:
        closing_ids = ids(engine, "[/THINK]" if kind == "special" else "</think>")
        for seed, budget in enumerate((5, 0)):
            asked = {**BEGUN[kind], "temperature": 1.0, "seed": seed, "max_reasoning_tokens": budget}
            asked |= {"structure": CHOICE, "logit_bias": {engine.model.eos_token_ids[0]: 3.0}}
            whole = await engine.generate(**asked)
            assert whole.text in ("yes", "no")
            assert whole.finish_reason is FinishReason.STOP
            assert whole.usage.reasoning_tokens == budget + len(closing_ids)
            assert whole.token_ids[budget : whole.usage.reasoning_tokens] == closing_ids
            plain = engine.model.tokenizer.decode(whole.token_ids[:budget], skip_special_tokens=True)
            assert whole.reasoning == plain.rstrip("\n").lstrip("\n" if kind == "text" else "")
            assert len(whole.logprobs or ()) == len(whole.token_ids)
            assert await streamed(engine, **asked) == told(whole)
            assert told(await engine.generate(**asked, stop="never")) == told(whole)
            assert await streamed(engine, **asked, stop="never") == told(whole)


async def test_a_conversation_without_tools_has_the_marks_of_its_own_template(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint may have another template for tools."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(folders["text"], tmp_path / "two")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with_tools = published.DEEPSEEK_R1 + "{% if tools %}{% endif %}"
    tokenizer.chat_template = {"default": published.PLAIN, "tool_use": with_tools}
    tokenizer.save_pretrained(folder)
    async with Engine(folder, config=EngineConfig(**CONFIG)) as engine:
        asked = {"messages": ASK, "structure": CHOICE, "max_reasoning_tokens": 1}
        plain = await engine.generate(**asked, logit_bias={ids(engine, "<")[0]: 1e4})
        assert plain.text in ("yes", "no")
        assert (plain.reasoning, plain.usage.reasoning_tokens) == ("", 0), "it may begin with no mark"
        thought = await engine.generate(messages=ASK, max_tokens=2, tools=[NOW])
        assert thought.usage.reasoning_tokens == 2


async def test_stop_strings_end_answers_and_reasoning_alone_ends_without_an_answer(folders: dict[str, Path]) -> None:
    """vLLM stops within reasoning, and answers nothing (53066)."""
    async with Engine(folders["text"], config=EngineConfig(**CONFIG)) as engine:
        c, asked = ids(engine, "c")[0], {"messages": ASK, "max_reasoning_tokens": 3}
        form = {"structure": Structure(kind="regex", text="abcabc")}
        for more, expected in (({}, "ab"), ({"include_stop_str_in_output": True}, "abc")):
            one = await engine.generate(**asked, **form, logit_bias={c: 1e4}, stop="c", **more)
            assert (one.reasoning, one.text, one.finish_reason) == ("ccc", expected, FinishReason.STOP)
        short = {"messages": ASK, "logit_bias": {c: 1e4}, "max_tokens": 2}
        cut = await engine.generate(**short, stop="c")
        assert told(cut) == ("cc", "", (c, c), 2, FinishReason.LENGTH)
        assert await streamed(engine, **short) == told(cut)
        eos = {engine.model.eos_token_ids[0]: 1e4}
        assert told(await engine.generate(messages=ASK, logit_bias=eos)) == ("", "", (), 0, FinishReason.STOP)
        assert (await engine.generate(**asked, **form, logit_bias=eos)).text == "abcabc", "a structure is written"
        beams = await engine.generate(**asked, beam_size=3, n=2, max_tokens=16)
        for one in (beams, *beams.alternatives):
            assert one.token_ids[: one.usage.reasoning_tokens][3:] == ids(engine, "</think>")
        raw = await engine.generate("<think>\n", max_tokens=4)
        assert (raw.reasoning, raw.usage.reasoning_tokens) == ("", 0), "a prompt has no marks"


async def test_a_text_with_a_structure_begins_with_the_structure_or_with_the_mark(folders: dict[str, Path]) -> None:
    for kind, first in (("tokens", "<think>"), ("special", "[THINK]"), ("undecided", "<")):
        async with Engine(folders[kind], config=EngineConfig(**CONFIG)) as engine:
            opening = ids(engine, "[THINK]" if kind == "special" else "<think>")
            for bias in (1e4, -1e4):
                asked = {"messages": ASK, "structure": CHOICE, "max_reasoning_tokens": 3, "temperature": 1.0}
                asked |= {"logit_bias": {ids(engine, first)[0]: bias}}
                one = await engine.generate(**asked)
                assert one.text in ("yes", "no")
                assert await streamed(engine, **asked) == told(one)
                assert (one.token_ids[: len(opening)] == opening) is (bias > 0) is (one.usage.reasoning_tokens > 0)
                told_apart = "<<"  # the third one may begin the closing mark
                assert one.reasoning == ("" if kind != "undecided" or bias < 0 else told_apart)
            none = await engine.generate(messages=ASK, structure=CHOICE, reasoning_effort="none", logit_bias={5: 1.0})
            assert none.text in ("yes", "no")
            assert not none.reasoning


async def test_an_answer_in_channels_comes_behind_a_header(folders: dict[str, Path]) -> None:
    """As gpt-oss writes: a structure is never written in place of the header."""
    async with Engine(folders["channels"], config=EngineConfig(**CONFIG)) as engine:
        opening = ids(engine, "<|channel|>analysis<|message|>")
        closing = ids(engine, "<|end|><|start|>assistant<|channel|>final<|message|>")
        for budget in (4, 0):
            asked = {
                "messages": ASK,
                "structure": CHOICE,
                "max_reasoning_tokens": budget,
                "temperature": 1.0,
                "seed": 1,
            }
            asked |= {"logit_bias": {ids(engine, "<|end|>")[0]: -1e4, engine.model.eos_token_ids[0]: -1e4}}
            one = await engine.generate(**asked)
            assert one.text in ("yes", "no")
            assert one.token_ids[: len(opening)] == opening
            assert one.token_ids[len(opening) + budget :][: len(closing)] == closing
            assert one.usage.reasoning_tokens == len(opening) + budget + len(closing)
            assert await streamed(engine, **asked) == told(one)


async def test_a_structure_that_has_the_opening_mark_itself_is_the_answer(folders: dict[str, Path]) -> None:
    async with Engine(folders["undecided"], config=EngineConfig(**CONFIG)) as engine:
        form = Structure(kind="regex", text="<think>ab</think>c")
        one = await engine.generate(messages=ASK, structure=form)
        assert (one.reasoning, one.text, one.usage.reasoning_tokens) == ("", "<think>ab</think>c", 0)
        asked = {"structure": Structure(kind="regex", text="(?s:.){3}"), "max_reasoning_tokens": 0}
        other = await engine.generate(messages=ASK, **asked, logit_bias=dict.fromkeys(ids(engine, "<think>"), 1e4))
        assert len(other.text) == 3
        assert other.usage.reasoning_tokens in (0, len(ids(engine, "<think></think>"))), "any text comes behind it"


async def test_a_call_ends_reasoning_where_tools_may_be_called_freely(tmp_path: Path) -> None:
    """Qwen3.5 calls within its reasoning now and then. A structure of calls comes behind the closing mark."""
    folder = make_tool_checkpoint(tmp_path, TEMPLATES["hermes"][0], ())
    async with Engine(folder, config=EngineConfig(**CONFIG)) as engine:
        for more, call in (({"tools": [NOW]}, "<tool_call>"), ({}, ""), ({"tools": [NOW], "structure": CHOICE}, "")):
            (request,) = await engine.inside.requests_of(read_query(None, {"messages": ASK, **more}))
            assert request.reasoning is not None
            assert (request.reasoning.call, request.reasoning.structured) == (call, "structure" in more)


def asked_of(number: int) -> dict[str, Any]:
    form = Structure(kind="regex", text="[abc]{12}")
    sampling = {"max_reasoning_tokens": 5 + 5 * number, "temperature": float(number % 2), "seed": number}
    return {"messages": ASK, "structure": form, **sampling}


async def test_forced_tokens_are_the_same_beside_others_with_drafts_and_after_preemption(
    folders: dict[str, Path],
) -> None:
    """A sequence that starts anew has its tokens of reasoning before it."""
    alone: list[Any] = []
    async with Engine(folders["text"], config=EngineConfig(**CONFIG, speculation=None)) as engine:
        for number in range(4):
            found = await engine.generate(**asked_of(number), n=2)
            alone.append([told(one) for one in (found, *found.alternatives)])

    async def ask(engine: Engine, number: int) -> None:
        found = await engine.generate(**asked_of(number), n=2)
        assert [told(one) for one in (found, *found.alternatives)] == alone[number]

    drafts = EngineConfig(**CONFIG, speculation=Speculation(tokens=4), max_step_tokens=24)
    async with Engine(folders["text"], config=drafts) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, engine, number)
        assert engine.statistics().requests.tokens_drafted
    async with Engine(folders["text"], config=EngineConfig(**CONFIG, max_running=1)) as engine:
        for arrives in (1, 6, 21, 2, 3, 4, 5):  # how far the other one is meanwhile depends on threads
            texts, read = ["", ""], 0
            async with engine.stream(**asked_of(3), priority=1) as deltas, trio.open_nursery() as nursery:
                async for delta in deltas:
                    texts = [texts[0] + delta.reasoning, texts[1] + delta.text]
                    read += 1
                    if read == arrives:
                        nursery.start_soon(ask, engine, 0)
            assert texts == list(alone[3][0][:2])
            if engine.statistics().requests.preemptions > 2:
                break
        assert engine.statistics().requests.preemptions
