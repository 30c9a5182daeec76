"""The commands ``triolet pull``, which downloads a model before it is needed, and ``triolet models``, which lists the
models in the hub's cache. Downloads and the cache are those of huggingface_hub."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from ...core.config import EngineConfig
from ...core.errors import TrioletError
from ...core.log_lines import mebibytes, one_line
from .models import MODELS_OPTION, complete_models, model_named, split_model
from .pages import HelpPage, in_flags
from .terminal import FAILED, complain, stdout, write

_GOOD = "can be opened"


@click.command(
    cls=HelpPage,
    examples=(
        ("triolet pull openai/whisper-small", ""),
        ("HF_HOME=/opt/triolet/models triolet pull Qwen/Qwen3-0.6B", "for a server that reads this folder"),
    ),
    short_help="Download models from the hub, to use them offline.",
)
@click.argument("models", metavar="MODEL...", nargs=-1, shell_complete=complete_models)
@MODELS_OPTION
def pull(models: tuple[str, ...], named: tuple[str, ...]) -> int:
    """Download each MODEL, a hub id or a name of openai/whisper such as turbo, into the hub's cache.

    Only the files that Triolet reads are downloaded. HF_HUB_CACHE or HF_HOME names the folder of the cache, HF_TOKEN
    the token for models that ask for one. Then a line says where the model is, and whether Triolet can open it. After
    ^C, the next pull goes on where this one was.
    """
    from ...models.checkpoints.files import resolve

    first, others = split_model(None, (*models, *named))
    out, status = stdout(), 0
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would wait for all downloads; the next pull goes on
    for model in (first, *others):
        try:
            folder = resolve(model_named(model))
        except TrioletError as error:
            complain(in_flags(str(error)))
            status = FAILED
            continue
        size, verdict = (
            sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            _verdict(model, folder),
        )
        status = status if verdict == _GOOD else FAILED
        write(f"{model}  {mebibytes(size)}  {folder}  {verdict}", out)
    return status


@click.command(
    cls=HelpPage,
    examples=(
        ("triolet models", ""),
        ("HF_HOME=/opt/triolet/models triolet models", "the models of another folder"),
    ),
    short_help="List the models in the hub's cache.",
)
def models() -> int:
    """List the models in the hub's cache, with their sizes on disk, and whether Triolet can open them.

    All files but the weights are read, which takes some seconds. hf cache rm MODEL removes a model.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    out = stdout()
    cache = scan_cache_dir() if os.path.isdir(HF_HUB_CACHE) else None
    repos = () if cache is None else [one for one in cache.repos if one.repo_type == "model" and one.revisions]
    found = sorted(repos, key=lambda one: one.repo_id)
    if not found:
        complain(f"there is no model in {HF_HUB_CACHE}; download one: triolet pull openai/whisper-base")
    widest = max((len(one.repo_id) for one in found), default=0)
    for one in found:
        newest = max(one.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        told = f"{one.repo_id:<{widest}}  {mebibytes(one.size_on_disk):>12}"
        write(f"{told}  {_verdict(one.repo_id, newest.snapshot_path)}", out)
    for warning in () if cache is None else cache.warnings:
        complain(f"warning: {one_line(str(warning))}")
    return 0


def _verdict(model: str, folder: Path) -> str:
    """Says whether ``model``, the checkpoint in ``folder``, can be opened, or why not. No weight is read."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from ...models.blueprints.read import read_blueprint
    from ...models.checkpoints.files import find_weights

    try:
        read_blueprint(folder, EngineConfig(device="cpu"))
        find_weights(folder)
    except TrioletError as error:
        return f"cannot be opened: {one_line(in_flags(str(error).replace(str(folder), model)))}"
    return _GOOD
