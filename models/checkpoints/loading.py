"""Loads modules of transformers, turns its errors into ours, and copies results so that they share no storage.

Whisper's weights are read by name in `triolet.models.networks.whisper_model` instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError, EngineClosed, TrioletError, UnsupportedModel
from ...core.model import Lengths
from ..machine.defaults import OwnDefaults
from .files import find_weights, is_mapped
from .gguf_folder import NOTE, file_of, settings_folder
from .gguf_tensors import noted_tensors
from .gguf_tokenizer import GgufTokenizer
from .parts import cut_off, leaving_out
from .quantized import READ, quantization_of, quantized_tensors
from .settings import FileSettings, read_json
from .stored import StoredTensor, stored_tensors
from .turns import TURNS, private
from .unread import UnreadSlice

TRIED = "5.23"
"""The version of transformers that was tried. Others are allowed, but some families and loads read private parts."""

# A tekken.json does not say what its special tokens are for.
_TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "add_bos_token": True}
_NAMED = 3  # how many missing weights an error names


def load_module(
    loader: str,
    folder: Path,
    dtype: torch.dtype,
    *,
    spare: str | None = None,
    left_out: str = "",
    lazily: bool = False,
) -> nn.Module:
    """Returns the model that transformers' class ``loader`` reads from ``folder``, on the CPU and in eval mode.

    Args:
        spare: the name of an unused part, whose weights may be missing.
        left_out: the name of a part to leave out of the model; its weights are not read.
        lazily: matrices in safetensors are `UnreadTensor`, which are read when they are needed, as quantized ones
            always are.

    Raises:
        UnsupportedModel: a GGUF file has weights that the model does not have.
        CheckpointError: weights are missing (transformers would fill them at random), damaged, or of another shape.
    """
    place = file_of(folder) or folder
    with TURNS.quiet():
        made = None if is_mapped(folder) else UnreadSlice if lazily else StoredTensor
        module, told = _load_private(loader, folder, dtype, made, left_out=left_out)
    missing = sorted(name for name in told["missing_keys"] if spare not in name.split("."))
    if missing:
        shown = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise CheckpointError(
            f"{place} lacks {len(missing)} weights that its configuration asks for: {shown}; "
            "download or save the checkpoint again"
        )
    if odd := sorted(told["mismatched_keys"]):
        name, got, wanted = odd[0]
        raise CheckpointError(
            f"weight {name!r} of {place} has shape {tuple(got)}; its configuration asks for {tuple(wanted)}. Download "
            "or save the checkpoint again"
        )
    others = sorted(told["unexpected_keys"])
    if others and place != folder:
        raise UnsupportedModel(
            f"{place} has weights that {loader} of transformers does not have: "
            f"{', '.join(others[:_NAMED])}; give the checkpoint that it was converted from"
        )
    if told["error_msgs"]:
        raise CheckpointError(f"the weights of {place} cannot be used: {'; '.join(told['error_msgs'])}")
    if left_out:
        cut_off(module, left_out)
    loaded: nn.Module = module.eval()
    return loaded


def _load_private(
    loader: str, folder: Path, dtype: torch.dtype, stored: type[StoredTensor] | None, *, left_out: str
) -> tuple[Any, Mapping[str, Any]]:
    """Returns the module, and what transformers tells of the load. Weights in safetensors are ``stored``
    tensors, which are read piece by piece, each into its own memory. ``None``: transformers maps the files, and mapped
    pages that are read count as the process's memory. If a part is left out, the caller must call `cut_off`."""
    with TURNS.turn(), _errors(loader, folder):
        import transformers

        config = load_part("AutoConfig", folder)
        made = getattr(transformers, _base_class(config) if loader == "AutoModel" else loader)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(folder)}
    written = quantization_of(config)
    if stored is not None or (written is not None and written["quant_method"] in READ):
        weights = stored_weights(folder, stored or StoredTensor, written)
        if written is not None:
            del config.quantization_config
        source = {"pretrained_model_name_or_path": None, "config": config, "state_dict": weights}
    own: Any = leaving_out(private(made), left_out) if left_out else private(made)
    own.made_by.discard(threading.get_ident())
    with OwnDefaults(), _errors(loader, folder):
        module, told = own.from_pretrained(
            **source, local_files_only=True, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    assert threading.get_ident() in own.made_by, (
        "this version of transformers makes modules without a call of get_init_context"
    )
    module.__class__ = made
    return module, told


def stored_weights(
    folder: Path, made: type[StoredTensor], told: Mapping[str, Any] | None
) -> Mapping[str, StoredTensor]:
    """Returns all weights of a checkpoint by name, as objects of the class ``made``, or as those of a GGUF file.
    Matrices that are quantized as config.json has ``told`` are `QuantizedTensor`.

    Raises:
        CheckpointError: the files are damaged, or lack a part of a quantized matrix.
        UnsupportedModel: quantized weights are in pickles.
    """
    if told is not None and is_mapped(folder):
        raise UnsupportedModel(f"{folder} has quantized weights in pickles; allowed: safetensors. Convert it")
    files = find_weights(folder)
    if files[0].name == NOTE:
        return noted_tensors(files[0], lazily=made is UnreadSlice)
    weights = {name: one for path in files for name, one in stored_tensors(path, made).items()}
    return weights if told is None else quantized_tensors(weights, told)


def _base_class(config: Any) -> str:
    """Returns the name of the class that AutoModel would choose, since AutoModel itself loads only from folders."""
    from transformers import MODEL_MAPPING

    found: Any = MODEL_MAPPING[type(config)]
    several = found if isinstance(found, tuple) else (found,)
    named = [one for one in several if one.__name__ in (config.architectures or ())]
    return str((named or several)[0].__name__)


def load_part(loader: str, folder: Path, **options: Any) -> Any:
    """Calls ``from_pretrained`` of transformers' class ``loader``, which is no model, for ``folder``.

    Raises:
        UnsupportedModel: transformers needs a package that is not installed.
        CheckpointError: transformers raises any other error.
    """
    with TURNS.turn(), _errors(loader, folder):
        import transformers

        made: Any = getattr(transformers, loader)
        return made.from_pretrained(str(folder), local_files_only=True, **options)


def text_alone(module: nn.Module) -> nn.Module:
    """Returns ``module``; of one that could read more than text, but has no encoder, its language model and head as
    transformers' class for text alone, if there is one."""
    import transformers

    language: Any = getattr(module.base_model, "language_model", None)
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    made_by = classes.get(type(getattr(language, "config", None)), None)
    if made_by is None or not hasattr(module, "lm_head"):
        return module
    with TURNS.turn(), torch.device("meta"):
        made: nn.Module = made_by(language.config).eval()
    setattr(made, str(made.base_model_prefix), language)
    made.lm_head = module.lm_head
    return made


@contextmanager
def _errors(loader: str, folder: Path) -> Iterator[None]:
    """Raises the errors of `load_part` for those of transformers."""
    try:
        yield
    except Exception as error:  # transformers raises many kinds: wrapped, not hidden
        place = file_of(folder) or folder
        if isinstance(error, ImportError):
            raise UnsupportedModel(f"{place} needs a package that is not installed: {error}") from error
        if isinstance(error, TrioletError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise  # given up, or out of memory: nothing is wrong with the checkpoint
        raise CheckpointError(
            f"{loader} cannot be made from {place}: {type(error).__name__}: {error}; "
            f"download or save the checkpoint again{untried()}"
        ) from error


def untried() -> str:
    """Returns the end of an error that may have its cause in the version of transformers; empty: it was tried."""
    import transformers

    version = str(transformers.__version__)
    return "" if version.startswith(f"{TRIED}.") else f", or install transformers {TRIED}: {version} was not tried"


def read_tokenizer(folder: Path, config: Any = None) -> Any:
    """Returns transformers' tokenizer for the checkpoint in ``folder``. That of a GGUF file is made later.

    Args:
        config: transformers' configuration of the checkpoint, if it was read already.

    Raises:
        CheckpointError: the tokenizer is missing or damaged.
        UnsupportedModel: the tokenizer needs code from the checkpoint.
    """
    note = read_json(folder / NOTE) if (folder / NOTE).is_file() else {}
    if (known := note.get("tokenizer")) is not None:  # a Whisper has none
        template = folder / "chat_template.jinja"
        options = read_json(folder / "tokenizer_config.json")
        options["chat_template"] = template.read_text("utf-8") if template.is_file() else None
        lengths = known.pop("lengths")
        known["chat_template"] = options["chat_template"]
        made = partial(_late_tokenizer, Path(note["file"]), folder, options)
        return GgufTokenizer(None if lengths is None else Lengths(*lengths), known, made)
    tekken = (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file()
    try:
        with TURNS.turn():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                str(folder),
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                mistral_format=False,  # else the class depends on whether mistral_common is installed
                **(_TEKKEN if tekken else {}),
            )
    except EngineClosed:
        raise
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


def _late_tokenizer(file: Path, folder: Path, options: Mapping[str, Any]) -> Any:
    """Returns transformers' tokenizer of the settings of a GGUF file, which are made again if they were removed.
    `from_pretrained` would read the tokenizer's file thrice."""
    if settings_folder(file) != folder:
        raise CheckpointError(f"{file} has changed since it was opened; restore it, or open another engine")
    with TURNS.turn(), _errors("the tokenizer", folder):
        from transformers import PreTrainedTokenizerFast

        own: Any = PreTrainedTokenizerFast
        tokenizer = own(tokenizer_file=str(folder / "tokenizer.json"), name_or_path=str(folder), **options)
        tokenizer("")  # as `settled` does
        return tokenizer


def processor_template(folder: Path) -> str | None:
    """The chat template of a processor, which older checkpoints have in a separate file; ``None``: the tokenizer's
    template is used."""
    if (folder / "chat_template.jinja").exists():  # the tokenizer has read this file
        return None
    written = FileSettings.read_if_there(folder / "chat_template.json")
    template = written.get("chat_template") if written else None
    return template if isinstance(template, str) else None


def place_of(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype that a module's inputs must have."""
    weight = next(module.parameters())
    return weight.device, weight.dtype


def placed(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a module on its device, numbers with fractions in its dtype."""
    device, dtype = place_of(module)
    return {name: one.to(device, dtype if one.is_floating_point() else None) for name, one in inputs.items()}


def stacked(module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inputs of a module for several ``payloads`` of equal shapes."""
    return placed(module, {name: torch.stack([payload[name] for payload in payloads]) for name in payloads[0]})


def apart(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies each tensor into storage of its own, since a view would keep the whole batch alive."""
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]
