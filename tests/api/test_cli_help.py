"""The help pages, their examples, and what a shell completes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

from triolet import EventLog, demo
from triolet.api.command_line.main import cli, main
from triolet.api.command_line.pages import _TOPIC, HelpPage, _topic
from triolet.bench.card import card
from triolet.bench.command import bench
from triolet.core.events import RequestQueued
from triolet.server.command import serve

from .generating import PaperEngine as PaperWriter
from .paper import PaperEngine

ROOT = Path(__file__).resolve().parents[2]
ADDED = {"bench": bench, "card": card, "serve": serve}  # by triolet.__main__


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by how it is called, as the installed command has them."""
    yield "triolet", cli
    stack = [(f"triolet {name}", command) for name, command in {**cli.commands, **ADDED}.items()]
    while stack:
        name, command = stack.pop()
        yield name, command
        if isinstance(command, click.Group):
            stack += [(f"{name} {inner}", each) for inner, each in command.commands.items()]


COMMANDS = dict(commands())


def page(name: str, topic: str = "") -> str:
    """The help at 80 columns, or a topic of it."""
    context = click.Context(COMMANDS[name], info_name=name, terminal_width=80)
    if topic:
        context.meta[_TOPIC] = topic
    return COMMANDS[name].get_help(context)


def examples_of(name: str) -> list[str]:
    """The command lines, without what explains them."""
    _, _, told = page(name).partition("\nExamples:\n")
    return [line.strip() for line in told.splitlines() if line.strip() and not line.strip().startswith("#")]


EXAMPLES = [(name, line) for name in COMMANDS for line in examples_of(name)]


def words_of(line: str) -> tuple[list[str], str | None]:
    """The arguments of ``triolet`` in a shell's line, and the file that is its standard input ("-": a pipe)."""
    inner = re.search(r"\$\((triolet [^)]*)\)", line)
    line = inner[1] if inner else line
    parts = [shlex.split(part) for part in line.split(" | ")]
    (number,) = [number for number, words in enumerate(parts) if "triolet" in words]
    words = parts[number][parts[number].index("triolet") + 1 :]
    stdin: str | None = "-" if number else None
    for sign in ("<", ">"):
        if sign in words:
            at = words.index(sign)
            stdin = words[at + 1] if sign == "<" else stdin
            words = words[:at]
    return words, stdin


# -- the pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_fits_into_80_columns_begins_with_a_sentence_and_has_two_to_four_examples(name: str) -> None:
    """Of its command. In a list of commands each has a whole sentence."""
    text, lines, command = page(name), examples_of(name), COMMANDS[name]
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 80
    assert text.startswith(f"Usage: {name} ")
    assert re.search(r"\n\n  [A-Z][^\n]+", text)
    assert 2 <= len(lines) <= 4, lines
    assert all("triolet" in line for line in lines)
    assert any(name in line for line in lines)
    if isinstance(command, click.Group):
        listed = re.findall(r"^  (\w+) +(.*)$", text.partition("\nCommands:\n")[2], re.MULTILINE)
        told = {name for name, sentence in listed if sentence.endswith(".") and not sentence.endswith("...")}
        assert set(command.commands) <= told


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if isinstance(command, HelpPage)])
def test_every_option_is_on_its_page_once_and_every_name_of_a_section_is_an_option(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, HelpPage)
    params = command.get_params(click.Context(command))
    options = {str(each.name): each for each in params if isinstance(each, click.Option)}
    placed = [each for names in command.sections.values() for each in names]
    assert len(placed) == len(set(placed))
    assert set(placed) <= set(options)
    wanted = [next(flag for flag in each.opts if flag.startswith("--")) for each in options.values()]
    topics = [f"--help {_topic(title)}" for title in command.topics(click.Context(command))] if command.brief else []
    assert sorted(flags_on(page(name, "all"))) == sorted(wanted)
    assert sorted(flag for topic in topics for flag in flags_on(page(name, topic.split()[1]))) in ([], sorted(wanted))
    assert command.brief <= options.keys()
    assert set(topics) >= set(re.findall(r"^  (--help (?!all)\w+)", page(name), re.MULTILINE))


def flags_on(text: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )*(--[\w-]+)", text.partition("\nMore options:")[0], re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_speaks_of_flags_and_not_of_python(name: str) -> None:
    text = re.sub(r"verbose_json|finish_reason|ik_llama|\$\w+|[A-Z]+_\w+", "", page(name, "all"))
    assert re.findall(r"\w+_\w+|False|True|Engine\.|of your own|\blists?\b of|tuple|\*\*", text) == []


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("transcribe --help", 0, "--help subtitles"),
        ("transcribe -h subtitles", 0, "Subtitles:\n  --max-line-width INTEGER"),
        ("serve a --help limits", 0, "--request-memory SIZE"),
        ("generate --help me", 2, "--help me; allowed: question, text, form, model, reports, options, all"),
        ("bench --help", 0, "--only NAME"),
    ],
)
def test_help_is_asked_for_by_topic(words: str, status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "commands", {**cli.commands, **ADDED})
        main(words.split())
    assert caught.value.code == status
    assert told in "".join(capsys.readouterr())


# -- the examples ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    sample = demo.samples()[0].path
    for name in ("talk.mp3", "a.wav", "b.wav", "film.mkv"):
        shutil.copy(sample, name)
    Image.new("RGB", (40, 60)).save("cat.png")
    Path("cat.json").write_text('{"type": "object"}')
    Path("lines.txt").write_text("a cat\na dog\n")
    with EventLog("events.jsonl") as log:
        log(RequestQueued("r", time=1.0))
    return tmp_path


def lines_of_documents() -> Iterator[tuple[str, str]]:
    """Command lines in the blocks of the documents, without their comments, and in backticks."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        told = [block.replace("\\\n", " ").splitlines() for language, block in blocks if not language]
        lines = [line for block in told for line in block if re.search(r"\btriolet [a-z]", line)]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        spans = re.findall(r"`([^`\n]*\btriolet [a-z]+ [^`\n]+)`", prose)
        for line in (*lines, *spans):
            yield path.name, re.sub(r"  +#.*", "", line.removeprefix("$ ")).strip()


DOCUMENTED = list(dict.fromkeys(lines_of_documents()))


def test_the_page_of_the_documents_has_every_command() -> None:
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    for name in (*cli.commands, *ADDED):
        assert f"\n## triolet {name}\n" in text
        assert f"[`{name}`](#triolet-{name})" in text
        assert any(re.search(rf"\btriolet {name}\b", line) for page, line in DOCUMENTED if page == "command_line.md")


@pytest.mark.parametrize(("name", "line"), [*EXAMPLES, *DOCUMENTED])
def test_an_example_is_understood(name: str, line: str) -> None:
    """Its options exist, and their values are of their kinds."""
    words, _ = words_of(line)
    command: click.Command = cli
    context = click.Context(cli, info_name="triolet")
    while isinstance(command, click.Group):
        inner = {**command.commands, **ADDED} if command is cli else command.commands
        command = inner[words.pop(0)]
    if "--help" not in words:
        command.make_context("example", words, parent=context)


OF_ENGINES = [
    (name, line)
    for name, line in EXAMPLES
    if words_of(line)[0][0] in ("transcribe", "generate", "embed", "trace", "completion") and "--help" not in line
]


@pytest.mark.parametrize(("name", "line"), OF_ENGINES)
@pytest.mark.usefixtures("folder")
def test_an_example_runs(name: str, line: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Over an engine on paper, with the files that it names."""
    words, stdin = words_of(line)
    words = [one for word in words for one in (["a.wav", "b.wav"] if word == "*.wav" else [word])]
    engine: Any = PaperEngine() if words[0] == "transcribe" else PaperWriter("a", media=["image", "audio"])
    piped = {"trace": "events.jsonl", "transcribe": "talk.mp3"}.get(words[0], "lines.txt")
    with open(stdin if stdin not in (None, "-") else piped, encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        with pytest.raises(SystemExit) as caught:
            main(words, engine)
    assert caught.value.code == 0
    assert re.sub(r"triolet: wrote .*\n", "", capfd.readouterr().err) == ""


# -- completion ------------------------------------------------------------------------------------------------------

COMPLETING = """
    import sys
    from triolet.__main__ import main
    try:
        main()
    except SystemExit as end:
        print(end.code, sorted({"torch", "transformers", "av", "huggingface_hub", "rich", "tqdm"} & set(sys.modules)))
"""


def completed(*words: str) -> list[str]:
    """The completions that bash gets for the last word, and the packages that were imported for it."""
    environment = {"_TRIOLET_COMPLETE": "bash_complete", "COMP_WORDS": shlex.join(words), "COMP_CWORD": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPLETING)],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=True,
        env=os.environ | environment | {"COMP_CWORD": str(len(words) - 1)},
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.real_time
def test_a_shell_completes_at_once() -> None:
    """In a process of its own: nothing that takes long is imported."""
    assert completed("triolet", "tra") == ["plain,transcribe", "plain,trace", "0 []"]


def completion(*words: str) -> list[tuple[str, str]]:
    """The completions that a shell gets, asked in this process."""
    from click.shell_completion import BashComplete

    asked = BashComplete(cli, {}, "triolet", "_TRIOLET_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [(item.type, item.value) for item in asked]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("transcribe", "--lang"), ("plain", "--language")),
        (("transcribe", "a.wav", "--language", "ger"), ("plain", "german")),
        (("transcribe", "a.wav", "--language", "d"), ("plain", "de")),
        (("transcribe", "ta"), ("file", "ta")),
        (("transcribe", "a.wav", "--beam_size", "5", "--model", "tur"), ("plain", "turbo")),
        (("transcribe", "a.wav", "--vad_filter", "True", "--model", "my/fol"), ("dir", "my/fol")),
        (("transcribe", "a.wav", "-f", "v"), ("plain", "vtt")),
        (("transcribe", "a.wav", "-o", "su"), ("dir", "su")),
        (("transcribe", "a.wav", "--device", "cu"), ("plain", "cuda")),
        (("generate", "my"), ("dir", "my")),
        (("generate", "m", "hi", "--image", "ca"), ("file", "ca")),
        (("trace", "ev"), ("file", "ev")),
        (("completion", "f"), ("plain", "fish")),
    ],
)
def test_a_shell_completes_options_files_folders_and_names(words: tuple[str, ...], expected: tuple[str, str]) -> None:
    """Also behind the spelling of other programs."""
    assert expected in completion(*words)


def script(shell: str, capfd: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["completion", shell])
    out, err = capfd.readouterr()
    assert (caught.value.code, err) == (0, "")
    return str(out)


@pytest.mark.real_time
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_a_shell_can_read_its_script(shell: str, capfd: Any, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(script(shell, capfd))
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", path], check=True, timeout=300)


@pytest.mark.real_time
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_by_the_script(capfd: Any, tmp_path: Path) -> None:
    """As it does behind the tabulator key."""
    path, program = tmp_path / "script", tmp_path / "triolet"
    path.write_text(script("bash", capfd))
    program.write_text(f"#!{sys.executable}\nfrom triolet.__main__ import main\nmain()\n")
    program.chmod(0o755)
    lines = 'source "$1"; COMP_WORDS=("$2" comp); COMP_CWORD=1; _triolet_completion "$2"; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", lines, "bash", path, program], capture_output=True, encoding="utf-8", check=True, timeout=300
    )
    assert done.stdout == "completion\n"
