"""Parameters between a model and a Hugging Face folder, one layer in host memory at a time, by a table of names.

Their tensors go to the devices as they are stored, each device getting its own part, and are turned, converted and put
into the stack of all layers there; and back the same way. Host memory holds the tensors of one layer or one of the
others (the embedding is the larger in every model of the families).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from rrl.errors import UserError
from rrl.models.tensor_files import FLOATS
from rrl.models.weights import SafetensorsFolder, read_config
from rrl.parallel.rules import RULES, shardings

LISTED = 8
"""Names in one error message, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One row of a name table."""

    ours: str
    """Path of the parameter; those under "layers." are stacked."""
    theirs: str
    """Name of the tensor; {} is the layer."""
    inputs: int | None = None
    """How many of our leading axes a matrix contracts over: theirs is [outputs, inputs]. None: the same, flattened."""

    @property
    def stacked(self) -> bool:
        """Whether ours has a leading axis of layers, of which theirs are one each."""
        return self.ours.startswith("layers.")

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """All names of theirs, from the shape of ours."""
        return [self.theirs.format(layer) for layer in range(shape[0])] if self.stacked else [self.theirs]

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """From the shape of ours, without the layer axis."""
        if self.inputs is None:
            return shape
        return tuple(math.prod(part) for part in (shape[self.inputs :], shape[: self.inputs]) if part)

    def their_spec(self, spec: Sequence[Any]) -> PartitionSpec:
        """From the placement of ours, without the layer axis: of the axes that are one in theirs, the first counts."""
        if self.inputs is None:
            return PartitionSpec(*spec)
        return PartitionSpec(*(part[0] for part in (spec[self.inputs :], spec[: self.inputs]) if part))

    def to_ours(self, tensor: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Their tensor in our shape."""
        return (tensor.T if self.inputs else tensor).reshape(shape)

    def to_theirs(self, parameter: jax.Array) -> jax.Array:
        """Our parameter (of one layer) in their shape."""
        theirs = self.their_shape(parameter.shape)
        return parameter.reshape(theirs[::-1]).T if self.inputs else parameter.reshape(theirs)


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """A parameter that is to be filled."""

    entry: Entry
    shape: tuple[int, ...]
    dtype: np.dtype
    place: NamedSharding | None

    def settle(self, array: jax.Array) -> jax.Array:
        """Within jit: the array where it belongs."""
        return array if self.place is None else jax.lax.with_sharding_constraint(array, self.place)

    def ours(self, tensor: jax.Array) -> jax.Array:
        """Within jit: their tensor, as it was stored, in our shape and dtype."""
        shape = self.shape[1:] if self.entry.stacked else self.shape
        return self.entry.to_ours(tensor, shape).astype(self.dtype)

    def fetch(self, weights: SafetensorsFolder, name: str) -> jax.Array:
        """Their tensor as it is stored; each process reads what its own devices hold, once."""
        if self.place is None:
            return jax.device_put(weights.read(name))
        spec = (*self.place.spec, *[None] * (len(self.shape) - len(self.place.spec)))
        place = NamedSharding(
            self.place.mesh, self.entry.their_spec(spec[1:] if self.entry.stacked else spec)
        )
        parts: dict[str, np.ndarray] = {}

        def part(index: tuple[slice, ...]) -> np.ndarray:
            key = str(index)
            if key not in parts:
                parts[key] = weights.read(name, index)
            return parts[key]

        return jax.make_array_from_callback(weights.shape(name), place, part)


def load(
    folder: str | Path,
    abstract: Any,
    table: Sequence[Entry],
    ignored: re.Pattern[str],
    mesh: Mesh | None,
    prefix: str = "",
    optional: Sequence[str] = (),
) -> Any:
    """Fills an abstract module from a folder; checks every name, dtype and shape before the first tensor is read.

    Args:
        folder: of config.json and safetensors weights.
        abstract: a module of shapes, from `nnx.eval_shape`.
        table: has an entry for each of its parameters.
        ignored: names of tensors that may be there and are not read.
        mesh: parameters are sharded over it by `rrl.parallel.rules`; None: all on the default device.
        prefix: of their names, in some files.
        optional: names of tensors whose parameters are 0 where the folder lacks them.

    Raises:
        UserError: naming the file, the tensor and what was expected and found.
    """
    if quantized := read_config(folder).get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{folder}: config.json has a quantization_config (quant_method={method!r}), and quantized weights are not "
            "supported; give the folder of the float32, bfloat16 or float16 model"
        )
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    places = {} if mesh is None else shardings(state, mesh, RULES)
    entries = {tuple(entry.ours.split(".")): entry for entry in table}
    targets = {
        path: _Target(entries[path], variable.shape, jnp.dtype(variable.dtype), places.get(path))
        for path, variable in flat.items()
    }
    weights = SafetensorsFolder(folder)
    found = {name.removeprefix(prefix): name for name in weights.names()}
    fresh = {path for path, target in targets.items() if target.entry.theirs in set(optional) - found.keys()}
    _check(folder, weights, found, [target for path, target in targets.items() if path not in fresh], ignored)
    stacked = tuple(target for target in targets.values() if target.entry.stacked)
    arrays: dict[_Target, jax.Array] = {}
    for path, target in targets.items():
        if path in fresh:
            (arrays[target],) = _empty((target,))
        elif not target.entry.stacked:
            tensor = target.fetch(weights, found[target.entry.theirs])
            arrays[target] = jax.block_until_ready(_turn(target, tensor))
    whole = _empty(stacked)
    for layer in range(stacked[0].shape[0]):
        tensors = tuple(target.fetch(weights, found[target.entry.theirs.format(layer)]) for target in stacked)
        whole = jax.block_until_ready(_write(stacked, whole, tensors, np.int32(layer)))
    arrays |= zip(stacked, whole, strict=True)
    filled = {path: variable.replace(arrays[targets[path]]) for path, variable in flat.items()}
    return nnx.merge(graph, nnx.from_flat_state(filled))


def shapes(model: nnx.Module, table: Sequence[Entry]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a model is written as: layer by layer, between what comes before and after."""
    flat = _parameters(model)
    top: dict[str, tuple[int, ...]] = {}
    layers: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
    for at, entry in enumerate(table):
        if entry.ours in flat:
            shape = flat[entry.ours].shape
            if entry.stacked:
                theirs = entry.their_shape(shape[1:])
                layers |= {(i, at): (name, theirs) for i, name in enumerate(entry.names(shape))}
            else:
                top[entry.theirs] = entry.their_shape(shape)
    return top | dict(layers[key] for key in sorted(layers))


def export(model: nnx.Module, table: Sequence[Entry], dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that a model is written as, in host memory one after the other.

    Where the parameters are sharded over several processes, each of them must go through all.

    Raises:
        UserError: float16 cannot hold a value.
    """
    flat, narrow = _parameters(model), jnp.dtype(dtype)
    entries = [entry for entry in table if entry.ours in flat]
    stacked = tuple(entry for entry in entries if entry.stacked)

    def checked(name: str, tensor: jax.Array) -> tuple[str, np.ndarray]:
        value = np.asarray(tensor)
        if narrow == np.float16 and not np.isfinite(value).all():
            raise UserError(
                f"tensor {name} has values that float16 cannot hold; write bfloat16 or float32 instead"
            )
        return name, value

    def read(which: tuple[Entry, ...], layer: int | None = None) -> Iterator[tuple[str, np.ndarray]]:
        # A generator of its own: at its end it lets go of the tensors, before the next ones are made.
        parameters = tuple(flat[entry.ours] for entry in which)
        index = None if layer is None else np.int32(layer)
        for entry, tensor in zip(
            which, _read(which, narrow, _everywhere(parameters[0]), parameters, index), strict=True
        ):
            yield checked(entry.theirs if layer is None else entry.theirs.format(layer), tensor)

    for entry in entries:
        if not entry.stacked:
            yield from read((entry,))
    for layer in range(flat[stacked[0].ours].shape[0]):
        yield from read(stacked, layer)


@functools.partial(jax.jit, static_argnums=0)
def _turn(target: _Target, tensor: jax.Array) -> jax.Array:
    return target.settle(target.ours(tensor))


@functools.partial(jax.jit, static_argnums=0)
def _empty(targets: tuple[_Target, ...]) -> tuple[jax.Array, ...]:
    return tuple(target.settle(jnp.zeros(target.shape, target.dtype)) for target in targets)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write(
    targets: tuple[_Target, ...],
    stacks: tuple[jax.Array, ...],
    tensors: tuple[jax.Array, ...],
    layer: jax.Array,
) -> tuple[jax.Array, ...]:
    """The stacks with one layer written."""

    def one(target: _Target, stack: jax.Array, tensor: jax.Array) -> jax.Array:
        # As whole numbers: on CPU, XLA would otherwise convert all of a bfloat16 stack to float32 and back each time.
        bits = f"uint{8 * target.dtype.itemsize}"
        whole, part = (jax.lax.bitcast_convert_type(array, bits) for array in (stack, target.ours(tensor)))
        whole = jax.lax.dynamic_update_index_in_dim(whole, part, layer, 0)
        return target.settle(jax.lax.bitcast_convert_type(whole, target.dtype))

    return tuple(map(one, targets, stacks, tensors))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    entries: tuple[Entry, ...],
    dtype: np.dtype,
    place: NamedSharding | None,
    parameters: tuple[jax.Array, ...],
    layer: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Their tensors of one layer, whole on every device; without a layer, of parameters that have none."""

    def one(entry: Entry, parameter: jax.Array) -> jax.Array:
        if layer is not None:
            parameter = jax.lax.dynamic_index_in_dim(parameter, layer, keepdims=False)
        # A copy, since jit hands an unchanged input back, and that would keep its host copy for good.
        tensor = jnp.copy(entry.to_theirs(parameter.astype(dtype)))
        return tensor if place is None else jax.lax.with_sharding_constraint(tensor, place)

    return tuple(map(one, entries, parameters))


def _everywhere(array: jax.Array) -> NamedSharding | None:
    place = array.sharding
    return NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else None


def _parameters(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def _check(
    folder: str | Path,
    weights: SafetensorsFolder,
    found: Mapping[str, str],
    targets: Sequence[_Target],
    ignored: re.Pattern[str],
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shape = target.shape[1:] if target.entry.stacked else target.shape
        expected |= dict.fromkeys(target.entry.names(target.shape), target.entry.their_shape(shape))
    cure = "use the config.json that belongs to these weights"
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in found]
    extra = [
        f"{real} {weights.shape(real)} in {weights.file(real).name}"
        for name, real in found.items()
        if name not in expected and not ignored.fullmatch(name)
    ]
    for what, names in (("lack tensors that", missing), ("hold tensors that do not belong to what", extra)):
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            raise UserError(
                f"{folder}: the weights {what} config.json describes: {', '.join(names[:LISTED])}{more}; {cure}"
            )
    for name, shape in expected.items():
        where = f"{weights.file(found[name])}: tensor {found[name]}"
        if (actual := weights.shape(found[name])) != shape:
            raise UserError(f"{where} has shape {actual}, but config.json asks for {shape}; {cure}")
        if (dtype := weights.dtype(found[name])) not in FLOATS:
            raise UserError(
                f"{where} has dtype {dtype}, which is none of {', '.join(FLOATS)}: quantized weights are not supported; "
                "give the folder of the float32, bfloat16 or float16 model"
            )
