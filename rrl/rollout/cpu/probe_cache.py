"""A cache of the shape probe's results (`rrl.rollout.cpu.shape_probe`), by model shape and machine.

One small JSON file for each key in the user's cache folder. The key covers all that the result depends on. A file that can't be
read or written does no harm: the sizes are tried again.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

import rrl.models
import rrl.rollout
from rrl.files import write_atomically
from rrl.models.cpu.layers import processor
from rrl.parallel.runtime import available_cores, cache_folder
from rrl.rollout.loop import RolloutPrograms

log = logging.getLogger(__name__)

LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
SOURCES = (".py", ".cc", ".h")
VARIABLES = ("XLA_FLAGS", "NPROC")
"""Of the environment, on which it depends how XLA compiles for a CPU."""
JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision")
"""Of JAX, on which the bits of a product depend."""


def cache_key(programs: RolloutPrograms, params: PyTree) -> str:
    """Names all that the bits of these programs depend on, but for the numbers in the parameters: shapes and settings, this code,
    the libraries, and the machine."""
    dtype = nnx.merge(programs.graph, params).dtype
    shapes = [(path, leaf[...].shape, str(leaf[...].dtype)) for path, leaf in nnx.to_flat_state(params)]
    config = dataclasses.replace(programs.config, search_seconds=1.0, stall_seconds=0.0)
    model = (
        programs.decoder_config,
        str(dtype),
        shapes,
        programs.uses_cpu_layers(dtype),
        programs.uses_cpu_attention(dtype),
    )
    engine = (
        config,
        programs.limits,
        programs.workers,
        programs.shards,
        programs.step_tokens,
        len(programs.eos),
    )
    compiler = programs.compiler_options, [(name, getattr(jax.config, name)) for name in JAX_OPTIONS]
    return _short(model, engine, compiler, _code(), _machine())


def load(key: str) -> Mapping[str, Any] | None:
    """What was remembered under the key; None where that is nothing, or nothing that can be read."""
    try:
        found = json.loads(_file(key).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def store(key: str, found: Mapping[str, Any]) -> None:
    """Writes it, whole or not at all; where it can't, it is left out."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(found))
    except OSError as error:
        log.debug("%s could not be written: %s", file, error)


def _file(key: str) -> Path:
    return cache_folder() / "sizes" / f"{key}.json"


def _short(*known: object) -> str:
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """The source of models and rollouts, the kernel's too, and the libraries."""
    folders = [Path(package.__path__[0]) for package in (rrl.models, rrl.rollout)]
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in SOURCES)
    sources = [(file.name, file.read_bytes()) for file in files]
    return _short(sources, [importlib.metadata.version(name) for name in LIBRARIES])


def _machine() -> str:
    return _short(
        processor(), available_cores(), os.cpu_count(), [os.environ.get(name) for name in VARIABLES]
    )
