"""The settings of a GGUF file, or one of whisper.cpp, as the folder of a checkpoint, so that all else reads it as any.

The folder is made once, in the user's cache folder: configuration, tokenizer, chat template, and a note (`NOTE`) that
names the file, whose weights are read where they are. Its name has a hash of the file's header and path. It appears as
a whole, so two processes may make it at once, and may be removed at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import CheckpointError
from ..machine.cache import CacheFile
from .gguf_file import MAGIC, GgufFile, split_files
from .settings import read_json
from .whisper_ggml import MAGIC as WHISPER
from .whisper_ggml import read_model, whisper_texts

NOTE = "gguf.json"
"""The file of such a folder that names the GGUF file."""
_FORM = 3  # raised with each change of what is written
_FILES = (NOTE, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_NAMED = ("bos", "eos", "unk", "pad")  # tokens, in transformers' order
_OLLAMA = "ollama:"
_OLLAMA_NAME = re.compile(
    r"(?:(?:(?P<host>[\w-][\w.-]*)/)?(?P<owner>[\w-][\w.-]*)/)?(?P<model>[\w-][\w.-]*)(?::(?P<tag>[\w-][\w.-]*))?"
)
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"


def is_gguf(path: Path) -> bool:
    """True if a file is, or by its name should be, a GGUF file, or one of whisper.cpp."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) in {MAGIC, WHISPER} or path.suffix == ".gguf"
    except OSError:
        return False


def gguf_within(folder: Path) -> Path | None:
    """Returns the GGUF file of the model in a folder; ``None``: there is none.

    Raises:
        CheckpointError: there are several models.
    """
    found = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith("mmproj")]
    if not found:
        return None
    if len(found) != len(split_files(found[0])):
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder} has {len(found)} GGUF files ({names}); give the path of one of them")
    return found[0]


def ollama_file(model: str) -> Path | None:
    """Returns the GGUF file of a model of Ollama, such as ``ollama:llama3.2:1b``; ``None``: ``model`` names no such
    model. The folder is that of ``OLLAMA_MODELS``. Ollama's own template and parameters are not used: the file has its
    chat template.

    Raises:
        CheckpointError: Ollama has no such model, or its files are damaged.
    """
    if not model.startswith(_OLLAMA):
        return None
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    name = _OLLAMA_NAME.fullmatch(model.removeprefix(_OLLAMA))
    if name is None:
        raise CheckpointError(f"{model!r} does not name a model of Ollama; allowed: names such as ollama:llama3.2:1b")
    parts = name["host"] or "registry.ollama.ai", name["owner"] or "library", name["model"], name["tag"] or "latest"
    manifest = root.joinpath("manifests", *parts)
    if not manifest.is_file():
        raise CheckpointError(
            f"there is no {manifest}; download the model (ollama pull {model.removeprefix(_OLLAMA)}), or set "
            "OLLAMA_MODELS to the folder of Ollama's models"
        )
    layers: Any = read_json(manifest).get("layers")
    kinds = dict[str, Any]()
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, dict):
            kinds.setdefault(str(layer.get("mediaType")), layer.get("digest"))
    digest = _DIGEST.fullmatch(str(kinds.get(_MODEL)))
    if digest is None or _ADAPTER in kinds:
        told = "has no file of weights" if digest is None else "has an adapter, which is not read"
        raise CheckpointError(f"{manifest} {told}; allowed: models of one GGUF file")
    return root / "blobs" / f"sha256-{digest[1]}"


def settings_folder(path: Path) -> Path:
    """Returns the folder with the settings of a GGUF file. Makes it if need be.

    Raises:
        CheckpointError: the file is damaged, or the folder cannot be written.
        UnsupportedModel: the model is of a kind that is not read.
    """
    path = path.absolute()
    file = read_model(path)
    key = header_key(file)
    folder = CacheFile.of_user("gguf").path / f"{path.stem[:80]}-{key[:16]}"
    if _is_whole(folder):
        return folder
    texts = _texts(file, {"file": str(path), "header": key})
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _drop_others(folder, path)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent, ignore_cleanup_errors=True) as made:
            for name, text in texts.items():
                (Path(made) / name).parent.mkdir(exist_ok=True)
                (Path(made) / name).write_text(text, encoding="utf-8")
            try:
                os.rename(made, folder)
            except OSError:  # another process was first
                if not _is_whole(folder):
                    raise
    except OSError as error:
        raise CheckpointError(
            f"the settings of {path} cannot be written to {folder}: {error}; set XDG_CACHE_HOME to a folder that can "
            "be written"
        ) from error
    return folder


def file_of(folder: Path) -> Path | None:
    """Returns the GGUF file whose settings ``folder`` has; ``None``: it is another folder.

    Raises:
        CheckpointError: the note is damaged.
    """
    note = folder / NOTE
    return Path(str(read_json(note).get("file"))) if note.is_file() else None


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _drop_others(folder: Path, path: Path) -> None:
    """Removes an incomplete folder, and those of other states of the file or of files that are gone. What other
    processes are making, or have made meanwhile, stays."""
    for other in folder.parent.iterdir():
        if other.name.startswith(".") or (other == folder and _is_whole(folder)):
            continue
        named: Path | None
        try:
            named = Path(str(read_json(other / NOTE).get("file")))
        except CheckpointError:
            named = path if other == folder else None
        if named is not None and (named == path or not named.exists()):
            shutil.rmtree(other, ignore_errors=True)


def header_key(file: GgufFile) -> str:
    """Returns a hash of what the settings are made of: the headers of a model's files, and its place."""
    digest = hashlib.sha256(f"{_FORM} {file.path}".encode())
    for path, length in file.parts:
        with path.open("rb") as part:
            digest.update(part.read(length))
    return digest.hexdigest()


def _texts(file: GgufFile, told: Mapping[str, str]) -> dict[str, str]:
    """Returns the texts of the folder's files, by name. The note has what is ``told``."""
    if file.settings.get("general.architecture") == WHISPER:
        return {NOTE: json.dumps({**told}), **whisper_texts(file)}
    from .gguf_speech import speech_of, speech_texts

    if (speech := speech_of(file)) is not None:
        return {NOTE: json.dumps({**told}), **speech_texts(file, speech)}
    from .gguf_models import pooling_of, read_gguf_config
    from .gguf_tokenizer import make_tokenizer

    config = read_gguf_config(file)
    tokenizer, settings, ends = make_tokenizer(file)
    if tokenizer.get_vocab_size() > config["vocab_size"]:
        count = f"{tokenizer.get_vocab_size()} tokens, but embeddings of {config['vocab_size']}"
        raise CheckpointError(f"{file.path} has {count}; download it again")
    begins = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    if silent := file.listed("tokenizer.ggml.suppress_tokens"):
        begins |= {"suppress_tokens": silent}
    made: dict[str, str] = {
        NOTE: json.dumps({**told, "tokenizer": _noted(tokenizer, settings)}),
        "config.json": json.dumps(config, indent=1),
        "generation_config.json": json.dumps(begins | {"eos_token_id": ends or None}, indent=1),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "tokenizer.json": tokenizer.to_str(),
    }
    if (pooling := pooling_of(file)) is not None:  # as the files of sentence-transformers say it
        made["modules.json"] = json.dumps([{"type": "Transformer"}, {"type": "Pooling", "path": "1_Pooling"}])
        made["1_Pooling/config.json"] = json.dumps({"pooling_mode": pooling})
    template = file.settings.get("tokenizer.chat_template")
    return made | ({"chat_template.jinja": template} if isinstance(template, str) else {})


def _noted(made: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `GgufTokenizer` knows of the tokenizer ``made`` here."""
    from .lengths import lengths_of_backend

    texts = {name: settings.get(f"{name}_token") for name in _NAMED}
    ids = {name: None if text is None else made.token_to_id(text) for name, text in texts.items()}
    lengths = lengths_of_backend(made)
    return {
        **{f"{name}_token_id": one for name, one in ids.items()},
        "all_special_ids": [one for one in dict.fromkeys(ids.values()) if one is not None],
        "lengths": None if lengths is None else [lengths.longest, lengths.unread],
    }
