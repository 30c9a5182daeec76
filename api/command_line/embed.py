"""The command ``triolet embed``: vectors of texts."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click
from attrs import frozen

from .following import Following
from .given import check_model, checked_text, text_of_stdin
from .pages import FOLLOWING, MODEL, Page, folders
from .terminal import (
    STDIN,
    OpenEngine,
    Opening,
    WrongInput,
    is_terminal,
    is_utf8,
    model_options,
    reported,
    shown,
    stdout,
    write,
)

if TYPE_CHECKING:
    from .watch import View

_TEXTS_AT_ONCE = 256  # enough for full steps, few enough that output comes early


_EXAMPLES = (
    ('triolet embed BAAI/bge-small-en-v1.5 "a cat on the mat" "a dog"', ""),
    ("triolet embed BAAI/bge-small-en-v1.5 --normalize < lines.txt", "a line of JSON for each line"),
)


@click.command(
    cls=Page,
    sections={"Vectors": ("pooling", "normalize"), "Model": MODEL, "Watching": FOLLOWING},
    examples=_EXAMPLES,
    short_help="Write embeddings of texts.",
)
@click.argument("model", shell_complete=folders)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pooling", type=click.Choice(["mean", "cls", "last"]), help="Default: as the checkpoint says.")
@click.option("--normalize/--no-normalize", default=None, help="To length 1. Default: as the checkpoint says.")
@model_options
@click.pass_obj
def embed(
    open_engine: OpenEngine,
    /,
    *,
    model: str,
    texts: tuple[str, ...],
    **options: Any,
) -> int:
    """Write the embedding of each TEXT by MODEL, a checkpoint's folder or hub id.

    One line of JSON a text: {"text": ..., "embedding": [...]}. Without TEXT, or where it is -, each line of standard
    input is one; empty lines are passed over.
    """
    following = Following.of("embed", options)
    config = following.config(options)
    check_model(model)
    out = stdout()
    given = tuple(_lines() if texts in ((), (STDIN,)) else [checked_text(text, "TEXT") for text in texts])
    job = Embedding(texts=given, view=following.view, **options)
    return following.run(lambda: job.run(lambda: open_engine(model, config), out))


def _lines() -> list[str]:
    if is_terminal(sys.stdin):
        raise click.UsageError("no TEXT: give texts as arguments, or pipe them in, one a line")
    found = text_of_stdin("texts", instead="embed reads texts alone").split("\n")
    lines = [line.removesuffix("\r") for line in found if line.strip()]
    if not lines:
        raise WrongInput(f"{shown(STDIN)} has no text; one a line is wanted")
    return lines


@frozen(kw_only=True)
class Embedding:
    """Texts to embed through one engine. ``pooling`` and ``normalize`` are those of `Engine.embed`, ``verbose`` and
    ``view`` those of `Generation`."""

    texts: tuple[str, ...]
    pooling: str | None = None
    normalize: bool | None = None
    verbose: bool = False
    view: View | None = None

    async def run(self, open_engine: Opening, out: TextIO) -> int:
        """Writes a line per text to ``out``; returns the exit status."""
        return await reported(open_engine, lambda engine: self._run(engine, out), self.view, verbose=self.verbose)

    async def _run(self, engine: Any, out: TextIO) -> None:
        for start in range(0, len(self.texts), _TEXTS_AT_ONCE):
            texts = self.texts[start : start + _TEXTS_AT_ONCE]
            vectors = await engine.embed(texts, pooling=self.pooling, normalize=self.normalize)
            if self.view is not None:
                self.view.clear()
            for text, vector in zip(texts, vectors, strict=True):
                shortest = [float(str(number)) for number in vector]  # float32 has no more digits
                write(json.dumps({"text": text, "embedding": shortest}, ensure_ascii=not is_utf8(out)), out)
