"""A Hugging Face folder as files: its config.json and its safetensors, one or sharded, memory-mapped, without torch."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rrl.errors import UserError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file; UserError if it is missing or broken."""
    if not file.is_file():
        raise UserError(f"{file.parent}: no {file.name}, {what}; give a Hugging Face model folder")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}; download or export the folder again") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder."""
    return read_json(Path(folder) / CONFIG, "which says what the model is")


class Weights(contextlib.ExitStack):
    """The tensors of a folder, opened memory-mapped: only what is asked for is read.

    Raises:
        UserError: no weights, a shard that the index names is missing, or a file is truncated or broken.
    """

    def __init__(self, folder: str | Path):
        super().__init__()
        folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._homes: dict[str, Path] = {}
        for file in _weight_files(folder):
            try:
                handle = self.enter_context(safe_open(file, framework="numpy"))
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                size = file.stat().st_size
                raise UserError(
                    f"{file} ({size} bytes) is truncated or no safetensors file: {error}; download or export it again"
                ) from error
            self._files[file.name] = handle
            self._homes.update(dict.fromkeys(names, file))

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._homes)

    def file(self, name: str) -> Path:
        """Where a tensor is."""
        return self._homes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        return tuple(self._files[self._homes[name].name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype."""
        return self._files[self._homes[name].name].get_tensor(name)


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors; the weights appear whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{SINGLE}.partial"
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    partial.replace(folder / SINGLE)
    write_json(folder / CONFIG, config)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """A JSON file as Hugging Face writes them."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def folder_hash(folder: str | Path) -> str:
    """SHA-256 over config.json and all weight files: the same numbers in the same shape give the same hash."""
    folder = Path(folder)
    digest = hashlib.sha256()
    for file in [folder / CONFIG, *_weight_files(folder)]:
        read_config(folder)
        with file.open("rb") as stream:
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder}: no {SINGLE} and no {INDEX}; give a Hugging Face folder with safetensors weights"
        )
    shards = sorted(
        set(read_json(folder / INDEX, "which lists the weight files").get("weight_map", {}).values())
    )
    for name in shards:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: weight file {name}, which {INDEX} names, is missing; download it again"
            )
    return [folder / name for name in shards]
