"""Watches a run for collapse: nothing earned any more, nothing left to chance, too far from the start, no finite number."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from rrl.errors import at_least, one_of

ACTIONS = ("off", "warn", "stop")


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """When a run counts as collapsed, and what happens then."""

    action: str = "warn"
    """"warn" says so in the log; "stop" ends the run at its last good checkpoint, or at its start; "off" does not look."""
    steps: int = 10
    """Steps in a row that a sign must last."""
    reward: float = 0.0
    """Mean total reward of a step at or below which nothing is earned."""
    entropy: float = 1e-3
    """Mean entropy of a policy token, in nats, at or below which nothing is left to chance."""
    kl: float = 10.0
    """Mean KL of a policy token from the reference, in nats, above which the policy has left it."""

    def __post_init__(self) -> None:
        one_of(ACTIONS, self, "action", where="guard.")
        at_least(1, self, "steps", where="guard.")
        at_least(0, self, "entropy", "kl", where="guard.")
        at_least(-math.inf, self, "reward", where="guard.")


class Guard:
    """Counts, for each sign of collapse, the steps in a row that show it."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._signs: dict[str, tuple[str, Callable[[float], bool]]] = {
            f"the reward is at most {config.reward:g}": ("reward/total", lambda x: not x > config.reward),
            f"the entropy is at most {config.entropy:g}": (
                "train/entropy",
                lambda x: not x > config.entropy,
            ),
            f"the KL from the reference is above {config.kl:g}": (
                "train/kl",
                lambda x: not x <= config.kl,
            ),
            "logits of the policy are not finite": ("train/not_finite", lambda x: x > 0),
            "no gradient is finite": ("train/grad_norm", lambda x: not math.isfinite(x)),
            "no gradient of the critic is finite": ("critic/grad_norm", lambda x: not math.isfinite(x)),
        }
        self._since: dict[str, list[int]] = {sign: [] for sign in self._signs}

    @property
    def sees_collapse(self) -> bool:
        """Whether the last step showed a sign."""
        return any(self._since.values())

    def check(self, step: int, metrics: Mapping[str, float]) -> str:
        """Takes the metrics of a finished step; says what has lasted for `steps` steps with this one, or "".

        A metric that the step does not have (nothing was learned) neither adds to its sign nor ends it.
        """
        if self.config.action == "off":
            return ""
        found = []
        for sign, (name, shown) in self._signs.items():
            if name not in metrics:
                continue
            since = self._since[sign] = [*self._since[sign], step] if shown(metrics[name]) else []
            if len(since) == self.config.steps:
                found.append(f"{sign} in each step from {since[0]} to {step}")
        return "; ".join(found)
