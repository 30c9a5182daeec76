"""Triolet: an async inference engine that lives inside your program.

::

    async with triolet.Engine("path-or-hub-id") as engine:
        transcript = await engine.transcribe("speech.wav")          # Whisper
        completion = await engine.generate("Once upon a time")      # decoders; images= and audio= where they read any
        vectors = await engine.embed(["a text", "another"])         # embedding models

torch and transformers are imported when an engine starts, not before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403  (its __all__)


def __getattr__(name: str) -> Any:
    """Returns a public name. All are imported when the first one is needed, so that the command starts at once and can
    handle ^C early. ``__version__`` is read from the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("triolet")
    public = import_module(".public", __name__)
    if name == "__all__":
        return public.__all__
    if name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    """Lists the public names beside the module's own."""
    return [*globals(), *import_module(".public", __name__).__all__]
