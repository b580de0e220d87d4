"""Optimisers and learning-rate schedules: one config, Optax underneath.

Muon orthogonalises the update of each weight *matrix* (Jordan et al., 2024); embeddings, norms and biases go to AdamW. Our
decoder stacks its layers on a leading axis, so that a parameter of shape [L, D, F] is L matrices: the leading axis is a batch
axis, never part of the matrix. A gradient that is not finite leaves parameters and optimiser state as they were and is counted.
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
"""(regex over the parameter's path, (input axes, output axes) counted from the end, or None for "not a matrix")."""

MATRIX_RULES: MatrixRules = (
    (r"embedding$|norm$|bias$|head$", None),
    (r"/(q|k|v)$", ((-3,), (-2, -1))),
    (r"/o$", ((-3, -2), (-1,))),
    (r"/(gate|up|down)$", ((-2,), (-1,))),
)
"""Of our decoder's parameters; first match wins, a parameter without a match is no matrix. Axes named on neither side (the
leading layer axis) are batch axes."""


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """An optimiser with its schedule."""

    name: str = "adamw"
    """One of adamw, muon, sgd."""
    lr: float = 1e-3
    """Peak learning rate. For Muon: of the matrices, with updates scaled to the RMS size of Adam's (0.2), so that one
    learning rate fits both."""
    schedule: str = "constant"
    """What follows the warm-up: constant, cosine (to final_ratio · lr) or linear (likewise)."""
    final_ratio: float = 0.0
    warmup_ratio: float = 0.0
    """Share of total_steps in which the rate rises linearly; R-Search uses 0.95."""
    warmup_steps: int = 0
    """The same as a number of steps; give one of the two."""
    weight_decay: float = 0.0
    """Decoupled; on matrices only."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    muon_beta: float = 0.95
    adam_lr: float | None = None
    """Rate of the parameters that Muon leaves to AdamW; None: lr."""
    clip_norm: float | None = 1.0
    """Global gradient norm above which gradients are scaled down; None: never."""
    frozen: tuple[str, ...] = ()
    """Parameters that keep their values: regular expressions searched in their paths, such as "^embedding$"."""
    total_steps: int = 1000

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
        shares = ("final_ratio", "b1", "b2", "muon_beta")
        at_least(0, self, "lr", "warmup_steps", "weight_decay", "eps", *given, *shares, where="optim.")
        at_most(1, self, *shares, where="optim.")
        for field in ("b1", "b2", "muon_beta"):
            if getattr(self, field) == 1:
                raise UserError(f"optim.{field}=1 must be below 1: a mean that takes in nothing new")
        if self.eps == 0:
            raise UserError("optim.eps=0 must be above 0: a parameter without a gradient would become 0/0")
        at_least(1, self, "total_steps", where="optim.")
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"optim.frozen={self.frozen}: {pattern!r} is no regular expression: {error}"
                ) from error

    @property
    def warmup(self) -> int:
        """Number of steps of the warm-up."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * self.total_steps)


def make_schedule(
    config: OptimConfig, peak: float | None = None
) -> Callable[[Int[Array, ""] | int], Float[Array, ""]]:
    """The learning rate of update `step` (from 0).

    It rises as (step + 1) / warmup, so that the first update is not lost and the last one of a run that is all warm-up has
    the peak rate.
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
    """A pytree path as "layers/attention/query/kernel"."""
    parts = (str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)
    return "/".join(p for p in parts if p != "value")


def matrix_dimensions(params: Any, rules: MatrixRules = MATRIX_RULES) -> Any:
    """For each parameter the axes that form its matrix, or None where it is none (the form that optax's Muon wants)."""

    def of(path: tuple[Any, ...], leaf: Any) -> contrib.MuonDimensionNumbers | None:
        for pattern, axes in rules:
            if re.search(pattern, path_name(path)):
                if axes is None or leaf.ndim < len(axes[0]) + len(axes[1]):
                    return None
                return contrib.MuonDimensionNumbers(reduction_axis=axes[0], output_axis=axes[1])
        return None

    return jax.tree_util.tree_map_with_path(of, params)


def make_optimizer(config: OptimConfig, rules: MatrixRules = MATRIX_RULES) -> optax.GradientTransformation:
    """The optimiser of a config: clip, rule, schedule; updates that are not finite are skipped and counted.

    The skipped updates of its state are read with `skipped_updates`.
    """
    rate = make_schedule(config)

    def dimensions(params: Any) -> Any:
        return matrix_dimensions(params, rules)

    def decayed(params: Any) -> Any:
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
            rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed
        )
    else:
        rule = optax.sgd(rate, momentum=config.b1 or None)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    rule = optax.chain(clip, rule)
    # optax gives up after so many bad updates in a row; the count of a run never reaches this.
    return optax.apply_if_finite(rule, max_consecutive_errors=2**31 - 2)


def split_trained(module: nnx.Module, frozen: Sequence[str] = ()) -> tuple[Any, nnx.State, nnx.State]:
    """A module's graph, the parameters that training changes, and the others, which need no gradient and no state.

    Where there are adapters (`nnx.LoRAParam`), they alone are trained. `frozen` is `OptimConfig.frozen`; UserError for a
    pattern that matches no parameter.
    """
    state = dict(nnx.to_flat_state(nnx.state(module)))
    paths = ["/".join(map(str, path)) for path in state]
    idle = [pattern for pattern in frozen if not any(re.search(pattern, path) for path in paths)]
    if idle:
        raise UserError(f"optim.frozen={idle} match no parameter; there are {', '.join(paths)}.")
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
    """The optimiser's first state, on a mesh of several devices made where its parameters lie."""
    if mesh is None or mesh.size == 1:
        return optimizer.init(params)
    places = optimizer_shardings(jax.eval_shape(optimizer.init, params), mesh)
    return jax.jit(optimizer.init, out_shardings=places)(params)


@jax.jit
def running_mean(mean: Any, params: Any, count: Int[Array, ""] | int) -> Any:
    """The mean of `count` pytrees from that of the first count - 1 and the last one; of one, that one."""
    return optax.incremental_update(params, mean, 1 / jnp.asarray(count, jnp.float32))


def taken_updates(state: optax.OptState) -> int:
    """How many updates were taken since the start: what the schedule counts. Skipped ones are none."""
    counts = optax.tree_utils.tree_get_all_with_path(state, "count")
    return max((int(count) for _, count in counts), default=0)


def skipped_updates(state: optax.ApplyIfFiniteState) -> Int[Array, ""]:
    """How many updates were skipped since the start because their gradient was not finite."""
    return state.total_notfinite
