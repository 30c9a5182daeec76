"""The command ``triolet embed``: vectors of texts."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from .following import config_of, model_options, run
from .given import STDIN, check_model, checked_text, shown, text_of_stdin
from .models import MODEL_OPTION, split_model
from .pages import MODEL, REPORTS, HelpPage, folders
from .terminal import OpenEngine, WrongInput, is_terminal, is_utf8, stdout, write
from .trace import TraceFile

_TEXTS_AT_ONCE = 256  # enough for full steps, few enough that output comes early


_POOLING = "How the vectors of a text's tokens become one vector. Default: as the checkpoint says."
_NORMALIZE = "Scale each vector to length 1. Default: as the checkpoint says."
_EXAMPLES = (
    ('triolet embed BAAI/bge-small-en-v1.5 "a cat on the mat" "a dog"', ""),
    ("triolet embed BAAI/bge-small-en-v1.5 --normalize < lines.txt", "one line of JSON for each line of the file"),
)


@click.command(
    cls=HelpPage,
    sections={"Vectors": ("pooling", "normalize"), "Model": ("model", *MODEL), "Reports": REPORTS},
    examples=_EXAMPLES,
    short_help="Write embeddings (vectors) of texts.",
)
@click.argument("words", nargs=-1, metavar="MODEL [TEXT]...", shell_complete=folders)
@MODEL_OPTION
@click.option("--pooling", type=click.Choice(["mean", "cls", "last"]), help=_POOLING)
@click.option("--normalize/--no-normalize", default=None, help=_NORMALIZE)
@model_options
@click.pass_obj
def embed(
    open_engine: OpenEngine,
    /,
    *,
    model: str | None,
    words: tuple[str, ...],
    pooling: str | None,
    normalize: bool | None,
    trace: TraceFile | None,
    verbose: bool,
    **options: Any,
) -> int:
    """Write the embedding of each TEXT. MODEL is a checkpoint's folder or hub id.

    The output has one line of JSON for each text: {"text": ..., "embedding": [...]}. If TEXT is missing or is -, each
    line of standard input is a text. Empty lines are skipped.
    """
    config = config_of(options, observer=trace)
    found_model, texts = split_model(model, words)
    check_model(found_model)
    out = stdout()
    given = _lines() if texts in ((), (STDIN,)) else [checked_text(text, "TEXT") for text in texts]

    async def write_all(engine: Any) -> None:
        for start in range(0, len(given), _TEXTS_AT_ONCE):
            part = given[start : start + _TEXTS_AT_ONCE]
            vectors = await engine.embed(part, pooling=pooling, normalize=normalize)
            for text, vector in zip(part, vectors, strict=True):
                shortest = [float(str(number)) for number in vector]  # float32 has no more digits
                write(json.dumps({"text": text, "embedding": shortest}, ensure_ascii=not is_utf8(out)), out)

    return run(lambda: open_engine(found_model, config), write_all, trace, verbose=verbose)


def _lines() -> list[str]:
    if is_terminal(sys.stdin):
        raise click.UsageError("TEXT is missing; give texts as arguments, or pipe them in, one a line")
    found = text_of_stdin("texts", instead="embed reads only text").split("\n")
    lines = [line.removesuffix("\r") for line in found if line.strip()]
    if not lines:
        raise WrongInput(f"{shown(STDIN)} has no text; give one text a line")
    return lines
