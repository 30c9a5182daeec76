"""The command ``triolet bench``, which measures the engine on this machine, beside other engines."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..api.command_line.pages import HelpPage, HelpPages
from ..api.command_line.terminal import FAILED, complain, stdout, write
from ..core.errors import InvalidRequest, TrioletError
from .entries import ours, peer_option, peers, settings_of

if TYPE_CHECKING:
    from .report import Table
    from .rounds import Contender, Entry
    from .scenarios import Scenario

Command = TypeVar("Command", bound=Callable[..., Any])

REAL = "TRIOLET_REAL"
"""The variable that names the folder with real weights and speech."""

_ROOM = 0.7  # share of the inputs a second that the engine handles offline
_TRIMMED, _WINDOW = 2.0, 30.0  # seconds: the least silence after a trimmed clip; the length of a whole window

_FILE, _COUNT, _SEVERAL = click.Path(dir_okay=False), click.IntRange(1), click.IntRange(2)
_CLIP = click.FloatRange(1, 30)  # seconds
_VARIANTS, _DEFAULTS = click.Choice(("float32", "bfloat16", "int8")), ("float32", "int8")
_ONLY = "A scenario to run, such as start, one, thread or online. May be repeated. Default: all."
_ONLINE = "The number of inputs that arrive at random times. Default: 24."
_RATE = "The number of --online inputs that arrive per second. Default: 70 % of the engine's throughput."
_PYTHON = (
    "The Python interpreter that has the packages of the other engines. PEER=PYTHON: of this one. May be repeated."
)
_COMPUTES = "The number type in which Triolet computes. May be repeated. Default: float32 and int8."
_LONG = "The largest length of a long clip, in seconds. Default: 25."
_SHORT = "The largest length of a short clip, in seconds. Default: 5."
_TOKENS = "The number of tokens to write after each prompt. Default: 64."
_QUALITY = "Measure instead how well each variant reads TEXT: perplexity, and how far it is from float32."
_AGAINST = "The model that --quality compares with in float32. Default: the same model."
_TOGETHER = "The number of prompts at once. May be repeated. Default: 8 and 32."

_EXAMPLES = (
    ("triolet bench speech --model whisper-base --audio speech", ""),
    ("triolet bench text --model smollm2 --peer transformers", "compares the engine with transformers"),
)
_EXAMPLES_OF_SPEECH = (
    ("triolet bench speech --model whisper-base --audio speech", ""),
    ("triolet bench speech --peer transformers --variant float32 --rounds 3", "if TRIOLET_REAL is set"),
    ("triolet bench speech --only start --json start.json", "measures only the start"),
)
_EXAMPLES_OF_TEXT = (
    ("triolet bench text --model smollm2", ""),
    ("triolet bench text --peer llama.cpp=smollm2.gguf --variant int8", "if TRIOLET_REAL is set"),
    ("triolet bench text --peer openvino=exported --no-draft-tokens", ""),
    ("triolet bench text model.Q4_K_M.gguf --quality prose.txt --against model", "tells what a format costs"),
)
_EXAMPLES_OF_EMBED = (
    ("triolet bench embed --model minilm --peer transformers", ""),
    ("triolet bench embed --peer openvino=exported --peer-python venv/bin/python", "if TRIOLET_REAL is set"),
)


@click.group(cls=HelpPages, examples=_EXAMPLES, short_help="Measure the engine on this machine, also beside others.")
def bench() -> None:
    """Measure the engine on this machine, in turn with other engines, and compare it with the machine's limit.

    Each engine runs in a process of its own. All are open at the same time, and do the same tasks. A ratio is the
    seconds of another engine divided by those of Triolet, in the same round. Each command takes --only NAME for a
    single scenario, --rounds N, --json FILE and more: triolet bench speech --help.
    """


def _common(command: Command) -> Command:
    for option in (
        click.option("--json", "json_path", type=_FILE, help="Write all results into FILE, as JSON."),
        click.option("--plot", "plot_path", type=_FILE, help="Draw the medians into FILE."),
        click.option("--only", multiple=True, metavar="NAME", help=_ONLY),
        click.option("--online", type=click.IntRange(0), default=24, help=_ONLINE),
        click.option("--rate", type=click.FloatRange(0, min_open=True), help=_RATE),
        click.option("--threads", type=_COUNT, default=2, help="The number of threads of each engine. Default: 2."),
        click.option("--rounds", type=_COUNT, default=5, help="The number of rounds that are measured. Default: 5."),
        click.option("--peer-python", "peer_pythons", metavar="PYTHON", multiple=True, help=_PYTHON),
        click.option("--variant", "variants", type=_VARIANTS, multiple=True, default=_DEFAULTS, help=_COMPUTES),
    ):
        command = option(command)
    return command


@bench.command(
    cls=HelpPage, examples=_EXAMPLES_OF_SPEECH, short_help="Measure transcriptions, and the start of the engine."
)
@click.argument("folder", metavar="[MODEL]", required=False)
@click.option("--model", metavar="DIR", help=f"The folder of a speech model. Default: whisper-base in ${REAL}.")
@click.option("--audio", metavar="DIR", help=f"The folder of recordings of English speech. Default: speech in ${REAL}.")
@peer_option("speech")
@click.option("--seconds", type=_CLIP, default=25.0, help=_LONG)
@click.option("--short-seconds", type=_CLIP, default=5.0, help=_SHORT)
@click.option("--together", type=_SEVERAL, default=8, help="The number of clips at once. Default: 8.")
@_common
def speech(
    folder: str | None,
    model: str | None,
    audio: str | None,
    seconds: float,
    short_seconds: float,
    together: int,
    **how: Any,
) -> int:
    """Measure transcriptions, and the start of the engine.

    The scenarios: clips one by one, several at once, short ones, the same ones again, clips at random times, and beside
    a busy process or thread.
    """

    from .inputs import Clips
    from .scenarios import SPEECH, speech_scenarios

    with scratch_folder() as clips_folder:
        checkpoint = _folder("--model", _one(folder, model), "whisper-base")
        recordings = _folder("--audio", audio, "speech")
        lacking = _lacking(checkpoint)
        wanted = _wanted([name for name in SPEECH if name not in lacking], how)
        entries = [*ours(checkpoint, "speech", how), *peers(checkpoint, "speech", how)]
        clips, short = (Clips.of(recordings, clips_folder, length) for length in (seconds, short_seconds))

        def scenarios(contenders: Sequence[Contender]) -> list[Scenario]:
            return speech_scenarios(
                clips.some,
                short.some,
                together=together,
                online=how["online"],
                rate=_rate(contenders[0], lambda number: {"paths": short.some(together, number)}, together, how),
                trimmed=min((short.shortest + _TRIMMED) / _WINDOW, 1.0),
            )

        return _play(checkpoint, entries, scenarios, wanted, [clips.texts, short.texts], how)


@bench.command(
    cls=HelpPage, examples=_EXAMPLES_OF_TEXT, short_help="Measure the generation of text, and the start of the engine."
)
@click.argument("folder", metavar="[MODEL]", required=False)
@click.option("--model", metavar="DIR", help=f"The folder or the GGUF file of a decoder. Default: smollm2 in ${REAL}.")
@peer_option("text")
@click.option("--tokens", type=_SEVERAL, default=64, help=_TOKENS)
@click.option("--together", type=_SEVERAL, multiple=True, default=(8, 32), help=_TOGETHER)
@click.option("--no-draft-tokens", is_flag=True, help="Let Triolet propose no draft tokens.")
@click.option("--quality", type=_FILE, metavar="TEXT", help=_QUALITY)
@click.option("--against", metavar="MODEL", help=_AGAINST)
@_common
def text(
    folder: str | None,
    model: str | None,
    tokens: int,
    together: tuple[int, ...],
    quality: str | None,
    against: str | None,
    **how: Any,
) -> int:
    """Measure the generation of text, and the start of the engine.

    The scenarios: prompts one by one, several at once, at random times, and beside a busy thread.
    """

    from .inputs import prompts_of
    from .scenarios import names_of_text, text_scenarios

    if against is not None and quality is None:
        raise click.UsageError("--against is for --quality, which is missing")
    with scratch_folder():
        decoder = _folder("--model", _one(folder, model), "smollm2")
        if quality is not None:
            return _judge(
                decoder, decoder if against is None else _folder("--against", against, ""), Path(quality), how
            )
        wanted = _wanted(names_of_text(together), how)
        entries = [*ours(decoder, "text", how), *peers(decoder, "text", how)]
        most = max(together)

        def scenarios(contenders: Sequence[Contender]) -> list[Scenario]:
            def task(number: int) -> dict[str, Any]:
                return {"prompts": prompts_of(most, number), "tokens": tokens}

            rate = _rate(contenders[0], task, most, how)
            return text_scenarios(prompts_of, tokens=tokens, together=together, online=how["online"], rate=rate)

        return _play(decoder, entries, scenarios, wanted, [], how)


@bench.command(cls=HelpPage, examples=_EXAMPLES_OF_EMBED, short_help="Measure vectors, and the start of the engine.")
@click.argument("folder", metavar="[MODEL]", required=False)
@click.option("--model", metavar="DIR", help=f"The folder of an embedding model. Default: minilm in ${REAL}.")
@peer_option("embed")
@click.option("--together", type=_SEVERAL, default=64, help="The number of texts at once. Default: 64.")
@_common
def embed(folder: str | None, model: str | None, together: int, **how: Any) -> int:
    """Measure vectors of texts, and the start of the engine.

    The scenarios: queries of 12 words one by one, texts of 6 to 160 words in one call and as tasks of one text each,
    queries at random times, and a query beside a busy thread. A vector is the mean over its tokens, with length 1.
    """

    from .inputs import queries_of, texts_of
    from .scenarios import EMBED, embed_scenarios

    with scratch_folder():
        encoder = _folder("--model", _one(folder, model), "minilm")
        wanted = _wanted(EMBED, how)
        entries = [*ours(encoder, "embed", how), *peers(encoder, "embed", how)]

        def scenarios(contenders: Sequence[Contender]) -> list[Scenario]:
            def task(number: int) -> dict[str, Any]:
                return {"texts": queries_of(together, number), "each": True}

            rate = _rate(contenders[0], task, together, how)
            return embed_scenarios(queries_of, texts_of, together=together, online=how["online"], rate=rate)

        return _play(encoder, entries, scenarios, wanted, [], how)


def _judge(model: Path, against: Path, text: Path, how: dict[str, Any]) -> int:
    """Tells how far each variant is from the reference."""
    from .quality import Quality, as_json, qualities

    check_packages((), how)
    asked = {variant: settings_of(variant) for variant in dict.fromkeys(how["variants"])}
    found = list[Quality]()
    try:
        words = text.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidRequest(f"{text} cannot be read: {error.strerror}; give a file with prose to --quality") from error
    for one in qualities(model, against, words, asked, how["threads"]):
        found.append(one)
        write(one.line(found[0]), stdout())
    if how["json_path"]:
        Path(how["json_path"]).write_text(as_json(model, against, text, found), encoding="utf-8")
    return 0


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a folder for files. An error in the block is reported, and ends the command with status 1."""
    try:
        with TemporaryDirectory(prefix="triolet-bench-") as folder:
            yield Path(folder)
    except TrioletError as error:
        complain(str(error))
        raise click.exceptions.Exit(FAILED) from None


def _one(word: str | None, option: str | None) -> str | None:
    if word is not None and option is not None:
        raise click.UsageError(f"two models, {word} and --model {option}; give one of them")
    return option if word is None else word


def _folder(option: str, given: str | None, name: str) -> Path:
    real = os.environ.get(REAL)
    if given is None and real is None:
        raise click.UsageError(
            f"{option} is missing, and {REAL} does not name a folder with {name}; give {option}, or set {REAL}"
        )
    found = Path(given) if given is not None else Path(str(real)) / name
    if found.is_file():  # of a GGUF file there is a folder with its settings
        from ..models.checkpoints.files import resolve

        return resolve(found)
    if not found.is_dir():
        raise click.UsageError(f"{option}: {found} is not a folder")
    return found


def _lacking(checkpoint: Path) -> set[str]:
    """Returns the scenarios that a model cannot play: some do not translate, and only Whisper's windows have one length
    that can be trimmed."""
    from ..models.checkpoints.settings import FileSettings

    written = FileSettings.read_if_there(checkpoint / "generation_config.json")
    own = FileSettings.read_if_there(checkpoint / "config.json")
    if own is None or own.get("model_type") != "whisper":
        return {"reuse", "trimmed"}
    return {"reuse"} if written is not None and written.get("is_multilingual") is False else set()


def _wanted(names: Sequence[str], how: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of the scenarios to play, in the order in which they are known."""
    known = [name for name in ("start", *names) if name != "online" or how["online"]]
    for name in how["only"]:
        if name not in known:
            raise click.UsageError(f"--only {name!r}; allowed: {', '.join(map(repr, known))}")
    return tuple(name for name in known if name in how["only"] or not how["only"])


def _rate(ours: Contender, task: Callable[[int], dict[str, Any]], count: int, how: dict[str, Any]) -> float:
    """Returns the inputs a second: the rate that the user asked for, or a rate that leaves the engine some room."""
    if how["rate"] or not how["online"] or "online" not in (how["only"] or ("online",)):
        return how["rate"] or 1.0
    ours.run(task(-2))  # warms the engine up
    seconds: float = ours.run(task(-3))["seconds"]
    return _ROOM * count / seconds


def _play(
    model: Path,
    entries: Sequence[Entry],
    scenarios: Callable[[Sequence[Contender]], Sequence[Scenario]],
    wanted: Sequence[str],
    texts: Sequence[dict[str, str | None]],
    how: dict[str, Any],
) -> int:
    from .contest import Rules, play, starts
    from .machine import Machine
    from .report import as_json, plot, shown
    from .rounds import opened
    from .work import Work

    check_packages(texts, how)
    out = stdout()
    machine = Machine.measure(how["threads"])
    speeds = ", ".join(f"{name} {value:.0f} GFLOP/s" for name, value in machine.gigaflops.items())
    write(f"{machine.cpu}, {machine.threads} threads: {speeds}, memory {machine.gigabytes:.1f} GB/s", out)
    rules = Rules(machine=machine, work=Work.of(model), rounds=how["rounds"], texts=ChainMap(*texts), say=complain)
    tables: list[Table] = []
    about: dict[str, Any] = {}

    def show(table: Table) -> None:
        tables.append(table)
        for line in shown([table]):
            write(line, out)

    try:
        if "start" in wanted:
            show(starts(entries, rules))
        with opened(entries) as contenders:
            about.update({one.entry.name: dict(one.about) for one in contenders})
            planned = [each for each in scenarios(contenders) if each.name in wanted]
            for table in play(contenders, planned, rules):
                show(table)
    finally:  # what was measured before an error is kept
        if how["json_path"] and tables:
            Path(how["json_path"]).write_text(as_json(machine, about, tables), encoding="utf-8")
        if how["plot_path"] and tables:
            plot(tables, Path(how["plot_path"]))
    return 0


def check_packages(texts: Sequence[dict[str, str | None]], how: dict[str, Any]) -> None:
    """Raises `InvalidRequest` if a step after the measurements (error rates, the plot, a file) would fail."""
    for name, why in (("jiwer", bool(texts)), ("matplotlib", how["plot_path"])):
        if why and find_spec(name) is None:
            raise InvalidRequest(f"{name} is not installed; pip install 'triolet[bench]'")
    for path in (how["json_path"], how["plot_path"]):
        if path and not Path(path).absolute().parent.is_dir():
            raise InvalidRequest(f"{path}: there is no folder {Path(path).absolute().parent}")
