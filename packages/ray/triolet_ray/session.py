"""The connection of this process to Ray: it is made for the first cluster, and ends with the last."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import outcome
import ray
from ray import serve

from triolet.core.errors import EngineError

LOGGING = {"log_level": "WARNING", "enable_access_log": False}
HERE = "local"  # Ray's word for a new cluster on this machine, for this process
_FOUND = "auto"  # Ray's word for the cluster that runs on this machine
_ALLOWED = (
    "allowed: host:port (such as head:6379) of a Ray cluster that this machine has joined by ray start "
    "--address=head:6379; auto; or no address, which starts Ray on this machine. If the cluster was started with a "
    "token, set RAY_AUTH_MODE=token"
)
_REACH_SECONDS = 5.0  # Ray itself tries for minutes, and cannot be interrupted
_HANDLER = ctypes.c_void_p  # the process's; Python's can be set only in the main thread
_GET_HANDLER = ctypes.PYFUNCTYPE(_HANDLER, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_SET_HANDLER = ctypes.PYFUNCTYPE(_HANDLER, ctypes.c_int, _HANDLER)(("PyOS_setsig", ctypes.pythonapi))


class _Stay:
    """A stay of this process on Ray. One thread joins Ray, stays alive, and leaves Ray.

    If Ray is started here, Linux ends Ray's processes when the *thread* that started them ends (PR_SET_PDEATHSIG). A
    thread of trio would end after ten idle seconds.
    """

    def __init__(self, where: str) -> None:
        """Joins Ray, and blocks until it is joined. Raises the errors of `_connect`; no thread is left then."""
        self.where = where
        self._joined = threading.Event()
        self._leave = threading.Event()
        self._outcome: outcome.Outcome[None]  # first of joining, then of leaving
        # A program that ends within the block does not wait for a daemon thread; Ray's own atexit ends the processes.
        self._thread = threading.Thread(target=self._live, name="triolet ray", daemon=True)
        self._thread.start()
        self._joined.wait()
        self._outcome.unwrap()

    def _live(self) -> None:
        self._outcome = outcome.capture(_connect, self.where)
        self._joined.set()
        if isinstance(self._outcome, outcome.Value):
            self._leave.wait()
            self._outcome = outcome.capture(ray.shutdown, wait_for_processes=True)

    def end(self) -> None:
        """Leaves Ray. Blocks until the processes that were started for us have ended."""
        self._leave.set()
        self._thread.join()
        self._outcome.unwrap()


class RaySession:
    """The one connection to Ray that all clusters of a process share. If the program has joined Ray itself, its
    connection is used, and not ended."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Allows one thread at a time to deploy: Serve cannot make deployments in several threads at once."""
        self._users = 0
        self._stay: _Stay | None = None  # if this session has joined Ray

    def join(self, address: str | None) -> None:
        """Joins Ray for one more cluster. Blocks: call it in a thread.

        Raises:
            EngineError: Ray cannot be reached or started at ``address``, or this process has joined another Ray
                cluster.
        """
        where = address or os.environ.get("RAY_ADDRESS") or HERE
        with self.lock:
            if self._stay is not None and self._stay.where != where:
                raise EngineError(
                    f"this process has joined the Ray at {self._stay.where}, so it cannot join the Ray at "
                    f"{where}; allowed: one Ray in a process"
                )
            if not (self._users or ray.is_initialized()):
                self._stay = _Stay(where)
            try:
                serve.start(proxy_location="Disabled", logging_config=LOGGING)
            except BaseException:
                self._leave()
                raise
            self._users += 1

    def leave(self) -> None:
        """Notes that one cluster needs Ray no more. The last such note ends the connection, and Ray too if it was
        started for it. Blocks: call it in a thread.
        """
        with self.lock:
            self._users -= 1
            self._leave()

    def _leave(self) -> None:
        if self._users or self._stay is None:
            return
        stay, self._stay = self._stay, None
        stay.end()


SESSION = RaySession()
"""The session of this process. Ray, too, has one connection for each process."""


def _connect(where: str) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    name = "on this machine" if where == HERE else f"at {where}"
    try:
        _check(where)
        _init(where)
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineError(f"Ray {name} cannot be reached: {error}; {_ALLOWED}") from error


def _init(where: str) -> None:
    if ray.is_initialized():  # init would fail, and shutdown would end the connection of the program
        raise RuntimeError("another thread has joined Ray meanwhile; enter the cluster again")
    dashboard = False if where == HERE else None  # the dashboard takes a gigabyte
    try:
        with _handlers_kept():
            ray.init(address=where, include_dashboard=dashboard, logging_level=logging.ERROR, log_to_driver=False)
    except BaseException:
        ray.shutdown(wait_for_processes=True)  # ends what was started before the failure
        raise


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keeps the program's handlers of SIGTERM and SIGALRM while Ray starts. Ray's own handler of SIGTERM calls the
    program's handler, but also sets an alarm that aborts the process three seconds later, even if something has still
    to end.
    """
    if not hasattr(signal, "SIGALRM"):  # Windows: no alarm, and no such handler
        yield
        return
    before = {one: _GET_HANDLER(one) for one in (signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        _SET_HANDLER(signal.SIGTERM, before[signal.SIGTERM])  # from here on no handler sets the alarm
        if _GET_HANDLER(signal.SIGALRM) != before[signal.SIGALRM]:  # SIGTERM came meanwhile, and Ray set the alarm
            signal.alarm(0)
            _SET_HANDLER(signal.SIGALRM, before[signal.SIGALRM])


def _check(where: str) -> None:
    """Raises obvious errors at once, for which Ray would try for minutes."""
    if where in (HERE, _FOUND):
        return
    if "://" in where:
        raise ValueError("Ray's client does not stream")
    host, colon, port = where.rpartition(":")
    if not (colon and host and port.isdecimal()):
        raise ValueError("this is not an address")
    socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
