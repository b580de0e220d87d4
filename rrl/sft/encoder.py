"""Contrastive training of a small text encoder on the built-in world, deterministic given its seed.

Read `train_encoder` first.
"""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rrl.errors import UserError, at_least
from rrl.miniwiki import generate
from rrl.models.config import EncoderConfig
from rrl.models.encoder import Encoder
from rrl.models.tokenizer import load_tokenizer
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.encode import TextEncoder, make_truncating_tokenizer, pad
from rrl.retrieval.encoder_folder import save_text_encoder
from rrl.retrieval.index import make_retriever
from rrl.retrieval.settings import TextSettings
from rrl.sft.encoder_pairs import QUERY_KINDS, EncoderPairs, make_pairs
from rrl.sft.encoder_recall import miniwiki_recall


@dataclasses.dataclass(frozen=True)
class EncoderTrainingConfig:
    """Size of the encoder, its training data and its optimiser."""

    seed: int = 0
    """Seed of parameters, sub-worlds and batches."""
    hidden: int = 128
    """Width of the encoder and length E of its embeddings."""
    layers: int = 1
    heads: int = 4
    """Attention heads."""
    mlp: int = 256
    """Width of the MLP."""
    query_tokens: int = 32
    """Largest number of tokens of a query; longer ones are cut."""
    passage_tokens: int = 64
    """Largest number of tokens of a passage; longer ones are cut."""
    worlds: int = 100
    """Sub-worlds of the training data (`rrl.miniwiki`)."""
    passages_per_world: int = 200
    steps: int = 200
    """Updates."""
    groups: int = 4
    """Sub-worlds per batch. A batch has many queries of each: the passages of one query are negatives of the others."""
    queries_per_group: int = 48
    """Queries of each sub-world in a batch."""
    learning_rate: float = 2e-3
    """Peak learning rate."""
    warmup: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.01
    temperature: float = 0.05
    """Softmax temperature of the contrastive loss."""
    names: float = 0.15
    """Share of queries that are only a name."""
    questions: float = 0.15
    """Share of queries that are a whole question."""

    def __post_init__(self) -> None:
        at_least(0, self, "seed", "learning_rate", "warmup", "weight_decay", "names", "questions")
        at_least(1, self, "hidden", "layers", "heads", "mlp", "query_tokens", "passage_tokens")
        at_least(1, self, "worlds", "passages_per_world", "steps", "groups", "queries_per_group")
        if not self.temperature > 0:
            raise UserError(f"temperature={self.temperature} must be above 0")
        if self.names + self.questions > 1:
            raise UserError(
                f"names={self.names} and questions={self.questions} are shares; their sum must be at most 1"
            )
        if self.queries_per_group > self.passages_per_world:
            raise UserError(
                f"queries_per_group={self.queries_per_group}: a world has only {self.passages_per_world} passages; "
                "give fewer queries or larger worlds"
            )


@dataclasses.dataclass(frozen=True)
class ContrastiveBatch:
    """B queries, each with a positive passage and a hard negative: C = 2B candidate passages."""

    queries: Int[np.ndarray, "B Tq"]
    """Token ids of the queries, padded."""
    passages: Int[np.ndarray, "C Tp"]
    """Token ids of the candidates, padded: first the positives, then the hard negatives, in the order of the queries."""
    allowed: Bool[np.ndarray, "B C"]
    """False where a candidate other than the query's own positive is a gold passage of the query, which is no negative."""


def contrastive_loss(
    queries: Float[Array, "B E"],
    passages: Float[Array, "C E"],
    allowed: Bool[Array, "B C"],
    temperature: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """InfoNCE (van den Oord et al. 2018, Eq. 4) over in-batch candidates; passage i is the positive of query i.

    Returns:
        The mean loss, and the share of queries whose positive passage scores highest.
    """
    logits = jnp.where(allowed, queries @ passages.T / temperature, -jnp.inf)
    labels = jnp.arange(queries.shape[0])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


def batches(
    config: EncoderTrainingConfig, pairs: EncoderPairs, tokenizer: Any, settings: TextSettings
) -> Iterator[ContrastiveBatch]:
    """Yield batches without end, drawn with the config's seed."""
    tokenize = make_truncating_tokenizer(tokenizer)
    texts = (f"{settings.passage_prefix}{passage.title} {passage.text}" for passage in pairs.passages)
    passages = pad(
        tokenize(texts, settings.passage_tokens)[0], settings.passage_tokens, tokenizer.pad_token_id
    )
    texts = (settings.query_prefix + query for query in pairs.queries)
    queries = pad(tokenize(texts, settings.query_tokens)[0], settings.query_tokens, tokenizer.pad_token_id)
    rng = np.random.default_rng(config.seed)
    while True:
        worlds = rng.choice(len(pairs.spans), min(config.groups, len(pairs.spans)), replace=False)
        positives = [
            int(passage)
            for world in worlds
            for passage in rng.choice(pairs.spans[world], config.queries_per_group, replace=False)
        ]
        query_indices = [_draw_query(config, pairs, passage, rng) for passage in positives]
        candidates = np.array(positives + [_draw_hard_negative(pairs, passage, rng) for passage in positives])
        other_gold = (candidates[None, :, None] == pairs.gold[query_indices][:, None, :]).any(-1)
        np.fill_diagonal(other_gold, False)  # the positive itself
        yield ContrastiveBatch(queries[query_indices], passages[candidates], ~other_gold)


def _draw_query(
    config: EncoderTrainingConfig, pairs: EncoderPairs, passage: int, rng: np.random.Generator
) -> int:
    """Return the index of a query that names a passage."""
    draw = rng.random()
    kind = (
        "name" if draw < config.names else "question" if draw < config.names + config.questions else "query"
    )
    # A passage may have no query of the drawn kind, but it always has its name.
    options = pairs.by_passage[kind][passage] or pairs.by_passage["name"][passage]
    return options[int(rng.integers(len(options)))]


def _draw_hard_negative(pairs: EncoderPairs, passage: int, rng: np.random.Generator) -> int:
    """Return the index of a hard negative of a passage."""
    options = pairs.hard_negatives[passage]
    if options:
        return options[int(rng.integers(len(options)))]
    # Without a hard negative: any other passage of the same sub-world.
    span = next(span for span in pairs.spans if passage in span)
    return span[(passage - span.start + 1 + int(rng.integers(len(span) - 1))) % len(span)]


def optimizer(config: EncoderTrainingConfig) -> optax.GradientTransformation:
    """Return AdamW with linear warm-up, cosine decay and gradients clipped to norm 1."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup, max(config.steps, config.warmup + 1)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=config.weight_decay))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _update(
    config: EncoderTrainingConfig, graph: Any, state: Any, opt_state: Any, batch: Any, pad_id: int
) -> Any:
    """Return (state, opt_state, loss, accuracy) after one update. `batch`: the arrays of a `ContrastiveBatch`."""
    queries, passages, allowed = batch

    def loss_of(state: Any) -> Any:
        encoder = nnx.merge(graph, state)
        embeddings = encoder.embed(queries, queries != pad_id), encoder.embed(passages, passages != pad_id)
        return contrastive_loss(*embeddings, allowed, config.temperature)

    (loss, accuracy), gradient = jax.value_and_grad(loss_of, has_aux=True)(state)
    updates, opt_state = optimizer(config).update(gradient, opt_state, state)
    return optax.apply_updates(state, updates), opt_state, loss, accuracy


def train_encoder(
    config: EncoderTrainingConfig, tokenizer: Any, log: Callable[[int, dict[str, float]], None] | None = None
) -> TextEncoder:
    """Train an encoder from scratch. The same config gives the same weights on the same machine.

    Args:
      config: size, data and optimiser.
      tokenizer: a loaded fast tokenizer with a padding token.
      log: called with (step, metrics) every 20 steps and at the end.
    """
    settings = TextSettings(query_tokens=config.query_tokens, passage_tokens=config.passage_tokens)
    model_config = EncoderConfig(
        vocab_size=len(tokenizer),
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        mlp=config.mlp,
        max_positions=max(config.query_tokens, config.passage_tokens),
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    graph, state = nnx.split(Encoder(model_config, rngs=nnx.Rngs(config.seed)))
    opt_state = optimizer(config).init(state)
    stream = batches(
        config, make_pairs(config.seed, config.worlds, config.passages_per_world), tokenizer, settings
    )
    started = time.perf_counter()
    for step in range(config.steps):
        batch = next(stream)
        arrays = (batch.queries, batch.passages, batch.allowed)
        state, opt_state, loss, accuracy = _update(
            config, graph, state, opt_state, arrays, tokenizer.pad_token_id
        )
        if log and (step % 20 == 19 or step + 1 == config.steps):
            seconds = time.perf_counter() - started
            log(step + 1, {"loss": float(loss), "accuracy": float(accuracy), "seconds": seconds})
    return TextEncoder(nnx.merge(graph, state), tokenizer, settings)


def train_and_save(
    config: EncoderTrainingConfig, tokenizer_folder: str, out: str, log: Callable[[str], None] = print
) -> None:
    """Train an encoder, write its folder, and log its recall@3 and that of BM25 on unseen worlds.

    Raises:
      UserError: `out` is a file or a folder that is not empty, or the tokenizer cannot be loaded.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"out={out}: exists. Remove it, or give another folder.")
    tokenizer = load_tokenizer(tokenizer_folder)
    log(f"generating {config.worlds} training worlds of {config.passages_per_world} passages, then compiling")

    def log_step(step: int, values: dict[str, float]) -> None:
        left = values["seconds"] / step * (config.steps - step)
        log(
            f"step {step}/{config.steps}  loss {values['loss']:.4f}  accuracy {values['accuracy']:.3f}  "
            f"{values['seconds']:.0f} s, {left:.0f} s left"
        )

    trained = save_text_encoder(folder, train_encoder(config, tokenizer, log_step))
    weights = folder / "model.safetensors"
    log(
        f"{folder}: {weights.stat().st_size / 2**20:.2f} MiB, sha256 {hashlib.sha256(weights.read_bytes()).hexdigest()}"
    )
    for worlds in (8, 64):
        log(f"recall@3 on {worlds} unseen worlds of 200 passages in one index ({', '.join(QUERY_KINDS)}):")
        wiki = generate("test", 0, 200 * worlds, worlds)
        bm25 = make_retriever(wiki.passages, "bm25", bm25=Bm25Config(title_weight=3))
        for name, retriever in (
            ("BM25, title x3", bm25),
            ("encoder", make_retriever(wiki.passages, "exact", trained)),
        ):
            recall = miniwiki_recall(retriever, wiki)
            log(f"  {name:15}" + "".join(f"{100 * recall[kind]:8.2f}" for kind in QUERY_KINDS))
