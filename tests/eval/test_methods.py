"""Records of answers have hits and costs for every method, and methods describe their settings."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search
from rrl.data.trajectory_files import load_trajectories
from rrl.errors import UserError
from rrl.eval.answer_records import record_of_result, record_of_trajectory
from rrl.eval.methods import TimedReader, make_answering_method
from rrl.eval.prediction_files import load_predictions
from rrl.rewards.reader import ReaderReply
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.runs.launcher import load_config
from tests.eval.fakes import spouse
from tests.recipes.prompted.scripted import FILM, PERSON, QUESTION, play


def test_a_record_can_be_read_as_prediction_and_as_trajectory(tmp_path: Path) -> None:
    trajectory = spouse()
    record = record_of_trajectory(trajectory)
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (prediction,) = load_predictions(file, "prediction")
    assert prediction.id == "mini-7" and prediction.answers == ("Edda Tolvik",)
    assert prediction.titles[:2] == ("Silver Harbour", "Silver Ridge") and len(prediction.titles) == 6
    roles = trajectory.roles
    assert dict(prediction.counts) == {
        "searches": 2,
        "turns": 3,
        "tokens": (roles == POLICY).sum(),
        "prompt_tokens": (roles == PROMPT).sum(),
        "environment_tokens": (roles == ENVIRONMENT).sum(),
    }
    (back,) = load_trajectories(file)
    assert back.question == trajectory.question and back.segments == trajectory.segments
    assert back.searches == trajectory.searches


def test_later_prompts_of_a_prompted_method_have_the_environments_role() -> None:
    outcome, prompts = play(
        "self_ask",
        [
            ("", "Follow up: Who directed Silver Harbour?"),
            ("", "Ada Berg."),
            ("", "The final answer: Oslo"),
        ],
    )
    record = record_of_result(QUESTION, outcome)
    assert record["prediction"] == "Oslo" and record["turns"] == 3 and len(prompts) == 3
    assert record["tokens"] == outcome.sampled_tokens and record["prompt_tokens"] == outcome.prompt_tokens
    assert record["searches"] == [
        {
            "turn": 0,
            "query": "Who directed Silver Harbour?",
            "titles": (FILM.title,),
            "ids": (FILM.id,),
            "failed": False,
        }
    ]


@pytest.mark.parametrize(("found", "rank"), [([FILM, FILM, PERSON], 2), ([PERSON], 1), ([FILM], 0), ([], 0)])
def test_without_gold_passages_the_rank_of_the_first_passage_with_an_answer_is_recorded(
    found: list[Passage], rank: int
) -> None:
    trajectory = spouse()
    trajectory.question = QUESTION
    trajectory.searches = [Search(0, "x", (), True), Search(1, "y", (), False, tuple(found))]
    assert record_of_trajectory(trajectory)["answer_rank"] == rank
    trajectory.question = dataclasses.replace(QUESTION, gold=("T",))
    assert record_of_trajectory(trajectory)["answer_rank"] is None


def test_names_of_methods_show_changed_options() -> None:
    method = make_answering_method({"name": "react", "steps": 4}, None, {"tokens": 99})
    assert method.name == "react (steps=4)" and method.limits == {
        "steps": 4,
        "tokens": 99,
        "most_passages": 15,
    }
    assert make_answering_method({"name": "react", "steps": 7}, None, None).name == "react"
    assert not make_answering_method({"name": "direct"}, None, None).searches
    trained = make_answering_method(
        {"name": "rsearch"}, {"use_evidence": False, "environment": {"max_searches": 2}}, None
    )
    assert trained.name == "rsearch (use_evidence=False)"
    names = [
        make_answering_method({"name": "rsearch"}, {"instruction": text}, None).name
        for text in ("x" * 99, "y" * 99)
    ]
    assert names[0] != names[1] and all(
        re.fullmatch(r"rsearch \(instruction=#[0-9a-f]{8}\)", name) for name in names
    )
    seen = make_answering_method(
        {"name": "r3rag"}, {"environment": {"drop_seen": False, "max_steps": 4}}, None
    )
    assert seen.name == "r3rag (drop_seen=False)" and seen.limits["max_steps"] == 4
    assert make_answering_method({"name": "r3rag"}, None, None).judges_short_forms  # it answers in sentences
    assert not make_answering_method({"name": "r3rag"}, {"short_answers": False}, None).judges_short_forms
    assert not (trained.judges_short_forms or method.judges_short_forms)
    assert trained.recipe_name == "rsearch" and method.recipe_name == ""
    assert trained.reader is method.reader is None
    assert trained.limits == {"max_searches": 2, "turn_tokens": 500, "observation_tokens": 1800}
    assert json.dumps(trained.identity) and json.dumps(method.identity)
    assert trained.identity["environment"]["max_searches"] == 2


def test_a_recipe_prompt_includes_the_choices_of_a_question() -> None:
    received = []

    class Engine:
        tokenizer = None
        fits = staticmethod(lambda prompt: True)

        def run(self, params, requests, environment, key, **_):
            received.extend(requests)

    method = make_answering_method({"name": "rsearch"}, {"instruction": ""}, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rrl.recipes.episodes.chat_ids", lambda _, prompt: np.frombuffer(prompt.encode(), np.uint8)
        )
        question = Question("q", "Which?", ("B",), choices=("red", "blue"))
        method.answer(Engine(), None, [(7, question)], None, 0.5, lambda record: None)
    assert b"(B) blue" in received[0].prompt.tobytes()
    assert received[0].question == question and received[0].seed == 7 and received[0].temperature == 0.5


def test_records_with_a_reader_are_written_after_the_reader_answered() -> None:
    """R2AG's generator answers from the documents of the whole tree (Table 3)."""

    class Engine:
        tokenizer = None
        fits = staticmethod(lambda prompt: True)

        def run(self, params, requests, environment, key, **_):
            (request,) = requests
            trajectory = spouse()
            trajectory.question = request.question
            trajectory.searches = [Search(0, "x", (PERSON.title,), False, (PERSON,))]
            return [trajectory]

    received: list = []

    def reader(prompts):
        received.extend(prompts)
        return [ReaderReply("Oslo", 40, 2)] * len(prompts)

    method = make_answering_method({"name": "r2ag"}, None, None, "models/generator")
    assert method.name == "r2ag (reader=models/generator)"
    records: list[dict] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rrl.recipes.episodes.prompt_ids", lambda *_: np.zeros(3, np.int32))
        question = dataclasses.replace(QUESTION, gold=(PERSON.title,))
        read = dataclasses.replace(method, reader=TimedReader(reader))
        read.answer(Engine(), None, [(0, question)], None, 0.0, records.append)
    assert records[0]["prediction"] == "Oslo" and len(received) == 1
    assert (records[0]["reader_prompt_tokens"], records[0]["reader_tokens"]) == (40, 2)
    assert read.batch_size < method.batch_size


@pytest.mark.parametrize(
    ("method", "recipe", "words"),
    [
        ({"name": "x"}, None, "method='x' is unknown; recipes are .*rsearch, .*prompted methods direct, cot"),
        (
            {"name": "react", "rounds": 2},
            None,
            "react.rounds is not an option of the method; its options are steps",
        ),
        ({"name": "rsearch"}, {"depth": 2}, "recipe.depth is not a field of rsearch"),
    ],
)
def test_errors_name_the_unknown_method_and_the_known_ones(
    method: dict, recipe: dict | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        make_answering_method(method, recipe, None)


def test_one_shot_rag_shows_all_retrieved_passages():
    def shown(arguments):
        return load_config(f"configs/eval.py:{arguments}", []).prompted.most_passages

    assert shown("method=naive_rag,top_k=16") == shown("method=rag_cot,top_k=16") == 16
    assert shown("method=ircot,top_k=16") == shown("method=naive_rag,top_k=3") == 15


def test_a_too_long_question_stops_a_run_only_with_on_error_stop() -> None:
    class Small:
        tokenizer = None
        config = EngineConfig(context=8)
        fits = Engine.fits

        def check_prompt(self, question, prompt):
            if not self.fits(prompt):
                raise UserError(f"question {question.id!r} is too long")

    questions = [Question("short", "a b", ("x",)), Question("long", "a b c d e f g h", ("x",))]
    with pytest.MonkeyPatch.context() as patch:
        for module in ("rrl.recipes.episodes", "rrl.eval.methods"):
            patch.setattr(f"{module}.chat_ids", lambda _, prompt: np.zeros(len(prompt.split()), np.int32))
        patch.setattr("rrl.recipes.episodes.chat_text", lambda _, prompt: prompt)
        patch.setattr("rrl.eval.methods.check_tags", lambda recipe, tokenizer: None)
        for name, recipe in (("rsearch", {"instruction": ""}), ("direct", None)):
            method, messages = make_answering_method({"name": name}, recipe, None), []
            method.check(Small(), questions, "refuse", messages.append)
            assert len(messages) == (name == "rsearch")
            assert all("1 of 2 questions do not fit" in text and "'long'" in text for text in messages)
            with pytest.raises(UserError, match="question 'long' is too long"):
                method.check(Small(), questions, "stop", messages.append)
