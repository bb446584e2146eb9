"""What a look at a model's files tells before anything starts: that they are there, whole, and that its tokenizer can word a prompt.

Standard library only: neither torch nor transformers is imported, so what they alone know (an architecture, the tensors' names) is not checked.
A hub id isn't looked up: that needs the network, and the actors do it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from streamrl.config.base import refuse
from streamrl.config.rollout import ModelConfig
from streamrl.errors import ConfigError

_HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "*.model", "tekken.json")


def check_model(model: ModelConfig, longest_row: int = 0) -> list[str]:
    """ConfigError for the first thing that would end a run when the model is loaded; warnings. ``model`` is resolved, rows are in tokens."""
    folder = _folder("model.path", model.path)
    if folder is not None:
        settings = _json("model.path", folder / "config.json", "a model's folder holds config.json")
        if "model_type" not in settings:
            raise refuse("model.path", "config.json of a model names its model_type", str(folder / "config.json"), "give the folder of a whole model")
        _check_weights("model.path", folder)
        _check_length(settings, longest_row)
    key = "model.path" if model.tokenizer_path in (None, model.path) else "model.tokenizer_path"
    folder = _folder(key, model.tokenizer_path or model.path)
    if folder is not None and not model.trust_remote_code:  # with it, the model's own code decides which files it reads
        _check_tokenizer(key, folder)
    return [text for text in {_hint_local(path) for path in (model.path, model.tokenizer_path or model.path)} if text]


def check_reference(path: str) -> None:
    """As ``check_model`` for ``ref.path``, resolved; the reference scores tokens, so its folder needs no tokenizer."""
    _check_further("ref.path", path)


def check_scorer(key: str, path: str, trust_remote_code: bool) -> None:
    """As ``check_model`` for a model that reads text by itself."""
    folder = _check_further(key, path)
    if folder is not None and not trust_remote_code:
        _check_tokenizer(key, folder)


def _check_further(key: str, path: str) -> Path | None:
    folder = _folder(key, path)
    if folder is not None:
        _json(key, folder / "config.json", "a model's folder holds config.json")
        _check_weights(key, folder)
    return folder


def _hint_local(path: str) -> str | None:
    owner = path.partition("/")[0]
    if Path(path).is_absolute() or owner == path or not Path(owner).is_dir():
        return None
    return f"$.model.path: there is no folder {path} here, though there is a folder {owner}: it is taken as a hub id; write ./{path} if a folder is meant"


def _folder(key: str, path: str) -> Path | None:
    """None for a hub id; resolved paths of this machine are absolute."""
    if not Path(path).is_absolute():
        if Path(path).exists() or not _HUB_ID.fullmatch(path):
            raise refuse(key, "must be a folder or a hub id (owner/name)", path, "correct the path")
        return None
    if not os.path.isdir(path):  # unlike Path.is_dir, False also below a folder that may not be read
        raise refuse(key, "must be an existing folder or a hub id (owner/name)", path, "correct the path or fetch the model")
    return Path(path)


def _check_weights(key: str, folder: Path) -> None:
    files = [*folder.glob("*.safetensors")]
    if not files and not [*folder.glob("*.bin")]:
        raise refuse(key, "a model's folder holds its weights (*.safetensors)", str(folder), "fetch the whole model")
    for index in folder.glob("*.safetensors.index.json"):
        shards = _json(key, index, "a model's folder is readable").get("weight_map", {}).values()
        missing = sorted({str(name) for name in shards} - {file.name for file in files})
        if missing:
            raise refuse(key, f"every file that {index} names is there", f"none of {', '.join(missing[:3])}", "fetch the whole model")
    for file in files:
        if not os.access(file, os.R_OK):
            raise refuse(key, "weights must be readable by this user", str(file), "change its permissions")
        if not _is_whole(file):
            raise refuse(key, "weights are whole safetensors files", str(file), "fetch that file again: it is a stub or was cut off")


def _check_length(settings: dict[str, Any], longest_row: int) -> None:
    limit = settings.get("max_position_embeddings")
    stretched = "factor" in json.dumps([settings.get("rope_parameters"), settings.get("rope_scaling")])
    if isinstance(limit, int) and longest_row > limit and not stretched:
        rule = f"data.max_prompt_length + data.max_response_length must fit the model, whose config.json allows {limit} tokens"
        raise refuse("data.max_response_length", rule, f"{longest_row} in all", "lower one of the two")


def _is_whole(file: Path) -> bool:
    """Whether the file is as long as its header says: 8 bytes of length, then the header as JSON, then the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length:
            return False
        try:
            header = json.loads(stream.read(length))
            return size >= 8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, TypeError, LookupError, AttributeError):
            return False


def _check_tokenizer(key: str, folder: Path) -> None:
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        todo = "add its files" + (", or set model.tokenizer_path" if key.startswith("model.") else "")
        raise refuse(key, "the folder holds a tokenizer (tokenizer.json)", str(folder), todo)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        settings = _json(key, folder / name, f"has a readable {name}") if (folder / name).exists() else {}
    template = folder / "chat_template.jinja"
    if template.exists():
        if not template.read_bytes().strip():
            raise refuse(key, "a chat template is not empty", str(template), "write the model's template into it")
    elif not settings.get("chat_template") and not [*folder.glob("additional_chat_templates/*.jinja"), *folder.glob("chat_template.json")]:
        raise refuse(key, "a tokenizer has a chat template", str(folder), "add a chat_template.jinja to that folder")


def _json(key: str, file: Path, rule: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise refuse(key, rule, str(file.parent), "give the folder of a whole model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"$.{key}: {file.name} must be readable JSON, got {file} ({error}); fetch that file again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"$.{key}: {file.name} must hold a JSON object, got {type(found).__name__} in {file}; fetch that file again")
    return found
