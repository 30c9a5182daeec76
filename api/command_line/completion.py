"""The command ``triolet completion``: what makes a shell complete commands, options and files."""

from __future__ import annotations

from collections.abc import Mapping

import click
from click.shell_completion import get_completion_class

from .pages import Page
from .terminal import stdout, write

INSTALLED: Mapping[str, str] = {
    "bash": "echo 'eval \"$(triolet completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(triolet completion zsh)\"' >> ~/.zshrc  (behind compinit)",
    "fish": "triolet completion fish > ~/.config/fish/completions/triolet.fish",
}
"""How it is installed for good."""


@click.command(
    cls=Page,
    examples=(
        ('eval "$(triolet completion bash)"', "for this shell alone"),
        ("triolet completion fish > ~/.config/fish/completions/triolet.fish", ""),
    ),
    short_help="Print what makes a shell complete triolet.",
)
@click.argument("shell", type=click.Choice([*INSTALLED]))
@click.pass_context
def completion(context: click.Context, /, *, shell: str) -> int:
    """Print what makes SHELL complete commands, options, languages and files.

    \b
    To have it in every new shell:
      bash  put eval "$(triolet completion bash)" into ~/.bashrc
      zsh   put eval "$(triolet completion zsh)" into ~/.zshrc, behind compinit
      fish  triolet completion fish > ~/.config/fish/completions/triolet.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows no {shell}"
    script = kind(context.find_root().command, {}, "triolet", "_TRIOLET_COMPLETE").source()
    out = stdout()
    write(script.rstrip("\n"), out)
    write(f"\n# To have it in every new shell: {INSTALLED[shell]}", out)
    return 0
