"""Contrastive training of a small text encoder on the built-in world, deterministic by its seed."""

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
from rrl.retrieval.encode import TextEncoder, pad, save_text_encoder, token_cutter
from rrl.retrieval.index import make_retriever
from rrl.retrieval.settings import TextSettings
from rrl.sft.encoder_pairs import QUERY_KINDS, EncoderPairs, make_pairs
from rrl.sft.encoder_recall import miniwiki_recall


@dataclasses.dataclass(frozen=True)
class EncoderTrainingConfig:
    """What is trained, on what, for how long."""

    seed: int = 0
    hidden: int = 128
    """Width of the encoder and length E of its embeddings."""
    layers: int = 1
    heads: int = 4
    mlp: int = 256
    query_tokens: int = 32
    passage_tokens: int = 64
    worlds: int = 100
    passages_per_world: int = 200
    steps: int = 200
    groups: int = 4
    """Worlds in a batch; the queries of one world are each other's negatives."""
    queries_per_group: int = 48
    learning_rate: float = 2e-3
    warmup: int = 20
    weight_decay: float = 0.01
    temperature: float = 0.05
    names: float = 0.15
    """Share of queries that are a bare name."""
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
                f"names={self.names} and questions={self.questions} are shares: at most 1 together"
            )
        if self.queries_per_group > self.passages_per_world:
            raise UserError(
                f"queries_per_group={self.queries_per_group}: a world has only {self.passages_per_world} passages; "
                "give fewer queries or larger worlds"
            )


@dataclasses.dataclass(frozen=True)
class ContrastiveBatch:
    """B queries with a positive passage each, and one misleading passage each: C = 2B candidates."""

    queries: Int[np.ndarray, "B Tq"]
    passages: Int[np.ndarray, "C Tp"]
    allowed: Bool[np.ndarray, "B C"]
    """False where a candidate is another right passage of the query, which must not count as a negative."""


def contrastive_loss(
    queries: Float[Array, "B E"],
    passages: Float[Array, "C E"],
    allowed: Bool[Array, "B C"],
    temperature: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """InfoNCE (van den Oord et al. 2018, Eq. 4) over in-batch candidates; passage i is right for query i.

    Returns the mean loss and the share of queries whose right passage scores highest.
    """
    logits = jnp.where(allowed, queries @ passages.T / temperature, -jnp.inf)
    labels = jnp.arange(queries.shape[0])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


def batches(
    config: EncoderTrainingConfig, pairs: EncoderPairs, tokenizer: Any, settings: TextSettings
) -> Iterator[ContrastiveBatch]:
    """Endless batches, drawn by the seed."""
    cut = token_cutter(tokenizer)
    texts = (f"{settings.passage_prefix}{passage.title} {passage.text}" for passage in pairs.passages)
    passages = pad(cut(texts, settings.passage_tokens)[0], settings.passage_tokens, tokenizer.pad_token_id)
    texts = (settings.query_prefix + query for query in pairs.queries)
    queries = pad(cut(texts, settings.query_tokens)[0], settings.query_tokens, tokenizer.pad_token_id)
    rng = np.random.default_rng(config.seed)
    while True:
        worlds = rng.choice(len(pairs.spans), min(config.groups, len(pairs.spans)), replace=False)
        positives = [
            int(at)
            for world in worlds
            for at in rng.choice(pairs.spans[world], config.queries_per_group, replace=False)
        ]
        asked = [_draw_query(config, pairs, at, rng) for at in positives]
        candidates = np.array(positives + [_draw_hard_negative(pairs, at, rng) for at in positives])
        right = (candidates[None, :, None] == pairs.gold[asked][:, None, :]).any(-1)
        right[np.arange(len(asked)), np.arange(len(asked))] = False
        yield ContrastiveBatch(queries[asked], passages[candidates], ~right)


def _draw_query(config: EncoderTrainingConfig, pairs: EncoderPairs, at: int, rng: np.random.Generator) -> int:
    chosen = rng.random()
    way = (
        "name"
        if chosen < config.names
        else "question"
        if chosen < config.names + config.questions
        else "query"
    )
    options = pairs.by_passage[way][at] or pairs.by_passage["name"][at]
    return options[int(rng.integers(len(options)))]


def _draw_hard_negative(pairs: EncoderPairs, at: int, rng: np.random.Generator) -> int:
    options = pairs.hard_negatives[at]
    if options:
        return options[int(rng.integers(len(options)))]
    span = next(span for span in pairs.spans if at in span)
    return span[(at - span.start + 1 + int(rng.integers(len(span) - 1))) % len(span)]


def optimizer(config: EncoderTrainingConfig) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay; gradients clipped to norm 1."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup, max(config.steps, config.warmup + 1)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=config.weight_decay))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _update(
    config: EncoderTrainingConfig, graph: Any, state: Any, moments: Any, batch: Any, pad_id: int
) -> Any:
    queries, passages, allowed = batch

    def loss_of(state: Any) -> Any:
        encoder = nnx.merge(graph, state)
        found = encoder.embed(queries, queries != pad_id), encoder.embed(passages, passages != pad_id)
        return contrastive_loss(*found, allowed, config.temperature)

    (loss, accuracy), gradient = jax.value_and_grad(loss_of, has_aux=True)(state)
    updates, moments = optimizer(config).update(gradient, moments, state)
    return optax.apply_updates(state, updates), moments, loss, accuracy


def train_encoder(
    config: EncoderTrainingConfig, tokenizer: Any, log: Callable[[int, dict[str, float]], None] | None = None
) -> TextEncoder:
    """Train from scratch; the same config gives the same weights on the same machine.

    Args:
      tokenizer: a loaded fast tokenizer with a padding token.
      log: called with (step, metrics) every 20 steps.
    """
    settings = TextSettings(query_tokens=config.query_tokens, passage_tokens=config.passage_tokens)
    shape = EncoderConfig(
        vocab_size=len(tokenizer),
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        mlp=config.mlp,
        max_positions=max(config.query_tokens, config.passage_tokens),
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    graph, state = nnx.split(Encoder(shape, rngs=nnx.Rngs(config.seed)))
    moments = optimizer(config).init(state)
    stream = batches(
        config, make_pairs(config.seed, config.worlds, config.passages_per_world), tokenizer, settings
    )
    started = time.perf_counter()
    for step in range(config.steps):
        batch = next(stream)
        arrays = (batch.queries, batch.passages, batch.allowed)
        state, moments, loss, accuracy = _update(
            config, graph, state, moments, arrays, tokenizer.pad_token_id
        )
        if log and (step % 20 == 19 or step + 1 == config.steps):
            seconds = time.perf_counter() - started
            log(step + 1, {"loss": float(loss), "accuracy": float(accuracy), "seconds": seconds})
    return TextEncoder(nnx.merge(graph, state), tokenizer, settings)


def train_and_save(
    config: EncoderTrainingConfig, tokenizer_folder: str, out: str, say: Callable[[str], None] = print
) -> None:
    """Train, write the encoder's folder, and say recall@3 on unseen worlds beside BM25's.

    Raises UserError if `out` is a folder with something in it, or the tokenizer cannot be loaded.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"out={out}: exists. Remove it, or give another folder.")
    tokenizer = load_tokenizer(tokenizer_folder)
    say(f"generating {config.worlds} training worlds of {config.passages_per_world} passages, then compiling")

    def log(step: int, values: dict[str, float]) -> None:
        left = values["seconds"] / step * (config.steps - step)
        say(
            f"step {step}/{config.steps}  loss {values['loss']:.4f}  right first {values['accuracy']:.3f}  "
            f"{values['seconds']:.0f} s, {left:.0f} s left"
        )

    trained = save_text_encoder(folder, train_encoder(config, tokenizer, log))
    weights = folder / "model.safetensors"
    say(
        f"{folder}: {weights.stat().st_size / 2**20:.2f} MiB, sha256 {hashlib.sha256(weights.read_bytes()).hexdigest()}"
    )
    for worlds in (8, 64):
        say(f"recall@3 on {worlds} unseen worlds of 200 passages in one index ({', '.join(QUERY_KINDS)}):")
        wiki = generate("test", 0, 200 * worlds, worlds)
        weighted = make_retriever(wiki.passages, "bm25", bm25=Bm25Config(title_weight=3))
        for name, retriever in (
            ("BM25, title x3", weighted),
            ("encoder", make_retriever(wiki.passages, "exact", trained)),
        ):
            found = miniwiki_recall(retriever, wiki)
            say(f"  {name:15}" + "".join(f"{100 * found[way]:8.2f}" for way in QUERY_KINDS))
