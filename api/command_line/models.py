"""The model of a command line, which is its first word or follows ``--model``, the same in every command."""

from __future__ import annotations

import os
from functools import partial

import click
from click.shell_completion import CompletionItem

from .given import is_media
from .pages import folders

DEMO = "demo"
_SIZES = ("tiny", "base", "small", "medium", "large", "large-v2", "large-v3", "turbo")
WHISPER_NAMES = {name: f"openai/whisper-{name}" for name in (*_SIZES, *(f"{size}.en" for size in _SIZES[:4]))} | {
    "large": "openai/whisper-large-v3",
    "large-v1": "openai/whisper-large",
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
    "turbo": "openai/whisper-large-v3-turbo",
}
"""Hub ids for the names that openai/whisper's command knows."""


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of models, or a folder."""
    known = [CompletionItem(name) for name in (DEMO, *WHISPER_NAMES) if name.startswith(incomplete)]
    return known or folders(ctx, param, incomplete)


_option = partial(click.option, "--model", metavar="MODEL", shell_complete=complete_models)
_TOLD = "Another way to give MODEL."
MODEL_OPTION = _option(help=_TOLD)
"""The other place of a model whose command takes it as its first word."""
MODELS_OPTION = _option("named", multiple=True, help=f"{_TOLD} May be repeated.")
"""The other place of the models whose command takes several."""


def split_model(model: str | None, words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The model of ``--model``, or else the first of ``words``, and the other words."""
    if model is None and not words:
        raise click.UsageError("MODEL is missing; give a checkpoint's folder or hub id, such as Qwen/Qwen3-0.6B")
    return (model_named(words[0]), words[1:]) if model is None else (model_named(model), words)


def is_model(word: str) -> bool:
    """True if ``word``, in a place where a file may stand, too, names a model."""
    if word == DEMO or word in WHISPER_NAMES or os.path.exists(word):
        return not os.path.isfile(word) and (not os.path.isdir(word) or os.path.exists(f"{word}/config.json"))
    return "/" in word and "://" not in word and not is_media(word)


def model_named(name: str) -> str:
    """The hub id or folder for a name that the command knows: ``demo``, and the names of openai/whisper."""
    if name == DEMO:
        from ...demo import checkpoint

        return str(checkpoint())
    if name in WHISPER_NAMES and not os.path.exists(name):
        return WHISPER_NAMES[name]
    return name
