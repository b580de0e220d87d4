"""Checkpoints of a run: Orbax saves them in the background; incomplete checkpoints are never restored.

Read `Checkpoints` first.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rrl.errors import UserError
from rrl.files import SaveError, saving, write_atomically
from rrl.runs.workdir import CONFIG, lock_workdir, refuse_other_config

FOLDER = "checkpoints"
"""Folder of a workdir with one folder per saved step."""
_log = logging.getLogger(__name__)

_INDEX_DIGITS = 4
"""Digits of the leaf index at the start of a leaf's name on disk. They make the alphabetical order the order of the leaves."""
_TEMPORARY = "*.orbax-checkpoint-tmp*"
"""Pattern of the names that Orbax gives checkpoints until they are complete."""
_COMMITTED = "commit_success.txt"
"""File that Orbax writes last into the folder of a step, before it gives the folder its final name."""
_STEP_METADATA = "_CHECKPOINT_METADATA"
"""File in a step's folder: JSON with the time of the commit."""
_ITEM_FILES = ("state/_METADATA", "metadata/metadata")
"""One file of each part (arrays, metadata) of a checkpoint. A checkpoint that lacks one of them cannot be read."""
_MAX_FILES = 64
"""Generous upper bound on the files and folders of one checkpoint."""


class Checkpoints:
    """The checkpoints of one workdir.

    A workdir belongs to one config, which is written to `config.json`. Opening it with another config raises an error.
    Saves are atomic (Orbax renames complete checkpoints) and run in the background.

    Opening a workdir removes the remains of killed saves and locks the workdir (`rrl.runs.workdir.lock_workdir`) until `close`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: Mapping[str, Any],
        keep: int = 2,
        may_differ: tuple[str, ...] = (),
        may_grow: tuple[str, ...] = (),
    ) -> None:
        """Open a workdir; create it if it is missing.

        Args:
            workdir: folder of the run.
            config: the run's settings, as JSON-able values (nested mappings allowed).
            keep: number of latest checkpoints to keep; older ones are deleted.
            may_differ: dotted names of fields that do not change a run's results (how often to log, ...).
            may_grow: dotted names of numeric fields that a continued run may raise (its steps).

        Raises:
            UserError: the workdir holds a run of another config, all its checkpoints are incomplete (nothing is written
                then), or another process has locked it.
            SaveError: the workdir cannot be written.
        """
        self.workdir = pathlib.Path(workdir).absolute()
        self._folder = self.workdir / FOLDER
        refuse_other_config(self.workdir, config, may_differ, may_grow)
        if self._folder.is_dir():
            # Raises UserError if all checkpoints are incomplete, before anything is written.
            _complete_steps(self._folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_workdir(self.workdir))
            with saving(self.workdir / CONFIG):
                write_atomically(self.workdir / CONFIG, json.dumps(config, indent=2, sort_keys=True))
            with saving(self._folder):
                self._folder.mkdir(exist_ok=True)
                if jax.process_index() == 0:
                    _remove_leftovers(self._folder)
                self._manager = _manager(self._folder, keep)
            self._exit_stack = stack.pop_all()
        self._workdir_stat = self.workdir.stat()
        self._save_path = self._folder
        """Path of the latest save, for error messages."""

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Save a pytree of arrays and JSON-able metadata after `step` updates. Does nothing if that step is already saved.

        Raises:
            SaveError: the disk is full, the workdir was deleted, or the previous save failed in the background.
        """
        if step == self.latest:
            return
        self._refuse_lost_workdir()
        self.wait()
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_leaves_by_path(state)),
            metadata=ocp.args.JsonSave(dict(metadata or {})),
        )
        self._save_path = self._folder / str(step)
        with saving(self._save_path):
            _require_room(self._folder, state)
            self._manager.save(step, args=items, force=True)

    def check(self) -> None:
        """Raise SaveError if the workdir was deleted or the latest save failed. Does not wait for a running save."""
        self._refuse_lost_workdir()
        if not self._manager.is_saving_in_progress():
            self.wait()  # returns at once, and raises the error of a failed save

    def _refuse_lost_workdir(self) -> None:
        if not (self.workdir.is_dir() and os.path.samestat(self._workdir_stat, self.workdir.stat())):
            raise SaveError(
                f"workdir {self.workdir} was deleted or replaced during the run. Put it back, then give "
                "the same command again: it continues from what was saved before."
            )

    def wait(self) -> None:
        """Wait until the latest save is on disk. Raises SaveError if it failed."""
        with saving(self._save_path):
            self._manager.wait_until_finished()

    def restore(
        self, template: Any, step: int | None = None, fields: Iterable[str] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """Restore a checkpoint.

        Args:
            template: pytree of arrays (or abstract arrays) that gives structure, shapes, dtypes and shardings.
            step: step of the checkpoint; None for the latest.
            fields: fields that the metadata must have.

        Returns:
            The saved state and its metadata.

        Raises:
            UserError: there is no such checkpoint, its arrays do not match the template, or it is damaged.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(
                f"no checkpoint of step {step} in {self.workdir}; there are {list(self._manager.all_steps()) or 'none'}."
            )
        abstract = jax.tree.map(_abstract, _leaves_by_path(template))
        with _explain_read_errors(self._folder / str(step)):
            _refuse_other_shapes(self._folder / str(step), abstract)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), metadata=ocp.args.JsonRestore()
                ),
            )
        if missing := [field for field in fields if field not in restored["metadata"]]:
            raise UserError(
                f"{self._folder / str(step)}: damaged, its metadata lacks {', '.join(missing)}. Delete that checkpoint; the "
                "one before it is then used"
            )
        leaves = jax.tree.leaves(restored["state"])
        return jax.tree.unflatten(jax.tree.structure(template), leaves), dict(restored["metadata"])

    def close(self) -> None:
        """Wait until everything is on disk and release the workdir. Raises SaveError if the latest save failed."""
        with self._exit_stack:
            try:
                self.wait()
            finally:
                self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A failing save must not hide the error that ended the block.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            self.close()


def saved_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Return the steps of a workdir's complete checkpoints. Only reads. Raises UserError if there are none."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"workdir {os.fspath(workdir)} has no folder checkpoints; give the workdir of a training run"
        )
    steps, _ = _complete_steps(folder)
    if not steps:
        raise UserError(
            f"workdir {os.fspath(workdir)} has no complete checkpoint yet; wait until the run has saved one"
        )
    return steps


def saved_metadata(workdir: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """Return the metadata of one checkpoint. Only reads. Raises UserError if the checkpoint is damaged."""
    folder = pathlib.Path(workdir).absolute() / FOLDER / str(step)
    with _explain_read_errors(folder), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
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
    with _explain_read_errors(folder):
        on_disk = handler.metadata(folder / "state").tree
    names = {name[_INDEX_DIGITS:]: name for name in on_disk}
    leaves = [(_leaf_name(path, where), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(template)]
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
    with _explain_read_errors(folder), ocp.Checkpointer(handler) as reader:
        arrays = reader.restore(
            folder / "state",
            args=ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True),
        )
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[names[name]] for name, _ in leaves])


def _manager(folder: pathlib.Path, keep: int) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        folder,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            # Otherwise threads, and with them the process, wait 20 minutes for a folder that could not be created.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        ),
    )


def _complete_steps(folder: pathlib.Path) -> tuple[list[int], dict[int, str]]:
    """Return the sorted steps of complete checkpoints, and for each incomplete step the file that it lacks.

    Orbax itself treats any folder with a number as a checkpoint.

    Raises:
        UserError: there are checkpoints, but none is complete.
    """
    missing_files = {
        int(path.name): _missing_file(path)
        for path in folder.iterdir()
        if path.name.isdigit() and path.is_dir()
    }
    complete = sorted(step for step, file in missing_files.items() if not file)
    incomplete = {step: file for step, file in sorted(missing_files.items()) if file}
    if incomplete and not complete:
        reasons = ", ".join(f"{step} lacks {file}" for step, file in incomplete.items())
        raise UserError(
            f"{folder} holds no complete checkpoint ({reasons}). Restore complete ones from a copy, or delete that folder and "
            "start from the beginning"
        )
    return complete, incomplete


def _missing_file(folder: pathlib.Path) -> str:
    """Return the first file that a step's folder lacks to be a complete checkpoint; "" if it lacks none."""
    if not (folder / _COMMITTED).is_file():
        try:  # Orbax before 0.12 writes only _COMMITTED; later versions also record the commit in _STEP_METADATA
            known = json.loads((folder / _STEP_METADATA).read_bytes())
            committed = known["commit_timestamp_nsecs"]
        except (OSError, ValueError, LookupError, TypeError):
            committed = None
        if not committed:
            return _COMMITTED
    return next((file for file in _ITEM_FILES if not (folder / file).is_file()), "")


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Remove the remains of killed saves and killed deletions.

    An incomplete checkpoint that is newer than all complete ones is only renamed, since it may come from an interrupted
    copy of the workdir, which the user can still complete.
    """
    for path in folder.glob(_TEMPORARY):
        if path.is_dir() and not path.is_symlink():
            _log.info("removing %s, left by a killed save", path)
            shutil.rmtree(path)
    complete, incomplete = _complete_steps(folder)  # raises if all checkpoints are incomplete
    for step, file in incomplete.items():
        path = folder / str(step)
        if step < complete[-1]:
            _log.warning("removing %s, an incomplete checkpoint (it lacks %s)", path, file)
            shutil.rmtree(path)
            continue
        new_path = path.with_name(f"{step}.incomplete")
        _log.warning(
            "%s is an incomplete checkpoint (it lacks %s): renamed to %s; the one of step %d is used",
            *(path, file, new_path.name, complete[-1]),
        )
        shutil.rmtree(new_path, ignore_errors=True)
        path.rename(new_path)


def _require_room(folder: pathlib.Path, state: Any) -> None:
    """Raise OSError if `folder` is missing or its disk has no room for the state.

    Without this check TensorStore's threads would print a traceback for each array.
    """
    with os.scandir(folder):
        disk = os.statvfs(folder)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes"))
    # Some file systems report 0 for blocks or inodes, which means unknown.
    full = disk.f_blocks and disk.f_bavail * disk.f_frsize < size
    if full or (disk.f_files and disk.f_favail < _MAX_FILES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _explain_read_errors(folder: pathlib.Path) -> Iterator[None]:
    """Turn any error while reading a checkpoint into a UserError that names its folder and the fix."""
    try:
        yield
    except (UserError, MemoryError, RuntimeError):  # JAX's own errors are RuntimeErrors
        raise
    except Exception as error:  # TensorStore raises a bare Exception for a truncated array
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the checkpoint {folder} is damaged ({reason}). Restore it from a copy, or move that folder away: the same command "
            "then continues from the checkpoint before it, or from the beginning"
        ) from error


def _refuse_other_shapes(folder: pathlib.Path, abstract: Mapping[str, Any]) -> None:
    """Raise UserError if the names or shapes of a checkpoint's arrays differ from those of `abstract`."""
    on_disk = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
    stored = {name: tuple(leaf.shape) for name, leaf in on_disk.items()}
    expected = {name: tuple(leaf.shape) for name, leaf in abstract.items()}
    if stored == expected:
        return
    name = min(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name))
    shapes = [f"of shape {side[name]}" if name in side else "absent" for side in (stored, expected)]
    raise UserError(
        f"the checkpoint {folder} does not fit this model and optimiser: {name[_INDEX_DIGITS:]} is {shapes[0]} there, and "
        f"{shapes[1]} now. Use the code and config that wrote it, or another --workdir."
    )


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return a flat dict from the number and path of each leaf to the leaf, such as "0003[0]...".

    Orbax saves this dict instead of the pytree, so that a checkpoint does not contain the Python classes of its containers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{i:0{_INDEX_DIGITS}d}{_leaf_name(path)}": leaf for i, (path, leaf) in enumerate(leaves)}


def _leaf_name(path: tuple[Any, ...], where: str = "") -> str:
    """Return the name of a leaf on disk, without its number."""
    return where + jax.tree_util.keystr(path).replace("/", "_")


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.asarray(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
