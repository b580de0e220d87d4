"""Which parameter is split over which mesh axes: one table for every model and its optimiser state."""

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
    # Embeddings [V, D] and head [D, V]: vocabulary over tensor, so that logits come out split.
    (r"embedding", P("tensor", "fsdp")),
    (r"(position|type)_embedding", P(None, "fsdp")),
    (r"head", P("fsdp", "tensor")),
    # Attention [L, D, N, H] and back [L, N, H, D]: whole heads over tensor.
    (r"layers/[qkv]", P(None, "fsdp", "tensor", None)),
    (r"layers/[qkv]_bias", P(None, "tensor", None)),
    (r"layers/o", P(None, "tensor", None, "fsdp")),
    # MLP [L, D, F] and back [L, F, D].
    (r"layers/(gate|up)", P(None, "fsdp", "tensor")),
    (r"layers/up_bias", P(None, "tensor")),
    (r"layers/down", P(None, "tensor", "fsdp")),
    # Adapters [L, inputs, rank] and [L, rank, outputs]: split as their kernel is, the rank whole.
    (r"layers/(q|k|v|gate|up)_lora_a", P(None, "fsdp", None)),
    (r"layers/[qkv]_lora_b", P(None, None, "tensor", None)),
    (r"layers/(gate|up)_lora_b", P(None, None, "tensor")),
    (r"layers/o_lora_a", P(None, "tensor", None, None)),
    (r"layers/down_lora_a", P(None, "tensor", None)),
    (r"layers/(o|down)_lora_b", P(None, None, "fsdp")),
    (r"head_lora_a", P("fsdp", None)),
    (r"head_lora_b", P(None, "tensor")),
    # Norms, output biases and the value head are small, and every device needs them whole.
    (r"score", P()),
    (r"(layers/)?([a-z]+_)?norm(_bias)?", P()),
    (r"layers/(o|down)_bias", P()),
)
"""(regular expression over the whole name "layers/q", spec); the first match wins."""


def shardings(state: Any, mesh: Mesh, rules: Rules = RULES) -> dict[tuple[str, ...], NamedSharding]:
    """Placement of each parameter of an NNX state, by path.

    A dimension that its axes do not divide (kv heads fewer than the tensor axis, an odd vocabulary) is replicated.

    Raises:
        UserError: no rule covers a parameter, or a spec has more dimensions than it, or names an axis twice.
    """
    placed = {}
    for path, variable in nnx.to_flat_state(state):
        name = "/".join(map(str, path))
        placed[path] = NamedSharding(mesh, fit(name, spec_of(name, rules), variable.shape, mesh))
    return placed


def shard(state: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """The same state with its arrays placed on the mesh."""
    placed = shardings(state, mesh, rules)
    flat = {
        path: variable.replace(jax.device_put(variable[...], placed[path]))
        for path, variable in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)


def optimizer_shardings(state: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Placement of an optimiser's state, leaf by leaf: a leaf that stands under a parameter's name (`.../mu/layers/q`) lies
    as that parameter does, every other one (a count) is whole on each device."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        keys = [key for key in keys if key != "value"]
        for start in range(len(keys)):
            name = "/".join(keys[start:])
            if any(re.fullmatch(pattern, name) for pattern, _ in rules):
                return NamedSharding(mesh, fit(name, spec_of(name, rules), leaf.shape, mesh))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(place, state)


def constrain(x: Array, *axes: Any) -> Array:
    """The same array, told to the partitioner as split over these mesh axes, where a mesh of several devices is set.

    `axes` are the entries of a PartitionSpec; those that do not divide their dimension are dropped. Without it the
    partitioner follows the embedding and splits the width of activations over "fsdp", where rows belong.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, fit("activation", P(*axes), x.shape, mesh))


def constrain_state(state: Any, rules: Rules = RULES) -> Any:
    """`constrain` for a model's state (or its gradients): each leaf as the table places its parameter."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return state
    flat = {
        path: variable.replace(constrain(variable[...], *spec_of("/".join(map(str, path)), rules)))
        for path, variable in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)


def spec_of(name: str, rules: Rules = RULES) -> PartitionSpec:
    """The first rule that matches the whole name."""
    for pattern, spec in rules:
        if re.fullmatch(pattern, name):
            return spec
    raise UserError(
        f"no sharding rule covers parameter {name!r}; add a (regex, PartitionSpec) for it to the rules"
    )


def fit(name: str, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec for a parameter of this shape: axes that do not divide their dimension are dropped."""
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
                    f"parameter {name!r}: its rule names axis {axis!r}; the mesh has {mesh.axis_names}"
                )
            if axis in used:
                raise UserError(f"parameter {name!r}: its rule {spec} names axis {axis!r} twice")
        used.extend(axes)
        fitted.append(entry if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None)
    return PartitionSpec(*fitted)
