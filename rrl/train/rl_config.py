"""Settings of a run of reinforcement learning."""

import dataclasses

from rrl.errors import UserError, at_least, at_most
from rrl.rl.critic import CriticConfig
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from rrl.train.guard import GuardConfig


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """Settings of one run of reinforcement learning."""

    steps: int
    """Updates; 0 only evaluates."""
    optim: OptimConfig
    objective: ObjectiveConfig
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    critic: CriticConfig | None = None
    """PPO: advantages come from a critic by GAE, and the recipe's own are not used; None: they are."""
    questions: int = 256
    """Questions a step."""
    samples: int = 5
    """Episodes a question: the group of GRPO."""
    rounds: int = 1
    """Above 1, dynamic sampling (DAPO): further questions are asked, at most so many times, until `questions` groups have
    rewards further apart than `drop_spread`; those are learned from."""
    overlong: tuple[int, ...] = ()
    """DAPO's rule for long outputs, (longest, cache) in policy tokens of an episode: its last `cache` tokens before `longest`
    take up to 1 from the reward (`rrl.rl.shaping.overlong_penalty`), in training only; empty: no such rule."""
    temperature: float = 1.0
    temperatures: tuple[float, ...] = ()
    """One for each of the samples of a question (R3-RAG), in place of `temperature`; empty: all have that."""
    seed: int = 0
    eval_every: int = 0
    """Steps between held-out evaluations; 0: before and after only."""
    eval_temperature: float = 0.0
    average_last: float = 0.0
    """Share of the updates, counted from the end, whose parameters are averaged (Polyak & Juditsky, 1992): the mean is
    what is evaluated and written, while episodes are sampled from the live parameters; 0: no averaging."""
    checkpoint_every: int = 20
    permute_rewards: bool = False
    """The control: rewards are dealt out at random over the batch (over each round of it), before anything is chosen by
    them, so that nothing can be learned from them."""

    def __post_init__(self) -> None:
        at_least(1, self, "questions", "samples", "rounds", "checkpoint_every", where="train.")
        at_least(0, self, "steps", "seed", "eval_every", "temperature", "eval_temperature", where="train.")
        at_most(2**32 - 1, self, "seed", where="train.")
        if self.temperatures and (len(self.temperatures) != self.samples or min(self.temperatures) < 0):
            raise UserError(
                f"train.temperatures={self.temperatures} must be {self.samples} numbers of at least 0, one for each of "
                f"train.samples={self.samples}; or none, for train.temperature"
            )
        if self.steps and self.samples == 1 and self.drop_spread is not None:
            raise UserError(
                "train.samples=1 gives groups of one, whose rewards never differ, so that nothing would be learned from: "
                f"raise it, or leave objective.drop_spread={self.objective.drop_spread} at None and "
                f"train.rounds={self.rounds} at 1"
            )
        if self.overlong and not (len(self.overlong) == 2 and 0 < self.overlong[1] <= self.overlong[0]):
            raise UserError(
                f"train.overlong={self.overlong} must be (longest, cache) with 0 < cache <= longest, in policy tokens of an "
                "episode; or (), for no such rule"
            )
        if not 0 <= self.average_last <= 1:
            raise UserError(
                f"train.average_last={self.average_last} must lie in 0..1, a share of the updates."
            )
        if self.steps and self.critic_warmup > self.steps:
            raise UserError(
                f"train.steps={self.steps} must be at least critic.warmup_steps={self.critic_warmup}: the policy "
                "waits for so many"
            )

    @property
    def critic_warmup(self) -> int:
        """Updates at the start in which only the critic learns."""
        return self.critic.warmup_steps if self.critic else 0

    @property
    def drop_spread(self) -> float | None:
        """Groups whose rewards lie within this of each other are not learned from; None: all are. Further rounds are asked
        for groups that tell something, so that they ask for unequal rewards at least."""
        return 0.0 if self.objective.drop_spread is None and self.rounds > 1 else self.objective.drop_spread

    @property
    def average_start(self) -> int:
        """Updates before the first whose parameters enter the mean."""
        return self.steps - round(self.average_last * self.steps)


MAY_DIFFER = ("checkpoint_every", "eval_every", "guard", "run.name", "run.data.path")
"""Fields that a continued run may change: they do not touch its numbers. The data are known by their content."""
MAY_GROW = ("steps", "optim.total_steps", "critic.optim.total_steps")
"""Fields that a continued run may raise: it goes on for longer, from where it was, by the schedules of the longer run."""
