"""The engine over two processes: python two_process_rollout.py PORT PROCESS; prints what the trajectories are."""

import dataclasses
import json
import sys

import jax
import numpy as np
from flax import nnx

PORT, PROCESS = sys.argv[-2], int(sys.argv[-1])

if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", num_processes=2, process_id=PROCESS)

    from rrl.parallel.mesh import make_mesh
    from rrl.parallel.rules import shard
    from rrl.rollout.engine import Engine
    from rrl.rollout.workflow import Completion, Generate, PromptTooLong
    from tests.rollout.test_engine import CONFIG, ENVIRONMENT_, KEY, Scripted
    from tests.rollout.test_workflow import hops
    from tests.rollout.world import alike, make_world

    class Faulty(Scripted):
        """Fails in one of the processes."""

        def react(self, episode, text, stop):
            if PROCESS == 1:
                raise LookupError("no such turn")
            return super().react(episode, text, stop)

    decoder, tokenizer, retriever, requests = make_world()
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    params = shard(jax.tree.map(np.asarray, nnx.state(decoder)), mesh)
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever, mesh=mesh)
    found = engine.run(params, requests, ENVIRONMENT_, KEY)
    said = {"tokens": [t.tokens.tolist() for t in found], "logps": [t.logps.tolist() for t in found]}
    said["exchanges"] = [max(host.exchanges for host in engine._schedulers)]
    said["stages"] = engine._stages()
    guesses = dataclasses.replace(CONFIG, draft_tokens=2)
    guessing = Engine(decoder, tokenizer, guesses, retriever=retriever, mesh=mesh)
    greedy = guessing.run(params, alike(requests), ENVIRONMENT_, KEY)
    said["guessed"] = [t.tokens.tolist() for t in greedy]
    said["tokens per step"] = guessing.stats.tokens_per_step
    try:
        engine.run(params, requests, Faulty(turn_tokens=12, observation_tokens=60), KEY)
    except (LookupError, RuntimeError) as error:
        said["failed"] = repr(error)
    said["exchanges"].append(max(host.exchanges for host in engine._schedulers))
    try:
        engine.run(params, requests, ENVIRONMENT_, KEY, reference=True)
    except ValueError as error:
        said["refused"] = str(error)
    small = dataclasses.replace(CONFIG, rows=4, context=160, wake_threshold=1, max_wait_steps=4)
    again = Engine(decoder, tokenizer, small, retriever=retriever, mesh=mesh)
    said["begun"] = []

    def told(place, question):
        said["begun"].append(place)
        return (yield from hops(question))

    def faulty(place):
        class Wordless(LookupError):
            def __repr__(self):
                raise RuntimeError("no words")

        if place == 2:  # the third is the second process's
            raise Wordless("no first ask")
        yield Generate("a")

    def long(place):
        yield Generate("a " * 200 if place == 0 else "a")

    said["never begun"] = []
    for flow in (faulty, long):
        try:
            again.run_workflows(params, [flow(place) for place in range(3)], Completion(turn_tokens=2), KEY)
        except (LookupError, PromptTooLong, RuntimeError) as error:
            said["never begun"].append(type(error).__name__ + " " + str(error))
    said["never begun"].append(max(host.exchanges for host in again._schedulers))

    def unpicklable(place):
        yield []
        return lambda: place

    try:
        again.run_workflows(
            params, [unpicklable(place) for place in range(3)], Completion(turn_tokens=2), KEY
        )
    except TypeError as error:
        said["unpicklable"] = str(error)

    flows = [told(place, request.question.text) for place, request in enumerate(requests[:3])]
    thoughts = again.run_workflows(params, flows, Completion((("e",), ("e", "o")), 10), KEY)
    said["thoughts"] = [thought.text for _, thought, *_ in thoughts]
    print(json.dumps(said))
