"""What the documents and the files of `deploy/` say of `triolet serve` to those who come from elsewhere is so."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import urllib.error
from pathlib import Path

import click
import openai
import pytest

from triolet import demo
from triolet.server.command import models_of, serve
from triolet.server.endpoints.table import ENDPOINTS
from triolet.server.schemas.chat import ChatRequest
from triolet.server.settings import ServerSettings

from ..checkpoints.families import make_checkpoint
from .served import served

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migration.md"
DOCUMENTS = ("README.md", "docs/serving.md", "docs/operate.md", "docs/deployment.md", "docs/migration.md")
ADDRESS = "http://127.0.0.1:8000"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(
        r"^##", PAGE.read_text(encoding="utf-8").partition(f"\n{title}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]


def commands() -> list[str]:
    """The arguments of each `triolet serve` that stands in a block of code."""
    blocks = [
        one for name in DOCUMENTS for one in re.findall(r"^```(\w*)\n(.*?)^```$", read(name), re.MULTILINE | re.DOTALL)
    ]
    lines = [line for kind, block in blocks if not kind for line in block.replace("\\\n", " ").splitlines()]
    return [line.partition("triolet serve ")[2] for line in lines if "triolet serve " in line]


def options() -> set[str]:
    return {name for one in serve.get_params(click.Context(serve)) for name in one.opts if name.startswith("--")}


def parsed(arguments: list[str]) -> click.Context:
    context = serve.make_context("serve", arguments)
    assert models_of(context.params["model"], context.params["models"])
    return context


@pytest.mark.real_time
def test_a_program_for_openai_runs_with_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section("## OpenAI's service"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copy(next(one.path for one in demo.samples() if one.path.stem == "en-command"), "talk.mp3")
    models = {
        "Qwen/Qwen3-0.6B": str(make_checkpoint("qwen3", tmp_path / "qwen3")),
        "openai/whisper-small": demo.checkpoint(),
        "BAAI/bge-small-en-v1.5": str(make_checkpoint("bert", tmp_path / "bert")),
    }
    with served(models) as running:
        exec(compile(code.replace(ADDRESS, running.url), str(PAGE), "exec"), {})
        monkeypatch.setenv("OPENAI_BASE_URL", f"{running.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        with openai.OpenAI() as client:
            assert {model.id for model in client.models.list()} == models.keys()
    *_, said, count = capsys.readouterr().out.splitlines()
    assert (said, count) == ("Please set the temperature in the cellar to eighteen degrees.", "2")


def test_every_command_of_the_documents_is_one() -> None:
    assert len(commands()) >= 5
    for line in commands():
        parsed(shlex.split(line.partition("#")[0]))


@pytest.mark.parametrize("title", ["### Its endpoint", "## faster-whisper-server and speaches"])
def test_every_option_on_our_side_is_one(title: str) -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section(title), re.MULTILINE)[1:]
    told = {name for theirs, ours in rows for name in re.findall(r"--[\w-]+", ours)}
    same = {n for theirs, ours in rows if ours.startswith("the same") for n in re.findall(r"--[\w-]+", theirs)}
    assert len(told | same) >= 6
    assert told | same <= options()


def test_the_members_and_paths_that_are_said_to_be_there_are() -> None:
    there, _, missing = section("### Its endpoint").partition("|\n\n")[2].partition("There is no ")
    members = set(re.findall(r"`([a-z_]+)`", there)) - {"structured_outputs"}
    assert members <= ChatRequest.model_fields.keys()
    paths = {one.path for one in ENDPOINTS}
    assert set(re.findall(r"`(/[\w/]+)`", there)) <= paths
    assert not set(re.findall(r"`(/[\w/]+)`", missing)) & paths


# -- deploy/ -----------------------------------------------------------------------------------------------------------


def test_the_unit_starts_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^ExecStart=\S+/triolet serve (.*)$", read("deploy/triolet.service"), re.MULTILINE)
    (tmp_path / "keys").write_text("secret\n")
    line = line.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).replace("$TRIOLET_MODELS", "--model a=demo")
    assert parsed(shlex.split(line)).params["api_key_file"] == str(tmp_path / "keys")


def test_the_page_makes_all_that_the_unit_reads_before_it_starts_it() -> None:
    unit = [line for line in read("deploy/triolet.service").splitlines() if not line.startswith("#")]
    paths = set(re.findall(r"/(?:opt|etc)/triolet/[\w.]+", "\n".join(unit)))
    assert paths == {"/opt/triolet/.venv", "/opt/triolet/models", "/etc/triolet/models", "/etc/triolet/keys"}
    made, started, _ = read("docs/deployment.md").partition("## With systemd")[2].split("```")[1].partition("systemctl")
    assert started
    assert paths <= set(re.findall(r"(?:python3 -m venv |>|HF_HOME=)(/[\w./]+)", made))
    assert made.index("mkdir --parents /etc/triolet\n") < min(
        made.index(f">{path}") for path in paths if "/etc" in path
    )


@pytest.mark.real_time
def test_the_unit_leaves_the_service_little_to_do_harm_with() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=15", ROOT / "deploy" / "triolet.service"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.real_time
def test_the_container_is_healthy_while_the_server_takes_requests() -> None:
    (line,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", read("deploy/Containerfile"), re.MULTILINE)
    program, flag, code = json.loads(line)
    assert (program, flag) == ("python3", "-c")
    with served({"demo": str(demo.checkpoint())}) as service:
        check = compile(code.replace("http://127.0.0.1:8000", service.url), "HEALTHCHECK", "exec")
        exec(check)
        service.ask(service.server.stop)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            exec(check)


def test_the_container_starts_the_server() -> None:
    start, models = (
        re.findall(r'"([^"]+)"', line)
        for line in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", read("deploy/Containerfile"), re.MULTILINE)
    )
    assert start[:2] == ["triolet", "serve"]
    assert parsed([*start[2:], *models]).params["host"] == "0.0.0.0"


def test_the_proxy_takes_what_the_server_takes() -> None:
    text = read("deploy/nginx.conf")
    (most,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(most) * 2**20 == ServerSettings().max_body_bytes
    assert f"server 127.0.0.1:{ServerSettings().port};" in text
    shown = re.findall(r"```nginx\n(.*?)```", read("docs/deployment.md"), re.DOTALL)[0].splitlines()
    assert [line for line in shown if line.partition(";")[0] not in text] == []
