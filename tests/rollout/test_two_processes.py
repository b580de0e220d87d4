"""A mesh over two processes gives every process the trajectories that one device gives, and both leave where one fails."""

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.rollout.engine import Engine
from rrl.rollout.workflow import Completion
from tests.rollout.test_engine import CONFIG, SCRIPTED, KEY
from tests.rollout.test_workflow import hops
from tests.rollout.world import greedy_groups, make_world
from tests.two_processes import ROOT, run_twice


@pytest.mark.slow
def test_two_processes_give_the_trajectories_of_one_and_leave_together_where_one_fails():
    decoder, tokenizer, retriever, requests = make_world()
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever)
    alone = engine.run(nnx.state(decoder), requests, SCRIPTED, KEY)
    greedy = engine.run(nnx.state(decoder), greedy_groups(requests), SCRIPTED, KEY)
    flows = [hops(request.question.text) for request in requests[:3]]
    thoughts = engine.run_workflows(nnx.state(decoder), flows, Completion((("e",), ("e", "o")), 10), KEY)
    jax.clear_caches()
    own = "LookupError('no such turn')"
    failed = (f'RuntimeError("the rollout failed in process 1: {own}")', own)
    both = run_twice(str(ROOT / "tests/rollout/two_process_rollout.py"))
    for process, said in enumerate(both):  # each process answers for two of the four data shards
        assert said["begun"] == [[0, 1], [2]][process]
        hosts = [stage.partition(",")[0] for stage in said["stages"].split("; ")]
        assert hosts == [f"host {2 * process + at} waiting for the device" for at in range(2)]
        first, second, exchanges = said["never begun"]
        assert first.endswith(["process 1: Wordless", "no first ask"][process])
        assert "PromptTooLong" in second and exchanges == 0
        assert [what.split()[0] for what in (first, second)] == [
            ["RuntimeError", "PromptTooLong"],
            ["Wordless", "RuntimeError"],
        ][process]
        assert said["unpicklable"].startswith("what process 0 gives to the others does not pickle")
    for said, words in zip(both, failed, strict=True):
        assert said["failed"] == words
        whole, cut = said["exchanges"]
        assert cut < whole / 2  # the first turns to end are the last of all
        assert said["tokens"] == [t.tokens.tolist() for t in alone]
        assert said["guessed"] == [t.tokens.tolist() for t in greedy]
        assert said["tokens per step"] > 1
        for found, expected in zip(said["logps"], alone, strict=True):
            np.testing.assert_allclose(found, expected.logps, atol=1e-5)
        assert "one process only" in said["refused"]
        assert said["thoughts"] == [thought.text for _, thought, *_ in thoughts]
