"""Triolet's plugin for pytest. With a mark, an ``async def`` test runs under many schedules, and with every fault.

::

    @pytest.mark.triolet_sweep
    async def test_my_service(triolet_engine, triolet_client):
        async with my_service(triolet_engine) as service:
            async with triolet_client():
                await service.ask("hello")
            await service.ask("hello")

pytest finds the plugin by itself. The plugin imports nothing of Triolet and changes nothing before a test has one of
its marks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import shlex
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from triolet.core.config import EngineConfig

    from .service import SimulatedService
    from .sim_model import SimModel
    from .trio_tools import Case, ProgramReport, Subject, Trial

_MARKS = ("triolet_sweep", "triolet_schedules")
_FAULTS = ("cancel", "leave", "interrupt", "device")
_QUICK, _THOROUGH = 200, 2000  # how often a test runs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Implements `pytest_addoption` of pytest: adds the options."""
    group = parser.getgroup("triolet", "triolet: schedules and faults (marks triolet_sweep and triolet_schedules)")
    group.addoption("--triolet-verify", action="store_true", help=f"{_THOROUGH} runs of each test, not {_QUICK}")
    group.addoption("--triolet-runs", type=int, metavar="N", help="so many runs of each test at most")
    group.addoption("--triolet-seed", type=int, metavar="N", default=0, help="of the schedules (0)")
    group.addoption(
        "--triolet-replay", metavar="CASE", help="runs the tests once, as a failure printed it: 'Case(...)'"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Implements `pytest_configure` of pytest: registers the marks."""
    arguments = "(runs=..., ignore=(), faults=('cancel', 'leave', 'interrupt', 'device'))"
    config.addinivalue_line("markers", f"triolet_sweep{arguments}: an async test, with every fault at every step")
    config.addinivalue_line("markers", "triolet_schedules(runs=..., ignore=()): an async test, under many schedules")


# -- fixtures --------------------------------------------------------------------------------------------------------


class Given:
    """A placeholder for an argument that each run of a test gets anew."""

    def __init__(self, name: str, take: Callable[[SimulatedService], object], *, opens: bool = False) -> None:
        self._name, self._take, self._opens = name, take, opens

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"{self._name}.{name} exists only within a run; make your service in the test itself")


@pytest.fixture
def triolet_model() -> SimModel:
    """The model of the simulated device: a decoder of text. Override this fixture for another
    `triolet_testing.SimModel`."""
    from triolet.core.model import Kind

    from .sim_model import SimModel

    return SimModel(kind=Kind.DECODER)


@pytest.fixture
def triolet_config() -> EngineConfig:
    """The settings of the simulated engines. Override this fixture for other settings."""
    from triolet.core.config import EngineConfig

    return EngineConfig()


@pytest.fixture
def triolet_engine(request: pytest.FixtureRequest, triolet_model: SimModel, triolet_config: EngineConfig) -> Given:
    """An open `triolet.Engine` over a simulated device, in a test with the mark ``triolet_sweep``."""
    del triolet_model, triolet_config  # requested only to be among the test's fixtures
    return _given(request, Given("triolet_engine", lambda service: service.engines[0].engine, opens=True))


@pytest.fixture
def triolet_make_engine(request: pytest.FixtureRequest, triolet_model: SimModel, triolet_config: EngineConfig) -> Given:
    """A function ``make(**settings)`` that returns another `triolet.Engine` over a simulated device. The service opens
    and closes it."""
    del triolet_model, triolet_config
    return _given(request, Given("triolet_make_engine", lambda service: service.make_engine))


@pytest.fixture
def triolet_client(request: pytest.FixtureRequest, triolet_model: SimModel, triolet_config: EngineConfig) -> Given:
    """A function for ``async with client():``. The block is one client, which may leave at any time. After it has left,
    its requests must end.
    """
    del triolet_model, triolet_config
    return _given(request, Given("triolet_client", lambda service: service.client))


def _given(request: pytest.FixtureRequest, given: Given) -> Given:
    if _mark(request.node) is None:
        pytest.fail(f"{given._name} needs a test with @pytest.mark.triolet_sweep", pytrace=False)
    return given


# -- tests with a mark -----------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Implements `pytest_pycollect_makeitem` of pytest: makes an async test with a mark a plain function, so that
    plugins for async tests ignore it."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Function) and _mark(item) is not None:
            item.obj = _plain(item, item.obj)
    return made


def _mark(item: pytest.Item) -> pytest.Mark | None:
    return next((mark for name in _MARKS if (mark := item.get_closest_marker(name)) is not None), None)


def _plain(item: pytest.Function, test: Callable[..., Any]) -> Callable[..., None]:
    """Returns a plain function that runs the async test many times."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        mark = _mark(item)
        assert mark is not None, "the mark was there when the test was found"
        if not inspect.iscoroutinefunction(test):
            pytest.fail(f"a test with @pytest.mark.{mark.name} has to be an async def", pytrace=False)
        _run(item, mark, test, arguments)

    return run


def _run(item: pytest.Function, mark: pytest.Mark, test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Runs a test, as the options and its mark say."""
    from .trio_tools import replay_program, sweep_program

    faults = _read_faults(mark)
    subject = _subject(test, arguments, item.funcargs, device="device" in faults)
    options = item.config.option
    if options.triolet_replay is not None:
        replay_program(subject, _read_case(options.triolet_replay))
        return
    with _unlogged():
        report = sweep_program(
            subject,
            kinds=_trio_kinds(faults),
            runs=options.triolet_runs or (_THOROUGH if options.triolet_verify else mark.kwargs.get("runs", _QUICK)),
            seed=options.triolet_seed,
            ignore=mark.kwargs.get("ignore", ()),
        )
    item.user_properties += [("triolet runs", report.runs), ("triolet faults", report.faults)]
    if report.failures:
        pytest.fail(_told(report, item.nodeid), pytrace=False)


def _read_faults(mark: pytest.Mark) -> tuple[str, ...]:
    """Returns the faults of a test, from its mark."""
    allowed = {"triolet_sweep": ("runs", "ignore", "faults"), "triolet_schedules": ("runs", "ignore")}[mark.name]
    unknown = [*map(repr, mark.args), *(name for name in mark.kwargs if name not in allowed)]
    if unknown:
        raise pytest.UsageError(f"@pytest.mark.{mark.name}: got {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    faults = tuple(mark.kwargs.get("faults", _FAULTS if mark.name == "triolet_sweep" else ()))
    if strange := [fault for fault in faults if fault not in _FAULTS]:
        raise pytest.UsageError(f"@pytest.mark.triolet_sweep: faults={strange}; allowed: {', '.join(_FAULTS)}")
    return faults


def _trio_kinds(faults: tuple[str, ...]) -> list[Any]:
    from .trio_tools import TrioFault

    kinds = {"cancel": TrioFault.CANCEL, "leave": TrioFault.CANCEL_PART, "interrupt": TrioFault.INTERRUPT}
    return [kind for name, kind in kinds.items() if name in faults]


def _subject(test: Callable[..., Any], arguments: dict[str, Any], fixtures: dict[str, Any], *, device: bool) -> Subject:
    """Makes the subject of the runs: the test, with the arguments that each run gets anew. A test without an engine has
    no device."""
    from .trio_tools import Subject

    passes = (pytest.skip.Exception, pytest.xfail.Exception)
    given = {name: value for name, value in arguments.items() if isinstance(value, Given)}
    if not given:

        async def program(_: Trial) -> None:
            await test(**arguments)

        return Subject(program=program, passes=passes)
    from .service import DEVICE_KINDS, service_subject

    async def with_engine(service: SimulatedService) -> None:
        await test(**arguments | {name: value._take(service) for name, value in given.items()})

    return service_subject(
        with_engine,
        model=fixtures.get("triolet_model"),
        config=fixtures.get("triolet_config"),
        opens=any(value._opens for value in given.values()),
        device=DEVICE_KINDS if device else (),
        passes=passes,
    )


def _read_case(text: str) -> Case:
    """Reads the case that a failure has printed."""
    from . import trio_tools
    from .faults import FaultKind
    from .service import LastingFault

    names = {name: getattr(trio_tools, name) for name in trio_tools.__all__}
    names |= {"FaultKind": FaultKind, "LastingFault": LastingFault}
    try:
        case = eval(text, {"__builtins__": {}}, names)
    except Exception as error:  # whatever the user has typed
        raise pytest.UsageError(f"--triolet-replay: {error}; allowed: the Case(...) that a failure prints") from error
    if not isinstance(case, trio_tools.Case):
        raise pytest.UsageError(f"--triolet-replay: got {case!r}; allowed: the Case(...) that a failure prints")
    return case


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps engines from logging within the block. They would log each injected fault."""
    log = logging.getLogger("triolet")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _told(report: ProgramReport, test: str) -> str:
    """Returns the failures in words, each with the command that repeats it."""
    command = f"pytest {_quoted(test)} --triolet-replay"
    told = [
        f"{number}. {failure}\n  again: {command} {_quoted(repr(failure.case))}"
        for number, failure in enumerate(report.failures, 1)
    ]
    return "\n\n".join([*told, report.counts])


def _quoted(text: str) -> str:
    """Quotes a text for a shell, in double quotes if possible, since Python's own quotes are single."""
    return shlex.quote(text) if set(text) & set('"$`!\\') or text == shlex.quote(text) else f'"{text}"'


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Implements `pytest_terminal_summary` of pytest: prints the numbers of tests, runs and faults."""
    if not terminalreporter.config.option.triolet_verify:
        return
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    told = [dict(report.user_properties) for report in reports]
    counts = [properties for properties in told if "triolet runs" in properties]
    runs, faults = (sum(one[f"triolet {name}"] for one in counts) for name in ("runs", "faults"))
    terminalreporter.write_line(f"triolet: {len(counts)} tests, {runs} runs, {faults} faults")
