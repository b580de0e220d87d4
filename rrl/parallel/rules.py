"""Sharding rules: which parameter is split over which mesh axes. One table serves all models and their optimiser states."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rrl.errors import UserError

P = PartitionSpec
Rules = Sequence[tuple[str, PartitionSpec]]

RULES: Rules = (
    # Embeddings [V, D] and head [D, V]: the vocabulary is split over tensor, and so are the logits.
    (r"embedding", P("tensor", "fsdp")),
    (r"(position|type)_embedding", P(None, "fsdp")),
    (r"head", P("fsdp", "tensor")),
    # Attention [L, D, N, H] and its output [L, N, H, D]: whole heads are split over tensor.
    (r"layers/[qkv]", P(None, "fsdp", "tensor", None)),
    (r"layers/[qkv]_bias", P(None, "tensor", None)),
    (r"layers/o", P(None, "tensor", None, "fsdp")),
    # MLP [L, D, F] and its output [L, F, D].
    (r"layers/(gate|up)", P(None, "fsdp", "tensor")),
    (r"layers/up_bias", P(None, "tensor")),
    (r"layers/down", P(None, "tensor", "fsdp")),
    # Adapters [L, inputs, rank] and [L, rank, outputs]: split like their kernel; the rank is not split.
    (r"layers/(q|k|v|gate|up)_lora_a", P(None, "fsdp", None)),
    (r"layers/[qkv]_lora_b", P(None, None, "tensor", None)),
    (r"layers/(gate|up)_lora_b", P(None, None, "tensor")),
    (r"layers/o_lora_a", P(None, "tensor", None, None)),
    (r"layers/down_lora_a", P(None, "tensor", None)),
    (r"layers/(o|down)_lora_b", P(None, None, "fsdp")),
    (r"head_lora_a", P("fsdp", None)),
    (r"head_lora_b", P(None, "tensor")),
    # The value head (`score`), norms and output biases are small and are replicated.
    (r"score", P()),
    (r"(layers/)?([a-z]+_)*norm(_bias)?", P()),
    (r"layers/(o|down)_bias", P()),
)
"""(regular expression that matches a whole parameter name such as "layers/q", spec); the first match wins."""


def shardings(state: Any, mesh: Mesh, rules: Rules = RULES) -> dict[tuple[str, ...], NamedSharding]:
    """Sharding of each parameter of an NNX state, by path.

    A dimension that is not a multiple of its axes' size is replicated, such as few kv heads or an odd vocabulary.

    Raises:
        UserError: no rule matches a parameter, or a spec has more dimensions than the parameter or names an axis twice.
    """
    shardings_by_path = {}
    for path, variable in nnx.to_flat_state(state):
        name = "/".join(map(str, path))
        shardings_by_path[path] = NamedSharding(mesh, fit(name, spec_of(name, rules), variable.shape, mesh))
    return shardings_by_path


def shard(state: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Puts the arrays of a state on the mesh."""
    shardings_by_path = shardings(state, mesh, rules)
    flat = {
        path: variable.replace(jax.device_put(variable[...], shardings_by_path[path]))
        for path, variable in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)


def optimizer_shardings(state: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Sharding of each leaf of an optimiser's state.

    A leaf whose path ends in a parameter's name (`.../mu/layers/q`) is sharded like that parameter. All others, such as
    counts, are replicated.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # The entry of a dictionary has `key`, that of a named tuple or object `name`, that of a sequence `idx`.
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        keys = [key for key in keys if key != "value"]  # the last key of an nnx.Variable's path
        for start in range(len(keys)):
            name = "/".join(keys[start:])
            if any(re.fullmatch(pattern, name) for pattern, _ in rules):
                return NamedSharding(mesh, fit(name, spec_of(name, rules), leaf.shape, mesh))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(place, state)


def constrain(x: Array, *axes: Any) -> Array:
    """Constrains the sharding of an activation if a mesh of several devices is set; otherwise returns it unchanged.

    Rows of activations are split over "fsdp". Without a constraint, XLA's partitioner would instead split their width over
    "fsdp", as in the embedding table.

    Args:
        x: the activation.
        axes: entries of a PartitionSpec; an axis that does not divide its dimension is dropped.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, fit("activation", P(*axes), x.shape, mesh))


def constrain_state(state: Any, rules: Rules = RULES) -> Any:
    """Constrains each leaf of a model's state, or of its gradients, to the sharding of its parameter."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return state
    flat = {
        path: variable.replace(constrain(variable[...], *spec_of("/".join(map(str, path)), rules)))
        for path, variable in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)


def spec_of(name: str, rules: Rules = RULES) -> PartitionSpec:
    """The spec of the first rule that matches the whole name."""
    for pattern, spec in rules:
        if re.fullmatch(pattern, name):
            return spec
    raise UserError(
        f"no sharding rule covers parameter {name!r}; add a (regex, PartitionSpec) for it to the rules"
    )


def fit(name: str, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the spec without the axes that do not divide their dimension of the shape; those dimensions are replicated.

    Args:
        name: name of the parameter, for error messages.
        spec: mesh axes of each dimension.
        shape: shape of the parameter.
        mesh: gives the sizes of the axes.

    Raises:
        UserError: the spec has more dimensions than the shape, or names an unknown axis or one axis twice.
    """
    if len(spec) > len(shape):
        raise UserError(
            f"parameter {name!r} has shape {shape}, but its sharding rule {spec} has {len(spec)} dimensions"
        )
    used: list[str] = []
    fitted: list[Any] = []
    for size, entry in zip(shape, spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in mesh.shape:
                raise UserError(
                    f"parameter {name!r}: its rule names axis {axis!r}, but the mesh has {mesh.axis_names}"
                )
            if axis in used:
                raise UserError(f"parameter {name!r}: its rule {spec} names axis {axis!r} twice")
        used.extend(axes)
        fitted.append(entry if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None)
    return PartitionSpec(*fitted)
