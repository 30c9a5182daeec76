"""``/v1/models`` and ``/health``."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ...core.power import Power
from ..schemas.models import Health, Model, ModelList
from ..server import Server
from .common import answered, server_of


async def list_models(request: Request) -> Response:
    """The models that are served, and their adapters."""
    server = server_of(request)
    return answered(
        ModelList(
            object="list", data=[_model(server, name) for name in (*server.engines.models, *server.engines.adapters)]
        )
    )


async def show_model(request: Request) -> Response:
    """One of the models that are served."""
    server = server_of(request)
    asked, engines = request.path_params["model"], server.engines
    return answered(_model(server, engines.adapter_of(asked) or engines.name_of(asked)))


def _model(server: Server, name: str) -> Model:
    model = server.engines.statistics()[server.engines.name_of(name)]
    positions = None if model.description is None else model.description.max_positions
    return Model(
        id=name, object="model", created=server.started, owned_by="triolet", state=model.state, max_model_len=positions
    )


async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(server_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def health(request: Request) -> Response:
    """The state of the server: it answers, takes requests, stops or sleeps. The status is 200 while it takes requests,
    else 503. A server with keys gives the names of models to those with a key alone."""
    server = server_of(request)
    stops = server.stopping
    told = Health(live=True, ready=not stops, draining=stops, running=len(server.counted))
    if request.scope["knows_key"]:
        models = server.engines.statistics()
        engines = {name: one.engine for name, one in models.items() if one.engine is not None}
        told.sleeping = [name for name, engine in engines.items() if engine.power is not Power.AWAKE]
        told.models = {name: one.state for name, one in models.items()}
    answer = answered(told)
    answer.status_code = 503 if stops else 200
    return answer
