"""Loads the modules of transformers, turns its errors into ours, and copies results so that they stand alone.

Whisper's weights are read by name in `triolet.models.networks.whisper` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError, UnsupportedModel
from .files import find_weights, is_mapped
from .parts import Find, cut_off, leaving_out
from .settings import Settings
from .stored import StoredTensor, stored_tensors

_NAMED = 3  # of many missing weights


def load_module(
    loader: str,
    folder: Path,
    dtype: torch.dtype,
    *,
    spare: str | None = None,
    quantized: bool = False,
    without: Find | None = None,
) -> nn.Module:
    """The model that transformers' class ``loader`` reads from ``folder``, on the CPU and in eval mode.

    Args:
        spare: the name of a part that nobody uses, so that its weights may be missing.
        without: names parts that the model is to lack; their weights are not read.
        quantized: another library quantized the weights, and transformers reads them by it.

    Raises:
        UnsupportedModel: that library is not installed.
        CheckpointError: weights are missing (which transformers would draw at random), of another shape, or damaged.
    """
    with _quiet():
        load = load_part if quantized else _load
        module, told = load(loader, folder, dtype=dtype, output_loading_info=True, without=without)
    missing = sorted(name for name in told["missing_keys"] if spare not in name.split("."))
    if missing:
        shown = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights that its config.json asks for: {shown}; "
            "download or save the checkpoint again"
        )
    if told["error_msgs"]:
        raise CheckpointError(f"the weights of {folder} cannot be used: {'; '.join(told['error_msgs'])}")
    if without is not None:
        cut_off(module)
    loaded: nn.Module = module.eval()
    return loaded


def _load(loader: str, folder: Path, **options: Any) -> Any:
    """Calls `load_part` with safetensors weights that are read piece by piece, each into its own memory. transformers
    alone would map the files, and touched pages count as the process's memory."""
    if is_mapped(folder):
        return load_part(loader, folder, **options)
    config = load_part("AutoConfig", folder)
    name = _base_class(config) if loader == "AutoModel" else loader
    stored: dict[str, StoredTensor] = {}
    for path in find_weights(folder):
        stored.update(stored_tensors(path))
    return load_part(name, folder, source=None, config=config, state_dict=stored, **options)


def _base_class(config: Any) -> str:
    """The class that AutoModel stands for; AutoModel itself loads from folders only."""
    from transformers import MODEL_MAPPING

    found: Any = MODEL_MAPPING[type(config)]
    several = found if isinstance(found, tuple) else (found,)
    named = [one for one in several if one.__name__ in (config.architectures or ())]
    return str((named or several)[0].__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from showing progress bars and its report of a load: what is wrong becomes an error. Both
    settings are the process's. Whoever finds them changed leaves them so: the one that changed them, in another thread
    perhaps, puts them back."""
    from transformers.utils import logging as untyped

    logging: Any = untyped

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        if verbosity != logging.ERROR:
            logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_part(loader: str, folder: Path, *, without: Find | None = None, **options: Any) -> Any:
    """Makes what transformers' class ``loader`` makes of ``folder``, or of ``options`` where they name another
    ``source``; a model ``without`` some parts is still to be cut off of them.

    Raises:
        UnsupportedModel: transformers needs a package that is not installed.
        CheckpointError: it raises anything else.
    """
    import transformers

    source = options.pop("source", str(folder))
    try:
        made: Any = getattr(transformers, loader)
        wanted: Any = made if without is None else leaving_out(made, without)
        return wanted.from_pretrained(source, local_files_only=True, **options)
    except Exception as error:  # transformers raises many kinds: wrapped, not hidden
        if isinstance(error, ImportError):
            raise UnsupportedModel(f"{folder} needs a package that is not installed: {error}") from error
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise  # nothing is wrong with the checkpoint
        raise CheckpointError(
            f"{loader} cannot be made from {folder}: {type(error).__name__}: {error}; "
            "download or save the checkpoint again"
        ) from error


def read_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of the checkpoint in ``folder``.

    Raises:
        CheckpointError: it is missing or damaged.
        UnsupportedModel: it is code of its own.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds: wrapped, not hidden
        if "custom code" in str(error):  # a ValueError like others
            raise UnsupportedModel(
                f"the tokenizer of {folder} is code of its own, which is never run; allowed: tokenizers that "
                "transformers has. Save it as one, as a PreTrainedTokenizerFast"
            ) from error
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be used: {type(error).__name__}: {error}; download it again, or save it "
            "beside the model"
        ) from error


def processor_template(folder: Path) -> str | None:
    """The chat template of an older checkpoint's processor, in a file of its own; ``None``: it is the tokenizer's."""
    if (folder / "chat_template.jinja").exists():  # which the tokenizer has read
        return None
    written = Settings.read_if_there(folder / "chat_template.json")
    template = written.get("chat_template") if written else None
    return template if isinstance(template, str) else None


def place_of(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype that a module's inputs must have."""
    weight = next(module.parameters())
    return weight.device, weight.dtype


def apart(parts: Sequence[Tensor]) -> list[Tensor]:
    """Each in storage of its own: a view would keep the whole batch alive."""
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]
