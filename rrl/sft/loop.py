"""Supervised training on packed rows. Pretraining on text and fine-tuning on demonstrations use the same loop.

Read `train` first.
"""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from rrl.data.examples import Example
from rrl.errors import UserError, at_least, at_most
from rrl.files import saving, write_atomically
from rrl.models.decoder import Decoder, cast_params
from rrl.parallel.mesh import put_rows, use_mesh
from rrl.parallel.rules import constrain_state
from rrl.rl.batch import Batch
from rrl.rl.logprobs import token_logprobs
from rrl.rl.optim import (
    OptimConfig,
    init_optimizer,
    make_optimizer,
    make_schedule,
    skipped_updates,
    split_trained,
)
from rrl.rl.packing import pack
from rrl.runs.checkpoints import Checkpoints
from rrl.runs.metrics import MetricsWriter
from rrl.runs.progress import Progress
from rrl.sft.sources import BatchSource
from rrl.stopping import stop_requested


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Settings of one supervised training run."""

    steps: int
    """Updates."""
    optim: OptimConfig
    rows: int = 16
    """Rows per step. A row holds one or more packed examples."""
    row_length: int = 512
    """Tokens per row."""
    chunk: int = 1024
    """Positions whose logits are computed at a time, which bounds memory. Chunks without a target are skipped."""
    seed: int = 0
    """Seed of initial parameters and data."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    patience: int = 0
    """Early stopping: end after this many evaluations without a lower held-out loss, with the best parameters; 0: never."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end and after SIGTERM."""
    minutes: float = 0.0
    """Limit of training time in minutes; 0: no limit. The run ends at the first step that exceeds it. Evaluations do not count.
    With a limit the result is not bitwise reproducible."""

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "row_length", "chunk", "log_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1.")
        at_least(0, self, "seed", "eval_every", "patience", "checkpoint_every", "minutes")
        at_most(2**32 - 1, self, "seed")


MAY_DIFFER = ("log_every", "checkpoint_every", "run.data.path", "run.data.encoder", "run.tokenizer")
"""Fields that a continued run may change, since they do not affect its results. Data, encoder and tokenizer are identified by
their content, not by their paths."""
MAY_GROW = ("steps", "optim.total_steps", "eval_every")
"""Fields that a continued run may raise. It then continues with the learning-rate schedule of the longer run."""


def learned_params_path(settings: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the path of the final parameters in a checkpoint's state, as `jax.tree_util.keystr` writes it.

    The state is (TrainState, best parameters). The final parameters are the best ones with `patience`, else the last ones.
    """
    return "[1]" if settings["patience"] and metadata["loss"] is not None else "[0].params"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    params: nnx.State
    """The trained parameters."""
    opt_state: optax.OptState
    step: jax.Array
    """Completed updates."""


@dataclasses.dataclass(frozen=True)
class SFTResult:
    """How a supervised run ended."""

    step: int
    """Completed updates."""
    evaluation: dict[str, float]
    """Held-out metrics of the final parameters; empty after a signal or without held-out examples."""
    stopped: str
    """Reason of the end: done, patience, minutes or signal."""


def loss_sums(decoder: Decoder, batch: Batch, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihood summed over the targets, and the number of targets."""
    scores = token_logprobs(decoder, batch, chunk=chunk)
    return -scores.logp.sum(), batch.loss_mask[:, 1:].sum()


def make_update(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, chunk: int
) -> Callable[..., Any]:
    """Return the jitted update: (state, fixed, batch) -> (state, metrics). It donates the buffers of the old state.

    `fixed` holds the frozen parameters. `graph` and `fixed` come from `rrl.rl.optim.split_trained`.
    """

    def loss(params: nnx.State, fixed: nnx.State, batch: Batch) -> jax.Array:
        total, count = loss_sums(nnx.merge(graph, params, fixed), batch, chunk)
        return total / jnp.maximum(count, 1)

    def update(state: TrainState, fixed: nnx.State, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        value, grads = jax.value_and_grad(loss)(state.params, fixed, batch)
        grads = constrain_state(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": value,
            "grad_norm": optax.global_norm(grads),
            "skipped": skipped_updates(opt_state),
            "tokens": (batch.segment_ids > 0).sum(),
            "targets": batch.loss_mask.sum(),
        }
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics

    return jax.jit(update, donate_argnums=0)


class Evaluator:
    """Computes held-out loss, token accuracy and exact match of whole responses over named sets of examples.

    A response matches if each of its targets is the most probable token given the true text before it (teacher forcing).
    Greedy decoding would reproduce exactly these responses.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[Example]],
        rows: int,
        row_length: int,
        chunk: int,
        mesh: Mesh | None = None,
    ) -> None:
        self._mesh = mesh
        self._sets = {}
        for name, examples in sets.items():
            packed = pack([e.tokens for e in examples], [e.loss for e in examples], row_length, multiple=rows)
            self._sets[name] = (packed, [len(e) for e in examples])
        self._rows = rows

        @jax.jit
        def scores(decoder: Decoder, batch: Batch) -> tuple[jax.Array, jax.Array]:
            out = token_logprobs(decoder, batch, chunk=chunk, greedy=True)
            return out.logp, out.greedy

        self._scores = scores

    def __call__(self, decoder: Decoder) -> dict[str, float]:
        """Return "loss", "accuracy" (of tokens) and "match" (of responses) over all sets, and "match/NAME" of each set."""
        totals = np.zeros(3)
        matches: dict[str, float] = {}
        all_matches = []
        for name, (packed, lengths) in self._sets.items():
            batch = packed.batch
            parts = []
            for at in range(0, len(batch.tokens), self._rows):
                part = jax.tree.map(lambda x, at=at: x[at : at + self._rows], batch)
                with use_mesh(self._mesh):
                    parts.append(jax.device_get(self._scores(decoder, put_rows(part, self._mesh))))
            logp, greedy = (np.concatenate(p) for p in zip(*parts, strict=True))
            totals += [
                -logp[batch.loss_mask].sum(dtype=np.float64),
                greedy[batch.loss_mask].sum(),
                batch.loss_mask.sum(),
            ]
            set_matches = [
                g[m].all()
                for g, m in zip(
                    packed.unpack(greedy, lengths), packed.unpack(batch.loss_mask, lengths), strict=True
                )
            ]
            matches[f"match/{name}"] = float(np.mean(set_matches))
            all_matches += set_matches
        count = max(1.0, totals[2])
        return {
            "loss": totals[0] / count,
            "accuracy": totals[1] / count,
            "match": float(np.mean(all_matches)),
            **matches,
        }


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
    graph, params, fixed = split_trained(decoder, config.optim.frozen)
    fixed = cast_params(fixed, decoder.dtype)
    nnx.update(decoder, fixed)  # frees the copy in the wider dtype
    optimizer = make_optimizer(config.optim)
    state = TrainState(params, init_optimizer(optimizer, params, mesh), jnp.zeros((), jnp.int32))
    update = make_update(graph, optimizer, config.chunk)
    rate = make_schedule(config.optim)
    evaluate = Evaluator(held_out, config.rows, config.row_length, config.chunk, mesh) if held_out else None
    settings = dataclasses.asdict(config) | {"run": dict(identity or {})}
    # Metadata of checkpoints. loss: lowest held-out loss; bad: evaluations since the lowest loss; seconds: training time;
    # lines: lines of metrics.jsonl.
    metadata: dict[str, Any] = {"loss": None, "bad": 0, "seconds": 0.0, "lines": 0}
    with Checkpoints(workdir, settings, 2, MAY_DIFFER, MAY_GROW) as checkpoints, stop_requested() as stop:
        best_params = jax.tree.map(jnp.copy, params) if config.patience else None
        if checkpoints.latest is not None:
            (state, best_params), metadata = checkpoints.restore(
                (state, best_params), required_fields=("loss", "bad", "seconds")
            )
        start = int(state.step)
        if metadata.get("stopped") == "done" and start < config.steps:  # the run was extended
            del metadata["stopped"]
        stopped = metadata.get("stopped") or ""
        with (
            MetricsWriter(workdir, start, metadata.get("lines")) as writer,
            Progress(config.steps, start, "sft") as progress,
        ):
            if start:
                words = "finished already," if stopped else "continues"
                progress.note(f"{words} after step {start} of {config.steps}")
            began, tokens, step = time.monotonic(), 0, start
            spent = metadata["seconds"]
            while step < config.steps and not stopped:
                with use_mesh(mesh):
                    state, metrics = update(state, fixed, put_rows(source.batch(step), mesh))
                step += 1
                checkpoints.check()
                last = step == config.steps
                metadata["seconds"] = spent + time.monotonic() - began
                if config.minutes and metadata["seconds"] > 60 * config.minutes:
                    stopped = "minutes"
                if step % config.log_every == 0 or last:
                    _refuse_divergence(step, metrics, checkpoints.latest)
                    host = {k: v.item() for k, v in jax.device_get(metrics).items()} | {
                        "lr": float(rate(step - 1))
                    }
                    # Tokens since the last line, if each step has as many as this one. The first line follows `start`.
                    tokens = host["tokens"] * (step - start if not tokens else config.log_every)
                    writer.write(step, host)
                    shown = {"loss": host["loss"], "lr": host["lr"]}
                    if config.minutes:
                        shown["minutes"] = f"{metadata['seconds'] / 60:.1f}/{config.minutes:g}"
                    progress.update(
                        step,
                        shown,
                        tokens,
                        60 * config.minutes - metadata["seconds"] if config.minutes else None,
                    )
                if evaluate and config.eval_every and step % config.eval_every == 0 and not last:
                    paused = time.monotonic()
                    with progress.paused():
                        evaluation = evaluate(nnx.merge(graph, state.params, fixed))
                    began += time.monotonic() - paused
                    writer.write(
                        step,
                        {f"eval/{k}": v for k, v in evaluation.items()} | {"seconds": metadata["seconds"]},
                    )
                    progress.note(f"step {step} ({metadata['seconds']:.0f} s): {_format_metrics(evaluation)}")
                    if config.patience:
                        if metadata["loss"] is None or evaluation["loss"] < metadata["loss"]:
                            metadata |= {"loss": evaluation["loss"], "bad": 0}
                            best_params = jax.tree.map(jnp.copy, state.params)
                        else:
                            metadata["bad"] += 1
                        if metadata["bad"] >= config.patience:
                            stopped = "patience"
                if stop and not stopped and not last:  # otherwise the run ends anyway
                    stopped = "signal"
                    break
                if (
                    config.checkpoint_every
                    and step % config.checkpoint_every == 0
                    and not stopped
                    and not last
                ):
                    _refuse_divergence(step, metrics, checkpoints.latest)
                    checkpoints.save(step, (state, best_params), metadata | {"lines": writer.lines})
            if stopped != "signal":
                metadata["stopped"] = stopped = stopped or "done"
            if (
                config.patience
                and metadata["loss"] is not None
                and evaluate
                and stopped in ("done", "minutes")
            ):
                last_evaluation = evaluate(nnx.merge(graph, state.params, fixed))
                if last_evaluation["loss"] < metadata["loss"]:
                    metadata["loss"], best_params = last_evaluation["loss"], state.params
            if step > start:
                _refuse_divergence(step, metrics, checkpoints.latest)
            checkpoints.save(step, (state, best_params), metadata | {"lines": writer.lines})
            final = best_params if config.patience and metadata["loss"] is not None else state.params
            nnx.update(decoder, final)
            evaluation = evaluate(decoder) if evaluate and stopped != "signal" else {}
            if stopped == "signal":
                progress.note(f"stopped after step {step} of {config.steps}; the same command continues")
            if evaluation:
                writer.write(
                    step, {f"eval/{k}": v for k, v in evaluation.items()} | {"seconds": metadata["seconds"]}
                )
                progress.note(f"end, step {step} ({stopped}): {_format_metrics(evaluation)}")
    file = pathlib.Path(workdir, "result.json")
    if jax.process_index() == 0:
        with saving(file):
            write_atomically(
                file, json.dumps({"step": step, "stopped": stopped, "evaluation": evaluation}, indent=2)
            )
    return SFTResult(step, evaluation, stopped)


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


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.3f}" for name, value in metrics.items())
