"""Embed queries and passages with an encoder, its tokenizer and prefixes.

Batches are padded to a few shapes, so that few programs are compiled. Read `TextEncoder` first.
"""

import collections
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from rrl.data.passages import Passage
from rrl.models.encoder import Encoder
from rrl.parallel.mesh import make_mesh
from rrl.retrieval.settings import TextSettings
from rrl.text.characters import replace_lone_surrogates

SMALLEST_BUCKET = 16
"""Smallest number of rows to which a batch is padded, and smallest width in tokens."""

CPU_BATCH, DEVICE_BATCH = 64, 256
"""Passages in a batch, on a CPU and on other devices."""

SEQUENTIAL_TEXTS = 16
"""Up to this many texts are tokenized one after the other; threads would wait for a core while rollouts use them all."""

BATCHES_AHEAD = 2
"""Maximum number of earlier batches whose results have not been read from the device when the next batch is sent."""

OnBatch = Callable[[Int[np.ndarray, "n"], Float[np.ndarray, "n E"]], None]
"""Callback after each batch: the positions of its texts, and their embeddings."""

LOG_SECONDS = 5.0
"""Seconds between two log lines on the progress of embedding."""

TruncatingTokenizer = Callable[[Iterable[str], int], tuple[list[list[int]], int]]
"""(texts, width) -> (token ids, at most `width` per text; number of texts that were truncated)."""


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A bi-encoder. It maps queries and passages to vectors whose inner product ranks the passages.

    The vectors have length 1 unless the pooling has `normalize=False`.
    """

    encoder: Encoder
    tokenizer: Any
    settings: TextSettings
    name: str = "encoder"
    """Name of the folder it was loaded from."""
    fingerprint: str = ""
    """SHA-256 of that folder (see `folder_fingerprint`); an index records it."""
    devices: tuple[jax.Device, ...] = ()
    """Devices over which batches are split. Empty: JAX's default device."""
    titles: bool = True
    """Whether passages are embedded with their titles, or by their texts alone."""

    @property
    def dim(self) -> int:
        """Length of an embedding, E."""
        return self.encoder.config.hidden

    @functools.cached_property
    def _sharding(self) -> NamedSharding | None:
        if len(self.devices) < 2:
            return None
        return NamedSharding(make_mesh(data=len(self.devices), devices=self.devices), PartitionSpec("data"))

    @functools.cached_property
    def _graph_and_state(self) -> tuple[Any, Any]:
        graph, state = nnx.split(self.encoder)
        if self._sharding is not None:
            state = jax.device_put(state, NamedSharding(self._sharding.mesh, PartitionSpec()))
        return graph, state

    @functools.cached_property
    def _truncating_tokenizer(self) -> TruncatingTokenizer:
        return make_truncating_tokenizer(self.tokenizer)

    def tokenize_queries(self, queries: Sequence[str]) -> Int[np.ndarray, "Q T"]:
        """Return token ids int32 of prefix + query, padded to `query_tokens`. NumPy only, thread-safe."""
        width = self.settings.query_tokens
        ids, _ = self._truncating_tokenizer((self.settings.query_prefix + query for query in queries), width)
        return pad(ids, width, self.tokenizer.pad_token_id)

    def embed_queries(self, queries: Sequence[str]) -> Float[np.ndarray, "Q E"]:
        """Return embeddings float32 of the queries, by JAX. Batches are padded to a power of two, so few programs compile."""
        tokens = self.tokenize_queries(queries)
        return np.asarray(self._embed_batch(tokens, _bucket(len(tokens))), np.float32)[: len(tokens)]

    def embed_passages(
        self, passages: Sequence[Passage], batch: int | None = None
    ) -> Float[np.ndarray, "N E"]:
        """Return embeddings float32 of the passages, in their order; log how many were truncated (see `tokenize_passages`)."""
        ids, truncated = self.tokenize_passages(passages)
        if truncated:
            limit = self.settings.passage_tokens
            logging.getLogger(__name__).info(
                "%d of %d passages truncated to %d tokens", truncated, len(ids), limit
            )
        return self.embed_tokens(ids, batch, _progress_logger(len(ids)))

    def tokenize_passages(self, passages: Sequence[Passage]) -> tuple[list[list[int]], int]:
        """Return token ids of "prefix title text" ("prefix text" without `titles`), and how many passages were truncated.

        Passages are truncated to `passage_tokens`. NumPy only, thread-safe.
        """
        prefix = self.settings.passage_prefix
        texts = (f"{prefix}{p.title} {p.text}" if self.titles else prefix + p.text for p in passages)
        return self._truncating_tokenizer(texts, self.settings.passage_tokens)

    def embed_tokens(
        self, ids: Sequence[Sequence[int]], batch: int | None = None, on_batch: OnBatch = lambda *_: None
    ) -> Float[np.ndarray, "N E"]:
        """Return embeddings float32 of sequences of token ids, in their order.

        The longest sequences are batched first, and each batch is padded to its longest, so that there is little padding and few
        programs compile. A batch is prepared while the device works on up to `BATCHES_AHEAD` earlier ones.
        """
        batch = batch or (CPU_BATCH if jax.default_backend() == "cpu" else DEVICE_BATCH)
        embeddings = np.empty((len(ids), self.dim), np.float32)
        waiting: collections.deque[tuple[np.ndarray, jax.Array]] = collections.deque()

        def collect() -> None:
            rows, vectors = waiting.popleft()
            embeddings[rows] = np.asarray(vectors, np.float32)[: len(rows)]
            on_batch(rows, embeddings[rows])

        for width, rows in length_batches([len(row) for row in ids], self.settings.passage_tokens, batch):
            tokens = pad([ids[row] for row in rows], width, self.tokenizer.pad_token_id)
            waiting.append((rows, self._embed_batch(tokens, min(batch, _bucket(len(rows))))))
            if len(waiting) > BATCHES_AHEAD:
                collect()
        while waiting:
            collect()
        return embeddings

    def _embed_batch(self, tokens: Int[np.ndarray, "B T"], min_rows: int) -> jax.Array:
        """Embed a batch, padded to `min_rows` rows so that each width compiles once. Does not wait for the device.

        With several devices, the number of rows is rounded up to a multiple of the number of devices.
        """
        devices = max(1, len(self.devices))
        padding = math.ceil(min_rows / devices) * devices - len(tokens)
        tokens = np.pad(tokens, ((0, padding), (0, 0)), constant_values=self.tokenizer.pad_token_id)
        graph, state = self._graph_and_state
        mask = tokens != self.tokenizer.pad_token_id
        if self._sharding is not None:
            tokens, mask = jax.device_put((tokens, mask), self._sharding)
        return _embed(graph, state, tokens, mask)


def _bucket(rows: int) -> int:
    """Return the power of two to which this many rows are padded."""
    return max(SMALLEST_BUCKET, 1 << max(0, rows - 1).bit_length())


def _progress_logger(count: int) -> OnBatch:
    """Return a callback that logs every `LOG_SECONDS` how many of `count` passages are embedded."""
    done, last = 0, time.monotonic()

    def on_batch(rows: Int[np.ndarray, "n"], _: Float[np.ndarray, "n E"]) -> None:
        nonlocal done, last
        done += len(rows)
        if time.monotonic() - last >= LOG_SECONDS and done < count:
            last = time.monotonic()
            logging.getLogger(__name__).info("embedded %d of %d passages", done, count)

    return on_batch


@functools.partial(jax.jit, static_argnums=0)
def _embed(graph: Any, state: Any, tokens: Any, mask: Any) -> Any:
    return nnx.merge(graph, state).embed(tokens, mask)


def make_truncating_tokenizer(tokenizer: Any) -> TruncatingTokenizer:
    """Return a thread-safe function (texts, width) -> (token ids, number of truncated texts).

    A truncated text keeps its closing special tokens. The tokenizer's built-in padding and truncation are not thread-safe,
    because they change shared state on each call.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    # An empty text gives only the special tokens, such as [CLS] [SEP]. The second half of them closes a text.
    special = backend.encode("").ids
    closing = special[(len(special) + 1) // 2 :]

    def tokenize(texts: Iterable[str], width: int) -> tuple[list[list[int]], int]:
        whole = list(map(replace_lone_surrogates, texts))
        parallel = len(whole) > SEQUENTIAL_TEXTS
        encodings = backend.encode_batch_fast(whole) if parallel else map(backend.encode, whole)
        rows = [encoding.ids for encoding in encodings]
        truncated = sum(len(row) > width for row in rows)
        return [
            row if len(row) <= width else row[: width - len(closing)] + closing for row in rows
        ], truncated

    return tokenize


def pad(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> Int[np.ndarray, "B T"]:
    """Return rows of ids as int32 [B, width], padded on the right."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens


def length_batches(
    lengths: Sequence[int], limit: int, batch: int
) -> Iterator[tuple[int, Int[np.ndarray, "n"]]]:
    """Yield (width, positions) of each batch, the longest sequences first. Only the last batch may have fewer than `batch`.

    A width is the longest length of its batch, rounded up (see `_width`), but at most `limit`.
    """
    order = np.argsort(lengths, kind="stable")[::-1]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        yield min(_width(int(lengths[rows[0]])), limit), rows


def _width(length: int) -> int:
    """Round a length up to a multiple of max(8, p / 8), with p the next power of two, so there are few different widths.

    From one power of two to the next there are at most four widths.
    """
    step = max(8, (1 << max(0, length - 1).bit_length()) // 8)
    return max(SMALLEST_BUCKET, -(-length // step) * step)
