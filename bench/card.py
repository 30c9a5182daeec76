"""The command ``triolet card``, which runs a model with its real weights and writes its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..api.command_line.pages import HelpPage
from ..api.command_line.terminal import complain, stdout, write
from ..core.errors import InvalidRequest
from .command import check_packages, scratch_folder
from .entries import settings_of

_FILE, _VARIANTS = click.Path(dir_okay=False), ("float32", "bfloat16", "int8", "int4")
_INPUTS = "Recordings with their texts (a folder), or prose for models of text and vectors (a file)."
_OUT = "Write the card into FILE. Default: standard output."
_FIGURES = "Keep the figures in FILE, as JSON, and measure only those that FILE lacks."
_PARTS = "Measure only the accuracy, at any load, or only the speed, on a machine that does nothing else."
_VARIANT = "A format to measure beside float32. May be repeated. Default: bfloat16, int8 and int4."
_ALSO = "The same weights in another file, with a name for its rows. May be repeated."
_NOTE = "A line for the card, such as a limit. May be repeated."
_MOST = "The most clips or texts whose accuracy is measured. Default: 24."
_EXAMPLES = (
    ("triolet card whisper-base --inputs speech --language en --out card.md", ""),
    ("triolet card smollm2 --inputs prose.txt --also GGUF=smollm2.gguf", "adds rows for a file with the same weights"),
    ("triolet card minilm --inputs prose.txt --figures minilm.json --only speed", "measures what the file lacks"),
)


@click.command(cls=HelpPage, examples=_EXAMPLES, short_help="Run a model, and write its card: what each format costs.")
@click.argument("model")
@click.option("--inputs", metavar="PATH", required=True, help=_INPUTS)
@click.option("--out", type=_FILE, help=_OUT)
@click.option("--figures", type=_FILE, help=_FIGURES)
@click.option("--only", type=click.Choice(("accuracy", "speed")), help=_PARTS)
@click.option("--variant", "variants", type=click.Choice(_VARIANTS), multiple=True, default=_VARIANTS, help=_VARIANT)
@click.option("--also", multiple=True, metavar="NAME=MODEL", help=_ALSO)
@click.option("--most", type=click.IntRange(2), default=24, help=_MOST)
@click.option("--threads", type=click.IntRange(1), default=2, help="The number of threads. Default: 2.")
@click.option("--language", help="The language of the recordings. Default: the model finds it.")
@click.option("--name", help="The name of the model on its card. Default: as MODEL.")
@click.option("--about", default="", metavar="TEXT", help="A sentence about the model, for its card.")
@click.option("--licence", default="", metavar="TEXT", help="The licence. Default: as the model's files say.")
@click.option("--note", "notes", multiple=True, metavar="TEXT", help=_NOTE)
def card(model: str, inputs: str, out: str | None, figures: str | None, only: str | None, **given: Any) -> int:
    """Run a model with its real weights, and write its card.

    A card says what the model is, what each format costs in accuracy, time and memory, and how far its results are from
    those of transformers. Models of speech, text and vectors have cards.
    """
    rows = _rows(model, given)
    with scratch_folder() as scratch:
        check_packages([{}] if Path(inputs).is_dir() else (), {"json_path": figures, "plot_path": None})
        check_packages((), {"json_path": out, "plot_path": None})
        kept = _read(Path(figures)) if figures else {}
        import trio

        from ..models.checkpoints.turns import TURNS
        from .figures import PARTS, measure
        from .judges import Given
        from .page import page

        asked = {name: given[name] for name in ("language", "most", "threads")}

        def keep(done: str) -> None:
            complain(done)
            if figures:
                Path(figures).write_text(json.dumps(kept, indent=1), encoding="utf-8")

        parts = (only,) if only else PARTS
        with TURNS.quiet():
            trio.run(measure, Given(inputs=Path(inputs), scratch=scratch, **asked), rows, parts, kept, keep)
        said = {"licence": given["licence"]} if given["licence"] else {}
        name = given["name"] or model
        more = [f"--{option} {given[option]}" for option in ("language", "most", "threads") if given[option]]
        more += [f"--variant {each}" for each in given["variants"] if given["variants"] != _VARIANTS]
        more += [f"--also {each.partition('=')[0]}=FILE" for each in given["also"]]
        command = " ".join(["triolet card", name, "--inputs", Path(inputs).name, *more])
        made = page({**kept, "facts": {**kept["facts"], **said}}, name, given["about"], given["notes"], command)
    if out is None:
        write(made, stdout())
    else:
        Path(out).write_text(made, encoding="utf-8")
    return 0


def _rows(model: str, given: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    found: dict[str, tuple[str, Mapping[str, Any]]] = {
        one: (model, settings_of(one)) for one in dict.fromkeys(("float32", *given["variants"]))
    }
    for each in given["also"]:
        name, _, place = each.partition("=")
        if not name or not place or name in found:
            raise click.UsageError(f"--also {each}; allowed: NAME=MODEL, each name once")
        found[name] = (place, settings_of("float32"))
        found[f"{name}, int8"] = (place, settings_of("int8"))
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}; give another file to --figures") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path} has no figures; give another file to --figures")
    return found
