"""DAPO's soft punishment of long outputs."""

import numpy as np
from jaxtyping import Float, Int

from rrl.errors import UserError


def overlong_penalty(lengths: Int[np.ndarray, "N"], longest: int, cache: int) -> Float[np.ndarray, "N"]:
    """What is added to the reward of long outputs: 0, then falling linearly to -1 over the last `cache` tokens.

    DAPO, Eq. 13 ("soft overlong punishment"). R2AG has the hard rule instead: what is cut earns 0.

    Args:
      lengths: policy tokens of each output.
      longest: L_max, beyond which the penalty is -1.
      cache: L_cache.
    """
    if not 0 < cache <= longest:
        raise UserError(
            f"cache={cache} must lie in 1..longest={longest}: the last tokens, which are penalised"
        )
    return np.clip((longest - cache - np.asarray(lengths, np.float64)) / cache, -1.0, 0.0)
