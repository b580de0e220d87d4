"""From text to embeddings: an encoder with its tokenizer and prefixes, run jitted over length buckets."""

import collections
import dataclasses
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int
from tokenizers import normalizers

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.files import shipped
from rrl.models.config import Pooling
from rrl.models.encoder import Encoder
from rrl.models.hf import folder_hash, load_encoder, save_encoder
from rrl.models.tokenizer import check_tokenizer, load_tokenizer
from rrl.models.weights import require_folder
from rrl.parallel.mesh import make_mesh
from rrl.retrieval.settings import SETTINGS_FILE, FolderSettings, TextSettings, read_settings
from rrl.text.characters import replace_lone_surrogates

FINGERPRINTED = ("config.json", "model.safetensors", "tokenizer.json", SETTINGS_FILE)
"""The files that decide an embedding."""

SMALLEST_BUCKET = 16

CPU_BATCH, BATCH = 64, 256
"""Passages that are embedded at once on a CPU, and elsewhere."""

FEW = 16
"""Texts are tokenized one after the other where there are not more: threads would wait for a core while rollouts have all."""

AHEAD = 2
"""Batches that are handed to the device before the first is taken back."""

Embedded = Callable[[Int[np.ndarray, "n"], Float[np.ndarray, "n E"]], None]
"""Is called with the rows of each batch that is embedded, and their embeddings."""

SECONDS = 5.0
"""After so long, how far the embedding of passages is stands in the log."""

Cutter = Callable[[Iterable[str], int], tuple[list[list[int]], int]]


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A bi-encoder: queries and passages become vectors, of length 1 unless its pooling says otherwise, whose inner
    product ranks."""

    encoder: Encoder
    tokenizer: Any
    settings: TextSettings
    name: str = "encoder"
    fingerprint: str = ""
    """SHA-256 of the folder it was loaded from; indexes remember it."""
    devices: tuple[jax.Device, ...] = ()
    """Over which batches are split; none: JAX's own choice of one."""
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
    def _split(self) -> tuple[Any, Any]:
        graph, state = nnx.split(self.encoder)
        if self._sharding is not None:
            state = jax.device_put(state, NamedSharding(self._sharding.mesh, PartitionSpec()))
        return graph, state

    @functools.cached_property
    def _encode_ids(self) -> Cutter:
        return token_cutter(self.tokenizer)

    def tokenize_queries(self, queries: Sequence[str]) -> Int[np.ndarray, "Q T"]:
        """Token ids int32 of prefix + query, padded to `query_tokens`. NumPy only, thread-safe."""
        width = self.settings.query_tokens
        ids, _ = self._encode_ids((self.settings.query_prefix + query for query in queries), width)
        return pad(ids, width, self.tokenizer.pad_token_id)

    def embed_queries(self, queries: Sequence[str]) -> Float[np.ndarray, "Q E"]:
        """Embeddings float32 of the queries, by JAX; padded to a power of two of queries, so few programs compile."""
        tokens = self.tokenize_queries(queries)
        return np.asarray(self._embed(tokens, _bucket(len(tokens))), np.float32)[: len(tokens)]

    def embed_passages(
        self, passages: Sequence[Passage], batch: int | None = None
    ) -> Float[np.ndarray, "N E"]:
        """Embeddings float32 of passages (see `tokenize_passages`), in their order; those that were cut are logged."""
        ids, cut = self.tokenize_passages(passages)
        if cut:
            limit = self.settings.passage_tokens
            logging.getLogger(__name__).info("%d of %d passages cut at %d tokens", cut, len(ids), limit)
        return self.embed_tokens(ids, batch, _logged(len(ids)))

    def tokenize_passages(self, passages: Sequence[Passage]) -> tuple[list[list[int]], int]:
        """Token ids of "prefix title text", or of "prefix text" without `titles`, cut at `passage_tokens`; and how many were cut.
        NumPy only, thread-safe."""
        prefix = self.settings.passage_prefix
        texts = (f"{prefix}{p.title} {p.text}" if self.titles else prefix + p.text for p in passages)
        return self._encode_ids(texts, self.settings.passage_tokens)

    def embed_tokens(
        self, ids: Sequence[Sequence[int]], batch: int | None = None, embedded: Embedded = lambda *_: None
    ) -> Float[np.ndarray, "N E"]:
        """Embeddings float32 of token ids, in their order.

        The longest are batched first, each batch as wide as its longest needs, so that little is padded and few programs
        compile. The next batch is prepared while the device works on the last.
        """
        batch = batch or (CPU_BATCH if jax.default_backend() == "cpu" else BATCH)
        embeddings = np.empty((len(ids), self.dim), np.float32)
        waiting: collections.deque[tuple[np.ndarray, jax.Array]] = collections.deque()

        def take() -> None:
            rows, found = waiting.popleft()
            embeddings[rows] = np.asarray(found, np.float32)[: len(rows)]
            embedded(rows, embeddings[rows])

        for width, rows in length_batches([len(row) for row in ids], self.settings.passage_tokens, batch):
            tokens = pad([ids[row] for row in rows], width, self.tokenizer.pad_token_id)
            waiting.append((rows, self._embed(tokens, min(batch, _bucket(len(rows))))))
            if len(waiting) > AHEAD:
                take()
        while waiting:
            take()
        return embeddings

    def _embed(self, tokens: Int[np.ndarray, "B T"], rows: int) -> jax.Array:
        """Embed, with the batch padded to `rows` so that each width compiles once; the device may not be done yet."""
        padding = -(-rows // max(1, len(self.devices))) * max(1, len(self.devices)) - len(tokens)
        tokens = np.pad(tokens, ((0, padding), (0, 0)), constant_values=self.tokenizer.pad_token_id)
        graph, state = self._split
        mask = tokens != self.tokenizer.pad_token_id
        if self._sharding is not None:
            tokens, mask = jax.device_put((tokens, mask), self._sharding)
        return _embed(graph, state, tokens, mask)


def _bucket(rows: int) -> int:
    """The power of two of rows that so many are padded to."""
    return max(SMALLEST_BUCKET, 1 << max(0, rows - 1).bit_length())


def _logged(count: int) -> Embedded:
    """Logs every `SECONDS` how many of `count` passages are embedded."""
    done, last = 0, time.monotonic()

    def embedded(rows: Int[np.ndarray, "n"], _: Float[np.ndarray, "n E"]) -> None:
        nonlocal done, last
        done += len(rows)
        if time.monotonic() - last >= SECONDS and done < count:
            last = time.monotonic()
            logging.getLogger(__name__).info("embedded %d of %d passages", done, count)

    return embedded


@functools.partial(jax.jit, static_argnums=0)
def _embed(graph: Any, state: Any, tokens: Any, mask: Any) -> Any:
    return nnx.merge(graph, state).embed(tokens, mask)


def token_cutter(tokenizer: Any) -> Cutter:
    """A thread-safe function (texts, width) -> token ids, cut at width with closing special tokens kept; how many were cut.

    The tokenizer's own padding and truncation change shared state on each call, which fails under threads.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    frame = backend.encode("").ids
    # An empty text shows the special tokens: those of the end must survive the cut ([CLS] [SEP]: one of each).
    closing = frame[(len(frame) + 1) // 2 :]

    def cut(texts: Iterable[str], width: int) -> tuple[list[list[int]], int]:
        whole = list(map(replace_lone_surrogates, texts))
        together = len(whole) > FEW
        encodings = backend.encode_batch_fast(whole) if together else map(backend.encode, whole)
        rows = [encoding.ids for encoding in encodings]
        long = sum(len(row) > width for row in rows)
        return [row if len(row) <= width else row[: width - len(closing)] + closing for row in rows], long

    return cut


def pad(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> Int[np.ndarray, "B T"]:
    """Rows of ids as int32 [B, width], padded on the right."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens


def length_batches(
    lengths: Sequence[int], limit: int, batch: int
) -> Iterator[tuple[int, Int[np.ndarray, "n"]]]:
    """(width, rows), the longest rows first and only the last batch with fewer than `batch`; four widths an octave."""
    order = np.argsort(lengths, kind="stable")[::-1]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        yield min(_width(int(lengths[rows[0]])), limit), rows


def _width(length: int) -> int:
    """The next multiple of a fourth of the octave, and of 8."""
    step = max(8, (1 << max(0, length - 1).bit_length()) // 8)
    return max(SMALLEST_BUCKET, -(-length // step) * step)


def load_text_encoder(folder: str | Path, settings: Mapping[str, Any] | None = None) -> TextEncoder:
    """Open an encoder folder: Hugging Face weights and tokenizer, with what `read_settings` understands beside them.

    That is `text_encoder.json`, the files of sentence-transformers, or the published name of a known model. `settings`
    has the keys of text_encoder.json and is stronger: `{"family": "bge-en-v1.5", "passage_tokens": 256}`.

    Raises UserError naming what is missing or not supported.
    """
    require_folder("encoder", folder)
    folder = shipped(folder)
    found = read_settings(folder, settings)
    tokenizer, encoder = load_tokenizer(folder), load_encoder(folder, pooling=found.pooling)
    check_tokenizer(tokenizer, encoder.config, "encoder")
    if tokenizer.pad_token_id is None:
        raise UserError(f"encoder={str(folder)!r}: the tokenizer has no padding token; set pad_token for it")
    if found.lower_case:
        _lower(tokenizer)
    return TextEncoder(encoder, tokenizer, found.text, folder.name, folder_fingerprint(folder, found))


def _lower(tokenizer: Any) -> None:
    """Makes a tokenizer lower its texts first."""
    backend = tokenizer.backend_tokenizer
    lower = normalizers.Lowercase()
    backend.normalizer = (
        normalizers.Sequence([lower, backend.normalizer]) if backend.normalizer is not None else lower
    )


def save_text_encoder(folder: str | Path, text_encoder: TextEncoder) -> TextEncoder:
    """Write what `load_text_encoder` opens; returns the encoder with its name and fingerprint."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(folder, text_encoder.encoder, text_encoder.tokenizer)
    pooling, settings = text_encoder.encoder.config.pooling, dataclasses.asdict(text_encoder.settings)
    if pooling != Pooling():
        settings |= {"pooling": pooling.mode, "normalize": pooling.normalize}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
    return dataclasses.replace(text_encoder, name=folder.name, fingerprint=folder_fingerprint(folder))


def folder_fingerprint(folder: Path, settings: FolderSettings | None = None) -> str:
    """SHA-256 over the files that decide an embedding, and over settings that come from elsewhere."""
    digest = hashlib.sha256()
    for name in FINGERPRINTED:
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        digest.update(f"{name} {size} ".encode())
        if size:
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    if not (folder / FINGERPRINTED[1]).is_file():
        digest.update(folder_hash(folder).encode())
    if settings and settings.derived:
        digest.update(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    return digest.hexdigest()
