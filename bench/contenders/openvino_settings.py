"""The settings of OpenVINO's CPU plugin, which all of its contenders share."""

from __future__ import annotations

from typing import Any


def settings_of(numbers: str, threads: str) -> dict[str, Any]:
    """Returns the settings. A model in float32 is computed in float32; one in int8 is computed as OpenVINO chooses."""
    found: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(threads)}
    return {**found, "INFERENCE_PRECISION_HINT": "f32"} if numbers == "float32" else found
