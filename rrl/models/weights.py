"""The files of a Hugging Face folder: config.json and safetensors weights in one file or several, without torch."""

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
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
SHARD_SIZE = 5 * 10**9
"""Maximum size of the tensors in one file, in bytes; a single larger tensor gets its own file."""
ALIGNMENT = 64
"""Alignment in bytes of host arrays that JAX uses on a CPU without a copy."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PARTIAL = ".{}.partial"


def read_json(file: Path, what: str) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises UserError if the file is missing or broken; `what` says what it is for."""
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
    """Raises UserError, which names the config field, if its value is not a model folder."""
    if not folder or not (shipped(folder) / CONFIG_FILE).is_file():
        raise UserError(
            f"{field}={str(folder)!r} is no Hugging Face folder (no {CONFIG_FILE} {looked_in(folder)}); give a model folder"
        )


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads config.json of a model folder."""
    return read_json(shipped(folder) / CONFIG_FILE, "which describes the model")


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """Reads generation_config.json of a model folder; empty if the file is missing."""
    file = shipped(folder) / GENERATION_FILE
    return read_json(file, "") if file.is_file() else {}


class SafetensorsFolder:
    """The tensors of a Hugging Face folder. Opening it reads only the files' headers.

    Raises:
        UserError: the folder has no weights; a shard in the index is missing or lacks a tensor listed there; a tensor is in
            two shards; or a file is truncated or broken.
    """

    def __init__(self, folder: str | Path):
        folder = shipped(folder)
        self._tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(folder):
            for name, stored in read_header(file).items():
                if name in self._tensors:
                    raise UserError(
                        f"{folder}: tensor {name} is in two files, {self.file(name).name} and {file.name}; "
                        "remove the outdated file, or download the folder again"
                    )
                self._tensors[name] = stored
        if (folder / WEIGHTS_FILE).is_file():
            return
        for name, shard in _weight_map(folder).items():
            if name not in self._tensors or self.file(name).name != shard:
                raise UserError(
                    f"{folder / shard}: tensor {name}, which {WEIGHTS_INDEX_FILE} lists for it, is missing; download both again"
                )

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._tensors)

    def file(self, name: str) -> Path:
        """File of a tensor."""
        return self._tensors[name].file

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a tensor, by its safetensors name."""
        return self._tensors[name].dtype

    def size(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        return self._tensors[name].view().nbytes

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or a part of it, in its stored dtype, at an address that JAX can use on a CPU without another copy."""
        stored = self._tensors[name].view()[index]
        buffer = np.empty(stored.nbytes + ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % ALIGNMENT
        copy = buffer[start : start + stored.nbytes].view(stored.dtype).reshape(stored.shape)
        np.copyto(copy, stored)
        return copy


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    tensors: Iterable[tuple[str, np.ndarray]],
    shard_size: int = SHARD_SIZE,
) -> None:
    """Writes config.json and the weights.

    The folder's old content stays until all tensors are on disk in temporary files, which are then renamed. The index of a
    sharded model is written after its shards, so a folder with an index is complete. Shards of an older export are removed.

    Args:
        folder: to write.
        config: the content of config.json.
        shapes: shape of each tensor, by name.
        dtype: of all tensors in the files.
        tensors: (name, value) in any order; each value is released after it is written.
        shard_size: maximum size of a file's tensors in bytes; larger models are written to several files with an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split(shapes, dtype, shard_size)
    names = _shard_names(len(shards))
    file_of = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
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
                files[file_of[name]].write(name, tensor)
        _publish(folder, config, partial, file_of, sum(file.size for file in files.values()))
    finally:
        for leftover in folder.glob(_PARTIAL.format("model*")):
            leftover.unlink()


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file in Hugging Face's format, atomically."""
    partial = file.parent / _PARTIAL.format(file.name)
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)


def folder_hash(folder: str | Path) -> str:
    """SHA-256 of config.json and all weight files.

    Raises:
        UserError: config.json is missing or broken, or a weight file is missing.
    """
    folder = shipped(folder)
    read_config(folder)  # checks it
    digest = hashlib.sha256()
    for file in [folder / CONFIG_FILE, *_weight_files(folder)]:
        with file.open("rb") as stream:
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _split(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, shard_size: int) -> list[list[str]]:
    """Distributes the tensors over files, in order; returns the tensor names of each file."""
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
        return [WEIGHTS_FILE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _publish(
    folder: Path,
    config: Mapping[str, Any],
    partial: Mapping[str, Path],
    file_of: Mapping[str, str],
    size: int,
) -> None:
    """Renames the finished files. The index is removed first and written last, so it never lists another export's shards."""
    sharded = WEIGHTS_FILE not in partial
    (folder / WEIGHTS_INDEX_FILE).unlink(missing_ok=True)
    if sharded:
        (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    write_json(folder / CONFIG_FILE, config)
    for name, file in partial.items():
        os.replace(file, folder / name)
    if sharded:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
        write_json(folder / WEIGHTS_INDEX_FILE, index)
    for file in folder.iterdir():
        if _SHARD.fullmatch(file.name) and file.name not in partial:
            file.unlink()


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index."""
    weight_map = read_json(folder / WEIGHTS_INDEX_FILE, "which lists the weight files").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise UserError(
            f"{folder / WEIGHTS_INDEX_FILE}: no weight_map, which maps tensors to files; download it again"
        )
    return weight_map


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / WEIGHTS_INDEX_FILE).is_file():
        pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
        raise UserError(
            f"{folder}: no {WEIGHTS_FILE} and no {WEIGHTS_INDEX_FILE}"
            + (
                f", only {pickled[0]}, which is not supported; save it again with transformers"
                if pickled
                else ""
            )
            + "; give a Hugging Face folder with safetensors weights"
        )
    shards = sorted(set(_weight_map(folder).values()))
    for name in shards:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: weight file {name}, which {WEIGHTS_INDEX_FILE} lists, is missing; download it again"
            )
    return [folder / name for name in shards]
