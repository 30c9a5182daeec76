"""The command ``triolet completion``: what makes a shell complete commands, options and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .pages import Page
from .terminal import stdout, write

COMPLETING = "_TRIOLET_COMPLETE"  # the variable by which a shell asks


@click.command(
    cls=Page,
    examples=(
        ('eval "$(triolet completion bash)"', "for this shell alone"),
        ("triolet completion fish > ~/.config/fish/completions/triolet.fish", ""),
    ),
    short_help="Print what makes a shell complete triolet.",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, /, *, shell: str) -> int:
    """Print what makes SHELL complete commands, options, languages and files.

    \b
    To have it in every new shell:
      bash  put eval "$(triolet completion bash)" into ~/.bashrc
      zsh   put eval "$(triolet completion zsh)" into ~/.zshrc, after compinit
      fish  triolet completion fish > ~/.config/fish/completions/triolet.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows no {shell}"
    script = kind(context.find_root().command, {}, "triolet", COMPLETING).source()
    write(script.rstrip("\n"), stdout())
    return 0
