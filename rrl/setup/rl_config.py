"""The sections `train` and `guard` of a training config: `RLConfig` and `GuardConfig`."""

import dataclasses
import math

from rrl.errors import UserError, at_least, at_most, one_of
from rrl.rl.critic import CriticConfig
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig

ACTIONS = ("off", "warn", "stop")


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Thresholds of the signs of collapse, and what to do about a collapse."""

    action: str = "warn"
    """"warn" logs a warning. "stop" ends the run and restores its latest checkpoint without a sign of collapse, which may be
    the initial state. "off" checks nothing."""
    steps: int = 10
    """Consecutive steps for which a sign of collapse must last."""
    reward: float | None = 0.0
    """A mean total reward of a step at or below this is a sign of collapse; None: the reward is not checked. In a config the
    default is "auto": `Recipe.collapsed_reward` times `rewards.recipe_weight` (`rrl.setup.automatic.guard_reward`)."""
    entropy: float = 1e-3
    """A mean entropy per policy token at or below this, in nats, is a sign of collapse."""
    kl: float = 10.0
    """A mean KL from the reference per policy token above this, in nats, is a sign of collapse."""

    def __post_init__(self) -> None:
        one_of(ACTIONS, self, "action", where="guard.")
        at_least(1, self, "steps", where="guard.")
        at_least(0, self, "entropy", "kl", where="guard.")
        if self.reward is not None:
            at_least(-math.inf, self, "reward", where="guard.")


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """Settings of one reinforcement-learning run."""

    steps: int
    """Updates; 0 only evaluates."""
    optim: OptimConfig
    objective: ObjectiveConfig
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    critic: CriticConfig | None = None
    """PPO: advantages come from this critic by GAE, instead of from the recipe. None: the recipe computes them."""
    questions: int = 256
    """Questions per step."""
    samples: int = 5
    """Episodes per question: the group size G of GRPO."""
    rounds: int = 1
    """Largest number of sampling rounds per step. Above 1 it is dynamic sampling (DAPO): rounds continue until `questions`
    groups have rewards that differ by more than `drop_spread`, and the update uses only those groups."""
    overlong: tuple[int, ...] = ()
    """DAPO's soft overlong punishment, (longest, cache) in policy tokens per episode: a penalty of up to 1 that grows over the
    last `cache` tokens before `longest` (`rrl.rl.overlong.overlong_penalty`), in training only. Empty: no penalty."""
    temperature: float = 1.0
    """Sampling temperature of training episodes."""
    temperatures: tuple[float, ...] = ()
    """One temperature for each sample of a question (R3-RAG). Empty: `temperature` for all."""
    seed: int = 0
    """Seed of sampling, of the order of questions, and of the initial LoRA parameters."""
    eval_every: int = 0
    """Steps between held-out evaluations; 0: only before and after training."""
    eval_temperature: float = 0.0
    """Sampling temperature of held-out evaluations; 0: greedy."""
    average_last: float = 0.0
    """Share of the updates, counted from the end, over which parameters are averaged (Polyak & Juditsky, 1992). The mean is
    evaluated and saved as the policy; episodes are sampled from the current parameters. 0: no averaging."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    permute_rewards: bool = False
    """Control experiment: permute the rewards at random over the trajectories of a step (of each round with dynamic sampling),
    so that they carry no information. This happens before groups are selected."""

    def __post_init__(self) -> None:
        at_least(1, self, "questions", "samples", "rounds", "checkpoint_every", where="train.")
        at_least(0, self, "steps", "seed", "eval_every", "temperature", "eval_temperature", where="train.")
        at_most(2**32 - 1, self, "seed", where="train.")
        if self.temperatures and (len(self.temperatures) != self.samples or min(self.temperatures) < 0):
            raise UserError(
                f"train.temperatures={self.temperatures} must be {self.samples} numbers of at least 0, one for each of "
                f"train.samples={self.samples}; or empty, to use train.temperature"
            )
        if self.steps and self.samples == 1 and self.drop_spread is not None:
            raise UserError(
                "train.samples=1 gives groups of one, whose rewards never differ, so that every group would be dropped: "
                f"raise it, or set objective.drop_spread={self.objective.drop_spread} to None and "
                f"train.rounds={self.rounds} to 1"
            )
        if self.overlong and not (len(self.overlong) == 2 and 0 < self.overlong[1] <= self.overlong[0]):
            raise UserError(
                f"train.overlong={self.overlong} must be (longest, cache) with 0 < cache <= longest, in policy tokens of an "
                "episode; or (), for no penalty"
            )
        if not 0 <= self.average_last <= 1:
            raise UserError(
                f"train.average_last={self.average_last} must lie in 0..1, a share of the updates."
            )
        if self.steps and self.critic_warmup > self.steps:
            raise UserError(
                f"train.steps={self.steps} must be at least critic.warmup_steps={self.critic_warmup}, during which the policy "
                "is not updated"
            )

    @property
    def critic_warmup(self) -> int:
        """Updates at the start that train only the critic; 0 without a critic."""
        return self.critic.warmup_steps if self.critic else 0

    @property
    def drop_spread(self) -> float | None:
        """The update drops groups whose rewards differ by at most this; None: it uses all groups.

        It is `objective.drop_spread`, except that with several rounds None means 0: dynamic sampling needs groups with
        unequal rewards.
        """
        return 0.0 if self.objective.drop_spread is None and self.rounds > 1 else self.objective.drop_spread

    @property
    def average_start(self) -> int:
        """Number of updates before averaging starts. The mean is over the parameters after each later update."""
        return self.steps - round(self.average_last * self.steps)


MAY_DIFFER = ("checkpoint_every", "eval_every", "guard", "run.name", "run.data.path")
"""Fields of config.json that a continued run may change, since they do not affect its results. `run` is the run's identity: its
models and data. The data are identified by their content, not by their path."""
MAY_GROW = ("steps", "optim.total_steps", "critic.optim.total_steps")
"""Fields of config.json that a continued run may raise. It then continues with the learning-rate schedules of the longer run."""
