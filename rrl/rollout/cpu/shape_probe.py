"""The shape probe: finds array shapes on one CPU that give bitwise the same results as the largest shape.

A decode step with fewer rows, or a prefill with fewer chunks, is faster. But for some shapes XLA splits a matrix product in
another way, which changes the last bits. Then the tokens of a row would depend on the number of rows in the step. This number
depends on the speed of searches, so results could not be repeated.

The probe runs the real decode and prefill steps over the model's first layers, once per candidate shape, and compares bits
(`rrl.rollout.cpu.probe_programs`). It also checks that draft tokens change no bits. Read `find_cpu_shapes`, then `probe_shapes`.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import PyTree

from rrl.parallel.runtime import available_cores
from rrl.rollout.backend import StepShapes
from rrl.rollout.cpu.probe_cache import cache_key, load, store
from rrl.rollout.cpu.probe_programs import DecodeOutput, compile_decode, first_layers, run_prefill
from rrl.rollout.cpu.workers import weights_dominate
from rrl.rollout.programs import RolloutPrograms

log = logging.getLogger(__name__)

MIN_PROBED_ROWS, ROW_MULTIPLE = 16, 8
"""If a worker has at least MIN_PROBED_ROWS rows, the candidates are a half of them, a quarter, and so on, as long as they are
multiples of ROW_MULTIPLE."""

MIN_CHUNKS = 2
"""Minimum number of chunks of a candidate: for a single one XLA omits the batch loop and sums in another order."""

PROBE_SECONDS = 60.0
"""Time limit: no further candidate is probed after it. The skipped shapes are not used, which costs speed but changes no bits.
Draft tokens could change bits, so they are always probed."""


def find_cpu_shapes(programs: RolloutPrograms, params: PyTree) -> StepShapes:
    """Return the shapes that programs on one CPU may use.

    The probe runs if a worker has at least MIN_PROBED_ROWS rows and the weights do not dominate the time of a step, or if
    there are draft tokens. If draft tokens change bits, they are disabled with a warning.
    """
    fewer_rows = programs.decode_rows >= MIN_PROBED_ROWS and not weights_dominate(programs.decoder_config)
    if not (fewer_rows or programs.shapes.step_tokens):
        return programs.shapes
    shapes = probe_shapes(programs, params)
    if programs.config.draft_tokens and not shapes.step_tokens:
        log.warning(
            "rollout.draft_tokens=%d is ignored: on this processor correct drafts would change the bits of later tokens",
            programs.config.draft_tokens,
        )
    return shapes


def probe_shapes(programs: RolloutPrograms, params: PyTree) -> StepShapes:
    """Return the shapes that change no bits, from the cache (`rrl.rollout.cpu.probe_cache`) or by probing all candidates.

    If the weights dominate (`workers.weights_dominate`), only draft tokens are probed: fewer rows or chunks save no time. A
    result that was cut short by the time limit is not stored: the next engine probes again, faster if there is a compilation
    cache.
    """
    dtype = nnx.merge(programs.graph, params).dtype
    rows, chunks = _row_candidates(programs), _chunk_candidates(programs, dtype)
    key = cache_key(programs, params)
    if (stored := _validated(load(key), rows, chunks, programs.shapes.step_tokens)) is not None:
        return stored
    deadline = _Deadline(PROBE_SECONDS)
    result = _probe(*first_layers(programs, params), rows, chunks, deadline)
    if deadline.missed:
        log.info("the shape probe stopped after %g s; result: %s", PROBE_SECONDS, result)
    else:
        store(key, result._asdict())
    return result


class _Deadline:
    """The time limit of a probe."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.missed = False
        """Whether a candidate was skipped."""

    def has_time(self) -> bool:
        """Return whether there is time for another candidate."""
        late = time.monotonic() >= self._end
        self.missed = self.missed or late
        return not late


def _row_candidates(programs: RolloutPrograms) -> list[int]:
    """Return the candidate numbers of rows, largest first."""
    counts = [programs.decode_rows]
    while (
        not weights_dominate(programs.decoder_config)
        and counts[-1] >= MIN_PROBED_ROWS
        and not counts[-1] % (2 * ROW_MULTIPLE)
    ):
        counts.append(counts[-1] // 2)
    return counts


def _chunk_candidates(programs: RolloutPrograms, dtype: DTypeLike) -> list[int]:
    """Return the candidate numbers of chunks, largest first."""
    counts = [programs.sizes.chunks_per_prefill]
    fewer = not (weights_dominate(programs.decoder_config) or programs.backend.computes_layers(dtype))
    while fewer and counts[-1] > MIN_CHUNKS and not counts[-1] % 2:
        counts.append(counts[-1] // 2)
    return counts


def _validated(
    stored: Mapping[str, Any] | None, rows: list[int], chunks: list[int], step_tokens: int
) -> StepShapes | None:
    """Return a stored result if it is a possible result of a probe, else None."""
    if stored is None or set(stored) != set(StepShapes._fields):
        return None
    valid = []
    for name, candidates in (("widths", rows), ("attention_batches", rows), ("chunk_counts", chunks)):
        counts = stored[name]
        if not isinstance(counts, list) or counts != [count for count in candidates if count in counts]:
            return None
        valid.append(tuple(count for count in candidates if count in counts))
    widths, attention_batches, chunk_counts = valid
    complete = widths[:1] == (rows[0],) and chunk_counts[:1] == (chunks[0],)
    if not complete or stored["step_tokens"] not in (0, step_tokens):
        return None
    return StepShapes(widths, attention_batches, chunk_counts, int(stored["step_tokens"]))


def _probe(
    programs: RolloutPrograms, params: PyTree, rows: list[int], chunks: list[int], deadline: _Deadline
) -> StepShapes:
    """Run all candidates and compare bits."""

    def prefilled(count: int) -> tuple[np.ndarray, ...] | None:
        return run_prefill(programs, params, count) if deadline.has_time() else None

    with concurrent.futures.ThreadPoolExecutor(available_cores(), "rrl-probe") as pool:
        # A single candidate needs no comparison.
        prefills = [pool.submit(prefilled, count) for count in chunks if len(chunks) > 1]
        step_tokens = programs.shapes.step_tokens
        decode_result = _probe_decode(programs, params, rows, step_tokens, pool, deadline)
        if decode_result is None:  # drafts change bits: probe again without them
            step_tokens = 0
            decode_result = _probe_decode(programs, params, rows, step_tokens, pool, deadline)
        same = _same_as_first([prefill.result() for prefill in prefills])
    assert decode_result is not None, "only drafts can make the result None"
    fewer = (count for count, is_same in zip(chunks[1:], same[1:], strict=True) if is_same)
    return StepShapes(*decode_result, (chunks[0], *fewer), step_tokens)


def _probe_decode(
    programs: RolloutPrograms,
    params: PyTree,
    rows: list[int],
    step_tokens: int,
    pool: concurrent.futures.Executor,
    deadline: _Deadline,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (widths, attention_batches); None if correct draft tokens change bits."""
    candidates = _decode_candidates(programs, params, rows)
    if not (candidates or step_tokens):
        return (rows[0],), ()

    def compiled(
        width: int, attention_batches: tuple[int, ...]
    ) -> Callable[[np.ndarray], DecodeOutput] | None:
        return (
            compile_decode(programs, params, step_tokens, width, attention_batches)
            if deadline.has_time()
            else None
        )

    largest = pool.submit(compile_decode, programs, params, step_tokens, rows[0], ())
    compiling = [pool.submit(compiled, *candidate) for candidate in candidates]
    expected = largest.result()(None)
    # The tokens of the first run are the correct drafts of all further runs.
    if step_tokens and not all(_same_as_first([expected, largest.result()(expected.ids)])):
        return None
    outputs: list[DecodeOutput | None] = [expected]
    for future in compiling:
        run = future.result()
        outputs.append(run(expected.ids) if run is not None and deadline.has_time() else None)
    same = [
        candidate
        for candidate, is_same in zip(candidates, _same_as_first(outputs)[1:], strict=True)
        if is_same
    ]
    widths = tuple(dict.fromkeys([rows[0], *(width for width, _ in same)]))
    attention_batches = next((attention_batches for width, attention_batches in same if width == rows[0]), ())
    return widths, attention_batches


def _decode_candidates(
    programs: RolloutPrograms, params: PyTree, rows: list[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the (width, attention_batches) pairs to compare with the largest shape, which is (rows[0], ())."""
    if len(rows) == 1:
        return []
    if programs.backend.kernels(nnx.merge(programs.graph, params).dtype) is not None:
        return [(count, ()) for count in rows[1:]]  # the kernel reads the cache row by row
    return [(count, tuple(rows[index:])) for index, count in enumerate(rows)]


def _same_as_first(outputs: Sequence[tuple[np.ndarray, ...] | None]) -> list[bool]:
    """Return which outputs equal the first rows of the first output. None never does."""
    first = outputs[0] if outputs else None
    return [
        output is not None
        and first is not None
        and all(np.array_equal(part, whole[: len(part)]) for part, whole in zip(output, first, strict=True))
        for output in outputs
    ]
