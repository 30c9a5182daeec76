"""``triolet serve --cluster`` before it serves, and what it says without the extra. Nothing of Ray runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import click
import pytest
from click.testing import CliRunner

from triolet.server.cluster_options import Replicas
from triolet.server.command import serve

pytestmark = pytest.mark.real_time

FLAGS = ("--replicas", "--replica-cpus", "--replica-gpus")


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
    pytest.importorskip("ray", reason="needs Ray; pip install 'triolet[cluster]'")
    result = CliRunner().invoke(serve, ["demo", "--cluster", *words])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


# -- without the extra -----------------------------------------------------------------------------------------------


def run(code: str) -> str:
    """What a new process of Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HIDE = """
    import sys
    from importlib.machinery import PathFinder

    class WithoutRay(PathFinder):
        "Finds all but Ray."

        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] == "ray" else super().find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutRay
"""


def test_without_ray_all_else_works_and_a_cluster_says_what_to_install() -> None:
    told = run(
        HIDE
        + """
    import importlib.util
    import triolet
    import triolet.cluster
    from click.testing import CliRunner
    from triolet.server.command import serve

    assert importlib.util.find_spec("ray") is None
    assert CliRunner().invoke(serve, ["--help"]).exit_code == 0
    try:
        triolet.cluster.Cluster("model")
    except triolet.InvalidRequest as error:
        print(error)
    result = CliRunner().invoke(serve, ["demo", "--cluster"])
    print(result.exit_code, " ".join(result.output.split()))
    """
    )
    first, second = told.splitlines()
    assert first == "a cluster needs Ray, which is not installed; pip install 'triolet[cluster]'"
    assert second.startswith("2 ")
    assert second.endswith(first)


def test_nothing_of_ray_is_imported_before_a_cluster_is_entered() -> None:
    """Not even to check settings: it takes seconds."""
    told = run(
        """
    import sys
    import triolet, triolet.cluster, triolet.server, triolet.server.command
    from click.testing import CliRunner
    from triolet.server.command import serve

    CliRunner().invoke(serve, ["--help"])
    CliRunner().invoke(serve, ["demo", "--cluster", "--replicas", "0"])
    try:
        triolet.cluster.Cluster("model")
    except triolet.InvalidRequest:
        pass
    print(sorted(name for name in sys.modules if name.partition(".")[0] == "ray"))
    """
    )
    assert told == "[]\n"
