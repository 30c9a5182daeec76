"""The options of ``triolet serve --cluster``, which finds them by the entry point ``cluster`` of ``triolet.serve``: the
number of replicas, and what Ray reserves for each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from attrs import evolve

from triolet.core.config import EngineConfig
from triolet.core.errors import InvalidRequest

_REPLICAS = re.compile(r"(\d+)(?:-(\d+))?")


class Replicas(click.ParamType[int | tuple[int, int]]):
    """A number of replicas: ``2``, or the least and the most, ``2-8``."""

    name = "replicas"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | tuple[int, int]:
        """Reads the value of the option, as click asks."""
        if isinstance(value, int | tuple):
            return value
        found = _REPLICAS.fullmatch(str(value).strip())
        if found is None:
            told = f"{value!r} is not a number of replicas; allowed: a number such as 2, or a range such as 2-8"
            self.fail(told, param, ctx)
        return int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))


OPTIONS = tuple(
    click.Option([flag], type=kind, metavar=metavar, help=f"{told}. Default: {default}.")
    for flag, kind, metavar, told, default in (
        ("--replicas", Replicas(), "N|N-M", "The number of replicas of each model: 2, or 2-8 to follow demand", 1),
        ("--replica-cpus", float, "N", "The number of cores that Ray reserves for each replica", 1),
        ("--replica-gpus", float, "N", "The number of GPUs that Ray reserves for each replica", 0),
    )
)


def check_options(given: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` if options contradict each other."""
    if given["cluster"]:
        if given["memory_budget"] is not None:
            raise InvalidRequest(
                "--memory-budget is for models in this process, but --cluster runs the models in replicas; leave it "
                "out. --replica-cpus and --replica-gpus say what Ray reserves for each replica"
            )
        return
    alone = [option.opts[0] for option in OPTIONS if given[str(option.name)] is not None]
    if alone:
        raise InvalidRequest(f"{' and '.join(alone)} without --cluster; add --cluster, or leave them out")


def cluster_spec(model: str | Path, config: EngineConfig, given: Mapping[str, Any]) -> Any:
    """Returns the spec of a model whose engine is a cluster. The model uses no memory of this machine's budget.

    Raises:
        InvalidRequest: a value that is not allowed.
    """
    from triolet.api.model_spec import ModelSpec

    from .cluster import Cluster

    named = {str(option.name): given[str(option.name)] for option in OPTIONS}
    settings = {name.removeprefix("replica_"): value for name, value in named.items() if value is not None}
    kept = evolve(config, encoder_idle_seconds=math.inf)  # with many replicas keeping outputs pays: docs/cluster.md
    make = partial(Cluster, model, config=kept, **settings)
    make()  # refuses wrong settings now rather than at the first request
    return ModelSpec.from_parts(make, 0)
