"""The settings of a cold start: what is refused, and what follows the paper."""

import re

import pytest

from rrl.errors import UserError
from rrl.sft.cold_start_settings import ColdStartSettings
from tests.sft.cold_start_runs import config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update({"model": ""}), "give exactly one of them as the teacher"),
        (
            lambda c: c.endpoint.update({"url": "http://x", "model": "m"}),
            "give exactly one of them as the teacher",
        ),
        (lambda c: c.recipe.update({"judge_answers": True}), "give the section judge"),
        (lambda c: c.sampling.update({"temperatures": ()}), "sampling.temperatures"),
        (lambda c: c.data.update({"path": "nowhere"}), "data='nowhere' is not a folder"),
        (lambda c: c.retriever.update({"encoder": "nowhere"}), "retriever.encoder"),
        (lambda c: c.sampling.update({"block": 0}), "sampling.block=0 must be at least 1"),
        (lambda c: c.endpoint.update({"temperature": 0.5}), "set sampling.temperatures"),
        (lambda c: c.endpoint.update({"seed": 3}), "set sampling.seed"),
        (
            lambda c: (
                c.update({"model": ""}),
                c.endpoint.update({"url": "http://x", "model": "m"}),
                c.rollout.update({"top_p": 0.5}),
            ),
            "rollout.top_p=0.5 is not sent to a service",
        ),
    ],
)
def test_a_wrong_config_is_refused(change, message):
    made = config("model=assets/miniwiki-policy")
    change(made)
    with pytest.raises(UserError, match=re.escape(message)):
        ColdStartSettings.from_config(made)


@pytest.mark.parametrize("arg", ["model=FOLDER,model_name=m", "judge=oracle,judge_model=m", "judge_model=m"])
def test_a_model_name_without_a_service_is_refused(arg):
    with pytest.raises(UserError, match="='m' names a service's model, but"):
        config(arg)


def test_the_teacher_gets_the_paper_prompt_and_the_limits_of_the_trained_policy():
    assert config("model=assets/miniwiki-policy").recipe.environment.opening == "paper"
    served = config(
        "model=http://127.0.0.1:1/v1,model_name=m,data=FOLDER,judge=http://127.0.0.1:2/v1,judge_model=j"
    )
    assert served.endpoint.url and not served.model and served.recipe.judge_answers
    assert served.rollout.top_k == 5 and served.recipe.environment.document_characters == 0
    assert served.judge.kind == "endpoint"
    environment = served.recipe.environment
    assert environment.max_steps == 5  # SPEC 2: "At most 5 steps in training and evaluation"
    trained = config("size=7b,data=FOLDER,policy=FOLDER,encoder=FOLDER", "r3rag_ppo")
    assert (
        environment.turn_tokens == trained.recipe.environment.turn_tokens
    )  # R3-RAG's training counts a longer step as malformed


def test_a_run_that_samples_in_another_number_format_is_another_run():
    identities = []
    for weights in ("auto", "int8"):
        made = config("model=assets/miniwiki-policy")
        made.rollout.weights = weights
        identities.append(ColdStartSettings.from_config(made).identity()["rollout"])
    automatic, int8 = identities
    assert int8 == automatic | {"weights": "int8"} and "weights" not in automatic
