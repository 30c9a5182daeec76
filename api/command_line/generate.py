"""The commands ``triolet generate`` and ``triolet embed``: text from a prompt, images and audio; vectors of texts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

import click
import trio
from attrs import asdict, define, field, frozen

from ...core.config import EngineConfig, Speculation
from ...core.errors import InvalidRequest, TrioletError
from ...core.request import SamplingParams, Structure
from ..inputs.images import load_image
from ..outputs.results import Delta
from .terminal import (
    FAILED,
    PIPE_CLOSED,
    STDIN,
    OpenEngine,
    OutputError,
    WrongFile,
    WrongInput,
    complain,
    file_fault,
    in_shell_words,
    is_terminal,
    is_utf8,
    log_lines,
    model_options,
    read_stdin,
    shown,
    stdout,
    until_interrupted,
    view_of,
    visible,
    watched,
    write,
)

if TYPE_CHECKING:
    from .watch import View

Opening: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]

_TEXTS_AT_ONCE = 256  # of `embed`: enough for full steps, few enough that output comes early


# ---- generate --------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--image", "images", multiple=True, metavar="FILE", help="An image to ask about; may be repeated.")
@click.option("--audio", "sounds", multiple=True, metavar="FILE", help="Audio to ask about; may be repeated.")
@click.option("--system", help="What the system says, before the prompt; needs a chat template.")
@click.option(
    "--chat/--raw", default=None, help="By the checkpoint's chat template, or as it is. Default: --chat, if any."
)
@click.option("--max-tokens", type=int, help="Most tokens to write. Default: up to the model's last position.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", default=1.0, show_default=True, help="Smallest set of tokens with this probability.")
@click.option("--top-k", default=0, show_default=True, help="Only the k likeliest tokens; 0 is off.")
@click.option("--min-p", default=0.0, show_default=True, help="Only tokens this times as likely as the likeliest.")
@click.option("--seed", default=0, show_default=True, help="Equal seeds draw equal tokens.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Ends before this text; may be repeated.")
@click.option("--json-schema", "schema", metavar="FILE", help="The output is JSON that follows the schema in FILE.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: text, tokens, finish_reason, usage.")
@model_options
@click.option(
    "--speculate",
    type=int,
    metavar="N",
    help="Propose up to N draft tokens a step; the text stays the same. 0: none. Default: 4 on the CPU.",
)
@click.pass_obj
def generate(
    open_engine: OpenEngine,
    /,
    *,
    model: str,
    prompt: str | None,
    images: tuple[str, ...],
    sounds: tuple[str, ...],
    schema: str | None,
    system: str | None,
    chat: bool | None,
    as_json: bool,
    verbose: bool,
    speculate: int | None,
    device: str,
    dtype: str,
    quantization: str | None,
    threads: int,
    watch: bool,
    **sampling: Any,
) -> int:
    """Write what MODEL, a checkpoint's folder or hub id, has to say to PROMPT.

    The text comes as it is sampled. Without PROMPT, or where it is -, the prompt is read from standard input. A model
    with a chat template is asked as in a conversation, images and audio before the text. With --raw it goes on where
    PROMPT ends; images and audio go where PROMPT has their placeholders, or else in front of it.
    """
    if system is not None and chat is False:
        raise click.UsageError("--system with --raw; write it into the prompt, or leave --raw out")
    view = view_of("generate", watch=watch)
    observer = None if view is None else view.state
    try:
        speculation: Speculation | Literal["auto"] | None = "auto"
        if speculate is not None:
            speculation = Speculation(tokens=speculate) if speculate else None
        # one request: pages for one sequence are enough
        config = EngineConfig(
            device=device,
            dtype=dtype,
            quantization=quantization,
            threads=threads,
            max_running=1,
            speculation=speculation,
            observer=observer,
        )
        params = SamplingParams(**sampling, structure=None if schema is None else _structure(schema))
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    out = stdout()
    pictures = tuple(map(_image, images))
    for name in sounds:
        _check_readable(name)
    job = Generation(
        prompt=_prompt(prompt, needed=not images and not sounds),
        images=pictures,
        sounds=sounds,
        system=None if system is None else _checked(system, "--system"),
        chat=chat,
        sampling=params,
        as_json=as_json,
        verbose=verbose,
        view=view,
    )
    return trio.run(until_interrupted, lambda: job.run(lambda: open_engine(model, config), out), view)


def _prompt(given: str | None, *, needed: bool) -> str:
    """The prompt: the argument, or standard input without the line end that shells put behind a text."""
    if given is not None and given != STDIN:
        text = _checked(given, "PROMPT")
    elif given is None and is_terminal(sys.stdin):
        raise click.UsageError("no PROMPT: give it as an argument, pipe it in, or type it after - (^D ends it)")
    else:
        text = _stdin_text("a prompt").removesuffix("\n").removesuffix("\r")
    if needed and not text.strip():
        raise WrongInput("the prompt is empty; write one, or give --image or --audio")
    return text


def _stdin_text(what: str) -> str:
    try:
        return read_stdin(what).decode()
    except InvalidRequest as error:
        raise WrongFile(f"{shown(STDIN)}: {error}") from error
    except UnicodeDecodeError as error:
        raise WrongFile(
            f"{shown(STDIN)}: byte {error.start} is no UTF-8 text; images and audio are given with --image and --audio"
        ) from error


def _checked(text: str, name: str) -> str:
    """Refuses lone surrogates: arguments that are no text reach Python so, and no tokenizer reads them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongInput(f"{name} is no UTF-8 text (character {error.start}); convert it first") from error
    return text


def _image(name: str) -> Any:
    """Reads the image here, so that a wrong file is refused before the model is loaded."""
    _check_readable(name)
    try:
        return load_image(name)
    except InvalidRequest as error:
        raise WrongFile(str(error)) from error


def _check_readable(name: str) -> None:
    fault = file_fault(name)
    if fault is not None:
        raise WrongFile(f"{shown(name)}: {fault}")


def _structure(name: str) -> Structure:
    """The JSON schema in the file ``name``."""
    from ...models.sampling.structure import fault_of

    _check_readable(name)
    try:
        with open(name, encoding="utf-8") as file:
            structure = Structure.json_schema(json.dumps(json.load(file)))
    except OSError as error:
        raise WrongFile(f"{name}: it cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise WrongFile(f"{name}: it is no JSON ({error}); a JSON schema is wanted") from error
    if fault := fault_of(structure):
        raise WrongFile(f"{name}: {fault}")
    return structure


@frozen(kw_only=True)
class Generation:
    """One prompt for one engine.

    Args:
        prompt: the text.
        images: what `Engine.generate` takes.
        sounds: paths of audio files.
        system: the system message.
        chat: whether to use the chat template; ``None``: if there is one.
        sampling: how tokens are sampled.
        as_json: one object instead of text.
        verbose: the log, and statistics at the end.
        view: what ``--watch`` draws.
    """

    prompt: str
    images: tuple[Any, ...] = ()
    sounds: tuple[str, ...] = ()
    system: str | None = None
    chat: bool | None = None
    sampling: SamplingParams = field(factory=SamplingParams)
    as_json: bool = False
    verbose: bool = False
    view: View | None = None

    async def run(self, open_engine: Opening, out: TextIO) -> int:
        """Writes the text to ``out``; returns the exit status."""
        begin = trio.current_time()
        return await _reported(open_engine, lambda engine: self._run(engine, out, begin), self.view, self.verbose)

    async def _run(self, engine: Any, out: TextIO, begin: float) -> None:
        parts: list[Delta] = []
        times = _Times(begin=begin, opened=trio.current_time())
        async with engine.stream(**self._question(engine.model), sampling=self.sampling) as deltas:
            if self.as_json or self._is_drawn_on(out):
                await _collect(deltas, parts, times)
            else:
                with _Text(out) as text:
                    await _collect(deltas, parts, times, text.add)
        times.ended = trio.current_time()
        if self.view is not None:
            self.view.close()
        if not self.as_json and self._is_drawn_on(out):
            with _Text(out) as text:
                text.add("".join(part.text for part in parts))
        if self.as_json:
            write(json.dumps(_as_object(parts), ensure_ascii=not is_utf8(out)), out)
        if self.verbose:
            for line in _statistics_lines(engine, parts, times):
                complain(line)

    def _is_drawn_on(self, out: TextIO) -> bool:
        """True if the text and the view share a terminal, so that the text must come at the end."""
        return self.view is not None and out.isatty()

    def _question(self, model: Any) -> dict[str, Any]:
        """The arguments of `Engine.stream`.

        Raises:
            InvalidRequest: there is a system message, but no chat template.
        """
        preparer = model.preparer
        chat = self.chat if self.chat is not None else preparer is not None and preparer.converses
        if chat:
            return {"messages": self._messages(parts_only=preparer is not None and bool(preparer.media))}
        if self.system is not None:
            raise InvalidRequest(f"--system, but {model.name} has no chat template; write it into the prompt")
        prompt = self.prompt
        if preparer is not None:
            prompt = preparer.with_items(prompt, len(self.images) + len(self.sounds))
        audio = None if not self.sounds else self.sounds[0] if len(self.sounds) == 1 else self.sounds
        return {"prompt": prompt, "images": self.images, "audio": audio}

    def _messages(self, *, parts_only: bool) -> list[dict[str, Any]]:
        """The messages. Templates of text models know texts alone, many other templates know parts alone."""
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in self.images]
        parts += [{"type": "audio", "audio": sound} for sound in self.sounds]
        words = [("system", [], self.system), ("user", parts, self.prompt)]
        messages: list[dict[str, Any]] = []
        for role, media, text in words:
            if text is None:
                continue
            told = [{"type": "text", "text": text}] if text else []
            messages.append({"role": role, "content": [*media, *told] if media or parts_only else text})
        return messages


async def _collect(
    deltas: AsyncIterator[Delta], parts: list[Delta], times: _Times, show: Callable[[str], None] | None = None
) -> None:
    async for delta in deltas:
        if not parts:
            times.first = trio.current_time()
        parts.append(delta)
        if show is not None:
            show(delta.text)


@define
class _Times:
    """Seconds of trio's clock."""

    begin: float
    opened: float
    first: float = math.nan  # the first token
    ended: float = math.nan


@define
class _Text:
    """Text on its way to ``out``, piece by piece. It ends with a line end, also when it is broken off: else the shell's
    prompt would not start on a line of its own."""

    out: TextIO
    _terminal: bool = field(init=False)
    _last: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self._terminal = self.out.isatty()

    def add(self, text: str) -> None:
        """Writes a piece. Raises the errors of `write`."""
        if not text:
            return
        self._last = text[-1]
        write(visible(text) if self._terminal else text, self.out, end="")

    def __enter__(self) -> _Text:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._last != "\n":
            write("", self.out)
        elif kind is not None and self._terminal and self._last not in ("", "\n"):
            with suppress(OSError, OutputError):
                write("", self.out)


def _as_object(parts: Sequence[Delta]) -> dict[str, Any]:
    last = parts[-1]
    assert last.finish_reason is not None, "a request ended without a reason"
    assert last.usage is not None, "a request ended without its usage"
    return {
        "text": "".join(part.text for part in parts),
        "tokens": [token for part in parts for token in part.token_ids],
        "finish_reason": last.finish_reason.value,
        "usage": asdict(last.usage),
    }


def _statistics_lines(engine: Any, parts: Sequence[Delta], times: _Times) -> Iterator[str]:
    model, statistics, usage = engine.model, engine.statistics(), parts[-1].usage
    assert usage is not None, "a request ended without its usage"
    yield f"{model.architecture} on {model.device}, {model.dtype}; opened in {times.opened - times.begin:.2f} s"
    behind = usage.completion_tokens - 1
    speed = f", then {behind / (times.ended - times.first):.1f} a second" if behind > 0 else ""
    yield (
        f"{usage.prompt_tokens} tokens read, {usage.completion_tokens} written; "
        f"the first after {times.first - times.opened:.2f} s{speed}"
    )
    requests = statistics.requests
    if requests.tokens_drafted:
        yield f"{requests.tokens_drafted} draft tokens, {requests.tokens_accepted} of them right"
    if statistics.encoder_cache.encoded:
        yield f"images and sounds encoded: {statistics.encoder_cache.encoded}"
    held = ", ".join(f"{owner} {count / 2**20:.1f}" for owner, count in statistics.device.by_owner.items() if count)
    yield f"{statistics.device.total / 2**20:.1f} MiB held: {held}"


# ---- embed -----------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pooling", type=click.Choice(["mean", "cls", "last"]), help="Default: what the checkpoint says.")
@click.option("--normalize/--no-normalize", default=None, help="Length 1. Default: what the checkpoint says.")
@model_options
@click.pass_obj
def embed(
    open_engine: OpenEngine,
    /,
    *,
    model: str,
    texts: tuple[str, ...],
    device: str,
    dtype: str,
    quantization: str | None,
    threads: int,
    watch: bool,
    **options: Any,
) -> int:
    """Write the embedding of each TEXT by MODEL, a checkpoint's folder or hub id.

    One line of JSON a text: {"text": ..., "embedding": [...]}. Without TEXT, or where it is -, each line of standard
    input is one; empty lines are passed over.
    """
    view = view_of("embed", watch=watch)
    observer = None if view is None else view.state
    try:
        config = EngineConfig(device=device, dtype=dtype, quantization=quantization, threads=threads, observer=observer)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    out = stdout()
    given = tuple(_lines() if texts in ((), (STDIN,)) else [_checked(text, "TEXT") for text in texts])
    job = Embedding(texts=given, view=view, **options)
    return trio.run(until_interrupted, lambda: job.run(lambda: open_engine(model, config), out), view)


def _lines() -> list[str]:
    if is_terminal(sys.stdin):
        raise click.UsageError("no TEXT: give texts as arguments, or pipe them in, one a line")
    lines = [line for line in _stdin_text("texts").split("\n") if line.strip()]
    if not lines:
        raise WrongInput(f"{shown(STDIN)} has no text; one a line is wanted")
    return lines


@frozen(kw_only=True)
class Embedding:
    """Texts to embed through one engine. ``pooling`` and ``normalize`` are those of `Engine.embed`; ``verbose`` and
    ``view`` as for `Generation`."""

    texts: tuple[str, ...]
    pooling: str | None = None
    normalize: bool | None = None
    verbose: bool = False
    view: View | None = None

    async def run(self, open_engine: Opening, out: TextIO) -> int:
        """Writes a line per text to ``out``; returns the exit status."""
        return await _reported(open_engine, lambda engine: self._run(engine, out), self.view, self.verbose)

    async def _run(self, engine: Any, out: TextIO) -> None:
        for start in range(0, len(self.texts), _TEXTS_AT_ONCE):
            texts = self.texts[start : start + _TEXTS_AT_ONCE]
            vectors = await engine.embed(texts, pooling=self.pooling, normalize=self.normalize)
            if self.view is not None:
                self.view.clear()
            for text, vector in zip(texts, vectors, strict=True):
                shortest = [float(str(number)) for number in vector]  # float32 has no more digits
                write(json.dumps({"text": text, "embedding": shortest}, ensure_ascii=not is_utf8(out)), out)


# ---- both ------------------------------------------------------------------------------------------------------------


async def _reported(
    open_engine: Opening, work: Callable[[Any], Awaitable[None]], view: View | None, verbose: bool
) -> int:
    """The exit status of ``work`` in an engine's block. An error becomes one line on standard error."""
    clear = nothing if view is None else view.clear
    with log_lines(clear, verbose=verbose):
        try:
            async with open_engine() as engine:
                try:
                    with watched(view, engine):
                        await work(engine)
                except BrokenPipeError:
                    return PIPE_CLOSED
                except OutputError as error:
                    return _failed(error, clear)
        except TrioletError as error:
            return _failed(error, clear)
    return 0


def _failed(error: Exception, clear: Callable[[], None]) -> int:
    clear()
    complain(in_shell_words(str(error)))
    return FAILED


def nothing() -> None:
    """For a terminal without a view, which need not make room."""
