"""DAPO's soft penalty for long outputs."""

import numpy as np
from jaxtyping import Float, Int

from rrl.errors import UserError


def overlong_penalty(lengths: Int[np.ndarray, "N"], longest: int, cache: int) -> Float[np.ndarray, "N"]:
    """Reward penalty of long outputs: 0, then falling linearly to -1 over the last `cache` tokens before `longest`.

    Source: DAPO, Eq. 13 ("soft overlong punishment"). R2AG has a hard rule instead: an output that is cut earns 0.

    Args:
      lengths: number of policy tokens of each output.
      longest: L_max, from which on the penalty is -1.
      cache: L_cache, the length of the ramp in tokens.

    Raises:
      UserError: `cache` is not in 1..longest.
    """
    if not 0 < cache <= longest:
        raise UserError(
            f"cache={cache} must lie in 1..longest={longest}: it is the number of last tokens over which the penalty grows"
        )
    return np.clip((longest - cache - np.asarray(lengths, np.float64)) / cache, -1.0, 0.0)
