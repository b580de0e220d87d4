"""Optimisers and learning-rate schedules, built with Optax from one config. Read `make_optimizer` first.

Muon orthogonalises the update of each weight matrix (Jordan et al., 2024); embeddings, norms and biases use AdamW. The
decoder stacks its layers on a leading axis, so a parameter of shape [L, D, F] is L matrices: the leading axis is a batch
axis. An optimiser step with a gradient that is not finite is skipped and counted.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from optax import contrib

from rrl.errors import UserError, at_least, at_most, one_of
from rrl.parallel.rules import optimizer_shardings

OPTIMIZERS = ("adamw", "muon", "sgd")
SCHEDULES = ("constant", "cosine", "linear")

MatrixRules = Sequence[tuple[str, tuple[tuple[int, ...], tuple[int, ...]] | None]]
"""(regex over the parameter's path, (input axes, output axes) counted from the end, or None if it is not a matrix)."""

MATRIX_RULES: MatrixRules = (
    (r"embedding$|norm$|bias$|head$", None),
    (r"/(q|k|v)$", ((-3,), (-2, -1))),
    (r"/o$", ((-3, -2), (-1,))),
    (r"/(gate|up|down)$", ((-2,), (-1,))),
)
"""Rules for the decoder's parameters. The first match wins; a parameter without a match is not a matrix. Axes that a rule
does not name, such as the leading layer axis, are batch axes."""


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """An optimiser and its learning-rate schedule."""

    name: str = "adamw"
    """One of adamw, muon, sgd."""
    lr: float = 1e-3
    """Peak learning rate. Muon's updates are scaled to the RMS size of Adam's (0.2), so that one learning rate fits both."""
    schedule: str = "constant"
    """Schedule after the warm-up: constant, cosine or linear; the latter two fall to final_ratio · lr."""
    final_ratio: float = 0.0
    """Final learning rate as a fraction of lr."""
    warmup_ratio: float = 0.0
    """Fraction of total_steps in which the rate rises linearly; R-Search uses 0.95."""
    warmup_steps: int = 0
    """Warm-up as a number of steps; set either this or warmup_ratio."""
    weight_decay: float = 0.0
    """Decoupled weight decay of adamw and muon, applied to matrices only; sgd has none."""
    b1: float = 0.9
    """Adam's decay of the first moment; for sgd the momentum."""
    b2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator of AdamW's update with name=adamw; muon uses Optax's default, 1e-8."""
    muon_beta: float = 0.95
    """Muon's momentum."""
    adam_lr: float | None = None
    """Peak learning rate of the parameters that use AdamW with name=muon; None: lr."""
    clip_norm: float | None = 1.0
    """Global gradient norm above which gradients are scaled down; None: no clipping."""
    frozen: tuple[str, ...] = ()
    """Regular expressions; a parameter whose path one of them matches is not trained. Example: "^embedding$"."""
    total_steps: int = 1000
    """Length of the schedule in optimiser steps; training commands set it."""

    def __post_init__(self) -> None:
        one_of(OPTIMIZERS, self, "name", where="optim.")
        one_of(SCHEDULES, self, "schedule", where="optim.")
        if self.warmup_ratio and self.warmup_steps:
            raise UserError(
                f"optim.warmup_ratio={self.warmup_ratio} and optim.warmup_steps={self.warmup_steps} are both given; set one to 0."
            )
        if not 0 <= self.warmup_ratio <= 1:
            raise UserError(f"optim.warmup_ratio={self.warmup_ratio} must lie in 0..1.")
        given = [name for name in ("adam_lr", "clip_norm") if getattr(self, name) is not None]
        fractions = ("final_ratio", "b1", "b2", "muon_beta")
        at_least(0, self, "lr", "warmup_steps", "weight_decay", "eps", *given, *fractions, where="optim.")
        at_most(1, self, *fractions, where="optim.")
        for field in ("b1", "b2", "muon_beta"):
            if getattr(self, field) == 1:
                raise UserError(f"optim.{field}=1 must be below 1: with 1 the running mean never changes")
        if self.eps == 0:
            raise UserError("optim.eps=0 must be above 0: a parameter without a gradient would become 0/0")
        at_least(1, self, "total_steps", where="optim.")
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"optim.frozen={self.frozen}: {pattern!r} is not a regular expression: {error}"
                ) from error

    @property
    def warmup(self) -> int:
        """Number of steps of the warm-up."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * self.total_steps)


def make_schedule(
    config: OptimConfig, peak: float | None = None
) -> Callable[[Int[Array, ""] | int], Float[Array, ""]]:
    """Returns the learning rate as a function of the optimiser step's number, from 0.

    The warm-up is (step + 1) / warmup. So the first update has a rate above 0, and the last warm-up step has the peak rate.

    Args:
      config: the schedule.
      peak: peak learning rate; None: `config.lr`.
    """
    peak = config.lr if peak is None else peak

    def rate(step: Int[Array, ""] | int) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        progress = jnp.clip((step - config.warmup) / max(1, config.total_steps - config.warmup), 0, 1)
        if config.schedule == "cosine":
            fall = config.final_ratio + (1 - config.final_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif config.schedule == "linear":
            fall = 1 - (1 - config.final_ratio) * progress
        else:
            fall = jnp.float32(1.0)
        return peak * rise * fall

    return rate


def path_name(path: tuple[Any, ...]) -> str:
    """Formats a pytree path as "layers/q". The last key of an `nnx.Variable`'s path, "value", is dropped."""
    parts = (str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)
    return "/".join(p for p in parts if p != "value")


def matrix_dimensions(params: Any, rules: MatrixRules = MATRIX_RULES) -> Any:
    """The matrix axes of each parameter, as optax's Muon takes them; None for a parameter that is not a matrix."""

    def axes_of(path: tuple[Any, ...], leaf: Any) -> contrib.MuonDimensionNumbers | None:
        for pattern, axes in rules:
            if re.search(pattern, path_name(path)):
                if axes is None or leaf.ndim < len(axes[0]) + len(axes[1]):
                    return None
                return contrib.MuonDimensionNumbers(reduction_axis=axes[0], output_axis=axes[1])
        return None

    return jax.tree_util.tree_map_with_path(axes_of, params)


def make_optimizer(config: OptimConfig, rules: MatrixRules = MATRIX_RULES) -> optax.GradientTransformation:
    """Builds the optimiser: gradient clipping, then the update rule with its schedule.

    Steps with a gradient that is not finite are skipped; `skipped_updates` reads their number from the state.
    """
    rate = make_schedule(config)

    def dimensions(params: Any) -> Any:
        return matrix_dimensions(params, rules)

    def decay_mask(params: Any) -> Any:
        return jax.tree.map(
            lambda _, d: d is not None, params, dimensions(params), is_leaf=lambda x: x is None
        )

    if config.name == "muon":
        rule = contrib.muon(
            rate,
            beta=config.muon_beta,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_learning_rate=make_schedule(config, config.lr if config.adam_lr is None else config.adam_lr),
            muon_weight_dimension_numbers=dimensions,
            consistent_rms=0.2,
        )
    elif config.name == "adamw":
        rule = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    else:
        rule = optax.sgd(rate, momentum=config.b1 or None)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    rule = optax.chain(clip, rule)
    # After this many skipped updates in a row optax would apply one; the number is too large to be reached.
    return optax.apply_if_finite(rule, max_consecutive_errors=2**31 - 2)


def split_trained(module: nnx.Module, frozen: Sequence[str] = ()) -> tuple[Any, nnx.State, nnx.State]:
    """Splits a module into its graph, its trained parameters and its frozen parameters.

    If the module has adapters (`nnx.LoRAParam`), only they are trained.

    Args:
      module: the model.
      frozen: as `OptimConfig.frozen`.

    Raises:
      UserError: a pattern in `frozen` matches no parameter.
    """
    state = dict(nnx.to_flat_state(nnx.state(module)))
    paths = ["/".join(map(str, path)) for path in state]
    unmatched = [pattern for pattern in frozen if not any(re.search(pattern, path) for path in paths)]
    if unmatched:
        raise UserError(
            f"optim.frozen={unmatched} match no parameter; the parameters are {', '.join(paths)}."
        )
    kind = nnx.LoRAParam if any(isinstance(leaf, nnx.LoRAParam) for leaf in state.values()) else nnx.Param

    def trained(path: tuple[Any, ...], leaf: Any) -> bool:
        name = "/".join(map(str, path))
        return issubclass(getattr(leaf, "type", type(leaf)), kind) and not any(
            re.search(p, name) for p in frozen
        )

    return nnx.split(module, trained, ...)


def init_optimizer(
    optimizer: optax.GradientTransformation, params: Any, mesh: Mesh | None = None
) -> optax.OptState:
    """The optimiser's initial state; on a mesh of several devices it is sharded like the parameters."""
    if mesh is None or mesh.size == 1:
        return optimizer.init(params)
    shardings = optimizer_shardings(jax.eval_shape(optimizer.init, params), mesh)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


@jax.jit
def running_mean(mean: Any, params: Any, count: Int[Array, ""] | int) -> Any:
    """Adds a pytree to a running mean.

    Args:
      mean: the mean of the first `count` - 1 pytrees.
      params: the pytree to add.
      count: number of pytrees in the result, `params` included.
    """
    return optax.incremental_update(params, mean, 1 / jnp.asarray(count, jnp.float32))


def applied_updates(state: optax.OptState) -> int:
    """Number of optimiser steps since the start, without skipped ones; the schedule counts these."""
    counts = optax.tree_utils.tree_get_all_with_path(state, "count")
    return max((int(count) for _, count in counts), default=0)


def skipped_updates(state: optax.ApplyIfFiniteState) -> Int[Array, ""]:
    """Number of optimiser steps skipped since the start because their gradient was not finite."""
    return state.total_notfinite
