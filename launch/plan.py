"""Predicts whether a run fits: `python launch/plan.py --config=configs/rsearch_grpo.py:size=7b --topology=v5e:4x4`.

Compiles the run's programs for the given chips, which this machine need not have. Prints memory, communication, minimum time
and whether the run fits.
"""

import os
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from rrl.runs import launcher

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with its arguments after a colon.", lock_config=True
)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Chips, such as v5e:4x4, v5p:4x4x4, v6e:4x4, h100:8 or cpu:8."
)
_TOKENS = flags.DEFINE_integer(
    "tokens", 0, "Mean number of tokens per trajectory, which sets the time of a step; 0: half the context."
)
_POLICY_TOKENS = flags.DEFINE_integer(
    "policy_tokens",
    0,
    "Mean number of tokens per trajectory that the policy samples; 0: a quarter of --tokens.",
)
flags.mark_flags_as_required(["config", "topology"])


def main(_: Sequence[str]) -> None:
    """Plan the run and print the report; exit code 1 if the run does not fit."""
    from rrl.plan.capacity import plan_capacity
    from rrl.plan.report import report

    result = plan_capacity(
        _CONFIG.value,
        _TOPOLOGY.value or "",
        tokens=_TOKENS.value,
        policy_tokens=_POLICY_TOKENS.value,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(report(result))
    if not result.fits:
        sys.exit(1)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on this machine's accelerators
    launcher.run(main)
