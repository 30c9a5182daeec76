"""The contender OpenVINO: ``openvino_embed.py FOLDER NUMBERS THREADS``. FOLDER is an export of ``optimum-cli``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from openvino_settings import settings_of
from serve import serve
from vectors import answer, open_tokenizer


def open_model() -> tuple[Any, dict[str, str]]:
    import openvino

    folder, numbers, threads = sys.argv[1:]
    model = openvino.Core().compile_model(Path(folder) / "openvino_model.xml", "CPU", settings_of(numbers, threads))
    known = {each.any_name for each in model.inputs}

    def rows(batch: dict[str, Any]) -> Any:
        return model({name: array for name, array in batch.items() if name in known})[0]

    return (open_tokenizer(folder), rows), {"openvino": openvino.__version__}


if __name__ == "__main__":
    serve(open_model, answer)
