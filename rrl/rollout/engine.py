"""The rollout engine: one jitted loop decodes, asks the host, and prefills its answers into the live KV cache.

Rows that pause wait while the others decode; a finished row takes the next request from the queue. The host is called
through `io_callback` inside a fully manual `shard_map`, so that every data shard asks its own host. `run_reference`
drives the same jitted steps from Python: it is what the loop is tested against.
"""

import collections
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Key, PyTree
from transformers import PreTrainedTokenizerBase

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, describe_error, integer_at_least
from rrl.models.decoder import Decoder
from rrl.models.tokenizer import check_tokenizer, end_ids, token_bytes
from rrl.parallel.gather import gather_objects
from rrl.parallel.mesh import make_mesh
from rrl.retrieval.retriever import Retriever
from rrl.rollout.automaton import StopSets, compile_sets
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu.shape_probe import configure_shapes
from rrl.rollout.episodes import Request, check_tokens
from rrl.rollout.exchange import PAUSED, DeviceReport
from rrl.rollout.loop import QueryEncoder, RolloutPrograms
from rrl.rollout.protocol import Environment, check_stops
from rrl.rollout.scheduler import DEVICE_STAGES, Scheduler
from rrl.rollout.searches import IDLE_WAIT_SECONDS, InFlightSearches
from rrl.rollout.stats import RolloutStats
from rrl.rollout.watchdog import Watchdog
from rrl.rollout.workflow import Completion, Workflow, WorkflowRunner, numbered_workflows
from rrl.text.chat import chat_ids
from rrl.text.encoding import plain_ids, special_name, text_ids

T = TypeVar("T")

log = logging.getLogger(__name__)

CACHED_TEXTS, MAX_CACHED_CHARACTERS = 4096, 4096
"""Texts whose tokens are kept, of at most so many characters: samples of a question read the same passages, and tags are always
the same."""
CACHED_STOP_TABLES = 8
"""Tables of stop strings that are kept: the next run asks for the same most often, or for some of them."""


class Engine:
    """Runs episodes of one decoder. Parameters are an argument of `run`, so that training needs no copy."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        retriever: Retriever | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.retriever = retriever
        self.mesh = mesh or make_mesh(data=1, devices=jax.devices()[:1])
        check_tokenizer(tokenizer, decoder.config)
        self.bytes = token_bytes(tokenizer)
        self._encoded = functools.lru_cache(CACHED_TEXTS)(self._encode)
        self._special = [piece for piece, number in tokenizer.get_vocab().items() if not self.bytes[number]]
        self.bytes += [b""] * (decoder.config.vocab_size - len(self.bytes))
        encoder = retriever.encoder if retriever is not None and retriever.needs_embeddings else None
        text_encoder = retriever.text_encoder if retriever is not None and encoder is not None else None
        self.encoder_state: Any = None
        query_encoder = None
        if text_encoder is not None:
            graph, state = nnx.split(encoder)
            self.encoder_state = self._everywhere(state)
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
        self._schedulers: list[Scheduler] = []
        self._preparing = ""  # what is done before the device first asks a host
        self._told: set[type] = set()
        self._stop_tables = collections.deque[StopSets](maxlen=CACHED_STOP_TABLES)
        self._compiled_loops: dict[Any, Callable] = {}
        self._closed = self._at_work = False
        self._lock = threading.Lock()  # of the two

    # -- public ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back the compiled programs and the memory they map; `run` raises UserError from here on. Also done by `with`.

        A run of another thread goes on to its end, and gives them back then.
        """
        with self._lock:
            self._closed = True
            if self._at_work:
                return
        self.programs.close()
        self._compiled_loops.clear()
        self._schedulers, self.encoder_state = [], None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fits(self, prompt: Int[np.ndarray, "T"]) -> bool:
        """Whether a prompt leaves room in the context for two tokens of the policy's."""
        return len(prompt) + 2 <= self.config.context

    def check_prompt(self, question: Question, prompt: Int[np.ndarray, "T"]) -> None:
        """Raises UserError for a prompt that does not fit the context, or has tokens that the model has not."""
        check_tokens(prompt, len(self.bytes), f"the prompt of question {question.id!r}")
        if not self.fits(prompt):
            raise UserError(
                f"the prompt of question {question.id!r} has {len(prompt)} tokens, the context holds "
                f"{self.config.context}, two of which are the policy's: raise rollout.context or shorten the prompt"
            )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, no special tokens added; read-only, since what is often asked is kept."""
        return self._encoded(text) if len(text) <= MAX_CACHED_CHARACTERS else self._encode(text)

    def encode_plain(self, text: str) -> np.ndarray:
        """The same of a text that others wrote: where it names a special token, that is text and no control token."""
        return plain_ids(self.tokenizer, text) if special_name(self.tokenizer, text) else self.encode(text)

    def _encode(self, text: str) -> np.ndarray:
        ids = text_ids(self.tokenizer, text)
        ids.setflags(write=False)
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids, from their bytes; special tokens are left out."""
        return b"".join(map(self.bytes.__getitem__, np.asarray(ids).tolist())).decode(errors="replace")

    def run(
        self,
        params: PyTree,
        requests: Sequence[Request],
        environment: Environment,
        key: Key,
        *,
        retriever: Retriever | None = None,
        on_finish: Callable[[int, Trajectory], None] = lambda place, trajectory: None,
        reference: bool = False,
    ) -> list[Trajectory]:
        """Runs every request to its end; trajectories come back in the order of `requests`.

        `on_finish` gets each of this process's as it ends, with its place in `requests`, from inside the loop: it must be
        quick and must not touch JAX; what it raises ends the run.

        `params` is the decoder's state (`nnx.state(decoder)`), on the mesh's devices as `rrl.parallel.rules.shard` puts it: the
        loop moves no array from one device to another. `retriever` stands in for the engine's own (another corpus behind
        the same encoder). `reference` runs the host-driven loop. Where the mesh spans several processes, each calls this with
        the same arguments, answers for its own data shards and gets all trajectories. The loop has a thread of its own, where
        what a `with` block sets for JAX (`jax.default_matmul_precision`) does not hold; `jax.config.update` does.

        Raises what the environment raised, and UserError for a prompt that does not fit the context, an environment without
        a token a turn or with stops that cannot be, or a retriever over another encoder. Where another process's environment
        raised, this process leaves the loop too, with a RuntimeError that names that process and the cause.
        """
        self._check(requests, environment)
        finished: dict[int, Trajectory] = {}
        alone = threading.Lock()

        def finish(index: int, trajectory: Trajectory) -> None:
            with alone:
                finished[index] = trajectory
                on_finish(index, trajectory)

        sets = [environment.stops if request.stops is None else request.stops for request in requests]
        stops = self._stop_table(sets or [environment.stops])
        prompts, shards = [request.prompt for request in requests], self.programs.shards
        shares = assign_to_shards(prompts, shards, self.programs.workers)
        queues = [collections.deque([(i, requests[i]) for i in group] for group in share) for share in shares]
        desk = InFlightSearches(self._told)
        hosts = [
            self._host(queue, environment, stops, retriever, desk)
            for _ in range(self.programs.workers)
            for queue in queues
        ]
        for host in hosts:
            host.on_finish = finish
        while sum(host.fill(1) for host in hosts):  # by turns, so that no loop gets all that are long
            pass
        with self._working():
            found = self._drive(hosts, finished, params, environment, key, reference)
        return [found[index] for index in range(len(requests))]

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
        """Runs generator functions (see `rrl.rollout.workflow`) side by side; returns what each returned.

        `environment` names all stop strings and the most tokens of one generation. `numbers` are the workflows' seeds, all
        of them different; their places unless given. `on_finish` gets each number with what its workflow returned, as in `run`:
        each process begins those of its own data shards. Raises what a workflow raises, and UserError for numbers that are
        not one for each workflow, there twice or too large, and for a workflow that is no fresh generator or there twice.
        """
        numbered = numbered_workflows(workflows, numbers)
        count = self.programs.shards * self.programs.workers
        stops = self._stop_table([(), *environment.stop_sets])
        desk = InFlightSearches(self._told)
        hosts = [self._host(collections.deque(), environment, stops, retriever, desk) for _ in range(count)]
        results: dict[int, Any] = {}
        alone = threading.Lock()

        def finish(number: int, result: Any) -> None:
            with alone:
                on_finish(number, result)

        starts = [
            (host, WorkflowRunner(numbered[place::count], host, environment, results, finish).start)
            for place, host in self._own(hosts)
        ]
        with self._working():
            found = self._drive(hosts, results, params, environment, key, reference, starts)
        return [found[number] for number, _ in numbered]

    # -- the host ----------------------------------------------------------------------------------------------------

    def _host(
        self,
        requests: collections.deque[list[tuple[int, Request]]],
        environment: Environment,
        stops: StopSets,
        retriever: Retriever | None,
        desk: InFlightSearches,
    ) -> Scheduler:
        return Scheduler(
            requests,
            environment,
            stops,
            self.programs.limits,
            encode=self.encode,
            encode_body=self.encode_plain,
            decode=self.decode,
            encode_prompt=lambda text: chat_ids(self.tokenizer, text),
            vocab_size=len(self.bytes),
            retriever=self._searched(retriever or self.retriever),
            top_k=self.config.top_k,
            search_seconds=self.config.search_seconds,
            share_prompts=self.config.share_prompts,
            desk=desk,
            nap=IDLE_WAIT_SECONDS / self.programs.shards,  # while one naps the others stand still
        )

    def _own(self, hosts: Sequence[Scheduler]) -> list[tuple[int, Scheduler]]:
        """Those that are asked in this process, with their places: their data shards lie on its devices."""
        shards = self.programs.shards
        asking = self.mesh.devices.reshape(shards, -1)[:, 0]  # rank 0 of the tensor axis
        here = [device.process_index == jax.process_index() for device in asking]
        return [(place, host) for place, host in enumerate(hosts) if here[place % shards]]

    def _searched(self, retriever: Retriever | None) -> Retriever | None:
        """The same; UserError where the engine cannot embed its queries."""
        if retriever is not None and retriever.needs_embeddings:
            assert retriever.text_encoder is not None
            wanted = retriever.text_encoder.dim
            given = self.programs.encoder.dim if self.programs.encoder else 0
            if wanted != given:
                raise UserError(
                    f"retriever: its {retriever.kind} index needs queries of {wanted} dimensions, the engine's query encoder "
                    f"gives {given or 'none'}; make the engine with a retriever over the same encoder"
                )
        return retriever

    def _stop_table(self, sets: Sequence[tuple[str, ...]]) -> StopSets:
        """The automata of these sets, and perhaps of more: a loop that is compiled serves a part of its sets too. UserError for a
        string that can never be seen."""
        wanted = dict.fromkeys(sets)
        for kept in self._stop_tables:
            if wanted.keys() <= kept.starts.keys():
                return kept
        for string in {string for strings in wanted for string in strings}:
            if hidden := [token for token in self._special if token in string]:
                raise UserError(
                    f"the policy would never be seen to write the stop string {string!r}: {hidden[0]!r} is a special token "
                    'of the tokenizer, which no text shows. Make it an ordinary one ("special": false in tokenizer.json '
                    "and tokenizer_config.json), or choose another tag"
                )
        self._stop_tables.append(compile_sets(tuple(wanted), self.bytes))
        return self._stop_tables[-1]

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """The engine is not closed within the block, but at its end."""
        with self._lock:
            if self._closed:
                raise UserError("this engine is closed; make another one")
            self._at_work = True
        try:
            yield
        finally:
            with self._lock:
                self._at_work = False
            if self._closed:
                self.close()

    def _drive(
        self,
        hosts: list[Scheduler],
        found: dict[int, Any],
        params: PyTree,
        environment: Environment,
        key: Key,
        reference: bool,
        starts: Sequence[tuple[Scheduler, Callable[[], None]]] = (),
    ) -> dict[int, Any]:
        """Runs the loop until every host has switched its rows off; fills `stats`.

        `starts` are done before. Hosts that are another process's are asked there; what all of them have put into `found` is
        returned. Raises what a host met.
        """
        if reference and jax.process_count() > 1:
            raise UserError("the reference loop runs in one process only; leave reference=True out")
        began, over = time.perf_counter(), threading.Event()
        self._schedulers = hosts
        for host in hosts:
            host.over = over
        self._preparing = ""
        watched = self._progress, self._stages, lambda: self._preparing, self._computes
        with Watchdog(self.config.stall_seconds, *watched):
            for host, start in starts:
                if not over.is_set():
                    host.begin(start)
            _gathered(hosts, None)  # where one has failed, no process begins the loop
            steps, wrote = self._run(hosts, params, environment, key, reference, over)
            counts = [(host.searches.seconds, host.written, host.prefilled, host.failed) for host in hosts]
            broken = [one for host in hosts for one in host.broken]
            parts = _gathered(hosts, (found, counts, broken))
        searching, written, prefilled, failed = np.sum([counts for _, counts, _ in parts], axis=0).T
        broken = sorted(one for *_, some in parts for one in some)
        self.stats = RolloutStats(
            seconds=time.perf_counter() - began,
            retrieval_seconds=float(searching.max()),
            policy_tokens=int(written.sum()),
            row_steps=int(steps) * self.programs.decode_rows,
            written_steps=int(wrote),
            prefilled_tokens=int(prefilled.sum()),
            searches_failed=int(failed.sum()),
            not_finite=len(broken),
        )
        if broken:
            log.warning(
                "not finite: %d texts ended because a logit of the next token was NaN or infinite; the first is that of "
                "question %r. Are all weights of the model finite, and large enough for its dtype?",
                len(broken),
                broken[0][1],
            )
        return {index: value for part, *_ in parts for index, value in part.items()}

    def _run(
        self,
        hosts: list[Scheduler],
        params: PyTree,
        environment: Environment,
        key: Key,
        reference: bool,
        over: threading.Event,
    ) -> Int[np.ndarray, "2"]:
        """Runs all loops to their end, which `over` brings about; returns their decode steps, and in how many of them each row
        wrote, added up."""
        stops = hosts[0].stops
        signature = (environment.turn_tokens, stops.first_accept, len(stops.table), reference)
        if fresh := signature not in self._compiled_loops:
            if not self._compiled_loops:
                self._preparing = "trying row counts"
                configure_shapes(self.programs, params)
            build = self.programs.reference_loop if reference else self.programs.episode_loop
            self._compiled_loops[signature] = build(environment.turn_tokens, stops.first_accept)
            turns = f"turns of {environment.turn_tokens} tokens, {len(stops.strings)} stop strings"
            self._preparing = f"compiling {self.programs.describe()}, {turns}"
            log.info(self._preparing)
        key, table = self._everywhere((key, stops.table))
        # The reference loop hands arrays to and fro at every step.
        moving = "allow" if reference else "disallow"

        def run(loop: int) -> np.ndarray:
            number = self._everywhere(np.int32(loop))
            with jax.set_mesh(self.mesh), jax.transfer_guard(moving):
                steps = self._compiled_loops[signature](params, self.encoder_state, key, table, number)
            return np.asarray(steps)

        loops = self.programs.workers
        if reference:
            return np.sum([run(loop) for loop in range(loops)], axis=0)
        if fresh and loops > 1:
            # Other calls wait until the first has ended: it is one that has nothing to do.
            self._schedulers = [self._host(collections.deque(), environment, stops, None, InFlightSearches())]
            run(0)
            self._schedulers = hosts
        # A single loop has a thread, too: this one hears Ctrl-C, as long as it waits for another.
        with concurrent.futures.ThreadPoolExecutor(loops, "rrl-rollout") as pool:
            try:
                running = [pool.submit(run, loop) for loop in range(loops)]
                concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_EXCEPTION)
                return np.sum([loop.result() for loop in running], axis=0)
            except BaseException:  # Ctrl-C, or a loop that broke: the others shall end too
                over.set()
                raise

    def _everywhere(self, tree: PyTree) -> PyTree:
        """The same values on all devices of the mesh; other processes may have some of them."""
        place = NamedSharding(self.mesh, PartitionSpec())

        def put(leaf: Any) -> jax.Array:
            if jax.process_count() == 1:
                return jax.device_put(leaf, place)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(put(jax.random.key_data(leaf)))
            return jax.device_put(np.asarray(leaf), place)

        return jax.tree.map(put, tree)

    def _host_callback(self, words: Any) -> np.ndarray:
        """The callback: NumPy in, NumPy out."""
        self._preparing = ""
        words = np.asarray(words)
        place, active = words[:2]
        limits, encoder = self.programs.limits, self.programs.encoder
        dim = encoder.dim if encoder else 0
        turns, vectors = DeviceReport.from_message(words[2:], limits.rows, limits.wake_threshold * dim)
        others = int(active) - int(np.count_nonzero(turns.status <= PAUSED))
        return self._schedulers[place].exchange(turns, vectors.reshape(limits.wake_threshold, dim), others)

    def _progress(self) -> int:
        return sum(host.exchanges for host in self._schedulers)

    def _computes(self) -> bool:
        return self.programs.on_cpu and all(
            host.stage in DEVICE_STAGES for _, host in self._own(self._schedulers)
        )

    def _stages(self) -> str:
        return "; ".join(
            f"host {number} {host.stage}, after {host.exchanges} exchanges"
            for number, host in self._own(self._schedulers)
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
                    f"{environment.turn_tokens}, the environment's"
                )


class WeakCallback:
    """A method to be called from a jitted program, held weakly.

    JAX's caches hold a program's callback for as long as the program, and the program for as long as the function that was
    jitted. An engine holds that function: were the callback to hold the engine, neither would ever be collected.
    """

    def __init__(self, method: Callable) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, message: Any) -> np.ndarray:
        method = self._method()
        assert method is not None, "an engine is held by who runs it"
        return method(message)


def _gathered(hosts: Sequence[Scheduler], value: T) -> list[T]:
    """What each process gives; raises what a host met, or that one of another process met something."""
    errors = [host.error for host in hosts if host.error is not None]
    parts = gather_objects((value, [describe_error(error) for error in errors]))
    if errors:
        raise errors[0]
    for process, (_, words) in enumerate(parts):
        if words:
            raise RuntimeError(f"the rollout failed in process {process}: {words[0]}")
    return [value for value, _ in parts]


def assign_to_shards(
    prompts: Sequence[Int[np.ndarray, "T"]], shards: int, loops: int = 1
) -> list[list[list[int]]]:
    """Which requests each data shard runs, in groups for one of its loops: those of one prompt together, as long as each loop
    gets as many prompts; those of the prompts that are left over go round one by one.

    Long prompts come first, since long questions tend to take more turns: short episodes then fill the rows at the end
    (longest processing time first, Graham 1969).
    """
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(np.asarray(prompt, np.int32).tobytes(), []).append(index)
    places = sorted(groups.values(), key=lambda place: -len(prompts[place[0]]))
    whole = len(places) - len(places) % (shards * loops)
    places[whole:] = [[place] for group in places[whole:] for place in group]
    return [places[shard::shards] for shard in range(shards)]
