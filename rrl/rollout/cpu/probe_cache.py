"""A cache of the shape probe's results (`rrl.rollout.cpu.shape_probe`), by model shape and machine.

One small JSON file per key in the user's cache folder. The key covers everything that the result depends on. If a file cannot
be read or written, the shapes are probed again.
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
from rrl.models.cpu.library import processor
from rrl.parallel.runtime import available_cores, cache_folder
from rrl.rollout.programs import RolloutPrograms

log = logging.getLogger(__name__)

LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
SOURCE_SUFFIXES = (".py", ".cc", ".h")
ENVIRONMENT_VARIABLES = ("XLA_FLAGS", "NPROC")
"""Environment variables that change how XLA compiles for a CPU."""
JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision")
"""JAX's config options that change the bits of a matrix product."""


def cache_key(programs: RolloutPrograms, params: PyTree) -> str:
    """Return a key of everything that the bits of these programs depend on, except the parameters' values: shapes, settings,
    source code, libraries, and the machine."""
    dtype = nnx.merge(programs.graph, params).dtype
    shapes = [(path, leaf[...].shape, str(leaf[...].dtype)) for path, leaf in nnx.to_flat_state(params)]
    # These two times change no bits. `oversubscribed_slots` stays in the key: it changes shapes.
    config = dataclasses.replace(programs.config, search_seconds=1.0, stall_seconds=0.0)
    model = (
        programs.decoder_config,
        str(dtype),
        shapes,
        programs.backend.computes_layers(dtype),
        programs.backend.kernels(dtype),
    )
    engine = (
        config,
        programs.sizes,
        programs.workers,
        programs.shards,
        programs.shapes.step_tokens,
        len(programs.eos),
    )
    compiler = programs.backend.compiler_options, [(name, getattr(jax.config, name)) for name in JAX_OPTIONS]
    return _hash(model, engine, compiler, _code(), _machine())


def load(key: str) -> Mapping[str, Any] | None:
    """Return the stored result of a key; None if there is none or it cannot be read."""
    try:
        result = json.loads(_file(key).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def store(key: str, result: Mapping[str, Any]) -> None:
    """Store a result under a key, atomically. Does nothing if the file cannot be written."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(result))
    except OSError as error:
        log.debug("%s could not be written: %s", file, error)


def _file(key: str) -> Path:
    return cache_folder() / "shape_probe" / f"{key}.json"


def _hash(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Return a hash of the sources of `rrl.models` (with the CPU kernel) and `rrl.rollout`, and of the libraries' versions."""
    folders = [Path(package.__path__[0]) for package in (rrl.models, rrl.rollout)]
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in SOURCE_SUFFIXES)
    sources = [(file.name, file.read_bytes()) for file in files]
    return _hash(sources, [importlib.metadata.version(name) for name in LIBRARIES])


def _machine() -> str:
    variables = [os.environ.get(name) for name in ENVIRONMENT_VARIABLES]
    return _hash(processor(), available_cores(), os.cpu_count(), variables)
