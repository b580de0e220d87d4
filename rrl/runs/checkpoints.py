"""Checkpoints of a run: Orbax saves them in the background; incomplete checkpoints are never restored.

Read `Checkpoints` first. `rrl.runs.checkpoint_reader` reads the checkpoints of other runs.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from rrl.errors import UserError
from rrl.files import SaveError, saving, write_atomically
from rrl.runs.checkpoint_folder import FOLDER, complete_steps, remove_leftovers, require_free_space
from rrl.runs.checkpoint_leaves import abstract_leaf, explain_read_errors, leaves_by_path, refuse_other_shapes
from rrl.runs.workdir import CONFIG, refuse_other_config
from rrl.runs.workdir_lock import lock_workdir


class Checkpoints:
    """The checkpoints of one workdir.

    A workdir belongs to one config, which is written to `config.json`. Opening it with another config raises an error.
    Saves are atomic (Orbax renames complete checkpoints) and run in the background.

    Opening a workdir removes the remains of killed saves. It locks the workdir until `close` (`rrl.runs.workdir_lock`).
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
            complete_steps(self._folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_workdir(self.workdir))
            with saving(self.workdir / CONFIG):
                write_atomically(self.workdir / CONFIG, json.dumps(config, indent=2, sort_keys=True))
            with saving(self._folder):
                self._folder.mkdir(exist_ok=True)
                if jax.process_index() == 0:
                    remove_leftovers(self._folder)
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
            state=ocp.args.StandardSave(leaves_by_path(state)),
            metadata=ocp.args.JsonSave(dict(metadata or {})),
        )
        self._save_path = self._folder / str(step)
        with saving(self._save_path):
            require_free_space(self._folder, state)
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
        self, template: Any, step: int | None = None, required_fields: Iterable[str] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """Restore a checkpoint.

        Args:
            template: pytree of arrays (or abstract arrays) that gives structure, shapes, dtypes and shardings.
            step: step of the checkpoint; None for the latest.
            required_fields: fields that the metadata must have.

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
        abstract = jax.tree.map(abstract_leaf, leaves_by_path(template))
        with explain_read_errors(self._folder / str(step)):
            refuse_other_shapes(self._folder / str(step), abstract)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), metadata=ocp.args.JsonRestore()
                ),
            )
        if missing := [field for field in required_fields if field not in restored["metadata"]]:
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
