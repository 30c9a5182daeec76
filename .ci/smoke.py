"""A short trial of an installed Triolet, by the interpreter that has it, in a folder outside of the tree:

    python smoke.py TREE

TREE is where the sources lie, from which nothing may be imported.
"""

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import trio

import triolet
import triolet_kit
import triolet_ray
import triolet_testing
from triolet import demo


async def transcribe() -> None:
    sample = next(one for one in demo.samples() if one.path.stem == "en-command")
    async with triolet.Engine(demo.checkpoint(), config=triolet.EngineConfig(verify=True)) as engine:
        transcript = await engine.transcribe(sample.path)
    assert transcript.text == sample.text, transcript


def command(*arguments: str) -> str:
    """The installed command, as a shell finds it."""
    script = Path(sysconfig.get_path("scripts")) / "triolet"
    return subprocess.run([script, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    tree = Path(sys.argv[1]).resolve()
    for module in (triolet, demo, triolet_kit, triolet_ray, triolet_testing):
        assert not Path(str(module.__file__)).resolve().is_relative_to(tree), module
    version = importlib.metadata.version("triolet")
    assert triolet.__version__ == version
    assert version in command("--version")
    assert (Path(str(triolet.__file__)).parent / "py.typed").is_file()
    assert callable(triolet_testing.requests)
    assert "--replicas" in command("serve", "--help")  # by the entry point of triolet-ray
    trio.run(transcribe)
    said = command("transcribe", str(demo.samples()[0].path), "--model", "demo")
    assert said.strip() == demo.samples()[0].text, said
    print(f"triolet {version} on Python {sys.version.split()[0]}: imported, transcribed")


if __name__ == "__main__":
    main()
