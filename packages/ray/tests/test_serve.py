"""``triolet serve --cluster`` before it serves. Nothing of Ray runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import click
import pytest
from click.testing import CliRunner

from triolet.server import command
from triolet.server.command import serve
from triolet_ray.serve import Replicas

pytestmark = pytest.mark.real_time

FLAGS = ("--replicas", "--replica-cpus", "--replica-gpus")


@pytest.fixture(autouse=True)
def _same_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of this process, which is that of other tests, stays as it is."""
    monkeypatch.setattr(command, "log_to", lambda *given: None)


@pytest.mark.parametrize(("word", "found"), [("2", 2), (" 2-8 ", (2, 8)), ("1-1", (1, 1)), (3, 3)])
def test_a_number_of_replicas_is_one_or_the_least_and_the_most(word: Any, found: Any) -> None:
    assert Replicas().convert(word, None, None) == found


@pytest.mark.parametrize("word", ["", "two", "-2", "2-", "2-8-9", "2.5", "2..8"])
def test_what_is_no_number_of_replicas_is_refused(word: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number of replicas; allowed: a number such as 2"):
        Replicas().convert(word, None, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((["demo", name, "0"], f"{name} without --cluster; add --cluster") for name in FLAGS),
        (["demo", "--replica-cpus", "1", "--replicas", "2"], "--replicas and --replica-cpus without --cluster"),
        (["demo", "--cluster", "--memory-budget", "1G"], "--memory-budget is for models in this process"),
    ],
)
def test_a_wrong_use_is_told(words: list[str], told: str) -> None:
    result = CliRunner().invoke(serve, words)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--replicas", "0"], "--replicas=0; allowed: an integer of 1 or more, or two: the least and the most"),
        (["--replicas", "5-2"], "--replicas=(5, 2); allowed: an integer of 1 or more, or two: the least and the most"),
        (["--replica-cpus", "-1"], "cpus=-1.0; allowed: a number, 0 or more"),
    ],
)
def test_what_the_cluster_refuses_is_told(words: list[str], told: str) -> None:
    result = CliRunner().invoke(serve, ["demo", "--cluster", *words])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_nothing_of_ray_is_imported_before_a_cluster_is_entered() -> None:
    """Not even to check settings: it takes seconds."""
    code = """
    import sys
    import triolet, triolet_ray, triolet.server, triolet.server.command
    from click.testing import CliRunner
    from triolet.server.command import serve

    CliRunner().invoke(serve, ["--help"])
    CliRunner().invoke(serve, ["demo", "--cluster", "--replicas", "0"])
    triolet_ray.Cluster("model")
    print(sorted(name for name in sys.modules if name.partition(".")[0] == "ray"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
