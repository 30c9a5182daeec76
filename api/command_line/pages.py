"""Help pages: options in sections, and examples, which tests run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...core.languages import LANGUAGES

_OTHERS = "Options"

MODEL = ("device", "dtype", "kv_dtype", "quantization", "threads")
FOLLOWING = ("watch", "trace", "verbose")


class _WithExamples(click.Command):
    """A command whose help ends with examples: each a command line, and what it does where that does not show."""

    def __init__(self, *given: Any, examples: Sequence[tuple[str, str]] = (), **options: Any) -> None:
        super().__init__(*given, **options)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  (click's)
        """click's: writes what comes last."""
        if not self.examples:
            return
        with formatter.section("Examples"):
            for line, told in self.examples:
                if told:
                    formatter.write(f"{'':{formatter.current_indent}}# {told}\n")
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Page(_WithExamples):
    """A command with the options of its help in sections, named by their parameters. The others come last."""

    def __init__(self, *given: Any, sections: Mapping[str, Sequence[str]] | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.sections = dict(sections or {})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """click's: writes the options."""
        rows: dict[str, list[tuple[str, str]]] = {}
        parameters = {str(each.name): each for each in self.get_params(ctx) if isinstance(each, click.Option)}
        placed = {name: title for title, names in self.sections.items() for name in names}
        order = [*placed, *(name for name in parameters if name not in placed)]
        for name in order:
            row = parameters[name].get_help_record(ctx) if name in parameters else None
            if row is not None:
                rows.setdefault(placed.get(name, _OTHERS), []).append(row)
        for title, told in rows.items():
            with formatter.section(title):
                formatter.write_dl(told)


class Pages(_WithExamples, click.Group):
    """A group of commands, in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's)
        """click's: the names of the commands."""
        return list(self.commands)


# ---- what a shell completes ------------------------------------------------------------------------------------------


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Any file."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Any folder."""
    return [CompletionItem(incomplete, type="dir")]


def devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """What every machine may have."""
    return [name for name in ("auto", "cpu", "cuda", "cuda:1") if name.startswith(incomplete)]


def languages(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Codes and English names."""
    return [name for pair in LANGUAGES.items() for name in pair if name.startswith(incomplete)]
