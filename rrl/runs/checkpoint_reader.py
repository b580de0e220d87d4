"""Read checkpoints of a run, such as for an export, without opening its workdir. Nothing is written."""

import os
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from rrl.errors import UserError
from rrl.runs.checkpoint_folder import FOLDER, complete_steps
from rrl.runs.checkpoint_leaves import INDEX_DIGITS, explain_read_errors, leaf_name


def saved_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Return the steps of a workdir's complete checkpoints. Only reads. Raises UserError if there are none."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"workdir {os.fspath(workdir)} has no folder checkpoints; give the workdir of a training run"
        )
    steps, _ = complete_steps(folder)
    if not steps:
        raise UserError(
            f"workdir {os.fspath(workdir)} has no complete checkpoint yet; wait until the run has saved one"
        )
    return steps


def saved_metadata(workdir: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """Return the metadata of one checkpoint. Only reads. Raises UserError if the checkpoint is damaged."""
    folder = pathlib.Path(workdir).absolute() / FOLDER / str(step)
    with explain_read_errors(folder), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return dict(reader.restore(folder / "metadata", args=ocp.args.JsonRestore()))


def read_part(workdir: str | os.PathLike[str], step: int, where: str, template: Any) -> Any:
    """Read a part of the state of one checkpoint, without loading the rest. Only reads.

    Args:
        workdir: folder of the run.
        step: one of `saved_steps`.
        where: path of the part in the saved pytree, as `jax.tree_util.keystr` writes it ("[0]" is the first item of a tuple).
        template: abstract arrays that give structure, shapes and shardings; dtypes are those on disk.

    Raises:
        UserError: an array of the template is missing or has another shape, or the checkpoint is damaged.
    """
    folder = pathlib.Path(workdir).absolute() / FOLDER / str(step)
    handler = ocp.PyTreeCheckpointHandler()
    with explain_read_errors(folder):
        on_disk = handler.metadata(folder / "state").tree
    names = {name[INDEX_DIGITS:]: name for name in on_disk}
    leaves = [(leaf_name(path, where), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(template)]
    item: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for name, leaf in leaves:
        shape = on_disk[names[name]].shape if name in names else None
        if shape != leaf.shape:
            raise UserError(
                f"the checkpoint of step {step} in {os.fspath(workdir)} has {'no ' if shape is None else ''}{name}"
                f"{'' if shape is None else f' of shape {tuple(shape)}'}; expected shape {tuple(leaf.shape)}. "
                "Use the code version that wrote it"
            )
        item[names[name]] = on_disk[names[name]]
        arguments[names[name]] = ocp.ArrayRestoreArgs(sharding=leaf.sharding)
    with explain_read_errors(folder), ocp.Checkpointer(handler) as reader:
        arrays = reader.restore(
            folder / "state",
            args=ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True),
        )
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[names[name]] for name, _ in leaves])
