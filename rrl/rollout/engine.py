"""The rollout engine: runs episodes of a policy with search, in one jitted loop that calls Python schedulers.

The jitted loop decodes, reports paused slots to the schedulers, and prefills their replies into the same KV cache. Paused slots
wait while others decode; the slot of a finished episode takes the next request. The loop calls the schedulers through
`io_callback` inside a fully manual `shard_map`, so that each data shard calls its own scheduler. `reference=True` drives the same
jitted steps from Python; tests compare the two. Read `Engine.run`, then
`rrl.rollout.programs.RolloutPrograms.episode_loop`.
"""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, Key, PyTree
from transformers import PreTrainedTokenizerBase

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, integer_at_least
from rrl.models.decoder import Decoder
from rrl.models.tokenizer import check_tokenizer, end_ids
from rrl.parallel.mesh import make_mesh
from rrl.retrieval.retriever import Retriever
from rrl.rollout.automaton import StopSets, StopSetsCache
from rrl.rollout.config import EngineConfig
from rrl.rollout.episodes import Request, check_tokens
from rrl.rollout.loop_runner import LoopInputs, LoopRunner
from rrl.rollout.protocol import Environment, check_stops
from rrl.rollout.scheduler import Scheduler
from rrl.rollout.searches import IDLE_WAIT_SECONDS, InFlightSearches, SearchRunner
from rrl.rollout.shards import assign_to_shards, gather_results
from rrl.rollout.stats import RolloutStats, SchedulerCounts
from rrl.rollout.text_codec import TextCodec
from rrl.rollout.workflow import Completion, Workflow, numbered_workflows
from rrl.rollout.workflow_runner import WorkflowRunner

log = logging.getLogger(__name__)


class Engine:
    """Runs episodes of one decoder. Parameters are an argument of `run`, so that training needs no copy of them."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        retriever: Retriever | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Set up an engine. Programs are compiled in the first run.

        Args:
          decoder: gives the model's graph. Its parameters are not used.
          tokenizer: the decoder's tokenizer.
          config: sizes and sampling settings.
          retriever: None: every search finds nothing.
          mesh: None: the first device.

        Raises:
          UserError: the sizes, the tokenizer or the mesh do not fit together.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.retriever = retriever
        self.mesh = mesh or make_mesh(data=1, devices=jax.devices()[:1])
        self._dtype = decoder.dtype
        check_tokenizer(tokenizer, decoder.config)
        self.text = TextCodec(tokenizer, decoder.config.vocab_size)
        self.bytes = self.text.bytes
        """The bytes of each token id; empty for special tokens."""
        eos = np.array(end_ids(tokenizer, decoder.config), np.int32)
        self.loops = LoopRunner(decoder, config, self.mesh, eos=eos, retriever=retriever)
        self.programs = self.loops.programs
        self.stats = RolloutStats()
        """Statistics of the last run."""
        self._logged_errors: set[type] = set()
        self._stop_tables = StopSetsCache(self.bytes, self.text.special_tokens)
        self._closed = self._running = False
        self._lock = threading.Lock()
        """Guards `_closed` and `_running`."""

    # -- public ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the compiled programs and their memory maps. Later runs raise UserError. A `with` block closes the engine.

        If a run is active in another thread, the programs are freed when it ends.
        """
        with self._lock:
            self._closed = True
            if self._running:
                return
        self.loops.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def product_format(self) -> str:
        """Number format of the model's matrix products (`Backend.product_format`). Raises UserError if it is not supported."""
        return self.programs.backend.product_format(self._dtype)

    def fits(self, prompt: Int[np.ndarray, "T"]) -> bool:
        """Return whether a prompt leaves room in the context for two tokens of the policy."""
        return len(prompt) + 2 <= self.config.context

    def check_prompt(self, question: Question, prompt: Int[np.ndarray, "T"]) -> None:
        """Raise UserError if a prompt does not fit the context or has token ids outside the vocabulary."""
        check_tokens(prompt, len(self.bytes), f"the prompt of question {question.id!r}")
        if not self.fits(prompt):
            raise UserError(
                f"the prompt of question {question.id!r} has {len(prompt)} tokens; the context holds {self.config.context}, "
                "two of which are for the policy: raise rollout.context or shorten the prompt"
            )

    def run(
        self,
        params: PyTree,
        requests: Sequence[Request],
        environment: Environment,
        key: Key,
        *,
        retriever: Retriever | None = None,
        on_finish: Callable[[int, Trajectory], None] = lambda index, trajectory: None,
        reference: bool = False,
    ) -> list[Trajectory]:
        """Run every request to its end.

        If the mesh spans several processes, each process calls this with the same arguments, serves its own data shards, and
        gets all trajectories. The loop runs in its own thread: a JAX setting of a `with` block, such as
        `jax.default_matmul_precision`, has no effect there; `jax.config.update` has.

        Args:
          params: the decoder's state (`nnx.state(decoder)`), placed on the mesh as by `rrl.parallel.rules.shard`. The loop
            moves no array between devices.
          requests: the episodes to run.
          environment: returns the next observation when a turn has ended, or ends the episode.
          key: with a request's seed, it determines the sampled tokens.
          retriever: used instead of the engine's retriever: another corpus behind the same query encoder.
          on_finish: receives each finished trajectory of this process and its index in `requests`. The loop waits for it; it
            must not use JAX. An exception in it ends the run.
          reference: use the host-driven loop.

        Returns:
          trajectories in the order of `requests`.

        Raises:
          UserError: a prompt does not fit the context, the environment allows no token per turn or has invalid stop strings,
            or the retriever has another encoder.
          RuntimeError: another process failed; names the process and the cause.
          Exception: whatever the environment raised.
        """
        self._check(requests, environment)
        finished: dict[int, Trajectory] = {}
        lock = threading.Lock()

        def finish(index: int, trajectory: Trajectory) -> None:
            with lock:
                finished[index] = trajectory
                on_finish(index, trajectory)

        schedulers = self._request_schedulers(requests, environment, retriever)
        for scheduler in schedulers:
            scheduler.on_finish = finish
        # One group at a time, so that the workers share the long prompts.
        while sum(scheduler.fill(1) for scheduler in schedulers):
            pass
        inputs = LoopInputs(params, environment, key, reference)
        trajectories = self._run_schedulers(schedulers, finished, inputs)
        return [trajectories[index] for index in range(len(requests))]

    def run_workflows(
        self,
        params: PyTree,
        workflows: Sequence[Workflow],
        environment: Completion,
        key: Key,
        *,
        numbers: Sequence[int] | None = None,
        retriever: Retriever | None = None,
        on_finish: Callable[[int, Any], None] = lambda number, result: None,
        reference: bool = False,
    ) -> list[Any]:
        """Run generator functions (see `rrl.rollout.workflow`) concurrently.

        Args:
          params: as in `run`.
          workflows: generators that have not started.
          environment: names all stop strings, and the maximum tokens of one generation.
          key: as in `run`.
          numbers: one distinct number per workflow. It is the workflow's seed, and its name in `on_finish` and in errors.
            None: the indices of the workflows.
          retriever: as in `run`.
          on_finish: receives the number and the result of each finished workflow of this process, as in `run`.
          reference: use the host-driven loop.

        Returns:
          what each workflow returned.

        Raises:
          UserError: a workflow is no fresh generator or is given twice, or `numbers` are not distinct, too large, or not one
            per workflow.
          Exception: whatever a workflow raised.
        """
        numbered = numbered_workflows(workflows, numbers)
        count = self.programs.shards * self.programs.workers
        stops = self._stop_tables.get([(), *environment.stop_sets])
        in_flight = InFlightSearches(self._logged_errors)
        schedulers = [
            self._scheduler(collections.deque(), environment, stops, retriever, in_flight)
            for _ in range(count)
        ]
        results: dict[int, Any] = {}
        lock = threading.Lock()

        def finish(number: int, result: Any) -> None:
            with lock:
                on_finish(number, result)

        starts = [
            (
                scheduler,
                WorkflowRunner(numbered[index::count], scheduler, environment, results, finish).start,
            )
            for index, scheduler in self.loops.local_schedulers(schedulers)
        ]
        inputs = LoopInputs(params, environment, key, reference)
        all_results = self._run_schedulers(schedulers, results, inputs, starts)
        return [all_results[number] for number, _ in numbered]

    # -- internal ----------------------------------------------------------------------------------------------------

    def _request_schedulers(
        self, requests: Sequence[Request], environment: Environment, retriever: Retriever | None
    ) -> list[Scheduler]:
        """Return the schedulers of all workers and data shards. The workers of a shard share a queue of its requests."""
        stop_sets = [environment.stops if request.stops is None else request.stops for request in requests]
        stops = self._stop_tables.get(stop_sets or [environment.stops])
        shards, workers = self.programs.shards, self.programs.workers
        groups_by_shard = assign_to_shards([request.prompt for request in requests], shards, workers)
        queues = [
            collections.deque([(index, requests[index]) for index in group] for group in groups)
            for groups in groups_by_shard
        ]
        in_flight = InFlightSearches(self._logged_errors)
        return [
            self._scheduler(queue, environment, stops, retriever, in_flight)
            for _ in range(workers)
            for queue in queues
        ]

    def _scheduler(
        self,
        groups: collections.deque[list[tuple[int, Request]]],
        environment: Environment,
        stops: StopSets,
        retriever: Retriever | None,
        in_flight: InFlightSearches,
    ) -> Scheduler:
        config = self.config
        retriever = self._checked_retriever(retriever or self.retriever)
        return Scheduler(
            groups,
            environment,
            stops,
            self.programs.sizes,
            self.text,
            SearchRunner(retriever, config.top_k, config.search_seconds, in_flight),
            share_prompts=config.share_prompts,
            # At most IDLE_WAIT_SECONDS in total if the shards wait in turn.
            idle_wait=IDLE_WAIT_SECONDS / self.programs.shards,
        )

    def _checked_retriever(self, retriever: Retriever | None) -> Retriever | None:
        """Return the retriever. Raises UserError if the engine cannot embed its queries."""
        if retriever is not None and retriever.needs_embeddings:
            assert retriever.text_encoder is not None
            needed = retriever.text_encoder.dim
            given = self.programs.encoder.dim if self.programs.encoder else 0
            if needed != given:
                raise UserError(
                    f"retriever: its {retriever.kind} index needs queries of {needed} dimensions, the engine's query encoder "
                    f"gives {given or 'none'}; create the engine with a retriever over the same encoder"
                )
        return retriever

    @contextlib.contextmanager
    def _active_run(self) -> Iterator[None]:
        """Mark a run as active in a `with` block. If `close` is called meanwhile, it takes effect at the end of the block."""
        with self._lock:
            if self._closed:
                raise UserError("this engine is closed; create another one")
            self._running = True
        try:
            yield
        finally:
            with self._lock:
                self._running = False
            if self._closed:
                self.close()

    def _run_schedulers(
        self,
        schedulers: list[Scheduler],
        results: dict[int, Any],
        inputs: LoopInputs,
        starts: Sequence[tuple[Scheduler, Callable[[], None]]] = (),
    ) -> dict[int, Any]:
        """Run the loops until every scheduler has finished; set `stats`.

        Args:
          schedulers: those of all data shards and workers. This process calls only those of its own shards.
          results: filled by the schedulers of this process.
          inputs: what the loops get.
          starts: (scheduler, function) pairs. The scheduler calls the function before the loop.

        Returns:
          the results of all processes. Raises the error of a scheduler.
        """
        if inputs.reference and jax.process_count() > 1:
            raise UserError("the reference loop runs in one process only; omit reference=True")
        began, aborted = time.perf_counter(), threading.Event()
        for scheduler in schedulers:
            scheduler.aborted = aborted
        with self._active_run(), self.loops.begin_run(schedulers):
            for scheduler, start in starts:
                if not aborted.is_set():
                    scheduler.begin(start)
            gather_results(schedulers, None)  # if one failed, no process begins the loop
            steps, written_row_steps = self.loops.run(inputs, aborted)
            parts = gather_results(schedulers, (results, [scheduler.counts for scheduler in schedulers]))
        counts = [count for _, part in parts for count in part]
        self.stats = RolloutStats.of_run(
            counts,
            seconds=time.perf_counter() - began,
            row_steps=int(steps) * self.programs.decode_rows,
            written_row_steps=int(written_row_steps),
        )
        _warn_not_finite(counts)
        return {index: value for part, _ in parts for index, value in part.items()}

    def _check(self, requests: Sequence[Request], environment: Environment) -> None:
        where = f"{type(environment).__name__}."
        integer_at_least(1, environment, "turn_tokens", where=where)
        integer_at_least(0, environment, "observation_tokens", where=where)
        check_stops(environment.stops, f"{where}stops")
        for request in requests:
            self.check_prompt(request.question, request.prompt)
            if not 0 <= request.turn_tokens <= environment.turn_tokens:
                raise UserError(
                    f"turn_tokens={request.turn_tokens} of question {request.question.id!r} must be 0 to "
                    f"{environment.turn_tokens}, the environment's turn_tokens"
                )


def _warn_not_finite(counts: Sequence[SchedulerCounts]) -> None:
    """Log a warning if episodes ended because their logits were not finite."""
    episodes = sorted(episode for count in counts for episode in count.not_finite)
    if episodes:
        log.warning(
            "not finite: %d texts ended because a logit of the next token was NaN or infinite, the first for question %r. "
            "Check that all weights of the model are finite, and not too large for its dtype",
            len(episodes),
            episodes[0][1],
        )
