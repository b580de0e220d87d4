"""Compiles the episode loop of an engine and runs it in one thread per worker. Read `LoopRunner.run` first."""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int, Key, PyTree

from rrl.models.decoder import Decoder
from rrl.retrieval.retriever import Retriever
from rrl.rollout.backends import find_shapes, select_backend
from rrl.rollout.config import EngineConfig
from rrl.rollout.exchange import PAUSED, DeviceReport
from rrl.rollout.host_calls import WeakCallback
from rrl.rollout.programs import RolloutPrograms
from rrl.rollout.protocol import Environment
from rrl.rollout.query_encoder import QueryEncoder
from rrl.rollout.scheduler import DEVICE_STAGES, Scheduler
from rrl.rollout.searches import SearchRunner
from rrl.rollout.shards import replicate
from rrl.rollout.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoopInputs:
    """What a run passes to its loops. The fields are the arguments of `Engine.run`."""

    params: PyTree
    environment: Environment
    key: Key
    reference: bool


class LoopRunner:
    """Runs the episode loops of all workers and passes the device's messages to the schedulers of the run."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        mesh: Mesh,
        *,
        eos: Int[np.ndarray, "E"],
        retriever: Retriever | None,
    ) -> None:
        """Set up without compiling.

        Args:
          decoder: gives the model's graph.
          config: sizes and sampling settings.
          mesh: devices to run on.
          eos: end-of-sequence token ids.
          retriever: its query encoder embeds the queries, if it needs embeddings.
        """
        self.mesh = mesh
        encoder, self.encoder_state = _split_query_encoder(retriever, mesh)
        self.programs = RolloutPrograms(
            nnx.split(decoder)[0],
            decoder.config,
            config,
            mesh,
            select_backend(config, decoder.config, mesh),
            eos=eos,
            host_callback=WeakCallback(self.host_callback),
            encoder=encoder,
        )
        self.schedulers: list[Scheduler] = []
        """The schedulers of all data shards and workers, in the present or last run. This process calls only those of its own
        shards."""
        self.compiled: dict[Any, Callable] = {}
        """The compiled loops."""
        self._preparing = ""
        """Name of the work before the device first calls a scheduler; "" once it has called one."""

    def close(self) -> None:
        """Free the compiled programs and the encoder's parameters."""
        self.programs.close()
        self.compiled.clear()
        self.schedulers, self.encoder_state = [], None

    def begin_run(self, schedulers: list[Scheduler]) -> Watchdog:
        """Pass the device's messages to these schedulers from now on. Return a watchdog for the run."""
        self.schedulers, self._preparing = schedulers, ""
        watched = self._progress, self.stages, lambda: self._preparing, self._device_computes
        return Watchdog(self.programs.config.stall_seconds, *watched)

    def run(self, inputs: LoopInputs, aborted: threading.Event) -> Int[np.ndarray, "2"]:
        """Run the loops until every scheduler has finished, or until `aborted` is set. Compile them first if needed.

        Returns:
          number of decode steps, and number of rows that wrote, summed over the steps.
        """
        run_worker, is_new = self._worker_function(inputs)
        if inputs.reference:
            return np.sum([run_worker(worker) for worker in range(self.programs.workers)], axis=0)
        if is_new and self.programs.workers > 1:
            # The first call compiles, and concurrent calls would wait until it has ended. A scheduler without requests makes it
            # end right after the compilation.
            schedulers = self.schedulers
            self.schedulers = [_without_requests(schedulers[0])]
            run_worker(0)
            self.schedulers = schedulers
        return self._run_workers(run_worker, aborted)

    def _worker_function(self, inputs: LoopInputs) -> tuple[Callable[[int], np.ndarray], bool]:
        """Return a function that runs the loop of one worker, and whether its first call compiles."""
        turn_tokens, stops = inputs.environment.turn_tokens, self.schedulers[0].stops
        signature = (turn_tokens, stops.first_accept, len(stops.table), inputs.reference)
        if is_new := signature not in self.compiled:
            if not self.compiled:
                self._preparing = "probing shapes"
                self.programs.shapes = find_shapes(self.programs, inputs.params)
            build = self.programs.reference_loop if inputs.reference else self.programs.episode_loop
            self.compiled[signature] = build(turn_tokens, stops.first_accept)
            turns = f"turns of {turn_tokens} tokens, {len(stops.strings)} stop strings"
            self._preparing = f"compiling {self.programs.describe()}, {turns}"
            log.info(self._preparing)
        key, table = replicate((inputs.key, stops.table), self.mesh)
        # The reference loop moves arrays between host and device at every step.
        transfers = "allow" if inputs.reference else "disallow"

        def run_worker(worker: int) -> np.ndarray:
            index = replicate(np.int32(worker), self.mesh)
            with jax.set_mesh(self.mesh), jax.transfer_guard(transfers):
                counts = self.compiled[signature](inputs.params, self.encoder_state, key, table, index)
            return np.asarray(counts)

        return run_worker, is_new

    def _run_workers(
        self, run_worker: Callable[[int], np.ndarray], aborted: threading.Event
    ) -> Int[np.ndarray, "2"]:
        """Run all workers at the same time and return the sum of their counts."""
        workers = self.programs.workers
        # A single worker has its own thread too: this thread handles Ctrl-C while it waits.
        with concurrent.futures.ThreadPoolExecutor(workers, "rrl-rollout") as pool:
            try:
                running = [pool.submit(run_worker, worker) for worker in range(workers)]
                concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_EXCEPTION)
                return np.sum([future.result() for future in running], axis=0)
            except BaseException:  # Ctrl-C, or a worker failed: the others must end too
                aborted.set()
                raise

    def host_callback(self, message: Any) -> np.ndarray:
        """Pass a device's message to its scheduler and return the reply. NumPy only: a callback must not call JAX."""
        self._preparing = ""
        message = np.asarray(message)
        index, active = message[:2]
        sizes, encoder = self.programs.sizes, self.programs.encoder
        dim = encoder.dim if encoder else 0
        report, embeddings = DeviceReport.from_message(message[2:], sizes.slots, sizes.wake_threshold * dim)
        active_elsewhere = int(active) - int(np.count_nonzero(report.status <= PAUSED))  # DECODING or PAUSED
        embeddings = embeddings.reshape(sizes.wake_threshold, dim)
        return self.schedulers[index].exchange(report, embeddings, active_elsewhere)

    def local_schedulers(self, schedulers: Sequence[Scheduler]) -> list[tuple[int, Scheduler]]:
        """Return the schedulers that this process calls, with their indices: those of the data shards on its devices."""
        shards = self.programs.shards
        calling = self.mesh.devices.reshape(shards, -1)[:, 0]  # rank 0 of the tensor axis
        local = [device.process_index == jax.process_index() for device in calling]
        return [(index, scheduler) for index, scheduler in enumerate(schedulers) if local[index % shards]]

    # -- for the watchdog --------------------------------------------------------------------------------------------

    def _progress(self) -> int:
        return sum(scheduler.exchanges for scheduler in self.schedulers)

    def _device_computes(self) -> bool:
        """Return whether all schedulers wait for a device that computes on the cores of this process."""
        return self.programs.backend.computes_on_host and all(
            scheduler.stage in DEVICE_STAGES for _, scheduler in self.local_schedulers(self.schedulers)
        )

    def stages(self) -> str:
        """Return what each scheduler of this process does now."""
        return "; ".join(
            f"scheduler {index} {scheduler.stage}, after {scheduler.exchanges} exchanges"
            for index, scheduler in self.local_schedulers(self.schedulers)
        )


def _split_query_encoder(
    retriever: Retriever | None, mesh: Mesh
) -> tuple[QueryEncoder | None, PyTree | None]:
    """Return the retriever's query encoder and its parameters on the mesh; None if the retriever needs no embeddings."""
    if retriever is None or not retriever.needs_embeddings:
        return None, None
    encoder, text_encoder = retriever.encoder, retriever.text_encoder
    if encoder is None or text_encoder is None:
        return None, None
    graph, state = nnx.split(encoder)
    query_encoder = QueryEncoder(
        graph,
        pad_token_id=text_encoder.tokenizer.pad_token_id,
        query_tokens=text_encoder.settings.query_tokens,
        dim=text_encoder.dim,
    )
    return query_encoder, replicate(state, mesh)


def _without_requests(scheduler: Scheduler) -> Scheduler:
    """Return a scheduler of the same sizes that has nothing to do."""
    searches = SearchRunner(None, top_k=1, time_limit=1.0)
    return Scheduler(
        collections.deque(),
        scheduler.environment,
        scheduler.stops,
        scheduler.sizes,
        scheduler.text,
        searches,
    )
