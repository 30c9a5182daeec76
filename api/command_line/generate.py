"""The command ``triolet generate``: text from a prompt, images and audio."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

import click
import trio
from attrs import asdict

from ...core.config import Speculation
from ...core.errors import InvalidRequest
from ...core.request import FinishReason, SamplingParams, Structure
from ..adapting import with_adapters
from ..outputs.results import Delta, Usage
from .flags import FORM, SAMPLING, sampling_of, sampling_options
from .following import config_of, model_options, run
from .given import STDIN, check_model, checked_text, image_of, sound_of, template_of, text_of_stdin
from .models import MODEL_OPTION, split_model
from .pages import FILE, MODEL, REPORTS, HelpPage, folders
from .terminal import (
    CUT_OFF,
    OpenEngine,
    OutputError,
    WrongInput,
    complain,
    is_terminal,
    is_utf8,
    stdout,
    visible,
    write,
)
from .trace import TraceFile

_SECTIONS = {
    "Question": ("images", "sounds", "system", "chat", "chat_template"),
    "Text": (*SAMPLING, "speculate", "draft_head"),
    "Form": (*FORM, "as_json", "as_lines"),
    "Model": ("model", "adapter", *MODEL),
    "Reports": REPORTS,
}
_BRIEF = (
    "images sounds system chat max_tokens temperature top_p seed schema choices as_json model device quantization "
    "max_positions verbose"
)
_SHORT = "Write text from a prompt, images and audio."
_MEDIA = "{} to ask about; - is standard input. May be repeated."
_CHAT = "Put the prompt into the chat template, or use it as it is. Default: --chat if there is a template."
_SPECULATE = (
    "Propose up to N draft tokens a step, which saves time and leaves the text the same. 0: off. Default: 4 on the CPU."
)
_DRAFT_HEAD = "A small model that proposes draft tokens for MODEL, by folder or hub id: an assistant of Gemma 4."
_EXAMPLES = (
    ('triolet generate HuggingFaceTB/SmolLM2-135M-Instruct "Why is the sky blue?"', ""),
    ('triolet generate Qwen/Qwen2-VL-2B-Instruct "What is it?" --image cat.png', ""),
    ('triolet generate Qwen/Qwen3-0.6B "A cat, as JSON" --json-schema cat.json', ""),
    ('git diff | triolet generate Qwen/Qwen3-0.6B --system "Write a commit message."', "the prompt is piped in"),
)


@click.command(cls=HelpPage, sections=_SECTIONS, brief=_BRIEF, examples=_EXAMPLES, short_help=_SHORT)
@click.argument("words", metavar="MODEL [PROMPT]", nargs=-1, shell_complete=folders)
@MODEL_OPTION
@click.option("--image", "images", multiple=True, **FILE, help=_MEDIA.format("An image"))
@click.option("--audio", "sounds", multiple=True, **FILE, help=_MEDIA.format("Audio"))
@click.option("--system", metavar="TEXT", help="A system message before the prompt. The model needs a chat template.")
@click.option("--chat/--raw", default=None, help=_CHAT)
@click.option("--chat-template", **FILE, help="A Jinja template that is used in place of the model's own.")
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object: text, tokens, finish_reason and usage.")
@click.option("--json-lines", "as_lines", is_flag=True, help="Write a line of JSON for each piece of text as it comes.")
@model_options
@click.option("--adapter", metavar="FOLDER", help="The folder of a LoRA adapter of the model, in peft's layout.")
@click.option("--speculate", type=int, metavar="N", help=_SPECULATE)
@click.option("--draft-head", metavar="MODEL", shell_complete=folders, help=_DRAFT_HEAD)
@click.pass_context
def generate(
    context: click.Context,
    /,
    *,
    model: str | None,
    words: tuple[str, ...],
    images: tuple[str, ...],
    sounds: tuple[str, ...],
    system: str | None,
    chat: bool | None,
    chat_template: str | None,
    as_json: bool,
    as_lines: bool,
    trace: TraceFile | None,
    verbose: bool,
    speculate: int | None,
    draft_head: str | None,
    adapter: str | None,
    **others: Any,
) -> int:
    """Write the answer of a model to PROMPT. MODEL is a checkpoint's folder or hub id, or a GGUF file.

    The text appears while it is sampled. If PROMPT is missing or is -, the prompt is read from standard input. A model
    with a chat template gets PROMPT as a message of the user, with images and audio before the text. With --raw the
    model continues PROMPT; images and audio take the places of their placeholders, or stand before PROMPT if it has
    none.
    """
    found_model, rest = split_model(model, words)
    if len(rest) > 1:
        raise click.UsageError(f"{rest[1]!r} follows the prompt; allowed: one prompt. Put all of it in quotes")
    prompt = rest[0] if rest else None
    if system is not None and chat is False:
        raise click.UsageError(
            "--system with --raw: a raw prompt has no system message; write it into the prompt, or leave --raw out"
        )
    if chat_template is not None and chat is False:
        raise click.UsageError("--chat-template with --raw: a raw prompt uses no template; leave one of the two out")
    template = None if chat_template is None else template_of(chat_template)
    speculation: Speculation | Literal["auto"] | None = "auto"
    if speculate is not None:
        speculation = Speculation(tokens=speculate) if speculate else None
    drafts = {"speculation": speculation, "draft_head": draft_head}
    # one request: pages for one sequence are enough
    config = config_of(others, observer=trace, max_running=1, chat_template=template, **drafts)
    params = sampling_of(context)
    if as_json and as_lines:
        raise click.UsageError("--json with --json-lines; allowed: one of them")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not (as_json or as_lines):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} needs an output that shows them; give --json or --json-lines too")
    check_model(found_model)
    _check_one_reads_stdin(prompt, images, sounds)
    out = stdout()
    ask = partial(
        _arguments,
        images=tuple(map(image_of, images)),
        sounds=tuple(map(sound_of, sounds)),
        prompt=_prompt(prompt, needed=not images and not sounds),
        system=None if system is None else checked_text(system, "--system"),
        chat=chat,
    )
    open_engine: OpenEngine = context.obj
    begin = math.nan

    def opening() -> AbstractAsyncContextManager[Any]:
        nonlocal begin
        begin = trio.current_time()
        return open_engine(found_model, with_adapters(config, [] if adapter is None else [Path(adapter)]))

    async def write_text(engine: Any) -> int:
        opened, first, parts = trio.current_time(), math.nan, list[Delta]()
        with _line(out) as add, _dimmed(shown=not (as_json or as_lines)) as think:
            named = await _adapted(engine, adapter)
            async with engine.stream(**ask(engine.model), **named, sampling=params) as deltas:
                async for delta in deltas:
                    if not parts:
                        first = trio.current_time()
                    parts.append(delta)
                    think(delta)
                    if not as_json:
                        add(_line_of([delta], params, out) + "\n" if as_lines else delta.text)
            ended = trio.current_time()
            text, usage = "".join(part.text for part in parts), parts[-1].usage
            assert usage is not None, "a request ended without its usage"
            if as_json:
                add(_line_of(parts, params, out))
        if verbose:
            for line in _statistics_lines(engine, usage, opened - begin, first - opened, ended - first):
                complain(line)
        return _status_of(text, parts[-1].finish_reason, usage, params.structure)

    return run(opening, write_text, trace, verbose=verbose)


async def _adapted(engine: Any, adapter: str | None) -> dict[str, str]:
    """Loads the adapter of a folder, if there is one. Returns the argument of `Engine.stream` that names it."""
    if adapter is None:
        return {}
    await engine.load_adapter(adapter, adapter)
    return {"adapter": adapter}


def _line_of(parts: Sequence[Delta], params: SamplingParams, out: TextIO) -> str:
    """Returns ``parts`` as one JSON object. It has the finish reason and the usage if the last part has them."""
    last = parts[-1]
    told: dict[str, Any] = {
        "text": "".join(part.text for part in parts),
        "tokens": [token for part in parts for token in part.token_ids],
    }
    if reasoning := "".join(part.reasoning for part in parts):
        told["reasoning"] = reasoning
    if params.logprobs is not None:
        told["logprobs"] = [logprob for part in parts for logprob in part.logprobs]
        told["top_logprobs"] = [top for part in parts for top in part.top_logprobs or ()]
    if parts[0].prompt_logprobs is not None:
        told["prompt_logprobs"] = parts[0].prompt_logprobs
    if last.finish_reason is not None and last.usage is not None:
        told |= {"finish_reason": last.finish_reason.value, "usage": asdict(last.usage)}
    return json.dumps(told, ensure_ascii=not is_utf8(out))


def _status_of(text: str, reason: FinishReason | None, usage: Usage, structure: Structure | None) -> int:
    """Returns the exit status for a text that ended for ``reason``. Reports a text that was cut off before it had all
    of ``structure``.
    """
    if structure is None or reason is not FinishReason.LENGTH:
        return 0
    from ...models.sampling.structure import is_complete

    if is_complete(structure, text):
        return 0
    complain(
        f"the output was cut off after {usage.completion_tokens} tokens, before it was complete; allow more with "
        "--max-tokens, or ask for something shorter"
    )
    return CUT_OFF


def _check_one_reads_stdin(prompt: str | None, images: Sequence[str], sounds: Sequence[str]) -> None:
    told = "the prompt (not given as an argument)" if prompt is None else "the prompt"
    readers = [told] if prompt in (None, STDIN) else []
    readers += ["--image -"] * images.count(STDIN) + ["--audio -"] * sounds.count(STDIN)
    if len(readers) > 1:
        raise click.UsageError(
            f"{' and '.join(readers)} would all be read from standard input, which can be read only once; give a "
            "file's name instead of -, or the prompt as an argument"
        )


def _prompt(given: str | None, *, needed: bool) -> str:
    """The prompt: the argument, or standard input without the line end that shells append."""
    if given is not None and given != STDIN:
        text = checked_text(given, "PROMPT")
    elif given is None and is_terminal(sys.stdin):
        raise click.UsageError(
            "PROMPT is missing; give it as an argument, pipe it in, or give - and type it (^D ends it)"
        )
    else:
        text = text_of_stdin("a prompt", instead="give images and audio with --image and --audio")
        text = text.removesuffix("\n").removesuffix("\r")
    if needed and not text.strip():
        raise WrongInput("the prompt is empty; give a text, or --image or --audio")
    return text


def _arguments(
    model: Any,
    *,
    prompt: str,
    images: Sequence[Any],
    sounds: Sequence[str | bytes],
    system: str | None,
    chat: bool | None,
) -> dict[str, Any]:
    """The arguments of `Engine.stream` for a prompt with images, sounds and a system message. ``chat``: True: use the
    chat template; ``None``: use it if the model has one.

    Raises:
        InvalidRequest: there is a system message, but no chat template.
    """
    preparer = model.preparer
    if chat or (chat is None and preparer is not None and preparer.converses):
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        parts += [{"type": "audio", "audio": sound} for sound in sounds]
        as_parts = preparer is not None and bool(
            preparer.media
        )  # templates of text models accept only texts as content
        messages: list[dict[str, Any]] = []
        for role, media, text in (("system", [], system), ("user", parts, prompt)):
            if text is not None:
                told = [{"type": "text", "text": text}] if text else []
                messages.append({"role": role, "content": [*media, *told] if media or as_parts else text})
        return {"messages": messages}
    if system is not None:
        raise InvalidRequest(
            f"--system is given, but {model.name} has no chat template; write the message into the prompt"
        )
    if preparer is not None:
        prompt = preparer.with_items(prompt, len(images) + len(sounds))
    audio = None if not sounds else sounds[0] if len(sounds) == 1 else sounds
    return {"prompt": prompt, "images": images, "audio": audio}


@contextmanager
def _dimmed(*, shown: bool) -> Iterator[Callable[[Delta], None]]:
    """Yields a function for the deltas of a text. It writes their reasoning to standard error, dimmed, if that is a
    terminal and the reasoning is to be ``shown``. A blank line is between reasoning and text."""
    shown, dim, begun = shown and is_terminal(sys.stderr), not os.environ.get("NO_COLOR"), False

    def end() -> None:
        nonlocal begun
        if begun:
            begun = False
            write("\x1b[0m\n" if dim else "\n", sys.stderr)

    def add(delta: Delta) -> None:
        nonlocal begun
        if delta.reasoning and shown:
            write(("" if begun or not dim else "\x1b[2m") + visible(delta.reasoning), sys.stderr, end="")
            begun = True
        if delta.text:
            end()

    try:
        yield add
    finally:
        with suppress(OSError, OutputError):
            end()


@contextmanager
def _line(out: TextIO) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes text to ``out`` piece by piece. A line end is written after the text. On a terminal
    it is written even if the text is broken off, so that the shell's prompt starts on a new line.
    """
    is_terminal, last = out.isatty(), ""

    def add(text: str) -> None:
        nonlocal last
        if text:
            last = text[-1]
            write(visible(text) if is_terminal else text, out, end="")

    try:
        yield add
    except BaseException:
        if is_terminal and last not in ("", "\n"):
            with suppress(OSError, OutputError):
                write("", out)
        raise
    if last != "\n":
        write("", out)


def _statistics_lines(engine: Any, usage: Usage, opening: float, waiting: float, writing: float) -> Iterator[str]:
    """The statistics as lines for people. ``opening``, ``waiting`` and ``writing`` are seconds: until the engine was
    open, until the first token, and from then to the end."""
    statistics, count = engine.statistics(), usage.completion_tokens
    speed = f", then {(count - 1) / writing:.1f} a second" if count > 1 else ""
    yield f"opened in {opening:.2f} s; {usage.prompt_tokens} tokens read, {count} written"
    yield f"the first token after {waiting:.2f} s{speed}"
    requests = statistics.requests
    if requests.tokens_drafted:
        yield f"{requests.tokens_drafted} draft tokens, {requests.tokens_accepted} of them right"
    if statistics.encoder_cache.encoded:
        yield f"images and sounds encoded: {statistics.encoder_cache.encoded}"
