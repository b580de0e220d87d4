"""All prompted methods run in one batch of the engine, with their stop strings and token bytes."""

import jax
import pytest
from flax import nnx

from rrl.recipes.prompted.base import PromptedSettings
from rrl.recipes.prompted.catalogue import METHODS
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.workflow import Completion
from tests.rollout.world import make_world

pytestmark = pytest.mark.slow


def test_methods_share_one_batch_and_do_not_depend_on_it() -> None:
    decoder, tokenizer, retriever, requests = make_world()
    config = EngineConfig(
        rows=4, context=2048, wake_threshold=2, prefill_tokens=256, max_wait_steps=4, top_k=2
    )
    engine, params = Engine(decoder, tokenizer, config, retriever=retriever), nnx.state(decoder)
    settings = PromptedSettings(
        tokens=12, passage_chars=40, most_passages=2, temperature=1.0, token_bytes=engine.bytes
    )
    stops = tuple(dict.fromkeys(stops for method in METHODS.values() for stops in method.stops))
    environment = Completion(stop_sets=stops, turn_tokens=settings.tokens)
    question = requests[0].question

    def run(names: list[str]) -> list:
        workflows = [METHODS[name].workflow(question, settings) for name in names]
        return engine.run_workflows(params, workflows, environment, jax.random.key(0))

    together = run(list(METHODS))
    assert all(isinstance(outcome.answer, str) and outcome.generations for outcome in together)
    for (name, method), outcome in zip(METHODS.items(), together, strict=True):
        assert method.searches or not outcome.searches
        assert all(output.trajectory.policy_tokens <= 12 for output in outcome.generations), name
        assert outcome.sampled_tokens > 0 and outcome.prompt_tokens > 0
    assert run(list(METHODS)[:3])[2].generations[0].text == together[2].generations[0].text
