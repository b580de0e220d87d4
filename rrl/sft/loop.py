"""Supervised training on packed rows. Pretraining on text and fine-tuning on demonstrations use the same loop.

Read `train` first.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rrl.data.examples import Example
from rrl.errors import UserError
from rrl.files import saving, write_atomically
from rrl.models.decoder import Decoder
from rrl.rl.optim import make_schedule
from rrl.runs.checkpoints import Checkpoints
from rrl.runs.metrics import MetricsWriter
from rrl.runs.progress import Progress
from rrl.sft.config import MAY_DIFFER, MAY_GROW, SFTConfig
from rrl.sft.sources import BatchSource
from rrl.sft.trainer import Trainer
from rrl.stopping import StopSignal, stop_requested


@dataclasses.dataclass(frozen=True)
class SFTResult:
    """How a supervised run ended."""

    step: int
    """Completed updates."""
    evaluation: dict[str, float]
    """Held-out metrics of the final parameters; empty after a signal or without held-out examples."""
    stopped: str
    """Reason of the end: done, patience, minutes or signal."""


def train(
    config: SFTConfig,
    source: BatchSource,
    decoder: Decoder,
    workdir: str | os.PathLike[str],
    *,
    held_out: Mapping[str, Sequence[Example]] | None = None,
    identity: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> SFTResult:
    """Train `decoder` in place. If the workdir has a checkpoint, continue from it.

    Args:
        config: settings of the run.
        source: provides the batch of each step.
        decoder: its parameters are replaced by the trained ones (the best ones, with `patience`).
        workdir: gets config.json, checkpoints, metrics.jsonl, TensorBoard files and result.json.
        held_out: named sets of examples for evaluation.
        identity: what identifies this run besides its settings (model, data). Another identity in the workdir is refused.
        mesh: mesh of the decoder; None: one device.

    Raises:
        UserError: the workdir belongs to another config, or the loss is not finite.
        SaveError: the workdir cannot be written.
    """
    trainer = Trainer(config, decoder, held_out, mesh)
    settings = dataclasses.asdict(config) | {"run": dict(identity or {})}
    with (
        Checkpoints(workdir, settings, keep=2, may_differ=MAY_DIFFER, may_grow=MAY_GROW) as checkpoints,
        stop_requested() as stop,
    ):
        trainer.restore(checkpoints)
        start = int(trainer.state.step)
        if trainer.history.stopped == "done" and start < config.steps:  # the run was extended
            trainer.history.stopped = ""
        with (
            MetricsWriter(workdir, start, trainer.history.lines) as writer,
            Progress(config.steps, start, "sft") as progress,
        ):
            log = _Log(config, start, writer, progress)
            if start:
                words = "finished already," if trainer.history.stopped else "continues"
                progress.note(f"{words} after step {start} of {config.steps}")
            step = _train_steps(trainer, source, start, checkpoints, log, stop)
            evaluation = _finish(trainer, decoder, checkpoints, log)
    result = SFTResult(step, evaluation, trainer.history.stopped)
    _write_result(pathlib.Path(workdir, "result.json"), result)
    return result


def _train_steps(
    trainer: Trainer,
    source: BatchSource,
    start: int,
    checkpoints: Checkpoints,
    log: "_Log",
    stop: StopSignal,
) -> int:
    """Update from step `start` to the last step, a limit or a signal, and set `history.stopped` to the reason.

    Returns the number of completed updates.
    """
    config, history = trainer.config, trainer.history
    step, clock = start, _Clock(history.seconds)
    while step < config.steps and not history.stopped:
        metrics = trainer.update(source.batch(step))
        step += 1
        checkpoints.check()  # raises if the workdir was deleted or a save in the background failed
        last = step == config.steps
        history.seconds = clock.seconds()
        if config.minutes and history.seconds > 60 * config.minutes:
            history.stopped = "minutes"
        if step % config.log_every == 0 or last:
            _refuse_divergence(step, metrics, checkpoints.latest)
            log.step(step, metrics, history.seconds)
        if trainer.has_held_out and config.eval_every and step % config.eval_every == 0 and not last:
            with clock.paused(), log.progress.paused():
                evaluation = trainer.evaluate()
            log.evaluation(step, evaluation, history.seconds, f"step {step} ({history.seconds:.0f} s)")
            if config.patience:
                trainer.record_best(evaluation["loss"])
                if history.bad >= config.patience:
                    history.stopped = "patience"
        if stop and not history.stopped and not last:  # otherwise the run ends anyway
            history.stopped = "signal"
        if (
            config.checkpoint_every
            and step % config.checkpoint_every == 0
            and not history.stopped
            and not last
        ):
            _refuse_divergence(step, metrics, checkpoints.latest)
            trainer.save(checkpoints, log.writer.lines)
    if step > start:
        _refuse_divergence(step, metrics, checkpoints.latest)
    history.stopped = history.stopped or "done"
    return step


def _finish(trainer: Trainer, decoder: Decoder, checkpoints: Checkpoints, log: "_Log") -> dict[str, float]:
    """Save the last checkpoint and put the final parameters into `decoder`; return their held-out metrics."""
    config, history = trainer.config, trainer.history
    stops_early = config.patience and trainer.has_held_out
    if stops_early and history.loss is not None and history.stopped in ("done", "minutes"):
        # `history.loss` is the lowest loss of the evaluations during training. The last parameters may have a lower one.
        last_loss = trainer.evaluate()["loss"]
        if last_loss < history.loss:
            history.loss, trainer.best_params = last_loss, trainer.state.params
    trainer.save(checkpoints, log.writer.lines)
    nnx.update(decoder, trainer.final_params)
    step = int(trainer.state.step)
    if history.stopped == "signal":
        log.progress.note(f"stopped after step {step} of {config.steps}; the same command continues")
        return {}
    evaluation = trainer.evaluate_final(decoder)
    if evaluation:
        log.evaluation(step, evaluation, history.seconds, f"end, step {step} ({history.stopped})")
    return evaluation


def _write_result(file: pathlib.Path, result: SFTResult) -> None:
    if jax.process_index() == 0:
        fields = {"step": result.step, "stopped": result.stopped, "evaluation": result.evaluation}
        with saving(file):
            write_atomically(file, json.dumps(fields, indent=2))


class _Clock:
    """Training time in seconds, without pauses, summed over a run and its restarts."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: training time before this start of the run."""
        self._earlier, self._began = seconds, time.monotonic()

    def seconds(self) -> float:
        """Return the training time so far."""
        return self._earlier + time.monotonic() - self._began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block."""
        paused_at = time.monotonic()
        yield
        self._began += time.monotonic() - paused_at


class _Log:
    """Writes the metrics of a run and shows its progress."""

    def __init__(self, config: SFTConfig, start: int, writer: MetricsWriter, progress: Progress) -> None:
        """`start`: updates that were completed before this start of the run."""
        self.writer, self.progress = writer, progress
        self._minutes, self._rate = config.minutes, make_schedule(config.optim)
        self._logged_step = start

    def step(self, step: int, metrics: Mapping[str, jax.Array], seconds: float) -> None:
        """Write the metrics of an update. `seconds`: training time so far."""
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        values["lr"] = float(self._rate(step - 1))
        self.writer.write(step, values)
        shown = {"loss": values["loss"], "lr": values["lr"]}
        seconds_left = None
        if self._minutes:
            shown["minutes"] = f"{seconds / 60:.1f}/{self._minutes:g}"
            seconds_left = 60 * self._minutes - seconds
        # The steps since the last line are assumed to have as many tokens as this one.
        tokens = values["tokens"] * (step - self._logged_step)
        self._logged_step = step
        self.progress.update(step, shown, tokens, seconds_left)

    def evaluation(self, step: int, evaluation: Mapping[str, float], seconds: float, heading: str) -> None:
        """Write the held-out metrics after `step` updates, and show them after `heading`."""
        values = {f"eval/{name}": value for name, value in evaluation.items()}
        self.writer.write(step, values | {"seconds": seconds})
        shown = " ".join(f"{name}={value:.3f}" for name, value in evaluation.items())
        self.progress.note(f"{heading}: {shown}")


def _refuse_divergence(step: int, metrics: Mapping[str, jax.Array], saved: int | None) -> None:
    """Raise UserError if the loss is not finite. Call it before saving, so that such parameters are never saved.

    `saved`: step of the latest checkpoint.
    """
    if not np.isfinite(loss := metrics["loss"].item()):
        latest = (
            f"the latest checkpoint is of step {saved}" if saved is not None else "there is no checkpoint yet"
        )
        raise UserError(
            f"step {step}: the loss is {loss}. Lower optim.lr, or check the weights that training starts from; {latest}"
        )
