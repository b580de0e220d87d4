"""What an RL run writes at its end: policy, curves, trajectories and summary. Read `write_report` first."""

import importlib.metadata
import pathlib
import shlex
import sys
import time
from typing import Any

import jax

from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import save_trajectories
from rrl.files import saving, write_atomically
from rrl.models.hf import folder_hash, save_decoder
from rrl.recipes.card import RecipeCard, make_card, write_card
from rrl.report.article import HELD_OUT, TRAINING, UNUSED
from rrl.report.curves import plot_training
from rrl.report.summary import summary
from rrl.report.trajectories_html import write_html
from rrl.runs.metrics import read_metrics
from rrl.runs.saved_trajectories import MAX_PER_SOURCE
from rrl.runs.timed_log import TimedLog
from rrl.setup.settings import TrainSettings
from rrl.train.components import TrainComponents
from rrl.train.task import Outcome


def write_report(
    settings: TrainSettings, loaded: TrainComponents, outcome: Outcome, workdir: pathlib.Path, log: TimedLog
) -> None:
    """Write policy, curves, trajectories and, for a finished run, the summary; print the summary.

    All processes take part in writing the policy, which is sharded over them; the first process does the rest.
    """
    with saving(workdir / "policy"):
        save_decoder(workdir / "policy", loaded.decoder, loaded.tokenizer)
    if jax.process_index() != 0:
        return
    with saving(workdir / "policy"):
        write_card(workdir / "policy", recipe_card(settings))
    metrics_lines = read_metrics(workdir / "metrics.jsonl")
    with saving(workdir / "curves.png"):
        plot_training(
            metrics_lines,
            workdir / "curves.png",
            f"Training of {settings.name}",
            settings.train.eval_temperature,
            settings.recipe.curves,
        )
    _write_trajectories(settings, loaded, outcome, workdir)
    outputs = [workdir / name for name in ("curves.png", "trajectories.html", "metrics.jsonl", "policy")]
    files = [str(file) for file in outputs if file.exists()]
    text = summary(
        outcome.start_metrics,
        outcome.final_metrics,
        facts=_facts(settings, outcome, log),
        reference=settings.reference,
        temperature=settings.train.eval_temperature,
        files=files,
        questions=len(loaded.task.held_out),
        note=settings.note,
    )
    if outcome.stopped != "signal":
        with saving(workdir / "summary.txt"):
            write_atomically(workdir / "summary.txt", text + "\n")
    print(text)


def recipe_card(settings: TrainSettings) -> RecipeCard:
    """Return the recipe card, which records for later evaluation how the policy was trained."""
    return make_card(settings.recipe, settings.rollout.context, settings.rollout.top_k)


def page_trajectories(outcome: Outcome) -> list[tuple[Trajectory, str]]:
    """Return the trajectories of trajectories.html, each with its source: held-out ones, then the last training step's."""
    held_out = [(trajectory, HELD_OUT) for trajectory in outcome.eval_trajectories]
    trained = [
        (trajectory, UNUSED if left_out else TRAINING)
        for trajectory, left_out in zip(outcome.last_trajectories, outcome.left_out, strict=True)
    ]
    return held_out[:MAX_PER_SOURCE] + trained[:MAX_PER_SOURCE]


def _write_trajectories(
    settings: TrainSettings, loaded: TrainComponents, outcome: Outcome, workdir: pathlib.Path
) -> None:
    """Write trajectories.jsonl (the last evaluation) and trajectories.html (`page_trajectories`), each if it has any."""
    on_page = page_trajectories(outcome)
    if outcome.eval_trajectories:
        with saving(workdir / "trajectories.jsonl"):
            save_trajectories(workdir / "trajectories.jsonl", outcome.eval_trajectories)
    if on_page:
        with saving(workdir / "trajectories.html"):
            write_html(
                [trajectory for trajectory, _ in on_page],
                workdir / "trajectories.html",
                title=f"{settings.name}: step {outcome.step}",
                tags=settings.recipe.tags,
                token_bytes=loaded.engine.bytes,
                sources=[source for _, source in on_page],
            )


def _facts(settings: TrainSettings, outcome: Outcome, log: TimedLog) -> dict[str, Any]:
    """Return facts about the run for its summary, by label."""
    return {
        "steps": f"{outcome.step} of {settings.train.steps} "
        f"({outcome.stopped}{outcome.guard_message and f': {outcome.guard_message}'})",
        "minutes": f"{outcome.seconds / 60:.1f} of training, {(time.perf_counter() - log.began) / 60:.1f} of this command",
        "policy": f"{settings.policy} (sha256 {folder_hash(settings.policy)[:12]})",
        "retriever": f"{settings.retriever.index or settings.retriever.kind}, top {settings.rollout.top_k}",
        "seed": settings.train.seed,
        "versions": ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "flax", "optax")),
        "command": shlex.join(["python", *sys.argv]),
    }
