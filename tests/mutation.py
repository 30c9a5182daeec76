"""Small mistakes in the product, one at a time, and whether the tests notice them: ``make mutants``.

::

    python -m pytest -p tests.mutation \\
        --mutants 60 --mutants-seed 1 --hypothesis-profile=mutation

A mutant is one function with one place changed: a comparison, an operator, a number, a condition turned round, a
statement left out. For each room of the table `ROOMS`, N are drawn by the seed from all that there are.

First all tests run once, and each is noted with the functions that it reaches: a mutant is reached if a test that
passes calls its function, in the test or in what its module sets up. Then each mutant has a process of its own, where
tests that reach it run until one fails: of each file its quickest ones, then the others, as long as they take no more
than `BOUND` seconds. Every process is forked from one that has imported all tests and run none, so it has no thread.

The run fails where a room has fewer noticed or fewer reached mutants than `ROOMS` says. A mutant counts as noticed
whatever a test says of it, also where it hangs; as not noticed, where it means the same as the program, which no test
can see. That the tests pass without a mistake is tried too, with shams: functions that are put in as they are.

mutmut and cosmic-ray start the tests anew for each mutant, which takes as long as a hundred mutants here.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import importlib
import inspect
import os
import pickle
import random
import resource
import shutil
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import trio
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item
from attrs import define, evolve, field, frozen

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 20.0  # seconds that a test may take beyond ten times what it takes without a mistake; then it hangs
BOUND = 30.0  # seconds of tests that a mutant may live through, as they were measured; one test may take more
MEMORY = 4 << 30  # bytes that a mistake may take
SHAMS = 2  # a room's


@frozen
class Room:
    """A folder of the product: the folders of tests that judge its mutants, and the rates that are held, in percent.

    The rates are floors: of 149 mutants of all rooms 82.6 percent were noticed, 80 to 86 percent of each room, and 97
    percent reached (N=30). Of 60 mutants, chance takes up to nine percent from that.
    """

    tests: tuple[str, ...]
    noticed: float
    reached: float


ROOMS = {
    "core": Room(("tests/properties/", "tests/actors/", "packages/testing/"), noticed=73, reached=88),
    "actors": Room(("tests/properties/", "tests/actors/"), noticed=73, reached=88),
    "models": Room(("tests/models/", "tests/properties/"), noticed=73, reached=88),
    "api": Room(("tests/api/", "tests/properties/"), noticed=73, reached=88),
    "server": Room(("tests/server/", "tests/properties/"), noticed=73, reached=88),
}
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


@frozen
class Mutant:
    """The place ``index`` of ``function`` of a module, as ``core.ledger`` and ``EncoderLedger.freed``, is mistaken."""

    module: str
    function: str
    index: int
    line: int
    mistake: str

    @property
    def place(self) -> str:
        """As a test has the functions that it reaches."""
        return f"{self.module}:{self.function}"

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} {self.function}: {self.mistake}"


# -- making mutants ----------------------------------------------------------------------------------------------------


def mutants(room: str) -> Iterator[Mutant]:
    """All that there are in a room, in a folder of one or in a file, in the order of the source."""
    top = ROOT / room
    for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function, node in _functions(ast.parse(path.read_text())):
            for index, (line, mistake) in enumerate(_change(node, -1)):
                yield Mutant(module, function, index, line, mistake)


def _functions(tree: ast.Module | ast.ClassDef, owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods with their qualified names; those within functions belong to these."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{owner}{node.name}.")


def _change(function: Any, wanted: int) -> list[tuple[int, str]]:
    """The mistakes that can be made in a function, by line; the one at ``wanted`` is made."""
    found: list[tuple[int, str]] = []

    def may(line: int, mistake: str) -> bool:
        found.append((line, mistake))
        return len(found) - 1 == wanted

    nodes = [node for statement in function.body for node in ast.walk(statement)]
    spared = {id(part) for node in nodes for part in _spared(node)}
    for node in nodes:
        if id(node) in spared:
            continue
        _swap(node, may)
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                _leave_out(body, spared, may)
    _leave_out(function.body, spared, may)
    return found


def _spared(node: ast.AST) -> Iterator[ast.AST]:
    """What says something to people alone: errors' texts, docstrings and annotations."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        yield from ast.walk(node)
    if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg in {"strict", "stacklevel"}):
        yield from ast.walk(node)  # noticed by nobody but us
    if isinstance(node, ast.AnnAssign):
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom | ast.Await):
        yield node


def _swap(node: Any, may: Any) -> None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        other = SWAPS[type(node.ops[0])]
        if may(node.lineno, f"{type(node.ops[0]).__name__} becomes {other.__name__}"):
            node.ops[0] = other()
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPS:
        other = SWAPS[type(node.op)]
        if may(node.lineno, f"{type(node.op).__name__} becomes {other.__name__}"):
            node.op = other()
    if isinstance(node, ast.If | ast.IfExp | ast.While) and may(node.lineno, "the condition is turned round"):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    if (
        isinstance(node, ast.Constant)
        and type(node.value) is int
        and may(node.lineno, f"{node.value} becomes one more")
    ):
        node.value += 1
    if (
        isinstance(node, ast.Constant)
        and type(node.value) is bool
        and may(node.lineno, f"{node.value} is turned round")
    ):
        node.value = not node.value


def _leave_out(body: list[ast.stmt], spared: set[int], may: Any) -> None:
    for place, node in enumerate(body):
        out = isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Break | ast.Continue)
        if out and id(node) not in spared and may(node.lineno, f"{ast.unparse(node)[:50]!r} is left out"):
            # it stays in dead code, so that the function has the variables that its closure has, as `super()` needs
            body[place] = ast.copy_location(ast.If(test=ast.Constant(False), body=[node], orelse=[]), node)


def plant(mutant: Mutant) -> None:
    """Puts the mistake into the program that runs.

    Raises:
        LookupError: the function is no more what its source says, as one that a decorator has replaced.
    """
    _put(mutant, lambda function: _change(copy.copy(function), mutant.index))


def watch(mutant: Mutant, seen: set[str]) -> None:
    """Has the mutant's function note its place in ``seen`` when it is called, by whatever thread. The note is on a line
    of the function, for tests that follow lines. Raises `LookupError` as `plant` does."""

    def note(function: Any) -> None:
        place = min(int(ast.get_docstring(function) is not None), len(function.body) - 1)
        call = ast.parse(f"_seen.add({mutant.place!r})").body[0]
        for node in ast.walk(call):
            ast.copy_location(node, function.body[place])
        function.body.insert(place, call)

    vars(builtins)["_seen"] = seen
    _put(mutant, note)


def _put(mutant: Mutant, change: Callable[[Any], object]) -> None:
    path = ROOT / (mutant.module.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text())
    node: Any = dict(_functions(tree))[mutant.function]
    change(node)
    code = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
    target = function_of(mutant)
    target.__code__ = next(one for one in _codes(code) if one.co_qualname == target.__code__.co_qualname)
    if any("enable_ki_protection" in ast.unparse(decorator) for decorator in node.decorator_list):
        trio.lowlevel.enable_ki_protection(target)  # trio keeps it by the code, and this is another one


def function_of(mutant: Mutant) -> FunctionType:
    """The function that runs. Raises `LookupError` as `plant` does."""
    owner: Any = importlib.import_module(f"triolet.{mutant.module}")
    *owners, name = mutant.function.split(".")
    for part in owners:
        owner = vars(owner)[part]
    found = vars(owner).get(name)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    found = inspect.unwrap(found) if callable(found) else found
    if not isinstance(found, FunctionType) or found.__code__.co_qualname != mutant.function:
        raise LookupError(f"{mutant.function} of {mutant.module} is {found!r}")
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


# -- running tests -----------------------------------------------------------------------------------------------------


@frozen
class Judge:
    """A test that passes, by its place in the collection: the seconds that it and its module's fixtures take, and the
    mutants that they reach, by their places. The seconds are the processor's: on a busy machine as many tests judge as
    on an idle one, and waiting costs nothing."""

    place: int
    file: str
    seconds: float
    places: frozenset[str]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutation")
    group.addoption("--mutants", type=int, default=60, help="mutants that are drawn of each room")
    group.addoption("--mutants-seed", type=int, default=1)
    group.addoption("--mutants-rooms", default=" ".join(ROOMS), help="rooms, or folders and files of them")
    group.addoption("--mutants-workers", type=int, default=1, help="processes at a time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out tests that judge none of the rooms."""
    wanted = [folder for room in config.option.mutants_rooms.split() for folder in _room(room).tests]
    path = f"{collection_path.relative_to(ROOT)}/"
    return not any(path.startswith(folder) or folder.startswith(path) for folder in wanted) or None


def _room(name: str) -> Room:
    return ROOMS[name.split("/", maxsplit=1)[0]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Judges mutants instead of running the tests."""
    if session.testsfailed:
        raise session.Interrupted("the tests cannot be collected")
    options, say = session.config.option, session.config.get_terminal_writer().line
    run = Run(session.items, Path(session.config._tmp_path_factory.getbasetemp()), options.mutants_workers)
    drawn = {name: _draw(name, options) for name in options.mutants_rooms.split()}
    known = [mutant for every in drawn.values() for mutant in every if _is_function(mutant)]
    allowed = [place for place, item in enumerate(session.items) if _may_judge(item)]
    tests, red = run.measure(allowed, list({mutant.place: mutant for mutant in known}.values()))
    seconds = sum(test.seconds for test in tests)
    say(f"{len(tests)} of {len(allowed)} tests reach a mutant, in {seconds:.0f} seconds; {len(known)} mutants")
    complaints = [f"{test} fails without a mistake, and judges nothing" for test in red]
    for name, every in drawn.items():
        complaints += [f"{name}: {complaint}" for complaint in _judge_room(name, run, tests, every, say)]
    for complaint in complaints:
        say(f"FAILED {complaint}", red=True)
    session.testsfailed = len(complaints)
    return True


def _draw(room: str, options: Any) -> list[Mutant]:
    every = list(mutants(room))
    return random.Random(f"{options.mutants_seed} {room}").sample(every, min(options.mutants, len(every)))


def _may_judge(item: pytest.Item) -> bool:
    """A server's tests are about sockets, so nearly all of them are marked ``real_time``; those that start a process
    have the product there, without the mistake."""
    if ROOT / "tests" / "server" in item.path.parents:
        return not {"subprocess", "Running"} & set(vars(item.module))
    return not any(map(item.get_closest_marker, ("thorough", "real_time")))


def _judge_room(
    name: str, run: Run, tests: Sequence[Judge], drawn: Sequence[Mutant], say: Callable[..., None]
) -> Iterator[str]:
    """Yields the promises that the room does not hold."""
    room, reaching = _room(name), defaultdict[str, list[Judge]](list)
    for test in tests:
        for place in test.places if test.file.startswith(room.tests) else ():
            reaching[place].append(test)
    known = [mutant for mutant in drawn if _is_function(mutant)]
    reached = [mutant for mutant in known if mutant.place in reaching]
    for mutant in known:
        if mutant.place not in reaching:
            say(f"is not reached: {mutant}")
    noticed = 0
    for mutant, said in run.judge([(mutant, reaching[mutant.place]) for mutant in reached]):
        noticed += said != "lives"
        say(f"{'lives' if said == 'lives' else 'noticed'}: {mutant}" + (f" ({said})" if said != "lives" else ""))
    for mutant, said in run.judge([(_sham(mutant), reaching[mutant.place]) for mutant in reached[:SHAMS]]):
        if said != "lives":
            yield f"{said} fails with no mistake, {mutant}"
    rates = {"noticed": 100 * noticed / max(len(known), 1), "reached": 100 * len(reached) / max(len(known), 1)}
    say(
        f"{name}: {rates['noticed']:.1f} percent of {len(known)} mutants are noticed, {rates['reached']:.1f} percent "
        f"reached; {len(drawn) - len(known)} more are in what is no plain function"
    )
    for what, rate in rates.items():
        if rate < (least := getattr(room, what)):
            yield f"{rate:.1f} percent are {what}, {least} are recorded in tests/mutation.py: add what notices them"


def _is_function(mutant: Mutant) -> bool:
    try:
        function_of(mutant)
    except LookupError:
        return False
    return True


def _sham(mutant: Mutant) -> Mutant:
    return evolve(mutant, index=-1, mistake="none")


@define
class Run:
    """Processes that run tests.

    Args:
        items: all tests.
        scratch: a folder for what they write.
        workers: processes at a time.
    """

    _items: Sequence[pytest.Item]
    _scratch: Path
    _workers: int
    _begun: int = field(init=False, default=0)

    def measure(self, places: Sequence[int], watched: Sequence[Mutant]) -> tuple[list[Judge], list[str]]:
        """The tests that reach one of the mutants, and the ids of those that fail: they cannot judge."""
        shares: list[list[int]] = [[] for _ in range(self._workers)]
        files = defaultdict[Path, list[int]](list)
        for place in places:
            files[self._items[place].path].append(place)
        for number, share in enumerate(files.values()):
            shares[number % self._workers] += share
        found, red = list[Judge](), list[str]()
        for _, said in self._each(
            [(share, lambda share=share: _reached(self._items, share, watched)) for share in shares]
        ):
            if not isinstance(said, tuple):
                raise pytest.UsageError(f"the tests could not be measured: {said}")
            found += said[0]
            red += said[1]
        return found, red

    def judge(self, cases: Sequence[tuple[Mutant, Sequence[Judge]]]) -> Iterator[tuple[Mutant, str]]:
        """Each mutant, in the order in which they end, with ``"lives"`` or what noticed it."""

        def trial(mutant: Mutant, tests: Sequence[Judge]) -> Callable[[], str]:
            return lambda: _try(mutant, [(test.seconds, self._items[test.place]) for test in _order(tests)])

        for mutant, said in self._each([(mutant, trial(mutant, tests)) for mutant, tests in cases]):
            yield mutant, str(said)

    def _each(self, calls: Sequence[tuple[Any, Callable[[], Any]]]) -> Iterator[tuple[Any, Any]]:
        """Yields what each call returns, or by what it ended. Each has a process of its own."""
        waiting, running = list(reversed(calls)), dict[int, tuple[Any, Path]]()
        try:
            while waiting or running:
                while waiting and len(running) < self._workers:
                    subject, call = waiting.pop()
                    self._begun += 1
                    scratch = self._scratch / f"process{self._begun}"
                    scratch.mkdir()
                    child = os.fork()
                    if not child:
                        _run(call, scratch, self._items[0].config)
                    running[child] = (subject, scratch)
                child, status = os.wait()
                subject, scratch = running.pop(child)
                yield subject, _end(child, status, scratch)
        finally:
            for child, (_, scratch) in running.items():
                _end(child, 0, scratch)


def _end(child: int, status: int, scratch: Path) -> Any:
    """Ends a process, with all that it has started and left. Returns what it has said.

    Raises:
        RuntimeError: the process made a mistake that is ours.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    said, wrong = scratch / "said", scratch / "wrong"
    if wrong.exists():
        raise RuntimeError(wrong.read_text())
    result = pickle.loads(said.read_bytes()) if said.exists() else f"a process that ended by {_way(status)}"
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def _way(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def _run(call: Callable[[], Any], scratch: Path, config: pytest.Config) -> None:
    """Ends this process, which is a fork, having written what the call returns."""
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        config._tmp_path_factory._basetemp = scratch / "tests"
        (scratch / "tests").mkdir()
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads"
        result = call()
        (scratch / "said.part").write_bytes(pickle.dumps(result))
        (scratch / "said.part").rename(scratch / "said")
    except BaseException:
        (scratch / "wrong").write_text(traceback.format_exc())
        raise
    finally:
        os._exit(1)


def _order(tests: Sequence[Judge]) -> list[Judge]:
    """The quickest tests of each file, then the next ones, within the bound."""
    files = defaultdict[str, list[Judge]](list)
    for test in sorted(tests, key=lambda test: test.seconds):
        files[test.file].append(test)
    rounds = sorted(
        (number // 3, files[file][0].seconds, file, number) for file in files for number in range(len(files[file]))
    )
    chosen, seconds = list[Judge](), 0.0
    for _, _, file, number in rounds:
        test = files[file][number]
        if not chosen or seconds + test.seconds <= BOUND:
            chosen.append(test)
            seconds += test.seconds
    return chosen


def _try(mutant: Mutant, tests: Sequence[tuple[float, pytest.Item]]) -> str:
    """``"lives"`` if each test passes with the mistake, the first that fails otherwise. One that takes too long, or too
    much memory, ends the process."""
    plant(mutant)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    following = [item for _, item in tests[1:]] + [None]
    for (seconds, item), after in zip(tests, following, strict=True):
        signal.setitimer(signal.ITIMER_REAL, PATIENCE + 10 * seconds)
        try:
            reports = _reports(item, after)
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            return item.nodeid
        if not all(report.passed for report in reports):
            return item.nodeid
    return "lives"


def _reached(
    items: Sequence[pytest.Item], places: Sequence[int], watched: Sequence[Mutant]
) -> tuple[list[Judge], list[str]]:
    """The tests that pass and reach a mutant; and those that fail."""
    reach, found, red = Reach(), list[Judge](), list[str]()
    for mutant in watched:
        watch(mutant, reach.seen)
    items[0].config.pluginmanager.register(reach)
    following = [*places[1:], None]
    for place, after in zip(places, following, strict=True):
        item = items[place]
        reach.begin(item.path)
        reports = _reports(item, None if after is None else items[after])
        red += [f"{item.nodeid}, by {_why(report)!r}," for report in reports if report.failed]
        seconds = reach.price()
        if all(report.passed for report in reports) and reach.all:
            found.append(Judge(place, str(item.path.relative_to(ROOT)), seconds, reach.all))
    return found, red


def _reports(item: pytest.Item, after: pytest.Item | None) -> list[pytest.TestReport]:
    """Runs a test as pytest's own loop does, with the filters of warnings that it is marked with, and tells nobody."""
    with catch_warnings_for_item(item.config, item.ihook, "runtest", item):
        return runtestprotocol(item, log=False, nextitem=after)


def _why(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash is not None else report.longreprtext).partition("\n")[0]


@define(eq=False)
class Reach:
    """The mutants that are reached in a test and in what the first test of its file sets up."""

    seen: set[str] = field(init=False, factory=set)
    _module: frozenset[str] = field(init=False, default=frozenset())
    _file: Path | None = field(init=False, default=None)
    _price: float | None = field(init=False, default=None)
    _begun: float = field(init=False, default=0.0)
    _set_up: float = field(init=False, default=0.0)

    def begin(self, file: Path) -> None:
        self.seen.clear()
        self._begun = time.process_time()
        if file != self._file:
            self._file, self._module, self._price = file, frozenset(), None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self._set_up = time.process_time() - self._begun
        if self._price is None:
            self._module = frozenset(self.seen)

    @property
    def all(self) -> frozenset[str]:
        return self._module | self.seen

    def price(self) -> float:
        """Seconds of a test that runs alone: what its file's first one set up is set up anew."""
        seconds = time.process_time() - self._begun
        if self._price is None:
            self._price = self._set_up
            return seconds
        return seconds + self._price
