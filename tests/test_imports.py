"""The import rule: core <- models <- actors <- api <- the face; testing may use all, and only tests use testing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACE = "src/triolet"
ALLOWED = {
    "core": {"core"},
    "models": {"core", "models"},
    "actors": {"core", "models", "actors"},
    "api": {"core", "models", "actors", "api", "demo"},
    FACE: {"core", "models", "actors", "api", FACE},
    "testing": {"core", "models", "actors", "api", "testing", "demo"},
    "demo": {"demo"},
}
FOREIGN = {  # what a room must not know of the outside
    "core": {
        "trio",
        "torch",
        "transformers",
        "numpy",
        "time",
        "random",
        "threading",
        "asyncio",
        "anyio",
        "os",
        "pathlib",
    },
    "models": {"trio", "asyncio", "anyio"},
    "actors": {"torch", "transformers", "numpy", "asyncio", "anyio"},
}
ASYNCIO = {"portal", "asyncio_host"}  # of api/: the only modules that know asyncio; programs on trio do not import it
ACTORS = {"scheduler", "encoder_cache", "gpu_runner"}
SCRIPTS = {"train", "evaluate", "make_samples", "speech", "grammar"}  # of demo/: run by hand, not imported


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).glob("*.py"))


def imports(path: Path, room: str) -> Iterator[tuple[str, ...]]:
    """Every import, inside functions too, as a path: ("triolet", "core", "ledger") or ("trio",)."""
    package = ("triolet",) if room == FACE else ("triolet", room)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*module, alias.name) for alias in node.names)


@pytest.mark.parametrize("room", ALLOWED)
def test_no_arrow_points_back(room: str) -> None:
    for path in modules(room):
        if room == "demo" and path.stem in SCRIPTS:
            continue
        for target in imports(path, room):
            if target[0] != "triolet" or len(target) == 1:
                continue
            reached = target[1] if target[1] in ALLOWED else FACE
            assert reached in ALLOWED[room], f"{room}/{path.name} imports {'.'.join(target)}"


@pytest.mark.parametrize("room", FOREIGN)
def test_a_room_knows_only_its_own_outside(room: str) -> None:
    for path in modules(room):
        for target in imports(path, room):
            assert target[0] not in FOREIGN[room], f"{room}/{path.name} imports {'.'.join(target)}"


def test_asyncio_stays_behind_the_portal() -> None:
    known = {path.stem for path in modules("api") for target in imports(path, "api") if target[0] == "asyncio"}
    assert known == ASYNCIO
    code = "import triolet, sys; print(sorted({'asyncio', 'anyio'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_actors_know_messages_and_not_each_other_and_only_the_runner_reaches_models() -> None:
    for path in modules("actors"):
        for target in imports(path, "actors"):
            if target[:2] == ("triolet", "models"):
                assert path.stem == "gpu_runner", f"actors/{path.name} imports {'.'.join(target)}"
            if target[:2] == ("triolet", "actors") and target[2] in ACTORS:
                assert path.stem == "supervisor", f"actors/{path.name} imports {'.'.join(target)}"


def test_the_walk_sees_imports() -> None:
    """The checks above would pass on an empty list."""
    found = {target[:2] for room in ALLOWED for path in modules(room) for target in imports(path, room)}
    assert {("triolet", "core"), ("triolet", "models"), ("triolet", "actors"), ("trio",), ("torch",)} <= found


def test_importing_triolet_does_not_import_torch() -> None:
    """torch and transformers take seconds; they are imported when an engine starts."""
    code = "import triolet, sys; print(sorted({'torch', 'transformers', 'av'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
