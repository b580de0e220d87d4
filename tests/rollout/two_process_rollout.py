"""The engine over two processes. `python two_process_rollout.py PORT PROCESS` runs one and prints its results as JSON."""

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
    from tests.rollout.scripted import CONFIG, KEY, SCRIPTED, Scripted
    from tests.rollout.test_workflow import hops
    from tests.rollout.world import greedy_groups, make_world

    class Faulty(Scripted):
        """Raises in process 1."""

        def step(self, episode, text, stop):
            if PROCESS == 1:
                raise LookupError("no such turn")
            return super().step(episode, text, stop)

    decoder, tokenizer, retriever, requests = make_world()
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    params = shard(jax.tree.map(np.asarray, nnx.state(decoder)), mesh)
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever, mesh=mesh)
    results = engine.run(params, requests, SCRIPTED, KEY)
    output = {"tokens": [t.tokens.tolist() for t in results], "logps": [t.logps.tolist() for t in results]}
    output["exchanges"] = [max(scheduler.exchanges for scheduler in engine.loops.schedulers)]
    output["stages"] = engine.loops.stages()
    guesses = dataclasses.replace(CONFIG, draft_tokens=2)
    guessing = Engine(decoder, tokenizer, guesses, retriever=retriever, mesh=mesh)
    greedy = guessing.run(params, greedy_groups(requests), SCRIPTED, KEY)
    output["greedy"] = [t.tokens.tolist() for t in greedy]
    output["tokens per step"] = guessing.stats.tokens_per_step
    try:
        engine.run(params, requests, Faulty(turn_tokens=12, observation_tokens=60), KEY)
    except (LookupError, RuntimeError) as error:
        output["failed"] = repr(error)
    output["exchanges"].append(max(scheduler.exchanges for scheduler in engine.loops.schedulers))
    try:
        engine.run(params, requests, SCRIPTED, KEY, reference=True)
    except ValueError as error:
        output["refused"] = str(error)
    small = dataclasses.replace(CONFIG, rows=4, context=160, wake_threshold=1, max_wait_steps=4)
    again = Engine(decoder, tokenizer, small, retriever=retriever, mesh=mesh)
    output["started"] = []

    def recorded(place, question):
        output["started"].append(place)
        return (yield from hops(question))

    def faulty(place):
        class WithoutRepr(LookupError):
            def __repr__(self):
                raise RuntimeError("no repr")

        if place == 2:  # the third workflow belongs to process 1
            raise WithoutRepr("no first request")
        yield Generate("a")

    def long(place):
        yield Generate("a " * 200 if place == 0 else "a")

    output["failed starts"] = []
    for flow in (faulty, long):
        try:
            again.run_workflows(params, [flow(place) for place in range(3)], Completion(turn_tokens=2), KEY)
        except (LookupError, PromptTooLong, RuntimeError) as error:
            output["failed starts"].append(type(error).__name__ + " " + str(error))
    output["failed starts"].append(max(scheduler.exchanges for scheduler in again.loops.schedulers))

    def unpicklable(place):
        yield []
        return lambda: place

    try:
        again.run_workflows(
            params, [unpicklable(place) for place in range(3)], Completion(turn_tokens=2), KEY
        )
    except TypeError as error:
        output["unpicklable"] = str(error)

    flows = [recorded(place, request.question.text) for place, request in enumerate(requests[:3])]
    thoughts = again.run_workflows(params, flows, Completion((("e",), ("e", "o")), 10), KEY)
    output["thoughts"] = [thought.text for _, thought, *_ in thoughts]
    print(json.dumps(output))
