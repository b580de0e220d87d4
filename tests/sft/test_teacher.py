"""The teacher behind a service: seeds, and protocols that it cannot follow."""

import dataclasses
from types import SimpleNamespace

import pytest

from rrl.data.trajectory import PROMPT
from rrl.errors import UserError
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.r3rag_steps import R3RagEnvironment
from rrl.rewards.chat_requests import request_body
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rollout.protocol import Append
from rrl.sft.teacher import EndpointTeacher


def test_a_repeated_temperature_uses_another_seed():
    endpoint = EndpointConfig(url="http://127.0.0.1:1", model="m")
    service = EndpointTeacher(endpoint, R3Rag(), None, 2, (0.5, 1.0, 0.5))
    assert [(e.config.temperature, e.config.seed) for e in service.endpoints] == [
        (0.5, None),
        (1.0, None),
        (0.5, 1),
    ]
    bodies = [request_body(e.config, "x") for e in service.endpoints]
    assert "seed" not in bodies[0] and bodies[2]["seed"] == 1


def test_different_seeds_never_send_the_same_request():
    endpoint, temperatures = EndpointConfig(url="http://127.0.0.1:1", model="m"), (0.7, 0.7, 1.0)
    made = [EndpointTeacher(endpoint, R3Rag(), None, 2, temperatures, seed).endpoints for seed in range(4)]
    asked = [(e.config.temperature, e.config.seed) for endpoints in made for e in endpoints]
    assert len(set(asked)) == len(asked)


def test_a_protocol_that_appends_to_a_context_is_refused_for_a_service(service, tmp_path):
    class Growing:
        """A recipe with the prompt of Figure 6 and an environment that appends."""

        prompt = R3Rag(environment=R3RagEnvironment(opening="paper")).prompt
        environment = SimpleNamespace(step=lambda episode, text, stop: Append("more"))

    (item, *_) = service.plans.values()
    endpoint = EndpointConfig(url=service.url, model="m", cache=str(tmp_path))
    with pytest.raises(UserError, match="cannot continue after Append"):
        EndpointTeacher(endpoint, Growing(), None, 2, (0.1,)).sample([item.question], 0)


def test_every_step_of_a_service_shows_the_choices(service, tmp_path):
    item = next(item for item in service.plans.values() if len(item.plan.hops) == 2)
    question = dataclasses.replace(item.question, choices=("Oslo", "Rome"))
    recipe = R3Rag(environment=R3RagEnvironment(opening="paper"))
    endpoint = EndpointConfig(url=service.url, model="m", cache=str(tmp_path))
    (one,) = EndpointTeacher(endpoint, recipe, None, 2, (0.1,)).sample([question], 0)
    prompts = [text for role, text in one.segments if role == PROMPT]
    shown = f"The question: {question.text}\n(A) Oslo\n(B) Rome\nAnswer with the letter of the right choice."
    assert len(prompts) == 3 and all(shown in prompt for prompt in prompts)
    assert one.question == question
