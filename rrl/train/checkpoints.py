"""Checkpoints of a run: Orbax underneath, exact resume, and a workdir that knows its config."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rrl.errors import UserError
from rrl.files import write_whole

_NUMBER = 4
"""Digits before the name of a leaf on disk, which keep their order."""


class Checkpoints:
    """The checkpoints of one workdir.

    A workdir belongs to one config, written to `config.json`; another config is refused, since a run continued under other
    settings is neither of the two. Saving is atomic (Orbax writes beside and renames), in the background.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: Mapping[str, Any],
        keep: int = 2,
        may_differ: tuple[str, ...] = (),
    ) -> None:
        """Opens a workdir, or makes it.

        Args:
            workdir: folder of the run.
            config: the run's settings, as JSON-able values (nested mappings allowed).
            keep: number of checkpoints that stay.
            may_differ: dotted names of fields that do not change the numbers of a run (how often to log, ...).

        Raises:
            UserError: the workdir holds a run of another config; nothing is written then.
        """
        self.workdir = pathlib.Path(workdir).absolute()
        refuse_other_config(self.workdir, config, may_differ)
        self.workdir.mkdir(parents=True, exist_ok=True)
        write_whole(self.workdir / "config.json", json.dumps(config, indent=2, sort_keys=True))
        self._manager = ocp.CheckpointManager(
            self.workdir / "checkpoints",
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Saves a pytree of arrays and JSON-able metadata as of `step` completed updates; a step already there is left."""
        if step == self.latest:
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_plain(state)), metadata=ocp.args.JsonSave(dict(metadata or {}))
        )
        self._manager.save(step, args=items, force=True)

    def restore(self, template: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The state as saved, with the template's structure, dtypes and shardings, and its metadata.

        Raises:
            UserError: there is no checkpoint (of that step), or its arrays are not the template's.
        """
        self._manager.wait_until_finished()
        step = self.latest if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(
                f"no checkpoint of step {step} in {self.workdir}; there are {list(self._manager.all_steps()) or 'none'}."
            )
        abstract = jax.tree.map(_abstract, _plain(template))
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), metadata=ocp.args.JsonRestore()
                ),
            )
        except (ValueError, KeyError) as error:
            raise UserError(
                f"the checkpoint of step {step} in {self.workdir} does not fit this model and optimiser: {error} "
                f"Use the code and config that made it, or another --workdir."
            ) from error
        leaves = jax.tree.leaves(found["state"])
        return jax.tree.unflatten(jax.tree.structure(template), leaves), dict(found["metadata"])

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def saved_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Steps of the complete checkpoints of a workdir, which is only read; UserError where it is none, or has none."""
    folder = pathlib.Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise UserError(
            f"workdir {os.fspath(workdir)} has no folder checkpoints; give the workdir of a training run"
        )
    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    if not steps:
        raise UserError(
            f"workdir {os.fspath(workdir)} has no complete checkpoint yet; wait until the run has saved one"
        )
    return steps


def saved_metadata(workdir: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """The metadata of one checkpoint; the workdir is only read."""
    folder = pathlib.Path(workdir).absolute() / "checkpoints" / str(step) / "metadata"
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return dict(reader.restore(folder, args=ocp.args.JsonRestore()))


def read_part(workdir: str | os.PathLike[str], step: int, where: str, template: Any) -> Any:
    """A part of the state of one checkpoint; the rest of it, and the workdir, stay untouched.

    Args:
        workdir: folder of the run.
        step: one of `saved_steps`.
        where: path of the part in the state that was saved, as JAX writes it ("[0]" is the first of a tuple).
        template: abstract arrays, whose structure and shardings the part gets; dtypes are those on disk.

    Raises:
        UserError: the part lacks an array of the template, or one has another shape.
    """
    folder = pathlib.Path(workdir).absolute() / "checkpoints" / str(step) / "state"
    handler = ocp.PyTreeCheckpointHandler()
    found = handler.metadata(folder).tree
    names = {name[_NUMBER:]: name for name in found}
    leaves = [(_name(path, where), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(template)]
    item: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for name, leaf in leaves:
        shape = found[names[name]].shape if name in names else None
        if shape != leaf.shape:
            raise UserError(
                f"the checkpoint of step {step} in {os.fspath(workdir)} has {'no ' if shape is None else ''}{name}"
                f"{'' if shape is None else f' of shape {tuple(shape)}'}, expected is shape {tuple(leaf.shape)}; "
                "use the code that made it"
            )
        item[names[name]] = found[names[name]]
        arguments[names[name]] = ocp.ArrayRestoreArgs(sharding=leaf.sharding)
    with ocp.Checkpointer(handler) as reader:
        arrays = reader.restore(
            folder, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
        )
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[names[name]] for name, _ in leaves])


LEFT: Mapping[str, str] = {"checkpoints/*": "checkpoints", "results.jsonl": "answers (results.jsonl)"}
"""What only a run of the same config may go on with."""
SHOWN = 6
"""Differences that one message names."""


def refuse_other_config(
    workdir: str | os.PathLike[str], config: Mapping[str, Any], may_differ: tuple[str, ...] = ()
) -> None:
    """Raises UserError when the workdir holds a run of another config, naming each field that differs, or cannot be made."""
    path = pathlib.Path(workdir) / "config.json"
    if pathlib.Path(workdir).is_file():
        raise UserError(
            f"workdir {os.fspath(workdir)} is a file; choose a folder, or one that is not there yet."
        )
    folder = pathlib.Path(workdir).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "cannot be written to" if there.is_dir() else "is a file"
        raise UserError(f"workdir {os.fspath(workdir)}: {there} {reason}; choose another --workdir.")
    if not path.exists():
        if left := [what for place, what in LEFT.items() if any(folder.glob(place))]:
            raise UserError(
                f"workdir {os.fspath(workdir)} holds {left[0]}, but not the config.json that says of which run; put that "
                "file back, choose another --workdir, or delete that folder."
            )
        return
    try:
        stored = _flat(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, AttributeError) as error:
        raise UserError(
            f"workdir {os.fspath(workdir)}: its config.json cannot be read ({error}); choose another --workdir, or "
            "delete that folder."
        ) from error
    given = _flat(json.loads(json.dumps(config)))
    names = sorted(n for n in stored.keys() | given.keys() if n not in may_differ)
    absent = "(absent)"
    differing = [
        f"{n}: {stored.get(n, absent)!r} there, {given.get(n, absent)!r} now"
        for n in names
        if stored.get(n, absent) != given.get(n, absent)
    ]
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise UserError(
            f"workdir {os.fspath(workdir)} holds a run of another config ({'; '.join(differing[:SHOWN])}{more}). "
            "Use the same settings to continue it, choose another --workdir, or delete that folder."
        )


def _plain(tree: Any) -> dict[str, Any]:
    """Leaves by path, so that what is on disk does not depend on the Python classes around them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{i:0{_NUMBER}d}{_name(path)}": leaf for i, (path, leaf) in enumerate(leaves)}


def _name(path: tuple[Any, ...], where: str = "") -> str:
    """Name of a leaf on disk, without its number."""
    return where + jax.tree_util.keystr(path).replace("/", "_")


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.asarray(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
