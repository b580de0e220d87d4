"""The rollout engine: runs episodes of a policy with search, in one jitted loop that calls Python schedulers.

The jitted loop decodes, reports paused slots to the schedulers, and prefills their replies into the same KV cache. Paused slots
wait while others decode; the slot of a finished episode takes the next request. The loop calls the schedulers through
`io_callback` inside a fully manual `shard_map`, so that each data shard calls its own scheduler. `reference=True` drives the same
jitted steps from Python; tests compare the two. Read `Engine.run`, then `rrl.rollout.loop.RolloutPrograms.episode_loop`.
"""

import collections
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
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
from rrl.rollout.cpu.shape_probe import configure_shapes
from rrl.rollout.episodes import Request, check_tokens
from rrl.rollout.exchange import PAUSED, DeviceReport
from rrl.rollout.host_calls import WeakCallback
from rrl.rollout.programs import RolloutPrograms
from rrl.rollout.protocol import Environment, check_stops
from rrl.rollout.query_encoder import QueryEncoder
from rrl.rollout.scheduler import DEVICE_STAGES, Scheduler
from rrl.rollout.searches import IDLE_WAIT_SECONDS, InFlightSearches
from rrl.rollout.shards import assign_to_shards, gather_results, replicate
from rrl.rollout.stats import RolloutStats
from rrl.rollout.text_codec import TextCodec
from rrl.rollout.watchdog import Watchdog
from rrl.rollout.workflow import Completion, Workflow, WorkflowRunner, numbered_workflows
from rrl.text.chat import chat_ids

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
        check_tokenizer(tokenizer, decoder.config)
        self.text = TextCodec(tokenizer, decoder.config.vocab_size)
        self.bytes = self.text.bytes
        """The bytes of each token id; empty for special tokens."""
        encoder = retriever.encoder if retriever is not None and retriever.needs_embeddings else None
        text_encoder = retriever.text_encoder if retriever is not None and encoder is not None else None
        self.encoder_state: Any = None
        query_encoder = None
        if text_encoder is not None:
            graph, state = nnx.split(encoder)
            self.encoder_state = replicate(state, self.mesh)
            query_encoder = QueryEncoder(
                graph,
                pad_token_id=text_encoder.tokenizer.pad_token_id,
                query_tokens=text_encoder.settings.query_tokens,
                dim=text_encoder.dim,
            )
        self.programs = RolloutPrograms(
            nnx.split(decoder)[0],
            decoder.config,
            config,
            self.mesh,
            eos=np.array(end_ids(tokenizer, decoder.config), np.int32),
            host_callback=WeakCallback(self._host_callback),
            encoder=query_encoder,
        )
        self.stats = RolloutStats()
        """Statistics of the last run."""
        self._schedulers: list[Scheduler] = []
        self._preparing = ""
        """The work before the device first calls a scheduler; "" once it has called one."""
        self._logged_errors: set[type] = set()
        self._stop_tables = StopSetsCache(self.bytes, self.text.special_tokens)
        self._compiled_loops: dict[Any, Callable] = {}
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
        self.programs.close()
        self._compiled_loops.clear()
        self._schedulers, self.encoder_state = [], None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
          environment: reacts to paused turns.
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

        sets = [environment.stops if request.stops is None else request.stops for request in requests]
        stops = self._stop_tables.get(sets or [environment.stops])
        prompts, shards = [request.prompt for request in requests], self.programs.shards
        shares = assign_to_shards(prompts, shards, self.programs.workers)
        queues = [collections.deque([(i, requests[i]) for i in group] for group in share) for share in shares]
        in_flight = InFlightSearches(self._logged_errors)
        schedulers = [
            self._scheduler(queue, environment, stops, retriever, in_flight)
            for _ in range(self.programs.workers)
            for queue in queues
        ]
        for scheduler in schedulers:
            scheduler.on_finish = finish
        # One group at a time, so that the workers share the long prompts.
        while sum(scheduler.fill(1) for scheduler in schedulers):
            pass
        with self._run_active():
            trajectories = self._drive(schedulers, finished, params, environment, key, reference)
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
          numbers: distinct seeds of the workflows. None: their indices.
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
            for index, scheduler in self._local_schedulers(schedulers)
        ]
        with self._run_active():
            found = self._drive(schedulers, results, params, environment, key, reference, starts)
        return [found[number] for number, _ in numbered]

    # -- internal ----------------------------------------------------------------------------------------------------

    def _scheduler(
        self,
        requests: collections.deque[list[tuple[int, Request]]],
        environment: Environment,
        stops: StopSets,
        retriever: Retriever | None,
        in_flight: InFlightSearches,
    ) -> Scheduler:
        return Scheduler(
            requests,
            environment,
            stops,
            self.programs.sizes,
            encode=self.text.encode,
            encode_body=self.text.encode_plain,
            decode=self.text.decode,
            encode_prompt=lambda text: chat_ids(self.tokenizer, text),
            vocab_size=len(self.bytes),
            retriever=self._checked_retriever(retriever or self.retriever),
            top_k=self.config.top_k,
            search_seconds=self.config.search_seconds,
            share_prompts=self.config.share_prompts,
            in_flight=in_flight,
            idle_wait=IDLE_WAIT_SECONDS
            / self.programs.shards,  # at most IDLE_WAIT_SECONDS in total if the shards wait in turn
        )

    def _local_schedulers(self, schedulers: Sequence[Scheduler]) -> list[tuple[int, Scheduler]]:
        """Return the schedulers that this process calls, with their indices: those of the data shards on its devices."""
        shards = self.programs.shards
        calling = self.mesh.devices.reshape(shards, -1)[:, 0]  # rank 0 of the tensor axis
        local = [device.process_index == jax.process_index() for device in calling]
        return [(index, scheduler) for index, scheduler in enumerate(schedulers) if local[index % shards]]

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
    def _run_active(self) -> Iterator[None]:
        """A context in which `close` is postponed to its end."""
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

    def _drive(
        self,
        schedulers: list[Scheduler],
        results: dict[int, Any],
        params: PyTree,
        environment: Environment,
        key: Key,
        reference: bool,
        starts: Sequence[tuple[Scheduler, Callable[[], None]]] = (),
    ) -> dict[int, Any]:
        """Run the loop until every scheduler has finished; set `stats`.

        Args:
          schedulers: all schedulers. Those of other processes are called there.
          results: filled by the schedulers of this process.
          params, environment, key, reference: as in `run`.
          starts: (scheduler, function) pairs. The scheduler calls the function before the loop.

        Returns:
          the results of all processes. Raises the error of a scheduler.
        """
        if reference and jax.process_count() > 1:
            raise UserError("the reference loop runs in one process only; omit reference=True")
        began, aborted = time.perf_counter(), threading.Event()
        self._schedulers = schedulers
        for scheduler in schedulers:
            scheduler.aborted = aborted
        self._preparing = ""
        watched = self._progress, self._stages, lambda: self._preparing, self._device_computes
        with Watchdog(self.config.stall_seconds, *watched):
            for scheduler, start in starts:
                if not aborted.is_set():
                    scheduler.begin(start)
            gather_results(schedulers, None)  # if one failed, no process begins the loop
            steps, written = self._run_loops(schedulers, params, environment, key, reference, aborted)
            counts = [
                (
                    scheduler.searches.seconds,
                    scheduler.policy_tokens,
                    scheduler.prefilled_tokens,
                    scheduler.searches_failed,
                )
                for scheduler in schedulers
            ]
            not_finite = [episode for scheduler in schedulers for episode in scheduler.not_finite]
            parts = gather_results(schedulers, (results, counts, not_finite))
        searching, policy_tokens, prefilled, failed = np.sum([counts for _, counts, _ in parts], axis=0).T
        not_finite = sorted(episode for *_, episodes in parts for episode in episodes)
        self.stats = RolloutStats(
            seconds=time.perf_counter() - began,
            retrieval_seconds=float(searching.max()),
            policy_tokens=int(policy_tokens.sum()),
            row_steps=int(steps) * self.programs.decode_rows,
            written_steps=int(written),
            prefilled_tokens=int(prefilled.sum()),
            searches_failed=int(failed.sum()),
            not_finite=len(not_finite),
        )
        if not_finite:
            log.warning(
                "not finite: %d texts ended because a logit of the next token was NaN or infinite, the first for question %r. "
                "Check that all weights of the model are finite, and not too large for its dtype",
                len(not_finite),
                not_finite[0][1],
            )
        return {index: value for part, *_ in parts for index, value in part.items()}

    def _run_loops(
        self,
        schedulers: list[Scheduler],
        params: PyTree,
        environment: Environment,
        key: Key,
        reference: bool,
        aborted: threading.Event,
    ) -> Int[np.ndarray, "2"]:
        """Run the loops of all workers, compiling them first if needed. They end early once `aborted` is set.

        Returns:
          number of decode steps, and the sum of the numbers of rows that wrote in each step.
        """
        stops = schedulers[0].stops
        signature = (environment.turn_tokens, stops.first_accept, len(stops.table), reference)
        if new := signature not in self._compiled_loops:
            if not self._compiled_loops:
                self._preparing = "probing shapes"
                configure_shapes(self.programs, params)
            build = self.programs.reference_loop if reference else self.programs.episode_loop
            self._compiled_loops[signature] = build(environment.turn_tokens, stops.first_accept)
            turns = f"turns of {environment.turn_tokens} tokens, {len(stops.strings)} stop strings"
            self._preparing = f"compiling {self.programs.describe()}, {turns}"
            log.info(self._preparing)
        key, table = replicate((key, stops.table), self.mesh)
        # The reference loop moves arrays between host and device at every step.
        transfers = "allow" if reference else "disallow"

        def run(worker: int) -> np.ndarray:
            number = replicate(np.int32(worker), self.mesh)
            with jax.set_mesh(self.mesh), jax.transfer_guard(transfers):
                counts = self._compiled_loops[signature](params, self.encoder_state, key, table, number)
            return np.asarray(counts)

        workers = self.programs.workers
        if reference:
            return np.sum([run(worker) for worker in range(workers)], axis=0)
        if new and workers > 1:
            # The first call compiles, and concurrent calls would wait until it has ended. A scheduler without requests makes it
            # end right after the compilation.
            idle = self._scheduler(collections.deque(), environment, stops, None, InFlightSearches())
            self._schedulers = [idle]
            run(0)
            self._schedulers = schedulers
        # A single worker has its own thread too: this thread handles Ctrl-C while it waits.
        with concurrent.futures.ThreadPoolExecutor(workers, "rrl-rollout") as pool:
            try:
                running = [pool.submit(run, worker) for worker in range(workers)]
                concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_EXCEPTION)
                return np.sum([future.result() for future in running], axis=0)
            except BaseException:  # Ctrl-C, or a worker failed: the others must end too
                aborted.set()
                raise

    def _host_callback(self, message: Any) -> np.ndarray:
        """Pass a device's message to its scheduler and return the reply. NumPy only: a callback must not call JAX."""
        self._preparing = ""
        message = np.asarray(message)
        index, active = message[:2]
        sizes, encoder = self.programs.sizes, self.programs.encoder
        dim = encoder.dim if encoder else 0
        report, embeddings = DeviceReport.from_message(message[2:], sizes.slots, sizes.wake_threshold * dim)
        others = int(active) - int(np.count_nonzero(report.status <= PAUSED))  # DECODING or PAUSED
        embeddings = embeddings.reshape(sizes.wake_threshold, dim)
        return self._schedulers[index].exchange(report, embeddings, others)

    def _progress(self) -> int:
        return sum(scheduler.exchanges for scheduler in self._schedulers)

    def _device_computes(self) -> bool:
        """Return whether all schedulers wait for a device that computes on the cores of this process."""
        return self.programs.on_cpu and all(
            scheduler.stage in DEVICE_STAGES for _, scheduler in self._local_schedulers(self._schedulers)
        )

    def _stages(self) -> str:
        return "; ".join(
            f"scheduler {index} {scheduler.stage}, after {scheduler.exchanges} exchanges"
            for index, scheduler in self._local_schedulers(self._schedulers)
        )

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
