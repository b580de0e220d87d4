"""A Hugging Face folder as files: its config.json and its safetensors, in one file or several, without torch."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.files import looked_in, shipped
from rrl.models.tensor_files import StoredTensor, TensorFileWriter, read_header

CONFIG_FILE = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_SIZE = 5 * 10**9
"""Most bytes of tensors in one file, unless one tensor alone has more."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PARTIAL = ".{}.partial"


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


def require_folder(field: str, folder: str | Path) -> None:
    """Raises UserError that names the field whose value is no model folder."""
    if not folder or not (shipped(folder) / CONFIG_FILE).is_file():
        raise UserError(
            f"{field}={str(folder)!r} is no Hugging Face folder (no {CONFIG_FILE} {looked_in(folder)}); give one that is"
        )


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder."""
    return read_json(shipped(folder) / CONFIG_FILE, "which says what the model is")


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """generation_config.json of a model folder; empty where there is none."""
    file = shipped(folder) / GENERATION
    return read_json(file, "") if file.is_file() else {}


class SafetensorsFolder:
    """The tensors of a folder; only their places are read.

    Raises:
        UserError: no weights; a shard that the index names is missing, or lacks a tensor that the index says it has; a
            tensor is in two shards; a file is truncated or broken.
    """

    def __init__(self, folder: str | Path):
        folder = shipped(folder)
        self._tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(folder):
            for name, stored in read_header(file).items():
                if name in self._tensors:
                    raise UserError(
                        f"{folder}: tensor {name} is in two files, {self.file(name).name} and {file.name}; "
                        "remove the one that is left over, or download the folder again"
                    )
                self._tensors[name] = stored
        if (folder / SINGLE).is_file():
            return
        for name, shard in _weight_map(folder).items():
            if name not in self._tensors or self.file(name).name != shard:
                raise UserError(
                    f"{folder / shard}: tensor {name}, which {INDEX} says is in it, is not; download both again"
                )

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._tensors)

    def file(self, name: str) -> Path:
        """Where a tensor is."""
        return self._tensors[name].file

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a tensor, as safetensors calls it."""
        return self._tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A part of a tensor, in its stored dtype."""
        return np.array(self._tensors[name].view()[index])


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    tensors: Iterable[tuple[str, np.ndarray]],
    shard_size: int = SHARD_SIZE,
) -> None:
    """Writes config.json and the weights, in one file or, above `shard_size` bytes, in several with their index.

    The tensors may come in any order; each is let go when it is written. What the folder held before stays until all of
    them are on disk. Then the file that makes it a model (the only one, or the index) is the last to appear, and shards of
    an older export are removed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split(shapes, dtype, shard_size)
    names = _shard_names(len(shards))
    homes = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    partial = {name: folder / _PARTIAL.format(name) for name in names}
    try:
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context(
                    TensorFileWriter(partial[name], {tensor: shapes[tensor] for tensor in shard}, dtype)
                )
                for name, shard in zip(names, shards, strict=True)
            }
            for name, tensor in tensors:
                files[homes[name]].put(name, tensor)
        _publish(folder, config, partial, homes, sum(file.size for file in files.values()))
    finally:
        for left in folder.glob(_PARTIAL.format("model*")):
            left.unlink()


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """A JSON file as Hugging Face writes them; it appears whole."""
    partial = file.parent / _PARTIAL.format(file.name)
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)


def folder_hash(folder: str | Path) -> str:
    """SHA-256 over config.json and all weight files: the same numbers in the same shape give the same hash."""
    folder = shipped(folder)
    digest = hashlib.sha256()
    for file in [folder / CONFIG_FILE, *_weight_files(folder)]:
        read_config(folder)
        with file.open("rb") as stream:
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _split(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, shard_size: int) -> list[list[str]]:
    """Names of the tensors of each file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        more = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if shards[-1] and size + more > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _publish(
    folder: Path,
    config: Mapping[str, Any],
    partial: Mapping[str, Path],
    homes: Mapping[str, str],
    size: int,
) -> None:
    """Whole files take their names; at no moment do an index and shards that are not its own stand together."""
    sharded = SINGLE not in partial
    (folder / INDEX).unlink(missing_ok=True)
    if sharded:
        (folder / SINGLE).unlink(missing_ok=True)
    write_json(folder / CONFIG_FILE, config)
    for name, file in partial.items():
        os.replace(file, folder / name)
    if sharded:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
        write_json(folder / INDEX, index)
    for file in folder.iterdir():
        if _SHARD.fullmatch(file.name) and file.name not in partial:
            file.unlink()


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file each tensor is in, by the index."""
    found = read_json(folder / INDEX, "which lists the weight files").get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise UserError(
            f"{folder / INDEX}: no weight_map, which says in which file each tensor is; download it again"
        )
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
        raise UserError(
            f"{folder}: no {SINGLE} and no {INDEX}"
            + (f", only {pickled[0]}, which is not read; save it again with transformers" if pickled else "")
            + "; give a Hugging Face folder with safetensors weights"
        )
    shards = sorted(set(_weight_map(folder).values()))
    for name in shards:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: weight file {name}, which {INDEX} names, is missing; download it again"
            )
    return [folder / name for name in shards]
