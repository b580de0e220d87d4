"""Held-out loss, token accuracy and exact match of whole responses."""

import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rrl.data.examples import Example
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import put_rows, use_mesh
from rrl.rl.batch import Batch
from rrl.rl.logprobs import token_logprobs
from rrl.rl.packing import pack


class Evaluator:
    """Computes held-out loss, token accuracy and exact match of whole responses over named sets of examples.

    A response matches if each of its targets is the most probable token given the true text before it (teacher forcing).
    Greedy decoding would reproduce exactly these responses.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[Example]],
        rows: int,
        row_length: int,
        chunk: int,
        mesh: Mesh | None = None,
    ) -> None:
        """`rows`, `row_length` and `chunk` are as in `SFTConfig`; mesh: mesh of the decoder, None: one device."""
        self._mesh, self._rows = mesh, rows
        self._sets = {}
        for name, examples in sets.items():
            packed = pack(
                [e.tokens for e in examples], [e.loss_mask for e in examples], row_length, multiple=rows
            )
            self._sets[name] = (packed, [len(e) for e in examples])

        @jax.jit
        def logprobs_and_matches(decoder: Decoder, batch: Batch) -> tuple[jax.Array, jax.Array]:
            out = token_logprobs(decoder, batch, chunk=chunk, greedy=True)
            return out.logp, out.greedy

        self._logprobs_and_matches = logprobs_and_matches

    def __call__(self, decoder: Decoder) -> dict[str, float]:
        """Return "loss", "accuracy" (of tokens) and "match" (of responses) over all sets, and "match/NAME" of each set."""
        loss_sum, correct, targets = 0.0, 0, 0
        matches: dict[str, list[np.bool_]] = {}
        for name, (packed, lengths) in self._sets.items():
            mask = packed.batch.loss_mask
            logp, is_greedy = self._score(decoder, packed.batch)
            loss_sum += -logp[mask].sum(dtype=np.float64)
            correct += is_greedy[mask].sum()
            targets += mask.sum()
            responses = zip(packed.unpack(is_greedy, lengths), packed.unpack(mask, lengths), strict=True)
            matches[name] = [example[is_target].all() for example, is_target in responses]
        count = max(1.0, targets)
        return {
            "loss": float(loss_sum / count),
            "accuracy": float(correct / count),
            "match": float(np.mean(list(itertools.chain.from_iterable(matches.values())))),
            **{f"match/{name}": float(np.mean(of_set)) for name, of_set in matches.items()},
        }

    def _score(self, decoder: Decoder, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each token of a batch [B, T], its log-probability and whether it is the most probable token."""
        parts = []
        for at in range(0, len(batch.tokens), self._rows):
            part = jax.tree.map(lambda x, at=at: x[at : at + self._rows], batch)
            with use_mesh(self._mesh):
                parts.append(jax.device_get(self._logprobs_and_matches(decoder, put_rows(part, self._mesh))))
        logp, is_greedy = (np.concatenate(p) for p in zip(*parts, strict=True))
        return logp, is_greedy
