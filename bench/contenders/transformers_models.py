"""The opening of a model, which all contenders of transformers share."""

from __future__ import annotations

import sys
from typing import Any


def open_as(kind: str) -> tuple[Any, str, dict[str, str]]:
    """Opens the model that the arguments FOLDER DTYPE THREADS name, by the class ``kind`` of transformers. Returns the
    model, the folder, and the versions of the packages."""
    import torch
    import transformers

    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    model = getattr(transformers, kind).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return model, folder, {"transformers": transformers.__version__, "torch": torch.__version__}
