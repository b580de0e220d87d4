"""Imports a GGUF file as a Hugging Face folder, without torch. Read `import_gguf` first."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rrl.errors import UserError
from rrl.files import saving
from rrl.models.gguf_config import end_ids, hf_config, token_ids
from rrl.models.gguf_file import GgufFile, check_quantizations, read_gguf, read_tensor
from rrl.models.gguf_tensors import TensorSource, tensor_sources
from rrl.models.gguf_tokenizer import build_tokenizer
from rrl.models.weights import CONFIG_FILE, GENERATION_FILE, SHARD_SIZE, write_folder, write_json
from rrl.parallel.memory import host_memory, require_memory

PARTIAL = ".partial"
"""Name of the folder, or end of its name, in which an import is written before it is complete."""
DTYPES = ("bfloat16", "float32", "float16")


def import_gguf(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    shard_size: int = SHARD_SIZE,
) -> str:
    """Writes a folder with config, tokenizer, chat template and de-quantized weights.

    Host memory holds one tensor at a time, in `dtype`. The folder appears under its name when it is complete.

    Args:
        path: a .gguf file of a Llama, Qwen2, Qwen3 or Gemma 3 model.
        out: a folder that does not exist yet or is empty.
        dtype: of the written weights, one of DTYPES.
        shard_size: maximum size of the weights in one file, in bytes.

    Returns:
        One line that describes the folder.

    Raises:
        UserError: the file is broken or not supported, or `out` is not empty. Nothing is written then.
        SaveError: the folder could not be written.
    """
    out = Path(out).resolve()
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(file.name != PARTIAL for file in out.iterdir())):
        raise UserError(f"out={out} is not an empty folder; choose one that does not exist yet")
    file = read_gguf(path)
    config = hf_config(file) | {"dtype": dtype}
    sources = tensor_sources(file, config)
    check_quantizations(file)
    _require_memory(path, sources, jnp.dtype(dtype))
    tokenizer = build_tokenizer(file, config["vocab_size"], config["max_position_embeddings"])
    with saving(out):
        _require_space(out, sources, jnp.dtype(dtype))
        _write(out, file, config, sources, tokenizer, shard_size)
    values = sum(int(np.prod(source.shape)) for source in sources.values())
    kinds = sorted({file.tensors[source.name].kind.name for source in sources.values()})
    return f"wrote {out}: {config['architectures'][0]}, {values:,} parameters in {dtype}, from {', '.join(kinds)}"


def _require_memory(
    path: str | os.PathLike[str], sources: Mapping[str, TensorSource], dtype: np.dtype
) -> None:
    """Raises UserError if the largest tensor does not fit into memory."""
    largest = max(float(np.prod(source.shape, dtype=float)) for source in sources.values())
    fix = "import it on a machine with more memory" + (
        ", or with --dtype=bfloat16" if dtype.itemsize > 2 else ""
    )
    require_memory(
        {"largest tensor": largest * dtype.itemsize}, host_memory(), f"gguf={os.fspath(path)}", fix
    )


def _require_space(out: Path, sources: Mapping[str, TensorSource], dtype: np.dtype) -> None:
    """Raises UserError if the weights do not fit on the disk."""
    needed = dtype.itemsize * sum(int(np.prod(source.shape)) for source in sources.values())
    nearest = next(folder for folder in (out, *out.parents) if folder.is_dir())
    if (free := shutil.disk_usage(nearest).free) < needed:
        raise UserError(
            f"out={out}: the weights need {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free; free space, or "
            "choose another --out"
        )


def _write(
    out: Path,
    file: GgufFile,
    config: Mapping[str, Any],
    sources: Mapping[str, TensorSource],
    tokenizer: Any,
    shard_size: int,
) -> None:
    """Writes a folder that appears under its name when it is complete.

    A folder that exists already, perhaps as the mount point of another disk, gets all files when they are complete, config.json
    last.
    """
    exists = out.is_dir()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out / PARTIAL if exists else out.with_name(f".{out.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    dtype = jnp.dtype(config["dtype"])
    shapes = {name: source.shape for name, source in sources.items()}
    try:
        write_folder(partial, config, shapes, dtype, _tensors(file, sources, dtype), shard_size)
        ends = end_ids(file)
        generation = token_ids(file) | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
        write_json(
            partial / GENERATION_FILE, {name: ids for name, ids in generation.items() if ids is not None}
        )
        tokenizer.save_pretrained(partial)
        if exists:
            for part in sorted(partial.iterdir(), key=lambda part: part.name == CONFIG_FILE):
                os.replace(part, out / part.name)
        else:
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tensors(
    file: GgufFile, sources: Mapping[str, TensorSource], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    for name, source in sources.items():
        yield name, source.reorder(read_tensor(file, file.tensors[source.name], dtype, source.add))
