"""One update of supervised training, and the state of a run that its checkpoints store. Read `Trainer` first."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from rrl.data.examples import Example
from rrl.models.decoder import Decoder, cast_params
from rrl.parallel.mesh import put_rows, use_mesh
from rrl.parallel.rules import constrain_state
from rrl.rl.batch import Batch
from rrl.rl.logprobs import token_logprobs
from rrl.rl.optim import init_optimizer, make_optimizer, skipped_updates, split_trained
from rrl.runs.checkpoints import Checkpoints
from rrl.sft.config import SFTConfig
from rrl.sft.evaluator import Evaluator


def learned_params_path(settings: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the path of the final parameters in a checkpoint's arrays, as `jax.tree_util.keystr` writes it.

    The arrays are (TrainState, best parameters), and `metadata` holds the fields of `History`. The final parameters are the best
    ones with `patience`, else the last ones.
    """
    return "[1]" if settings["patience"] and metadata["loss"] is not None else "[0].params"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    params: nnx.State
    """The trained parameters."""
    opt_state: optax.OptState
    step: jax.Array
    """Completed updates."""


def loss_sums(decoder: Decoder, batch: Batch, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihood summed over the targets, and the number of targets."""
    logprobs = token_logprobs(decoder, batch, chunk=chunk)
    return -logprobs.logp.sum(), batch.loss_mask[:, 1:].sum()


def make_update(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, chunk: int
) -> Callable[..., Any]:
    """Return the jitted update: (state, frozen, batch) -> (state, metrics). It donates the buffers of the old state.

    `graph` and the frozen parameters `frozen` come from `rrl.rl.optim.split_trained`.
    """

    def loss(params: nnx.State, frozen: nnx.State, batch: Batch) -> jax.Array:
        total, count = loss_sums(nnx.merge(graph, params, frozen), batch, chunk)
        return total / jnp.maximum(count, 1)

    def update(state: TrainState, frozen: nnx.State, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        value, grads = jax.value_and_grad(loss)(state.params, frozen, batch)
        grads = constrain_state(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": value,
            "grad_norm": optax.global_norm(grads),
            "skipped": skipped_updates(opt_state),
            "tokens": (batch.segment_ids > 0).sum(),
            "targets": batch.loss_mask.sum(),
        }
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics

    return jax.jit(update, donate_argnums=0)


@dataclasses.dataclass
class History:
    """What a run remembers besides its arrays. The field names are keys of the checkpoints' metadata."""

    loss: float | None = None
    """Early stopping: the lowest held-out loss; None before the first evaluation."""
    bad: int = 0
    """Early stopping: evaluations since the lowest loss."""
    seconds: float = 0.0
    """Training time, without evaluations."""
    lines: int | None = 0
    """Lines of metrics.jsonl; None if an older checkpoint lacks their number."""
    stopped: str = ""
    """Why the run ended (`rrl.sft.loop.SFTResult.stopped`); "" while it runs."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "History":
        """Return the history in a checkpoint's metadata."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{"lines": None} | {name: metadata[name] for name in names if name in metadata})

    def to_metadata(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint. A run that a signal stopped continues later, so it has no `stopped`."""
        fields = dataclasses.asdict(self)
        if self.stopped in ("", "signal"):
            del fields["stopped"]
        return fields


class Trainer:
    """Updates and evaluates the parameters of a run, and saves and restores its state.

    The arrays of a checkpoint are (state, best_params), its metadata is `history`.
    """

    def __init__(
        self,
        config: SFTConfig,
        decoder: Decoder,
        held_out: Mapping[str, Sequence[Example]] | None,
        mesh: Mesh | None,
    ) -> None:
        """See `rrl.sft.loop.train`. The frozen parameters of `decoder` get its compute dtype."""
        self.config = config
        self._mesh = mesh
        self._graph, params, frozen = split_trained(decoder, config.optim.frozen)
        frozen = cast_params(frozen, decoder.dtype)
        nnx.update(decoder, frozen)  # frees the copy in the wider dtype
        self._frozen = frozen
        optimizer = make_optimizer(config.optim)
        self.state = TrainState(params, init_optimizer(optimizer, params, mesh), jnp.zeros((), jnp.int32))
        self.best_params = jax.tree.map(jnp.copy, params) if config.patience else None
        """Early stopping: the parameters of the lowest held-out loss."""
        self.history = History()
        self._update = make_update(self._graph, optimizer, config.chunk)
        self._evaluate = (
            Evaluator(held_out, config.rows, config.row_length, config.chunk, mesh) if held_out else None
        )

    @property
    def has_held_out(self) -> bool:
        """Whether there are examples to evaluate on."""
        return self._evaluate is not None

    def update(self, batch: Batch) -> dict[str, jax.Array]:
        """Do one update and return its metrics, which are still on the device."""
        with use_mesh(self._mesh):
            self.state, metrics = self._update(self.state, self._frozen, put_rows(batch, self._mesh))
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Return the held-out metrics of the current parameters."""
        assert self._evaluate is not None
        return self._evaluate(nnx.merge(self._graph, self.state.params, self._frozen))

    def record_best(self, loss: float) -> None:
        """Early stopping: copy the current parameters if their held-out loss is the lowest so far."""
        if self.history.loss is None or loss < self.history.loss:
            self.history.loss, self.history.bad = loss, 0
            self.best_params = jax.tree.map(jnp.copy, self.state.params)
        else:
            self.history.bad += 1

    def evaluate_final(self, decoder: Decoder) -> dict[str, float]:
        """Return the held-out metrics of `decoder`, which has the final parameters; empty without held-out examples."""
        return self._evaluate(decoder) if self._evaluate else {}

    @property
    def final_params(self) -> nnx.State:
        """The best parameters with early stopping, otherwise the current ones."""
        stops_early = self.config.patience and self.history.loss is not None
        return self.best_params if stops_early and self.best_params is not None else self.state.params

    def restore(self, checkpoints: Checkpoints) -> None:
        """Continue from the latest checkpoint, if there is one."""
        if checkpoints.latest is not None:
            (self.state, self.best_params), metadata = checkpoints.restore(
                (self.state, self.best_params), required_fields=("loss", "bad", "seconds")
            )
            self.history = History.from_metadata(metadata)

    def save(self, checkpoints: Checkpoints, lines: int) -> None:
        """Save a checkpoint. `lines`: lines of metrics.jsonl."""
        self.history.lines = lines
        checkpoints.save(int(self.state.step), (self.state, self.best_params), self.history.to_metadata())
