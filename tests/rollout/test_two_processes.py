"""With a mesh over two processes, both get the trajectories of one device, and both end if one fails."""

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.rollout.engine import Engine
from rrl.rollout.workflow import Completion
from tests.rollout.scripted import CONFIG, KEY, SCRIPTED
from tests.rollout.test_workflow import hops
from tests.rollout.world import greedy_groups, make_world
from tests.two_processes import ROOT, run_twice


@pytest.mark.slow
def test_two_processes_give_the_trajectories_of_one_and_end_together_after_an_error():
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
    for process, output in enumerate(both):  # each process has two of the four data shards
        assert output["started"] == [[0, 1], [2]][process]
        stages = [stage.partition(",")[0] for stage in output["stages"].split("; ")]
        assert stages == [f"scheduler {2 * process + at} waiting for the device" for at in range(2)]
        first, second, exchanges = output["failed starts"]
        assert first.endswith(["process 1: WithoutRepr", "no first request"][process])
        assert "PromptTooLong" in second and exchanges == 0
        assert [what.split()[0] for what in (first, second)] == [
            ["RuntimeError", "PromptTooLong"],
            ["WithoutRepr", "RuntimeError"],
        ][process]
        assert output["unpicklable"].startswith("the value of process 0 cannot be pickled")
    for output, message in zip(both, failed, strict=True):
        assert output["failed"] == message
        whole, cut = output["exchanges"]
        assert cut < whole / 2  # the run ends at the first paused turns
        assert output["tokens"] == [t.tokens.tolist() for t in alone]
        assert output["greedy"] == [t.tokens.tolist() for t in greedy]
        assert output["tokens per step"] > 1
        for logps, expected in zip(output["logps"], alone, strict=True):
            np.testing.assert_allclose(logps, expected.logps, atol=1e-5)
        assert "one process only" in output["refused"]
        assert output["thoughts"] == [thought.text for _, thought, *_ in thoughts]
