"""The reasoning of a conversation: the marks of its chat template, the template's switch, and the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from ...core.checks import demand
from ...core.reasoning import Reasoning, Stage
from ...core.request import SamplingParams
from .messages import Message

_HEADER = "<|end|><|start|>assistant<|channel|>"


@frozen
class _Marks:
    """Marks by a ``sign`` in the text of a chat template, as in `Reasoning`."""

    sign: str
    opening: str
    closing: str
    around: tuple[str, str] = ("", "")
    pauses: tuple[str, ...] = ()


_MARKS = (
    _Marks("<response></response>", "<think>", "</think>", around=("<response>", "</response>")),  # Granite 3.3
    _Marks("</think>", "<think>", "</think>"),  # DeepSeek, Qwen3, SmolLM3, GLM, LFM2.5 and many others
    _Marks("[/THINK]", "[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    _Marks("<|channel>thought", "<|channel>thought\n", "<channel|>"),  # Gemma 4
    _Marks("Here is my thought process:", "Here is my thought process:", "Here is my response:"),  # Granite 3.2
    _Marks("<seed:think>", "<seed:think>", "</seed:think>"),  # Seed-OSS
    _Marks("<thought>", "<thought>", "</thought>"),  # EXAONE Deep
    _Marks(  # Command R7B, Command A Reasoning
        *("<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    _Marks(  # gpt-oss: each message has its channel in its header
        "<|channel|>analysis<|message|>",
        "<|channel|>analysis<|message|>",
        f"{_HEADER}final<|message|>",
        around=("<|channel|>final<|message|>", ""),
        pauses=(f"{_HEADER}analysis<|message|>", f"{_HEADER}commentary<|message|>"),
    ),
)
_REFLECTS = "<seed:cot_budget_reflect>"  # Seed-OSS's template goes on so behind the mark if there is no budget
_CALLS = ("<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<｜tool▁calls▁begin｜>")  # with which calls begin
_SHARES = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}  # OpenRouter's
_EFFORT = "reasoning_effort"
_BUDGET = "thinking_budget"
_SWITCHES = ("enable_thinking", "thinking", "reasoning")


def _variables(template: str) -> frozenset[str]:
    from ...models.architectures.conversations import variables_of  # it imports jinja2

    return variables_of(template)


def options_of(template: str, sampling: SamplingParams, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The variables of a chat template: its switch, its effort and its budget, as far as it reads them, for the effort
    and the budget of ``sampling``; and those that the caller has ``given``, which count more."""
    effort, budget = sampling.reasoning_effort, sampling.max_reasoning_tokens
    told: dict[str, Any] = {} if budget is None else {_BUDGET: budget}
    if effort is not None:
        told = {**dict.fromkeys(_SWITCHES, effort != "none"), _EFFORT: _nearest(template, effort), **told}
    if effort == "none":
        told.setdefault(_BUDGET, 0)
    return {**{name: value for name, value in told.items() if name in _variables(template)}, **given}


def _nearest(template: str, effort: str) -> str:
    """``effort``, or the nearest word of a template that knows several, but not this one. A template that knows one or
    none writes any word as it is."""
    order = (*_SHARES, "max")
    known = [word for word in order if f"'{word}'" in template or f'"{word}"' in template]
    if effort in known or len(known) < 2:
        return effort
    words = known if effort == "none" else [word for word in known if word != "none"]
    return min(words, key=lambda word: abs(order.index(word) - order.index(effort)))


def with_budget(
    reasoning: Reasoning | None, sampling: SamplingParams, template: str, given: Mapping[str, Any], max_tokens: int
) -> Reasoning | None:
    """``reasoning`` with the budget that ``sampling`` gives it. An effort that the template does not read is a share of
    ``max_tokens``, which leaves room for the closing mark and a token. None at all is held, unless the variables that
    the caller has ``given`` ask for reasoning.

    Raises:
        InvalidRequest: the caller's own budget leaves nothing of the caller's own ``max_tokens`` for an answer.
    """
    budget, effort = sampling.max_reasoning_tokens, sampling.reasoning_effort
    if reasoning is not None and budget is not None and sampling.max_tokens is not None:
        demand(
            budget < sampling.max_tokens,
            f"max_reasoning_tokens={budget} with max_tokens={sampling.max_tokens}, which count reasoning, too",
            f"up to {sampling.max_tokens - 1}, so that there is room for an answer",
        )
    if reasoning is None or budget is not None or effort not in _SHARES:
        return reasoning and evolve(reasoning, budget=budget)
    wanted = any(given.get(name) not in (None, False, "none") for name in (*_SWITCHES, _EFFORT))
    is_read = wanted if effort == "none" else _EFFORT in _variables(template)
    share = min(int(_SHARES[effort] * max_tokens), max_tokens - len(reasoning.closing_ids) - 1)
    return evolve(reasoning, budget=None if is_read else max(share, 0))


def reasoning_of(
    template: str, tokenizer: Any, prompt: str, messages: Sequence[Message], options: Mapping[str, Any], *, calls: bool
) -> Reasoning | None:
    """The reasoning that may come before the answer to a conversation, which ``template`` has rendered as ``prompt``.
    ``None``: the template has no marks, the tokenizer cannot write them, or the prompt ends behind the reasoning.
    ``calls``: the model may call tools or not."""
    found = next((marks for marks in _MARKS if marks.sign in template), None)
    if found is None:
        return None
    last = messages[-1] if options.get("continue_final_message") else None
    stage = _stage(found.opening, found.closing, prompt, last)
    call = next((mark for mark in _CALLS if calls and mark in template), "")
    others = "".join((*found.around, call))
    begins, ends, parts = (
        tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (found.opening, found.closing, others)
    )
    if stage is None or found.closing not in tokenizer.decode(ends, skip_special_tokens=False):
        return None
    added = {token: one.content for token, one in getattr(tokenizer, "added_tokens_decoder", {}).items() if one.special}
    return Reasoning(
        found.opening,
        found.closing,
        stage=stage,
        opening_ids=begins,
        closing_ids=ends,
        spelled=tuple((token, added[token]) for token in sorted({*begins, *ends, *parts} & added.keys())),
        pauses=found.pauses,
        around=found.around,
        call=call,
    )


def _stage(opening: str, closing: str, prompt: str, last: Message | None) -> Stage | None:
    """The stage at the end of ``prompt``, which ends within the ``last`` message if there is one. Users may write about
    marks, so nothing but the end is looked at."""
    end = prompt.rstrip()
    if last is not None:
        content = last.get("content") or ""
        end = (content if isinstance(content, str) else str(content[-1].get("text", ""))).rstrip()
        if not end:
            return Stage.REASONS if last.get("reasoning_content") else Stage.UNDECIDED
    if end.endswith(opening.rstrip()):
        return Stage.OPENED
    if end.endswith(opening + _REFLECTS):
        return Stage.REASONS
    if last is not None:
        return Stage.REASONS if end.rfind(opening) > end.rfind(closing) else None
    return None if end.endswith(closing) else Stage.UNDECIDED
