"""The contender ONNX Runtime: ``onnxruntime_embed.py FOLDER NUMBERS THREADS``. FOLDER has ``model.onnx`` and
``tokenizer.json``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from serve import serve
from vectors import answer, open_tokenizer


def open_model() -> tuple[Any, dict[str, str]]:
    import onnxruntime

    folder, _, threads = sys.argv[1:]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    session = onnxruntime.InferenceSession(Path(folder) / "model.onnx", options, ["CPUExecutionProvider"])
    known = {each.name for each in session.get_inputs()}

    def rows(batch: dict[str, Any]) -> Any:
        return session.run(None, {name: array for name, array in batch.items() if name in known})[0]

    return (open_tokenizer(folder), rows), {"onnxruntime": onnxruntime.__version__}


if __name__ == "__main__":
    serve(open_model, answer)
