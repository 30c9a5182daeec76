"""Help pages: options in sections, and examples that the tests run.

click has neither; rich-click has sections, but no examples, and imports rich for every page.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...core.errors import InvalidRequest
from ...core.languages import LANGUAGES

MODEL = ("device", "dtype", "kv_dtype", "quantization", "max_positions", "threads")
REPORTS = ("trace", "verbose")
_TOPIC, _ALL = "triolet.pages.topic", "all"  # in click's `Context.meta`


class HelpPage(click.Command):
    """A command whose help shows the options in sections and ends with examples. A section lists its options by the
    names of their parameters; options without a section come last. An example is a command line, and a sentence on what
    it does if that is not obvious. A command with many options names in ``brief``, with blanks between, those that
    ``--help`` shows; ``--help TOPIC`` shows a section, by the first word of its title, and ``--help all`` everything.
    """

    def __init__(
        self,
        *given: Any,
        examples: Sequence[tuple[str, str]] = (),
        sections: Mapping[str, Sequence[str]] | None = None,
        brief: str = "",
        **options: Any,
    ) -> None:
        super().__init__(*given, **options)
        self.examples = tuple(examples)
        self.sections = dict(sections or {})
        self.brief = frozenset(f"{brief} topic".split() if brief else ())
        self._asked = click.Option(
            ["-h", "--help", "topic"],
            metavar="[TOPIC]",
            is_flag=False,
            flag_value="",
            is_eager=True,
            expose_value=False,
            callback=_help,
            help="Show this page, a topic of it, or all of it.",
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, as click asks. An `InvalidRequest` becomes an error of usage, since the arguments caused
        it."""
        try:
            return super().invoke(ctx)
        except InvalidRequest as error:
            raise click.UsageError(in_flags(str(error)), ctx) from error

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Returns the option ``--help``, as click asks: with a topic where there are some."""
        return self._asked if self.brief else super().get_help_option(ctx)

    def topics(self, ctx: click.Context) -> dict[str, dict[str, tuple[str, str]]]:
        """The options of each section, by the name of the parameter: the flag and its help."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        left = {str(each.name): row for each in options if (row := each.get_help_record(ctx)) is not None}
        found = {
            title: {name: left.pop(name) for name in names if name in left} for title, names in self.sections.items()
        }
        return {**found, "Options": left} if left else found

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the page, as click asks."""
        topic = ctx.meta.get(_TOPIC, "")
        if topic not in ("", _ALL):
            self.format_usage(ctx, formatter)
            self.format_options(ctx, formatter)
            return
        super().format_help(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, as click asks."""
        topic, topics = ctx.meta.get(_TOPIC, _ALL if not self.brief else ""), self.topics(ctx)
        for title, rows in topics.items():
            shown = [row for name, row in rows.items() if topic or name in self.brief]
            if shown and topic in ("", _ALL, _topic(title)):
                with formatter.section(title):
                    formatter.write_dl(shown)
        if not topic:
            more = [(f"--help {_topic(title)}", _flags(rows, self.brief)) for title, rows in topics.items()]
            with formatter.section("More options"):
                listed = [row for name, lines in more for row in zip([name, ""], lines, strict=False)]
                formatter.write_dl([*listed, (f"--help {_ALL}", "everything")])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  (click's)
        """Writes the examples, as click asks."""
        if not self.examples:
            return
        with formatter.section("Examples"):
            for line, told in self.examples:
                if told:
                    formatter.write(f"{'':{formatter.current_indent}}# {told}\n")
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _topic(title: str) -> str:
    return title.split(maxsplit=1)[0].lower()


def _flags(rows: Mapping[str, tuple[str, str]], brief: Collection[str]) -> list[str]:
    """The flags that are not in ``brief``, in up to two lines that fit beside the names of topics."""
    flags = [re.findall(r"--[\w-]+", row[0])[0] for name, row in rows.items() if name not in brief]
    return textwrap.wrap(", ".join(flags), 56, max_lines=2, placeholder=" ...", break_on_hyphens=False)


def _help(ctx: click.Context, param: click.Parameter, topic: str | None) -> None:  # noqa: ARG001  (click's)
    if topic is None or ctx.resilient_parsing:
        return
    page = ctx.command
    assert isinstance(page, HelpPage), f"{page.name} has no topics"
    allowed = [*map(_topic, page.topics(ctx)), _ALL]
    if topic and topic not in allowed:
        raise click.UsageError(f"--help {topic}; allowed: {', '.join(allowed)}", ctx)
    ctx.meta[_TOPIC] = topic
    click.echo(ctx.get_help())
    ctx.exit()


class HelpPages(click.Group, HelpPage):
    """A group of commands, in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's)
        """The names of the commands, as click asks."""
        return list(self.commands)


def in_flags(message: str) -> str:
    """``message`` with the command's flags in place of Python's arguments, ``--beam-size=0`` for ``beam_size=0`` and
    ``--parallel`` for ``parallel=True``, and with commands in place of methods."""
    message = re.sub(r"engine\.(transcribe|generate|embed)(\(\.\.\.\))?", r"triolet \1", message)
    context = click.get_current_context(silent=True)
    given = [] if context is None else context.command.get_params(context)
    options = [each for each in given if isinstance(each, click.Option)]
    long = [(each.name, flag) for each in options for flag in each.opts if flag.startswith("--")]
    flags = {name: flag for own, flag in long for name in (own, flag[2:].replace("-", "_"))}
    switches = {
        flag: (each.secondary_opts or [f"no {flag}"])[0] for each in options if each.is_flag for flag in each.opts
    }

    def bare(found: re.Match[str]) -> str:
        setting, name = found.groups()
        return setting if name in flags else found.group()

    def spelled(found: re.Match[str]) -> str:
        name, equals, value = found.groups()
        flag = flags.get(name)
        if flag is None or not (equals or "_" in name):  # a name without an underscore may be a plain word
            return found.group()
        if flag in switches and value in ("True", "False"):
            return flag if value == "True" else switches[flag]
        return found.group().replace(name, flag, 1)

    message = re.sub(r"EngineConfig\(((\w+)=[^()]*)\)", bare, message)
    return re.sub(r"(?<![\w-])(\w+)\b(?:(=)(True|False)?)?", spelled, message)


# ---- what a shell completes ------------------------------------------------------------------------------------------


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """The completions of an option that names a file."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """The completions of an option that names a folder."""
    return [CompletionItem(incomplete, type="dir")]


FILE: Mapping[str, Any] = {"metavar": "FILE", "shell_complete": files}
"""An option that names a file."""


def devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """The names of devices that a machine may have."""
    return [name for name in ("auto", "cpu", "cuda", "cuda:1") if name.startswith(incomplete)]


def languages(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """The codes and English names of languages."""
    return [name for pair in LANGUAGES.items() for name in pair if name.startswith(incomplete)]
