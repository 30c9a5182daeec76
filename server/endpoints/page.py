"""``/``: the page that shows the engines, and ``/events``, which it reads."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response

from ..event_stream import Events, EventStream
from ..server import Server
from ..view.messages import message, model_figures, state_message
from ..view.page import HEADERS, HtmlPage, read_page
from .common import exchange_of, server_of

_TELLS = 8  # times a second
_FIGURES = 2  # figures are sent once in so many turns


async def show_page(_: Request) -> Response:
    """The page that shows the engines at work."""
    return page_answer(await trio.to_thread.run_sync(read_page))


def page_answer(page: HtmlPage) -> Response:
    """Returns a page with the headers that keep everything else out of it."""
    return Response(page.html, media_type="text/html", headers={**HEADERS, "content-security-policy": page.policy})


async def watch(request: Request) -> Response:
    """The events of the engines, as they happen: ids, times, counts and keys of all requests, and of the encoder
    outputs. Ends when the server stops."""
    return EventStream(partial(_watch, request))


async def _watch(request: Request, events: Events) -> None:
    server = server_of(request)
    server.forget(exchange_of(request))
    with server.watchers.joined() as watcher:
        await events.write(_state(server))
        turn = 0
        while not server.stopping:
            if turn % _FIGURES == 0:
                await events.write(message("figures", trio.current_time(), models=_figures_of_models(server)))
            turn += 1
            with trio.move_on_after(1 / _TELLS):
                await server.stop_called.wait()
            lost, changes = watcher.take()
            if lost:  # some are lost: the whole state is sent instead
                await events.write(message("lost", trio.current_time(), count=lost))
                await events.write(_state(server))
            elif changes:
                await events.write(message("changes", trio.current_time(), changes=changes))
    await events.write(message("end", trio.current_time()), last=True)


def _figures_of_models(server: Server) -> dict[str, Any]:
    return {
        name: model_figures(one, server.watchers.state_of(name), server.answers[name], server.abilities[name])
        for name, one in server.engines.statistics().items()
    }


def _state(server: Server) -> dict[str, Any]:
    return state_message(server.watchers.states, server.started, trio.current_time())
