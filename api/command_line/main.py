"""The command ``triolet``, with its subcommands.

Results go to standard output or into files; progress and errors go to standard error. Every command ends with the same
exit statuses:

=====  ===============================================================================================================
0      all is well
1      a file or the model failed, the model refused a request, or the output could not be written
2      wrong usage: options or arguments that are wrong by themselves, found before any model is loaded
3      ``triolet generate``: the output was cut off before it had the form that was asked for
130    interrupted (^C)
141    the reader of the output went away
=====  ===============================================================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn

import click
from click.shell_completion import shell_complete

from ...core.config import EngineConfig
from .doctor import devices, doctor
from .embed import embed
from .generate import generate
from .hub import models, pull
from .pages import HelpPage, HelpPages
from .terminal import FAILED, INTERRUPTED, PIPE_CLOSED, UNWRITABLE, OpenEngine, complain, end_stdout, stdout
from .trace import trace
from .transcribe import transcribe

_COMPLETING = "_TRIOLET_COMPLETE"  # the variable by which a shell asks for completions


def main(arguments: Sequence[str] | None = None, open_engine: OpenEngine | None = None) -> NoReturn:
    """Runs the command and exits. ``open_engine`` replaces `Engine` in tests.

    It is click's own ``main`` with other exit statuses: click ends with 1 if the reader of the output went away.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # no Unicode here, or a file name that is no text
    if asked := os.environ.get(_COMPLETING):
        sys.exit(shell_complete(cli, {}, "triolet", _COMPLETING, asked))
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with cli.make_context("triolet", given, obj=open_engine or _open_engine) as context:
            status = cli.invoke(context)
    except click.exceptions.Exit as end:
        status = end.exit_code
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except BrokenPipeError:
        status = PIPE_CLOSED
    except OSError as error:  # from click, which writes the help to a stream of its own
        if error.errno not in UNWRITABLE:
            raise
        complain(f"the output cannot be written: {error}")
        status = FAILED
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except BaseExceptionGroup as errors:  # interrupted for a second time, while the engine closed
        if errors.subgroup(KeyboardInterrupt) is None:
            raise
        status = INTERRUPTED
    end_stdout()
    sys.exit(status or 0)


_EXAMPLES = (
    ("triolet transcribe talk.mp3 --model openai/whisper-small", ""),
    ('triolet generate HuggingFaceTB/SmolLM2-135M-Instruct "Why is the sky blue?"', ""),
    ("triolet transcribe --help", "each command has a help page of its own"),
    ("triolet doctor", "checks this machine"),
)


@click.group(cls=HelpPages, examples=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="triolet", message="triolet %(version)s")
def cli() -> None:
    """Transcribe speech, generate text, ask about images and audio, and embed text, with models on this machine."""


@click.command(
    cls=HelpPage,
    examples=(
        ('eval "$(triolet completion bash)"', "for this shell only"),
        ("triolet completion fish > ~/.config/fish/completions/triolet.fish", ""),
    ),
    short_help="Print a script that lets a shell complete triolet.",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a script that lets SHELL complete commands, options, languages and files.

    \b
    To load it in every new shell:
      bash  put eval "$(triolet completion bash)" into ~/.bashrc
      zsh   put eval "$(triolet completion zsh)" into ~/.zshrc, after compinit
      fish  triolet completion fish > ~/.config/fish/completions/triolet.fish
    """
    stdout()
    return shell_complete(cli, {}, "triolet", _COMPLETING, f"{shell}_source")


for _command in (transcribe, generate, embed, pull, models, devices, doctor, trace, completion):
    cli.add_command(_command)


def _open_engine(model: str, config: EngineConfig) -> AbstractAsyncContextManager[Any]:
    from ..engine import Engine

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # problems become errors of ours
    return Engine(model, config=config)
