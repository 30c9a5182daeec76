"""The import rule: core <- models <- actors <- api <- the face. Satellites, the distributions in packages/, may use
all of these, and only tests and benchmarks use satellites. The rooms within core, models and api have rules of their
own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACE = "src/triolet"
TESTING = "packages/testing/triolet_testing"
ALLOWED = {
    "core": {"core"},
    "models": {"core", "models"},
    "actors": {"core", "models", "actors"},
    "api": {"core", "models", "actors", "api", "demo"},
    "bench": {"core", "models", "api", "bench", FACE},
    "server": {"core", "actors", "api", "demo", "server"},
    FACE: {"core", "models", "actors", "api", "bench", "server", FACE},
    TESTING: {"core", "models", "actors", "api", "demo"},
    "packages/ray/triolet_ray": {"core", "actors", "api"},
    "demo": {"demo"},
}
ROOMS = {  # which rooms of its own folder each may use; the folder's own files are a room by the folder's name
    "core": {"planning"},
    "core/planning": {"core"},
    "models": {"architectures", "blueprints", "checkpoints", "machine", "memory", "native", "networks", "sampling"},
    "models/machine": set(),
    "models/linear": {"checkpoints", "native"},
    "models/memory": {"machine"},
    "models/native": {"memory"},
    "models/attention": {"memory"},
    "models/checkpoints": {"machine"},
    "models/architectures": {"checkpoints", "machine"},
    "models/sampling": {"native"},
    "models/speech": {"architectures", "checkpoints"},
    "models/networks": {
        *("architectures", "attention", "checkpoints", "linear"),
        *("machine", "memory", "native", "sampling"),
    },
    "models/blueprints": {
        *("architectures", "attention", "checkpoints", "linear", "machine"),
        *("memory", "native", "networks", "speech"),
    },
    "api": {"hosts", "inputs", "live", "outputs", "speech"},
    "api/inputs": set(),
    "api/outputs": set(),
    "api/formats": {"outputs"},
    "api/speech": {"inputs", "outputs"},
    "api/tools": set(),
    "api/live": {"inputs", "outputs", "speech"},
    "api/hosts": {"inputs", "live", "outputs", "speech", "tools"},
    "api/command_line": {"api", "formats", "inputs", "outputs", "speech"},
    "server": {"endpoints", "manners", "schemas", "view"},
    "server/endpoints": {"schemas", "server", "view"},
    "server/manners": set(),
    "server/schemas": set(),
    "server/view": {"server"},
}
FOREIGN = {  # what a folder must not know of the outside
    "core": {
        *("trio", "torch", "transformers", "numpy", "time", "random"),
        *("threading", "asyncio", "anyio", "os", "pathlib"),
    },
    "models": {"trio", "asyncio", "anyio"},
    "actors": {"torch", "transformers", "numpy", "asyncio", "anyio"},
    "server": {"torch", "transformers", "asyncio"},
    FACE: {"torch", "transformers", "asyncio", "starlette", "fastapi"},
}
ASYNCIO = {"asyncio_host"}  # of api/: the only module that knows asyncio
ACTORS = {"scheduler", "encoder_cache", "gpu_runner"}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@cache
def imports(path: Path) -> tuple[tuple[str, ...], ...]:
    """Every import, inside functions too, as a path: ("triolet", "core", "ledger") or ("trio",)."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, ...]]:
    folders = path.relative_to(ROOT).parts[:-1]
    if folders[0] == "packages":
        package = folders[2:]
    else:
        package = ("triolet",) if path.is_relative_to(ROOT / FACE) else ("triolet", *folders)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*module, alias.name) for alias in node.names)


def room_of(target: tuple[str, ...]) -> str:
    """Where in its folder an imported name lives: ``("triolet", "models", "memory", "kv", ...)`` in "memory"."""
    folder = target[1]
    inner = (ROOT / folder / target[2]).is_dir() if len(target) > 2 else False
    return target[2] if inner else folder


@pytest.mark.parametrize("room", ALLOWED)
def test_no_arrow_points_back(room: str) -> None:
    for path in modules(room):
        for target in imports(path):
            if target[0] != "triolet" or len(target) == 1:
                continue
            reached = target[1] if target[1] in ALLOWED else FACE
            assert reached in ALLOWED[room], f"{room}/{path.name} imports {'.'.join(target)}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_only_the_rooms_below_it(room: str) -> None:
    folder, _, own = room.partition("/")
    allowed = ROOMS[room] | {own or folder}
    for path in sorted((ROOT / room).glob("*.py")):
        for target in imports(path):
            if target[:2] == ("triolet", folder):
                assert room_of(target) in allowed, f"{path.relative_to(ROOT)} imports {'.'.join(target)}"


def test_the_kit_uses_attrs_and_the_standard_library_alone() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "packages/kit/triolet_kit").glob("*.py")]
    used = {name for text in texts for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
    assert used - sys.stdlib_module_names - {"triolet_kit"} == {"attrs"}


def test_the_tools_for_any_trio_program_use_nothing_of_triolet_but_themselves() -> None:
    found = {target[:2] for path in modules(f"{TESTING}/trio_tools") for target in imports(path)}
    assert {target for target in found if target[0].startswith("triolet")} == {("triolet_testing", "trio_tools")}


def test_the_engine_uses_no_satellite() -> None:
    for room in (room for room in ALLOWED if not room.startswith("packages/")):
        for path in modules(room):
            for target in imports(path):
                assert not target[0].startswith("triolet_"), f"{path.relative_to(ROOT)} imports {'.'.join(target)}"


def test_every_folder_is_a_room_with_a_rule_a_docstring_and_a_place_in_the_package() -> None:
    packages = set(re.findall(r'^ +"(triolet[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for folder in ("core", "models", "actors", "api", "server"):
        for init in (ROOT / folder).rglob("__init__.py"):
            room = init.parent.relative_to(ROOT)
            assert folder == "actors" or str(room) in ROOMS, f"{room} has no import rule"
            assert f"triolet.{'.'.join(room.parts)}" in packages, f"{room} is not among pyproject's packages"
            docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            assert len(docstring.split()) >= 25, f"{room}/__init__.py does not say what the room holds"


@pytest.mark.parametrize("room", FOREIGN)
def test_a_room_knows_only_its_own_outside(room: str) -> None:
    for path in modules(room):
        for target in imports(path):
            assert target[0] not in FOREIGN[room], f"{path.relative_to(ROOT)} imports {'.'.join(target)}"


def test_no_two_modules_import_each_other() -> None:
    """Not even inside functions, and through no other one; under TYPE_CHECKING neither."""
    names = {path: _name(path) for path in product()}
    arrows = {
        names[path]: {module for target in imports(path) for module in _modules(target, set(names.values()))}
        for path in names
    }
    done: set[str] = set()
    while free := {name for name in arrows if name not in done and arrows[name] - {name} <= done}:
        done |= free
    assert done == set(arrows), f"circles among {sorted(set(arrows) - done)}"


def product() -> Iterator[Path]:
    for folder in ("core", "models", "actors", "api", "server", TESTING):
        yield from (path for path in modules(folder) if path.stem != "__init__")


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[2:] if parts[0] == "packages" else ("triolet", *parts))


def _modules(target: tuple[str, ...], known: set[str]) -> Iterator[str]:
    for length in (len(target), len(target) - 1):
        if ".".join(target[:length]) in known:
            yield ".".join(target[:length])


@pytest.mark.real_time
def test_asyncio_stays_behind_the_portal() -> None:
    known = {path.stem for path in modules("api") for target in imports(path) if target[0] == "asyncio"}
    assert known == ASYNCIO
    code = "import triolet, sys; print(sorted({'asyncio', 'anyio'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_actors_know_messages_and_not_each_other_and_only_the_runner_reaches_models() -> None:
    for path in modules("actors"):
        for target in imports(path):
            if target[:2] == ("triolet", "models"):
                assert path.stem == "gpu_runner", f"actors/{path.name} imports {'.'.join(target)}"
            if target[:2] == ("triolet", "actors") and target[2] in ACTORS:
                assert path.stem == "supervisor", f"actors/{path.name} imports {'.'.join(target)}"


def test_no_file_of_the_product_is_longer_than_500_lines() -> None:
    long = [path.name for path in product() if len(path.read_text(encoding="utf-8").splitlines()) > 500]
    assert not long, f"more than one room: {long}"


def test_the_walk_sees_imports() -> None:
    """The checks above would pass on an empty list."""
    found = {target[:2] for room in ALLOWED for path in modules(room) for target in imports(path)}
    assert {("triolet", "core"), ("triolet", "models"), ("triolet", "actors"), ("trio",), ("torch",)} <= found


@pytest.mark.real_time
def test_importing_triolet_does_not_import_torch(tmp_path: Path) -> None:
    """torch and transformers take seconds; they are imported when an engine starts. A command checks the model before,
    and OpenMP is set up between."""
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}', encoding="utf-8")
    code = (
        "import triolet, sys; triolet.Engine, triolet.ToolFormat; "
        "from triolet.api.command_line.given import check_model; check_model(sys.argv[1], transcribes=True); "
        "print(sorted({'torch', 'transformers', 'av', 'jinja2'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
