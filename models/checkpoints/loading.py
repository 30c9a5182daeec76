"""Loads modules of transformers, turns its errors into ours, and copies results so that they share no storage.

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

# A tekken.json does not say what its special tokens are for.
_TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "add_bos_token": True}
_NAMED = 3  # how many missing weights an error names


def load_module(
    loader: str,
    folder: Path,
    dtype: torch.dtype,
    *,
    spare: str | None = None,
    quantized: bool = False,
    without: Find | None = None,
) -> nn.Module:
    """Returns the model that transformers' class ``loader`` reads from ``folder``, on the CPU and in eval mode.

    Args:
        spare: the name of an unused part, whose weights may be missing.
        without: finds parts to leave out of the model; their weights are not read.
        quantized: another library quantized the weights, and transformers uses this library to read them.

    Raises:
        UnsupportedModel: the library that quantized the weights is not installed.
        CheckpointError: weights are missing (transformers would fill them at random), damaged, or of another shape.
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
    """Calls `load_part` so that safetensors weights are read piece by piece, each tensor into its own memory.
    transformers itself would map the files, and mapped pages that are read count as the process's memory."""
    if is_mapped(folder):
        return load_part(loader, folder, **options)
    config = load_part("AutoConfig", folder)
    name = _base_class(config) if loader == "AutoModel" else loader
    stored: dict[str, StoredTensor] = {}
    for path in find_weights(folder):
        stored.update(stored_tensors(path))
    return load_part(name, folder, source=None, config=config, state_dict=stored, **options)


def _base_class(config: Any) -> str:
    """Returns the name of the class that AutoModel would choose, since AutoModel itself loads only from folders."""
    from transformers import MODEL_MAPPING

    found: Any = MODEL_MAPPING[type(config)]
    several = found if isinstance(found, tuple) else (found,)
    named = [one for one in several if one.__name__ in (config.architectures or ())]
    return str((named or several)[0].__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from showing progress bars and its report of a load, since we raise an error for anything
    wrong. Both settings belong to the process. The block that changed a setting restores it. A block that finds the
    setting changed, perhaps in another thread, leaves it.
    """
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
    """Calls ``from_pretrained`` of transformers' class ``loader`` for ``folder``, or for the ``source`` in ``options``
    if there is one. If parts are left out (``without``), the caller must call `cut_off` afterwards.

    Raises:
        UnsupportedModel: transformers needs a package that is not installed.
        CheckpointError: transformers raises any other error.
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
            raise  # out of memory: nothing is wrong with the checkpoint
        raise CheckpointError(
            f"{loader} cannot be made from {folder}: {type(error).__name__}: {error}; "
            "download or save the checkpoint again"
        ) from error


def read_tokenizer(folder: Path) -> Any:
    """Returns transformers' tokenizer for the checkpoint in ``folder``.

    Raises:
        CheckpointError: the tokenizer is missing or damaged.
        UnsupportedModel: the tokenizer needs code from the checkpoint.
    """
    from transformers import AutoTokenizer

    tekken = (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file()
    try:
        return AutoTokenizer.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            mistral_format=False,  # else the class depends on whether mistral_common is installed
            **(_TEKKEN if tekken else {}),
        )
    except Exception as error:  # transformers raises many kinds: wrapped, not hidden
        if "custom code" in str(error):  # transformers has no class of its own for this error
            raise UnsupportedModel(
                f"the tokenizer of {folder} is code in the checkpoint, which is never run; allowed: tokenizers of "
                "transformers. Save it as a PreTrainedTokenizerFast"
            ) from error
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be used: {type(error).__name__}: {error}; download it again, or save "
            "it in the model's folder"
        ) from error


def processor_template(folder: Path) -> str | None:
    """The chat template of a processor, which older checkpoints have in a separate file; ``None``: the tokenizer's
    template is used."""
    if (folder / "chat_template.jinja").exists():  # the tokenizer has read this file
        return None
    written = Settings.read_if_there(folder / "chat_template.json")
    template = written.get("chat_template") if written else None
    return template if isinstance(template, str) else None


def place_of(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype that a module's inputs must have."""
    weight = next(module.parameters())
    return weight.device, weight.dtype


def apart(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies each tensor into storage of its own, since a view would keep the whole batch alive."""
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]
