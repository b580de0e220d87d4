"""Transfers parameters between a module and a Hugging Face folder, with few tensors in host memory at a time.

`load_module` puts each stored tensor on the devices, each of which gets its shard; there it is transposed, converted, and
written into the stack of all layers. Meanwhile other threads read the next tensors. `export_tensors` goes the other way. When
loading, host memory holds the tensors of two layers, or two tensors outside the layers, the largest of which is the embedding;
when exporting, those of one.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from rrl.errors import UserError
from rrl.models.tensor_files import FLOATS
from rrl.models.weights import SafetensorsFolder, read_config
from rrl.parallel.memory import device_memory, require_memory
from rrl.parallel.rules import RULES, shardings
from rrl.parallel.runtime import available_cores

T = TypeVar("T")

MAX_LISTED_NAMES = 8
"""Maximum number of tensor names in an error message."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMap:
    """Maps one parameter of a module to its tensors in a Hugging Face folder."""

    path: str
    """Path of the parameter; those under "layers." are stacked over layers."""
    hf_name: str
    """Name of the Hugging Face tensor; {} stands for the layer."""
    inputs: int | None = None
    """For a matrix: number of leading input axes of the parameter; the tensor is [outputs, inputs]. For a bias: 0; the tensor is
    flat. None: parameter and tensor have the same shape."""

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading layer axis; each layer is one tensor."""
        return self.path.startswith("layers.")

    def hf_names(self, shape: tuple[int, ...]) -> list[str]:
        """Names of the tensors of a parameter with this shape."""
        return [self.hf_name.format(layer) for layer in range(shape[0])] if self.stacked else [self.hf_name]

    def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor, from the parameter's shape without the layer axis."""
        if self.inputs is None:
            return shape
        return tuple(math.prod(part) for part in (shape[self.inputs :], shape[: self.inputs]) if part)

    def hf_spec(self, spec: Sequence[Any]) -> PartitionSpec:
        """Sharding of the tensor, from the parameter's without the layer axis; merged axes use the first one's sharding."""
        if self.inputs is None:
            return PartitionSpec(*spec)
        return PartitionSpec(*(part[0] for part in (spec[self.inputs :], spec[: self.inputs]) if part))

    def from_hf(self, tensor: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Converts a tensor to the parameter's shape."""
        return (tensor.T if self.inputs else tensor).reshape(shape)

    def to_hf(self, parameter: jax.Array) -> jax.Array:
        """Converts a parameter, of one layer if stacked, to the tensor's shape."""
        shape = self.hf_shape(parameter.shape)
        return parameter.reshape(shape[::-1]).T if self.inputs else parameter.reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """A parameter to be loaded."""

    entry: TensorMap
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding | None

    @property
    def device_bytes(self) -> int:
        """Bytes of the parameter on each device."""
        shape = self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)
        return math.prod(shape) * self.dtype.itemsize

    def constrain(self, array: jax.Array) -> jax.Array:
        """Within jit: constrains the array to the parameter's sharding."""
        return array if self.sharding is None else jax.lax.with_sharding_constraint(array, self.sharding)

    def convert(self, tensor: jax.Array) -> jax.Array:
        """Within jit: converts a stored tensor to the parameter's shape and dtype."""
        shape = self.shape[1:] if self.entry.stacked else self.shape
        return self.entry.from_hf(tensor, shape).astype(self.dtype)

    def read(self, weights: SafetensorsFolder, name: str) -> np.ndarray | jax.Array:
        """Reads a stored tensor: to the devices if it is sharded, else to host memory.

        Each process reads only the parts that its devices hold, each part once. Any thread may call this: no default device of
        the calling thread is used.
        """
        if self.sharding is None:
            return weights.read(name)
        spec = (*self.sharding.spec, *[None] * (len(self.shape) - len(self.sharding.spec)))
        sharding = NamedSharding(
            self.sharding.mesh, self.entry.hf_spec(spec[1:] if self.entry.stacked else spec)
        )
        parts: dict[str, np.ndarray] = {}

        def part(index: tuple[slice, ...]) -> np.ndarray:
            key = str(index)
            if key not in parts:
                parts[key] = weights.read(name, index)
            return parts[key]

        return jax.make_array_from_callback(weights.shape(name), sharding, part)


def load_module(
    folder: str | Path,
    abstract: Any,
    table: Sequence[TensorMap],
    ignored: re.Pattern[str],
    mesh: Mesh | None,
    rename: Callable[[str], str] = str,
    optional: Sequence[str] = (),
) -> Any:
    """Loads the parameters of an abstract module from a folder.

    Checks all names, dtypes and shapes before it reads the first tensor.

    Args:
        folder: contains config.json and safetensors weights.
        abstract: a module of shapes, from `nnx.eval_shape`.
        table: has an entry for each parameter of the module.
        ignored: matches the names of tensors in the folder that are not read.
        mesh: parameters are sharded over it by `rrl.parallel.rules`; None: all are on the default device.
        rename: maps the name of a tensor in the folder to that of the table, for names that differ between folders.
        optional: names of tensors whose parameters become 0 if the folder lacks them.

    Raises:
        UserError: a tensor is missing, unexpected, or has the wrong shape or dtype; or the weights are quantized.
    """
    _refuse_quantized(folder)
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    placements = {} if mesh is None else shardings(state, mesh, RULES)
    entries = {tuple(entry.path.split(".")): entry for entry in table}
    targets = {
        path: _Target(entries[path], variable.shape, jnp.dtype(variable.dtype), placements.get(path))
        for path, variable in flat.items()
    }
    weights = SafetensorsFolder(folder)
    # Name in the table -> name in the folder.
    stored_names = {rename(name): name for name in weights.names()}
    missing = {
        path
        for path, target in targets.items()
        if target.entry.hf_name in set(optional) - stored_names.keys()
    }
    _check(
        folder,
        weights,
        stored_names,
        [target for path, target in targets.items() if path not in missing],
        ignored,
    )
    _require_memory(folder, list(targets.values()), weights, mesh)
    arrays = {target: _zeros((target,))[0] for path, target in targets.items() if path in missing}
    arrays |= _read_targets(
        [target for target in targets.values() if target not in arrays], weights, stored_names
    )
    filled = {path: variable.replace(arrays[targets[path]]) for path, variable in flat.items()}
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _require_memory(
    folder: str | Path, targets: Sequence[_Target], weights: SafetensorsFolder, mesh: Mesh | None
) -> None:
    """Raises UserError, with the numbers, if the parameters do not fit into the memory of a device."""
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    needs = {"parameters": float(sum(target.device_bytes for target in targets))}
    if device.platform == "cpu":
        needs["largest tensor"] = float(max(weights.size(name) for name in weights.names()))
    fix = "use a smaller model" + (
        ", or bfloat16 (--config.compute.dtype, --config.compute.param_dtype)"
        if any(target.dtype.itemsize > 2 for target in targets)
        else ""
    )
    require_memory(needs, device_memory(mesh), str(folder), fix)


def _refuse_quantized(folder: str | Path) -> None:
    """Raises UserError if the folder's config.json says that its weights are quantized."""
    if quantized := read_config(folder).get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{folder}: config.json has a quantization_config (quant_method={method!r}), and quantized weights are not "
            "supported; give the folder of the float32, bfloat16 or float16 model"
        )


def _read_targets(
    targets: Sequence[_Target], weights: SafetensorsFolder, stored_names: Mapping[str, str]
) -> dict[_Target, jax.Array]:
    """Reads parameters: first those outside the layers, then all others layer by layer."""
    single = [target for target in targets if not target.entry.stacked]
    stacked = tuple(target for target in targets if target.entry.stacked)

    def reader(target: _Target, layer: int = 0) -> Callable[[], np.ndarray | jax.Array]:
        return functools.partial(target.read, weights, stored_names[target.entry.hf_name.format(layer)])

    layers = stacked[0].shape[0]
    groups = [[reader(target)] for target in single]
    groups += [[reader(target, layer) for target in stacked] for layer in range(layers)]
    tensors = _read_ahead(groups)
    arrays = {target: jax.block_until_ready(_convert(target, *next(tensors))) for target in single}
    stacks = _zeros(stacked)
    for layer in range(layers):
        stacks = jax.block_until_ready(_write_layer(stacked, stacks, next(tensors), np.int32(layer)))
    return arrays | dict(zip(stacked, stacks, strict=True))


def _read_ahead(groups: Sequence[Sequence[Callable[[], T]]]) -> Iterator[tuple[T, ...]]:
    """Yields the results of each group of functions. The next group's functions are called meanwhile, on other threads."""
    with concurrent.futures.ThreadPoolExecutor(available_cores(), "rrl-read") as pool:
        pending: collections.deque[list[concurrent.futures.Future[T]]] = collections.deque()
        for group in groups:
            pending.append([pool.submit(read) for read in group])
            if len(pending) > 1:
                yield tuple(future.result() for future in pending.popleft())
        while pending:
            yield tuple(future.result() for future in pending.popleft())


def tensor_shapes(model: nnx.Module, table: Sequence[TensorMap]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `export_tensors` yields."""
    flat = _parameters(model)
    top: dict[str, tuple[int, ...]] = {}
    layers: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
    for at, entry in enumerate(table):
        if entry.path in flat:
            shape = flat[entry.path].shape
            if entry.stacked:
                hf_shape = entry.hf_shape(shape[1:])
                layers |= {(i, at): (name, hf_shape) for i, name in enumerate(entry.hf_names(shape))}
            else:
                top[entry.hf_name] = entry.hf_shape(shape)
    return top | dict(layers[key] for key in sorted(layers))


def export_tensors(
    model: nnx.Module, table: Sequence[TensorMap], dtype: DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and values of a model's tensors, one after another in host memory.

    If the parameters are sharded over several processes, each process must iterate over all tensors.

    Raises:
        UserError: a value is too large for float16.
    """
    flat, dtype = _parameters(model), jnp.dtype(dtype)
    entries = [entry for entry in table if entry.path in flat]
    stacked = tuple(entry for entry in entries if entry.stacked)

    def checked(name: str, tensor: jax.Array) -> tuple[str, np.ndarray]:
        value = np.asarray(tensor)
        if dtype == np.float16 and not np.isfinite(value).all():
            raise UserError(
                f"tensor {name} has values too large for float16; write bfloat16 or float32 instead"
            )
        return name, value

    def read(which: tuple[TensorMap, ...], layer: int | None = None) -> Iterator[tuple[str, np.ndarray]]:
        # A separate generator for each layer: its tensors are freed when it ends, before those of the next layer are made.
        parameters = tuple(flat[entry.path] for entry in which)
        index = None if layer is None else np.int32(layer)
        for entry, tensor in zip(
            which, _read_tensors(which, dtype, _replicated(parameters[0]), parameters, index), strict=True
        ):
            yield checked(entry.hf_name if layer is None else entry.hf_name.format(layer), tensor)

    for entry in entries:
        if not entry.stacked:
            yield from read((entry,))
    for layer in range(flat[stacked[0].path].shape[0]):
        yield from read(stacked, layer)


@functools.partial(jax.jit, static_argnums=0)
def _convert(target: _Target, tensor: np.ndarray | jax.Array) -> jax.Array:
    return target.constrain(target.convert(tensor))


@functools.partial(jax.jit, static_argnums=0)
def _zeros(targets: tuple[_Target, ...]) -> tuple[jax.Array, ...]:
    return tuple(target.constrain(jnp.zeros(target.shape, target.dtype)) for target in targets)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write_layer(
    targets: tuple[_Target, ...],
    stacks: tuple[jax.Array, ...],
    tensors: tuple[np.ndarray | jax.Array, ...],
    layer: jax.Array,
) -> tuple[jax.Array, ...]:
    """Writes one layer into the stacks."""

    def write(target: _Target, stack: jax.Array, tensor: jax.Array) -> jax.Array:
        # Updates the stack as integers: XLA on CPU would otherwise convert a whole bfloat16 stack to float32 and back.
        bits = f"uint{8 * target.dtype.itemsize}"
        whole, part = (jax.lax.bitcast_convert_type(array, bits) for array in (stack, target.convert(tensor)))
        whole = jax.lax.dynamic_update_index_in_dim(whole, part, layer, 0)
        return target.constrain(jax.lax.bitcast_convert_type(whole, target.dtype))

    return tuple(map(write, targets, stacks, tensors))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read_tensors(
    entries: tuple[TensorMap, ...],
    dtype: np.dtype,
    sharding: NamedSharding | None,
    parameters: tuple[jax.Array, ...],
    layer: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Tensors of parameters, or of one layer of stacked parameters, replicated on every device."""

    def read(entry: TensorMap, parameter: jax.Array) -> jax.Array:
        if layer is not None:
            parameter = jax.lax.dynamic_index_in_dim(parameter, layer, keepdims=False)
        # Without the copy, jit may return the parameter itself. np.asarray would then cache its host value in the parameter, and
        # host memory would hold it as long as the model.
        tensor = jnp.copy(entry.to_hf(parameter.astype(dtype)))
        return tensor if sharding is None else jax.lax.with_sharding_constraint(tensor, sharding)

    return tuple(map(read, entries, parameters))


def _replicated(array: jax.Array) -> NamedSharding | None:
    sharding = array.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


def _parameters(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def _check(
    folder: str | Path,
    weights: SafetensorsFolder,
    stored_names: Mapping[str, str],
    targets: Sequence[_Target],
    ignored: re.Pattern[str],
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shape = target.shape[1:] if target.entry.stacked else target.shape
        expected |= dict.fromkeys(target.entry.hf_names(target.shape), target.entry.hf_shape(shape))
    fix = "use the config.json that belongs to these weights"
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in stored_names]
    extra = [
        f"{stored} {weights.shape(stored)} in {weights.file(stored).name}"
        for name, stored in stored_names.items()
        if name not in expected and not ignored.fullmatch(name)
    ]
    for problem, names in (
        ("lack tensors that config.json describes", missing),
        ("contain tensors that do not belong to what config.json describes", extra),
    ):
        if names:
            more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
            raise UserError(
                f"{folder}: the weights {problem}: {', '.join(names[:MAX_LISTED_NAMES])}{more}; {fix}"
            )
    for name, shape in expected.items():
        where = f"{weights.file(stored_names[name])}: tensor {stored_names[name]}"
        if (actual := weights.shape(stored_names[name])) != shape:
            raise UserError(f"{where} has shape {actual}, but config.json requires {shape}; {fix}")
        if (dtype := weights.dtype(stored_names[name])) not in FLOATS:
            raise UserError(
                f"{where} has dtype {dtype}, which is none of {', '.join(FLOATS)}: quantized weights are not supported; "
                "give the folder of the float32, bfloat16 or float16 model"
            )
