"""The files of a checkpoint: finds them and those that hold weights, and notices changes of the files.

Nothing here needs torch or transformers, so a wrong folder is refused at once.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import CheckpointError, UnsupportedModel
from .ctranslate2_file import MODEL
from .ctranslate2_whisper import Converted
from .gguf_file import split_files
from .gguf_folder import NOTE, gguf_within, is_gguf, ollama_file, settings_folder
from .settings import read_json

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocabulary.json",
    "vocabulary.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "normalizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    "adapter_config.json",
    "speech-lora/adapter_config.json",
    "modules.json",
    "1_Pooling/config.json",
)
_ALLOWED = (
    "a checkpoint's folder or a hub id such as 'openai/whisper-base' or 'Qwen/Qwen3-0.6B', or a file of GGUF or "
    "whisper.cpp"
)
_WHISPER_SIZES = ("tiny", "base", "small", "medium", "large", "tiny.en", "base.en", "small.en", "medium.en", "large-v3")
_ADAPTERS = ("adapter_model.safetensors", "speech-lora/adapter_model.safetensors")
_SHARDS = ("*.json", "*.txt", "*.jinja", "model.safetensors", "model-*-of-*.safetensors", *_ADAPTERS)
_HUB_FILE = re.compile(r"(?P<repository>[^/]+/[^/]+)/(?P<file>.+\.gguf)")
_PART = re.compile(r"-\d{5}-of-(?=\d{5}\.gguf$)")
_MERGED = frozenset({"granite_speech", "granite_speech_plus"})  # model types whose adapter is merged when loading


def resolve(model: str | Path) -> Path:
    """Returns the folder of ``model``: the folder itself, or the local copy for a hub id, downloaded if needed. A GGUF
    file, on this machine or behind a hub id, or ``ollama:`` with the name of a model, has a folder with its settings:
    `settings_folder`.

    Raises:
        CheckpointError: ``model`` does not exist, is another or a damaged file, or the hub cannot be reached and there
            is no local copy.
        UnsupportedModel: ``model`` is in the format of another program.
    """
    folder = local_folder(model)
    return _from_hub(str(model)) if folder is None else folder


def local_folder(model: str | Path) -> Path | None:
    """Returns the folder that ``model`` names, as `resolve` does; ``None``: ``model`` may be a hub id.

    Raises:
        CheckpointError: ``model`` is a path that does not exist, or another or a damaged file.
        UnsupportedModel: ``model`` is a file in the format of another program.
    """
    folder = Path(model).expanduser()
    if (file := ollama_file(str(model))) is not None:
        return settings_folder(file)
    if os.path.isdir(folder):  # unlike Path's methods, os.path raises no error without permission
        weights = any(os.path.isfile(folder / name) for name in (NOTE, *_WEIGHTS, MODEL))
        file = None if weights else gguf_within(folder)
        return folder if file is None else settings_folder(file)
    if os.path.exists(folder):
        if is_gguf(folder):
            return settings_folder(folder)
        raise _is_a_file(folder)
    if isinstance(model, Path) or not _may_be_hub_id(model):
        raise CheckpointError(f"there is no {_kind_of(folder.name)} {folder}; allowed: {_ALLOWED}")
    return None


def is_here(model: str | Path) -> bool:
    """True if the checkpoint ``model`` is a folder, or its configuration is in the hub's cache.

    Raises:
        CheckpointError: as in `local_folder`.
    """
    return folder_here(model) is not None


def folder_here(model: str | Path) -> Path | None:
    """Returns the folder of the checkpoint ``model``, if `is_here`. Files of one in the hub's cache may be missing, but
    no part of a GGUF file."""
    from huggingface_hub import try_to_load_from_cache

    folder = local_folder(model)
    if folder is not None:
        return folder
    named = _HUB_FILE.fullmatch(str(model))
    found = try_to_load_from_cache(*named.groups()) if named else try_to_load_from_cache(str(model), "config.json")
    if not isinstance(found, str):
        return None
    if named is None:
        return Path(found).parent
    whole = all(map(os.path.isfile, split_files(Path(found), here=False)))
    return settings_folder(Path(found)) if whole else None


def converses(folder: Path) -> bool:
    """True if the checkpoint in ``folder`` has a chat template, and is no model of sentence vectors."""
    if (folder / "modules.json").is_file():
        return False
    if any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings).get("chat_template"))


def _is_a_file(path: Path) -> CheckpointError:
    own = path.name == "config.json" or path.suffix == ".safetensors" or path.name in {*_WEIGHTS, MODEL}
    hint = f"; give its folder, {path.parent}" if own else ""
    return CheckpointError(f"{path} is a file; allowed: {_ALLOWED}{hint}")


def _may_be_hub_id(model: str) -> bool:
    if not model or model.startswith((".", "/", "~")) or "\\" in model:
        return False
    return _HUB_FILE.fullmatch(model) is not None if model.endswith(".gguf") else model.count("/") <= 1


def _kind_of(name: str) -> str:
    return "file" if name.endswith(".gguf") else "folder"


def _from_hub(name: str) -> Path:
    from huggingface_hub import list_repo_files

    named, others = _HUB_FILE.fullmatch(name), None
    repository, file = named.groups() if named else (name, None)
    try:
        folder = _download(repository, file)
        if not any((folder / weights).is_file() for weights in ((file,) if file else (*_WEIGHTS, MODEL))):
            others = [one for one in list_repo_files(repository) if one.endswith(".gguf")]
    except Exception as error:  # the hub's client raises many kinds: wrapped, not hidden
        hint = f"; did you mean openai/whisper-{name}?" if name in _WHISPER_SIZES else ""
        raise CheckpointError(
            f"there is no {_kind_of(name)} {name!r}, and it could not be downloaded from the hub: "
            f"{type(error).__name__}: {error}; check the name and the network, or give its folder. triolet pull "
            f"downloads beforehand{hint}"
        ) from error
    if others or (file and others is not None):
        told = f"no {file}" if file else "no weights but those of GGUF files"
        raise CheckpointError(
            f"{repository} on the hub has {told}; its GGUF files are {', '.join(others) or 'none'}. Give one of them, "
            f"as in {repository}/{next(iter(others), 'FILE.gguf')}"
        )
    return settings_folder(folder / file) if file else folder


def _download(repository: str, file: str | None) -> Path:
    """Returns the folder of the local copy. It has all parts of the GGUF ``file``, or else what is read of the others,
    without weights if the repository has none in their layouts."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))

    if file is not None:
        return fetch(_PART.sub("-*-of-", glob.escape(file)))
    folder = fetch(*_SHARDS)
    if any((folder / weights).is_file() for weights in _WEIGHTS[:2]):
        return folder
    return fetch("pytorch_model*.bin", "pytorch_model.bin.index.json", MODEL)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of the checkpoint in ``folder``, or returns what it would be of a Whisper of CTranslate2.

    Raises:
        CheckpointError: config.json is missing or damaged.
        UnsupportedModel: the folder holds an adapter, or a model in the format of another program.
    """
    if (converted := open_converted(folder)) is not None:
        return converted.config()
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    if (folder / "adapter_config.json").is_file() and config.get("model_type") not in _MERGED:
        raise UnsupportedModel(  # beside a model, the adapter would be ignored silently
            f"{folder} is an adapter (adapter_config.json); allowed: whole models. Merge the adapter into its model "
            "(merge_and_unload of peft) and save the result"
        )
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a checkpoint; give a folder that save_pretrained has written"
        )
    return config


def open_converted(folder: Path) -> Converted | None:
    """Opens a Whisper of CTranslate2; ``None``: the checkpoint in ``folder`` is in transformers' layout."""
    if not (folder / MODEL).is_file() or any((folder / name).is_file() for name in _WEIGHTS):
        return None
    return Converted.open(folder)


def find_weights(folder: Path) -> tuple[Path, ...]:
    """Returns the weight files of a checkpoint, each shard once; or the note that names its GGUF file. Safetensors are
    preferred to pickles.

    Raises:
        CheckpointError: there are no weight files, or a shard that the index names is missing.
    """
    if (folder / NOTE).is_file():
        return (folder / NOTE,)
    for name in (*_WEIGHTS, MODEL):
        path = folder / name
        if path.is_file():
            files = _shards(path) if name.endswith(".index.json") else (path,)
            break
    else:
        raise CheckpointError(
            f"{folder} has a config.json but no weights; allowed: {', '.join(_WEIGHTS)}, or "
            f"{MODEL} of CTranslate2's Whisper"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks the shards {', '.join(missing)} of {path.name}; download them again")
    return files


def _shards(index: Path) -> tuple[Path, ...]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise CheckpointError(
            f"{index} does not have a weight_map of file names; download or save the checkpoint again"
        )
    return tuple(index.parent / name for name in sorted(set(mapping.values())))


def is_mapped(folder: Path) -> bool:
    """True if the weights of the checkpoint are pickles. torch maps pickles, so the tensors are views of a file that
    may change. Raises `CheckpointError` as `find_weights` does."""
    weights = find_weights(folder)[0]
    return weights.suffix == ".bin" and weights.name != MODEL


def file_stamps(folder: Path) -> dict[str, str]:
    """Returns a hash of each settings file that exists in ``folder``."""
    names = [name for name in _SETTINGS if (folder / name).is_file()]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def changed_files(folder: Path, stamps: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the settings files that have changed since ``stamps`` were taken."""
    now = file_stamps(folder)
    return tuple(name for name in _SETTINGS if now.get(name) != stamps.get(name))
