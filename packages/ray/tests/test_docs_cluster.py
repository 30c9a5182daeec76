"""The page on many machines is true: its code runs, and prints what it says."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from triolet import EngineConfig

from .conftest import UNHURRIED

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "cluster.md"
pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("machines")]


@pytest.mark.thorough
async def test_every_piece_of_code_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, value in UNHURRIED.items():
        monkeypatch.setitem(EngineConfig.__init__.__wrapped__.__kwdefaults__, setting, value)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)
    (setup, _), *pieces = blocks
    assert len(pieces) == 3
    said: list[str] = []
    names: dict[str, Any] = {"print": lambda *values: said.append(" ".join(map(str, values)))}
    exec(compile(setup, str(PAGE), "exec"), names)
    async with names["cluster"]:
        for code, expected in pieces:
            said.clear()
            running = eval(compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.iscoroutine(running):
                await running
            assert said == expected.splitlines()


def test_the_manifest_is_one_whose_groups_are_alike() -> None:
    """Ray's own version, one image, and a server of a command that exists."""
    import ray

    from triolet.server.command import serve

    manifest = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    assert manifest["spec"]["rayVersion"] == ray.__version__
    groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
    containers = [container for group in groups for container in group["template"]["spec"]["containers"]]
    assert {container["image"] for container in containers} == {"triolet:cluster"}
    (command,) = (container["command"] for container in containers if "command" in container)
    options = {name for parameter in serve.get_params(click.Context(serve)) for name in parameter.opts}
    assert command[:2] == ["triolet", "serve"]
    assert {word for word in command if word.startswith("--")} <= options
    head, server = manifest["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert server["volumeMounts"] == head["volumeMounts"] == [{"name": "ray", "mountPath": "/tmp/ray"}], "Ray's sockets"
    assert {"containerPort": 8000, "name": "serve"} in head["ports"], "the head's service has the ports of the first"
