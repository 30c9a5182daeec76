"""The contenders that the user asks for: the engine with each variant, and other engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import frozen

from ..core.config import QUANTIZATIONS
from .rounds import Entry

Command = TypeVar("Command", bound=Callable[..., Any])


@frozen
class Peer:
    """Another engine: the types of numbers in which it takes part, and what the user names as its model."""

    numbers: tuple[str, ...]
    model: str = ""  # empty: it reads the checkpoint itself
    exported: bool = False  # the model of each type of numbers is in a folder with the name of the type

    def path(self, given: str, numbers: str) -> Path:
        """Returns the path of the model that computes in ``numbers``."""
        return Path(given) / numbers if self.exported else Path(given)


_BOTH = ("float32", "int8")
_EXPORTED = Peer(_BOTH, "FOLDER", exported=True)
_TRANSFORMERS = Peer(("float32", "bfloat16"))
_LLAMA_CPP = Peer(("int8",), "FILE.gguf")
PEERS: Mapping[str, Mapping[str, Peer]] = {
    "speech": {
        "transformers": Peer(("float32",)),
        "faster-whisper": Peer(_BOTH, "FOLDER"),
        "openvino": _EXPORTED,
    },
    "text": {
        "transformers": _TRANSFORMERS,
        "llama.cpp": _LLAMA_CPP,
        "ik_llama.cpp": _LLAMA_CPP,
        "openvino": _EXPORTED,
    },
    "embed": {
        "transformers": _TRANSFORMERS,
        "openvino": _EXPORTED,
        "onnxruntime": _EXPORTED,
    },
}
"""The other engines of each command, by their names."""


def peer_option(kind: str) -> Callable[[Command], Command]:
    """Returns the option ``--peer`` of the command ``kind``."""
    exported = " and ".join(name for name, peer in PEERS[kind].items() if peer.exported)
    told = f"The models of {exported} are in FOLDER/float32 and FOLDER/int8. May be repeated."
    told = f"Another engine: {_forms(kind)}. {told}"
    return click.option("--peer", "peers", multiple=True, metavar="PEER", help=told)


def _forms(kind: str) -> str:
    return ", ".join(f"{name}={peer.model}" if peer.model else name for name, peer in PEERS[kind].items())


def settings_of(variant: str) -> Mapping[str, Any]:
    """Returns the settings of the engine for a variant."""
    return {"quantization": variant} if variant in QUANTIZATIONS else {"dtype": variant}


def ours(folder: Path, kind: str, how: Mapping[str, Any]) -> list[Entry]:
    """Returns the entries of the engine, one for each variant."""
    found = []
    for variant in dict.fromkeys(how["variants"]):
        asked = dict(settings_of(variant))
        if how.get("no_draft_tokens"):
            asked["speculation"] = None
        config = json.dumps({"device": "cpu", "threads": how["threads"], **asked})
        arguments = (str(folder), config, kind)
        found.append(Entry(name=f"triolet {variant}", program="triolet_engine", arguments=arguments, numbers=variant))
    return found


def peers(folder: Path, kind: str, how: Mapping[str, Any]) -> list[Entry]:
    """Returns the entries of the other engines, one for each of their types of numbers that is among the variants.

    Raises:
        click.UsageError: an engine is not known, has no model, or computes in none of the variants.
    """
    known, pythons = PEERS[kind], _pythons(kind, how["peer_pythons"])
    found = []
    for given in how["peers"]:
        name, _, place = given.partition("=")
        peer = known.get(name)
        if peer is None or bool(place) != bool(peer.model):
            raise click.UsageError(f"--peer {given}; allowed: {_forms(kind)}")
        taking_part = [numbers for numbers in peer.numbers if numbers in how["variants"]]
        if not taking_part:
            raise click.UsageError(
                f"--peer {given} computes in {' and '.join(peer.numbers)}, and Triolet in "
                f"{' and '.join(how['variants'])}; add --variant {peer.numbers[0]}, or leave this peer out"
            )
        for numbers in taking_part:
            model = peer.path(place, numbers) if place else folder
            if not model.exists():
                raise click.UsageError(f"--peer {given}: there is no {model}")
            program = f"{name.replace('-', '_').replace('.', '_')}_{kind}"
            arguments = (str(model), numbers, str(how["threads"]))
            python = pythons.get(name, sys.executable if not peer.model else pythons[""])
            entry = Entry(
                name=f"{name} {numbers}", program=program, arguments=arguments, python=python, numbers=numbers
            )
            found.append(entry)
    return found


def _pythons(kind: str, given: tuple[str, ...]) -> dict[str, str]:
    """Returns the interpreter of each peer that has its own, by name, and under ``""`` that of all others."""
    found = {"": sys.executable}
    for each in given:
        name, equals, python = each.partition("=")
        found.update({name: python} if equals and name in PEERS[kind] else {"": each})
    return found
