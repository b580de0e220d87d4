"""The leaves of a pytree as a checkpoint stores them: a flat dict from numbered paths to arrays."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rrl.errors import UserError

INDEX_DIGITS = 4
"""Digits of the leaf index at the start of a leaf's name on disk. They make the alphabetical order the order of the leaves."""


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return a flat dict from the number and path of each leaf to the leaf, such as "0003[0]...".

    Orbax saves this dict instead of the pytree, so that a checkpoint does not contain the Python classes of its containers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{i:0{INDEX_DIGITS}d}{leaf_name(path)}": leaf for i, (path, leaf) in enumerate(leaves)}


def leaf_name(path: tuple[Any, ...], where: str = "") -> str:
    """Return the name of a leaf on disk, without its number. `where` is the path of the tree that `path` starts from."""
    return where + jax.tree_util.keystr(path).replace("/", "_")


def abstract_leaf(leaf: Any) -> Any:
    """Return a leaf as a restore template: a JAX array as its shape, dtype and sharding; other arrays as NumPy arrays."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.asarray(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def refuse_other_shapes(folder: pathlib.Path, abstract: Mapping[str, Any]) -> None:
    """Raise UserError if the names or shapes of a checkpoint's arrays differ from those of `abstract`."""
    on_disk = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
    stored = {name: tuple(leaf.shape) for name, leaf in on_disk.items()}
    expected = {name: tuple(leaf.shape) for name, leaf in abstract.items()}
    if stored == expected:
        return
    name = min(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name))
    shapes = [f"of shape {side[name]}" if name in side else "absent" for side in (stored, expected)]
    raise UserError(
        f"the checkpoint {folder} does not fit this model and optimiser: {name[INDEX_DIGITS:]} is {shapes[0]} there, and "
        f"{shapes[1]} now. Use the code and config that wrote it, or another --workdir."
    )


@contextlib.contextmanager
def explain_read_errors(folder: pathlib.Path) -> Iterator[None]:
    """Turn an error while reading a checkpoint into a UserError that names its folder and the fix.

    UserError, MemoryError and RuntimeError (JAX's own errors) pass through unchanged.
    """
    try:
        yield
    except (UserError, MemoryError, RuntimeError):
        raise
    except Exception as error:  # TensorStore raises a bare Exception for a truncated array
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the checkpoint {folder} is damaged ({reason}). Restore it from a copy, or move that folder away: the same command "
            "then continues from the checkpoint before it, or from the beginning"
        ) from error
