"""Checkpoints of a run: Orbax underneath, exact resume, and nothing taken for a checkpoint that is not whole."""

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
"""Of a workdir: holds a folder for each step."""
_log = logging.getLogger(__name__)

_NUMBER = 4
"""Digits before the name of a leaf on disk, which keep their order."""
_TEMPORARY = "*.orbax-checkpoint-tmp*"
"""What Orbax writes a checkpoint under until it is whole."""
_COMMITTED = "commit_success.txt"
"""What Orbax writes last into the folder of a step, before it gives that its name."""
_STEP_METADATA = "_CHECKPOINT_METADATA"
"""Of a step's folder: JSON with the time of the commit."""
_ITEMS = ("state/_METADATA", "metadata/metadata")
"""A file of each item of a step, without which it cannot be read."""
_MAX_FILES = 64
"""Files and folders of one checkpoint at most, by far."""


class Checkpoints:
    """The checkpoints of one workdir.

    A workdir belongs to one config, written to `config.json`; another config is refused, since a run continued under other
    settings is neither of the two. Saving is atomic (Orbax writes beside and renames), in the background.

    Opening a workdir removes what killed saves have left, and holds the workdir (`rrl.runs.workdir.lock_workdir`) until `close`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: Mapping[str, Any],
        keep: int = 2,
        may_differ: tuple[str, ...] = (),
        may_grow: tuple[str, ...] = (),
    ) -> None:
        """Opens a workdir, or makes it.

        Args:
            workdir: folder of the run.
            config: the run's settings, as JSON-able values (nested mappings allowed).
            keep: number of checkpoints that stay.
            may_differ: dotted names of fields that do not change the numbers of a run (how often to log, ...).
            may_grow: those of numbers that a continued run may raise (its steps).

        Raises:
            UserError: the workdir holds a run of another config, or checkpoints of which none is whole (nothing is written
                then), or another process holds it.
            SaveError: it cannot be written.
        """
        self.workdir = pathlib.Path(workdir).absolute()
        self._folder = self.workdir / FOLDER
        refuse_other_config(self.workdir, config, may_differ, may_grow)
        if self._folder.is_dir():
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
            self._open = stack.pop_all()
        self._opened = self.workdir.stat()
        self._saving = self._folder
        """Where the latest save goes."""

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Saves a pytree of arrays and JSON-able metadata as of `step` completed updates; a step already there is left.

        Raises:
            SaveError: there is no room, the workdir was deleted, or the save before failed in the background.
        """
        if step == self.latest:
            return
        self._refuse_lost_workdir()
        self.wait()
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_leaves_by_path(state)),
            metadata=ocp.args.JsonSave(dict(metadata or {})),
        )
        self._saving = self._folder / str(step)
        with saving(self._saving):
            _require_room(self._folder, state)
            self._manager.save(step, args=items, force=True)

    def check(self) -> None:
        """Raises SaveError if the workdir was deleted or the latest save has failed. Does not wait for one that is under way."""
        self._refuse_lost_workdir()
        if not self._manager.is_saving_in_progress():
            self.wait()

    def _refuse_lost_workdir(self) -> None:
        if not (self.workdir.is_dir() and os.path.samestat(self._opened, self.workdir.stat())):
            raise SaveError(
                f"workdir {self.workdir} was deleted, or another put in its place, while the run went on. Put it back, then give "
                "the same command again: it continues from what was saved before."
            )

    def wait(self) -> None:
        """Waits until the latest save is on disk. Raises SaveError if it failed."""
        with saving(self._saving):
            self._manager.wait_until_finished()

    def restore(
        self, template: Any, step: int | None = None, fields: Iterable[str] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """The state as saved, with the template's structure, dtypes and shardings, and its metadata, which has these `fields`.

        Raises:
            UserError: there is no checkpoint (of that step), its arrays are not the template's, or it is damaged.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(
                f"no checkpoint of step {step} in {self.workdir}; there are {list(self._manager.all_steps()) or 'none'}."
            )
        abstract = jax.tree.map(_abstract, _leaves_by_path(template))
        with _reading(self._folder / str(step)):
            _refuse_other_shapes(self._folder / str(step), abstract)
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), metadata=ocp.args.JsonRestore()
                ),
            )
        if missing := [field for field in fields if field not in found["metadata"]]:
            raise UserError(
                f"{self._folder / str(step)}: damaged, its metadata lacks {', '.join(missing)}. Delete that checkpoint, and the "
                "one before is used"
            )
        leaves = jax.tree.leaves(found["state"])
        return jax.tree.unflatten(jax.tree.structure(template), leaves), dict(found["metadata"])

    def close(self) -> None:
        """Waits until everything is on disk. Raises SaveError if the latest save failed."""
        with self._open:
            try:
                self.wait()
            finally:
                self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A save that fails too does not hide the error that ends the block.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            self.close()


def saved_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Steps of the complete checkpoints of a workdir, which is only read; UserError where it is none, or has none."""
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
    """The metadata of one checkpoint; the workdir is only read. UserError where it is damaged."""
    folder = pathlib.Path(workdir).absolute() / FOLDER / str(step)
    with _reading(folder), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return dict(reader.restore(folder / "metadata", args=ocp.args.JsonRestore()))


def read_part(workdir: str | os.PathLike[str], step: int, where: str, template: Any) -> Any:
    """A part of the state of one checkpoint; the rest of it, and the workdir, stay untouched.

    Args:
        workdir: folder of the run.
        step: one of `saved_steps`.
        where: path of the part in the state that was saved, as JAX writes it ("[0]" is the first of a tuple).
        template: abstract arrays, whose structure and shardings the part gets; dtypes are those on disk.

    Raises:
        UserError: the part lacks an array of the template, or one has another shape; or the checkpoint is damaged.
    """
    folder = pathlib.Path(workdir).absolute() / FOLDER / str(step)
    handler = ocp.PyTreeCheckpointHandler()
    with _reading(folder):
        found = handler.metadata(folder / "state").tree
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
    with _reading(folder), ocp.Checkpointer(handler) as reader:
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
            # Else threads wait for 20 minutes for a folder that could not be made, and the process with them.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        ),
    )


def _complete_steps(folder: pathlib.Path) -> tuple[list[int], dict[int, str]]:
    """Steps whose checkpoints are complete, in order, and of the others the file that each lacks.

    Orbax takes any folder with a number for a checkpoint. Raises UserError where there are some, of which none is whole.
    """
    lacks = {
        int(path.name): _missing_file(path)
        for path in folder.iterdir()
        if path.name.isdigit() and path.is_dir()
    }
    whole = sorted(step for step, lack in lacks.items() if not lack)
    broken = {step: lack for step, lack in sorted(lacks.items()) if lack}
    if broken and not whole:
        named = ", ".join(f"{step} lacks {lack}" for step, lack in broken.items())
        raise UserError(
            f"{folder} holds no complete checkpoint ({named}). Put complete ones there from a copy, or delete that folder and "
            "start from the beginning"
        )
    return whole, broken


def _missing_file(folder: pathlib.Path) -> str:
    """The first file that the folder of a step lacks to be a checkpoint; or ""."""
    if not (folder / _COMMITTED).is_file():
        try:  # Orbax before 0.12 has that mark alone
            known = json.loads((folder / _STEP_METADATA).read_bytes())
            committed = known["commit_timestamp_nsecs"]
        except (OSError, ValueError, LookupError, TypeError):
            committed = None
        if not committed:
            return _COMMITTED
    return next((file for file in _ITEMS if not (folder / file).is_file()), "")


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Removes what killed saves and killed removals have left; an incomplete checkpoint that is newer than all complete ones
    is only renamed, since it may be a copy that was broken off."""
    for path in folder.glob(_TEMPORARY):
        if path.is_dir() and not path.is_symlink():
            _log.info("removing %s, which a killed save has left", path)
            shutil.rmtree(path)
    whole, broken = _complete_steps(folder)
    for step, lack in broken.items():
        path = folder / str(step)
        if step < whole[-1]:
            _log.warning("removing %s, an incomplete checkpoint (it lacks %s)", path, lack)
            shutil.rmtree(path)
            continue
        aside = path.with_name(f"{step}.incomplete")
        _log.warning(
            "%s is an incomplete checkpoint (it lacks %s): renamed to %s; the one of step %d is used",
            *(path, lack, aside.name, whole[-1]),
        )
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def _require_room(folder: pathlib.Path, state: Any) -> None:
    """OSError where `folder` is gone, or its disk has no room for the state: TensorStore's threads would print a traceback
    for each array."""
    with os.scandir(folder):
        disk = os.statvfs(folder)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes"))
    # Some file systems count neither blocks nor inodes.
    full = disk.f_blocks and disk.f_bavail * disk.f_frsize < size
    if full or (disk.f_files and disk.f_favail < _MAX_FILES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _reading(folder: pathlib.Path) -> Iterator[None]:
    """Turns any error of reading a checkpoint into a UserError that names its folder and what to do."""
    try:
        yield
    except (UserError, MemoryError, RuntimeError):  # JAX's own errors are RuntimeErrors
        raise
    except Exception as error:  # for a truncated array TensorStore raises a bare Exception
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the checkpoint {folder} is damaged ({reason}). Restore it from a copy, or move that folder away: the same command "
            "then goes on from the checkpoint before it, or from the beginning"
        ) from error


def _refuse_other_shapes(folder: pathlib.Path, abstract: Mapping[str, Any]) -> None:
    """UserError where the arrays of a checkpoint are not those of `abstract`."""
    found = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
    stored = {name: tuple(leaf.shape) for name, leaf in found.items()}
    wanted = {name: tuple(leaf.shape) for name, leaf in abstract.items()}
    if stored == wanted:
        return
    name = min(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    shapes = [f"of shape {shapes[name]}" if name in shapes else "absent" for shapes in (stored, wanted)]
    raise UserError(
        f"the checkpoint {folder} does not fit this model and optimiser: {name[_NUMBER:]} is {shapes[0]} there, and {shapes[1]} "
        "now. Use the code and config that made it, or another --workdir."
    )


def _leaves_by_path(tree: Any) -> dict[str, Any]:
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
