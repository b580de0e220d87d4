"""Detects the collapse of a run: no reward, no entropy, a large KL from the reference, or numbers that are not finite."""

import math
from collections.abc import Callable, Mapping

from rrl.setup.rl_config import GuardConfig


class Guard:
    """Counts the consecutive steps with each sign of collapse."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        # `not x > limit` is also true for NaN.
        self._signs: dict[str, tuple[str, Callable[[float], bool]]] = {
            f"the entropy is at most {config.entropy:g}": (
                "train/entropy",
                lambda x: not x > config.entropy,
            ),
            f"the KL from the reference is above {config.kl:g}": (
                "train/kl",
                lambda x: not x <= config.kl,
            ),
            "logits of the policy are not finite": ("train/not_finite", lambda x: x > 0),
            # The metric is a mean over the optimiser steps with a finite gradient. It is not finite if there is no such step.
            "no gradient is finite": ("train/grad_norm", lambda x: not math.isfinite(x)),
            "no gradient of the critic is finite": ("critic/grad_norm", lambda x: not math.isfinite(x)),
        }
        if (reward := config.reward) is not None:

            def is_low(x: float) -> bool:
                return not x > reward + 1e-8  # the mean of equal rewards may differ from them by rounding

            self._signs = {f"the reward is at most {reward:g}": ("reward/total", is_low), **self._signs}
        self._streaks: dict[str, list[int]] = {sign: [] for sign in self._signs}

    @property
    def sees_collapse(self) -> bool:
        """Whether any sign of collapse was present when its metric was last checked."""
        return any(self._streaks.values())

    def check(self, step: int, metrics: Mapping[str, float]) -> str:
        """Check the metrics of a completed step.

        A step without an update lacks some metrics. The counts of the signs that need these metrics stay unchanged.

        Returns:
            A description of the signs that have lasted for exactly `config.steps` steps now; "" if there are none.
        """
        if self.config.action == "off":
            return ""
        messages = []
        for sign, (name, is_sign) in self._signs.items():
            if name not in metrics:
                continue
            streak = self._streaks[sign] = [*self._streaks[sign], step] if is_sign(metrics[name]) else []
            if len(streak) == self.config.steps:
                messages.append(f"{sign} in each step from {streak[0]} to {step}")
        return "; ".join(messages)
