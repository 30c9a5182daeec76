"""The command ``triolet serve``: an HTTP server in the shape of OpenAI's API."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve, fields_dict

from ..api.command_line.following import device_options
from ..api.command_line.given import check_model, template_of
from ..api.command_line.models import complete_models, model_named
from ..api.command_line.pages import MODEL, HelpPage, in_flags
from ..api.command_line.terminal import FAILED, INTERRUPTED, WrongInput, complain
from ..core.checks import shown
from ..core.config import EngineConfig
from ..core.errors import InvalidRequest, TrioletError
from .log_format import FORMATS, log_to
from .manners.keys import key_fault

if TYPE_CHECKING:
    from ..api.engine import Engine
    from ..api.engines import Engines
    from .server import Observers, Server

KEY_VARIABLE = "TRIOLET_API_KEY"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

_CONVERSATIONS = ("chat_template", "tool_format")
_SECTIONS = {
    "Models": ("models", "aligner", "preload", "memory_budget", "idle_seconds", "draft_heads", *_CONVERSATIONS),
    "Device": MODEL,
    "Replicas on Ray": ("cluster", "replicas", "replica_cpus", "replica_gpus"),
    "Access": ("host", "port", "api_keys", "api_key_file", "allow_anyone", "cors_origins", "certfile", "keyfile"),
    "Limits": (
        "max_body_bytes",
        "max_audio_seconds",
        "max_requests",
        "request_memory",
        "requests_per_minute",
        "drain_seconds",
    ),
    "Log": ("log_format", "no_access_log"),
    "Addresses of images and audio": ("url_prefixes", "private_urls"),
}
_BRIEF = (
    "models preload memory_budget device quantization max_positions replicas cluster host port api_key_file "
    "allow_anyone max_requests requests_per_minute max_body_bytes"
)
_SHORT = "Serve models over HTTP with OpenAI's API."
_NAMED = "Serve MODEL, under the name NAME. May be repeated."
_KEY = f"An API key that clients send. May be repeated. Set ${KEY_VARIABLE} to keep the key out of the command line."
_BUDGET = "The memory that all loaded models may take together, such as 4GiB. Default: no limit."
_IDLE = "Unload a model after this many seconds without a request. Default: never."
_MEMORY = "The memory that all requests together may take. Default: a quarter of the free memory, up to 2GiB."
_RATE = "The most requests a minute with one API key, or from one address if there are no keys."
_DRAIN = "The seconds that running requests have to end when the server stops. Default: 30."
_PREFIX = "Fetch images and audio whose address begins with URL. May be repeated."
_ORIGIN = "Let web pages of ORIGIN use the server. May be repeated."
_TEMPLATE = "A Jinja template that is used in place of the model's own. With several models: NAME=FILE."
_DRAFT_HEAD = "A small model that proposes draft tokens: an assistant of Gemma 4. With several models: NAME=MODEL."
_CALLS = "The format in which the models write tool calls, such as hermes. Default: found for each checkpoint."
_LOG = "The form of the lines of the log and the access log, on standard error: text, or a JSON object each."
_ADAPTER = (
    "A LoRA adapter in FOLDER, served under the name NAME. May be repeated. With several models: MODEL=NAME=FOLDER."
)
_LONGEST = (
    "The most tokens of a prompt and its answer together. With several models: NAME=N. Default: as many as the model "
    "and the memory allow."
)
_CLUSTER = "Run the models as replicas on Ray: on the cluster at $RAY_ADDRESS, or on a Ray that is started here."
_FILE = click.Path(exists=True, dir_okay=False)
_EXAMPLES = (
    ("triolet serve openai/whisper-base", ""),
    ("triolet serve --model speech=openai/whisper-base --model chat=Qwen/Qwen3-0.6B", "each is loaded by a request"),
    ("TRIOLET_API_KEY=secret triolet serve demo --host 0.0.0.0", "for other machines"),
    ("triolet serve openai/whisper-base --cluster --replicas 2-8", "2 to 8 replicas on Ray, by demand"),
)


class _Bytes(click.ParamType[int]):
    """A size: ``512M``, ``4GiB``, ``1.5G``, or a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads the value of the option, as click asks."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a size; allowed: 512M, 4GiB or a number of bytes", param, ctx)
        return int(float(found[1]) * _UNITS[found[2].upper()])


class _Serve(HelpPage):
    """The command, with the options of the distribution ``triolet-ray`` where it is installed."""

    @cached_property
    def replicas(self) -> Any:
        """The module of ``triolet-ray`` for this command; ``None``: it is not installed."""
        found = entry_points(group="triolet.serve", name="cluster")
        return next(iter(found)).load() if found else None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the options, as click asks."""
        return [*super().get_params(ctx), *(() if self.replicas is None else self.replicas.OPTIONS)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the command line, as click asks."""
        if "--cluster" in args and self.replicas is None:
            raise click.UsageError("--cluster needs the package triolet-ray: pip install triolet-ray", ctx)
        return super().parse_args(ctx, args)


@click.command(cls=_Serve, sections=_SECTIONS, brief=_BRIEF, examples=_EXAMPLES, short_help=_SHORT)
@click.argument("model", required=False, shell_complete=complete_models)
@click.option("--model", "models", multiple=True, metavar="[NAME=]MODEL", help=_NAMED)
@click.option("--aligner", metavar="MODEL", help="A model that finds the times of words, for models that cannot.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=8000, show_default=True, help="The port to listen on; 0 chooses a free port.")
@click.option("--api-key", "api_keys", multiple=True, help=_KEY)
@click.option("--api-key-file", type=_FILE, help="A file of API keys, one a line.")
@click.option("--allow-anyone", is_flag=True, help="Let other machines use the server without an API key.")
@click.option("--preload", is_flag=True, help="Load all models at the start, as a single model always is.")
@click.option("--memory-budget", type=_Bytes(), help=_BUDGET)
@click.option("--idle-seconds", type=float, help=_IDLE)
@click.option("--max-body", "max_body_bytes", type=_Bytes(), help="The largest request, such as 64M. Default: 512M.")
@click.option("--max-audio-seconds", type=float, help="The longest audio file, in seconds. Default: 21600, six hours.")
@click.option("--max-requests", type=int, help="The most requests that run or wait at the same time. Default: 512.")
@click.option("--request-memory", type=_Bytes(), help=_MEMORY)
@click.option("--rate-limit", "requests_per_minute", type=int, metavar="N", help=_RATE)
@click.option("--drain-seconds", type=float, help=_DRAIN)
@click.option("--allow-url-prefix", "url_prefixes", multiple=True, metavar="URL", help=_PREFIX)
@click.option("--allow-private-urls", "private_urls", is_flag=True, help="Fetch from private networks, too.")
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN", help=_ORIGIN)
@click.option("--certfile", type=_FILE, help="The file of the TLS certificate, PEM.")
@click.option("--keyfile", type=_FILE, help="The file of the certificate's key, PEM.")
@click.option("--chat-template", multiple=True, metavar="[NAME=]FILE", help=_TEMPLATE)
@click.option("--adapter", "adapters", multiple=True, metavar="NAME=FOLDER", help=_ADAPTER)
@click.option("--tool-format", help=_CALLS)
@click.option("--draft-head", "draft_heads", multiple=True, metavar="[NAME=]MODEL", help=_DRAFT_HEAD)
@click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help=_LOG)
@click.option("--no-access-log", is_flag=True, help="Do not log each request.")
@click.option("--max-model-len", "max_positions", multiple=True, metavar="[NAME=]N", help=_LONGEST)
@device_options
@click.option("--cluster", is_flag=True, help=_CLUSTER)
def serve(**given: Any) -> int:
    """Serve models over HTTP in the form of OpenAI's API: speech, text, vectors and live audio, with a page to watch.

    After SIGTERM or ^C, running requests have --drain-seconds to end. A second SIGTERM or ^C ends them at once.
    docs/serving.md describes the endpoints, docs/operate.md all options.
    """
    for library in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):  # read where they are imported first; their lines
        os.environ.setdefault(library, "error")  # have a form of their own
    log_to(sys.stderr, given["log_format"])
    complains = complain if given["log_format"] == "text" else logging.getLogger("triolet.server").error
    try:
        from .heap import Heap
        from .server import Observers, Server
        from .settings import ServerSettings
    except ImportError as error:
        complains(f"the server needs more packages: pip install 'triolet[server]' ({error})")
        return FAILED
    if serve.replicas is not None:
        serve.replicas.check_options(given)
    settings = {name: given[name] for name in fields_dict(ServerSettings) if given.get(name) is not None}
    settings["api_keys"] = _keys(given["api_keys"], given["api_key_file"])
    settings["access_log"] = not given["no_access_log"]
    observers = Observers([Heap().heard])
    try:
        server = Server(ServerSettings(**settings), _engines(observers, given), observers, _aligner(given))
    except WrongInput as error:
        complains(error.message)
        raise click.exceptions.Exit(error.exit_code) from None
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each broken form; clients are told
    return _run(server, preload=given["preload"] or len(server.engines.models) == 1, complains=complains)


def models_of(single: str | None, named: tuple[str, ...]) -> dict[str, str]:
    """Returns the models by name: each ``MODEL`` by its own name, and each of ``--model NAME=MODEL`` by ``NAME``.

    Raises:
        InvalidRequest: there is no model, a name comes twice, or a name has no model.
    """
    found = {} if single is None else {_name_of(single): single}
    for one in named:
        name, equals, path = one.partition("=")
        if not equals:
            name, path = _name_of(one), one
        if not (name and path):
            told = "MODEL, or NAME=MODEL, such as speech=openai/whisper-base"
            raise InvalidRequest(f"--model {one!r}; allowed: {told}")
        if name in found:
            raise InvalidRequest(f"two models have the name {name!r}; give each model a name of its own")
        found[name] = path
    if not found:
        raise InvalidRequest(
            "no model is given; give one, as in triolet serve openai/whisper-base, or try triolet serve demo"
        )
    return found


def by_model(flag: str, given: tuple[str, ...], models: Collection[str]) -> dict[str, str]:
    """Returns the value that an option has for each model that it names: ``NAME=VALUE``, or ``VALUE`` if there is a
    single model.

    Raises:
        InvalidRequest: there are several models, and none is named; or a model has two values.
    """
    found = dict[str, str]()
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or name not in models:
            if len(models) > 1:
                allowed = f"NAME=VALUE, where NAME is one of {', '.join(models)}"
                raise InvalidRequest(f"{flag} {shown(one)} with {len(models)} models; allowed: {allowed}")
            name, value = next(iter(models)), one
        if name in found:
            raise InvalidRequest(f"{flag} is given twice for {name!r}; allowed: once for each model")
        found[name] = value
    return found


def adapters_of(given: tuple[str, ...], models: Collection[str]) -> dict[str, dict[str, str]]:
    """Returns the folders of the adapters of each model, by the adapters' names.

    Raises:
        InvalidRequest: an adapter has no name, no folder or no model, or a name comes twice.
    """
    found: dict[str, dict[str, str]] = {model: {} for model in models}
    for one in given:
        model, _, rest = one.partition("=")
        if model not in models or "=" not in rest:
            model, rest = next(iter(models)), one
        name, _, folder = rest.partition("=")
        if not (name and folder) or (rest is one and len(models) > 1) or name in found[model]:
            told = "NAME=FOLDER, each name once" if len(models) == 1 else "MODEL=NAME=FOLDER, each name once"
            raise InvalidRequest(f"--adapter {shown(one)}; allowed: {told}")
        found[model][name] = folder
    return found


def _name_of(model: str) -> str:
    """Returns the name of a model: a hub id unchanged, the last part of the path of a folder or of a GGUF file, or the
    name that Ollama has for it."""
    if os.path.isfile(model):
        return Path(model).stem
    return Path(model).resolve().name if os.path.isdir(model) else model.removeprefix("ollama:")


def _keys(options: tuple[str, ...], path: str | None) -> list[str]:
    """Returns the API keys: those of ``--api-key``, the lines of the file that do not begin with ``#``, and that of the
    environment variable.

    Raises:
        InvalidRequest: the file has no key, or a key that no client can send. The error names the place of such a key
            and does not show it.
    """
    found = [(f"--api-key (number {number})", key) for number, key in enumerate(options, 1)]
    if path is not None:
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")  # no text: refused as a key
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        kept = [(number, line) for number, line in lines if line and not line.startswith("#")]
        if not kept:
            raise InvalidRequest(f"--api-key-file {path} has no key; write one key a line")
        found += [(f"--api-key-file {path} (line {number})", line) for number, line in kept]
    for number, key in enumerate(os.environ.get(KEY_VARIABLE, "").split(","), 1):
        if key.strip():
            found.append((f"{KEY_VARIABLE} (number {number})", key.strip()))
    for where, key in found:
        if fault := key_fault(key):
            raise InvalidRequest(f"the key in {where} {fault}")
    return [key for _, key in found]


def _engines(observers: Observers, given: dict[str, Any]) -> Engines:
    from ..api.engines import Engines
    from ..api.model_spec import ModelSpec

    models = models_of(given["model"], given["models"])
    own: dict[str, dict[str, Any]] = {name: _shared(given) for name in models}
    for name, text in by_model("--max-model-len", given["max_positions"], models).items():
        own[name]["max_positions"] = int(text) if text.isdecimal() else text  # which the configuration refuses
    for name, text in by_model("--chat-template", given["chat_template"], models).items():
        own[name]["chat_template"] = template_of(text)
    for name, head in by_model("--draft-head", given["draft_heads"], models).items():
        check_model(head)
        own[name]["draft_head"] = head
    adapters, specs = adapters_of(given["adapters"], models), {}
    for name, path in models.items():
        config, folder = EngineConfig(**own[name]), model_named(path)
        if given["cluster"]:
            if adapters[name]:
                raise InvalidRequest(
                    f"--adapter with --cluster, where {name} can have no adapters; leave one of them out"
                )
            specs[name] = serve.replicas.cluster_spec(folder, config, given)
        else:
            check_model(folder)
            config = evolve(config, observer=observers.of(name))
            specs[name] = ModelSpec(folder, config=config, adapters=adapters[name])
    return Engines(specs, memory_budget=given["memory_budget"], idle_seconds=given["idle_seconds"])


def _aligner(given: dict[str, Any]) -> Engine | None:
    from ..api.engine import Engine

    if given["aligner"] is None:
        return None
    check_model(given["aligner"])
    return Engine(given["aligner"], config=EngineConfig(**_shared(given)))


def _shared(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that all models share."""
    return {setting: given[setting] for setting in MODEL if setting != "max_positions"}


def _run(server: Server, *, preload: bool, complains: Callable[[str], object] = complain) -> int:
    import trio

    from ..api.speech.word_aligner import check_aligns
    from .listening import Listener
    from .serving import until_told

    async def main() -> int:
        async with server.aligner or nullcontext(), server.engines:
            if server.aligner is not None:
                check_aligns(server.aligner.model)
            return await until_told(server, listener, preload=preload)

    try:
        server.engines.check_fits()
        with Listener(server.settings) as listener:
            return trio.run(main)
    except TrioletError as error:
        complains(in_flags(" ".join(str(error).split())))  # the hub uses many lines to say that it lacks a model
    except KeyboardInterrupt:
        return INTERRUPTED
    return FAILED
