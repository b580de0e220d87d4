"""What a run starts from (`Task`, `RunModels`), and how it ended (`Outcome`)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.models.decoder import Decoder
from rrl.models.heads import ValueModel
from rrl.recipes.base import NO_MODELS, ScoringContext
from rrl.retrieval.retriever import Retriever
from rrl.rollout.engine import Engine


@dataclasses.dataclass(frozen=True)
class Task:
    """The questions of a run, for training and for evaluation."""

    train: Sequence[Question]
    held_out: Sequence[Question]
    held_out_retriever: Retriever | None = None
    """Retriever over the corpus of the held-out questions; None: the engine's retriever."""


@dataclasses.dataclass(frozen=True)
class RunModels:
    """The models of a run."""

    engine: Engine
    """Samples episodes."""
    decoder: Decoder
    """Initial policy, and the frozen reference."""
    value_model: ValueModel | None = None
    """Initial critic, with `RLConfig.critic`."""
    scoring: ScoringContext = NO_MODELS
    """Models that the rewards use."""


@dataclasses.dataclass
class Outcome:
    """How a run ended."""

    step: int
    """Completed updates."""
    stopped: str
    """Why the run ended: "done" (all steps are completed), "signal" (SIGTERM or Ctrl-C) or "collapse" (its guard ended it)."""
    start_metrics: dict[str, float]
    """Held-out metrics of the initial policy."""
    final_metrics: dict[str, float]
    """Held-out metrics of the final policy."""
    seconds: float
    """Training time of all processes of the run, without evaluations."""
    last_trajectories: list[Trajectory]
    """The N trajectories of the last training step. If an earlier process finished the run, only those that
    `SavedTrajectories` saved for the report."""
    left_out: Bool[np.ndarray, "N"]
    """True for the trajectories of the last step that its update did not use."""
    eval_trajectories: list[Trajectory]
    """Trajectories of the last evaluation. If an earlier process did it, they are loaded from `SavedTrajectories`."""
    guard_message: str = ""
    """The guard's last message; "" if there was none."""
