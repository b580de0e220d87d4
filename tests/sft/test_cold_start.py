"""Cold start by rejection sampling, end to end with a scripted teacher, and training on its pairs."""

import collections
import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.files import SaveError, exclusive_lock
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.models.tokenizer import load_tokenizer
from rrl.recipes.card import read_card
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.r3rag_steps import R3RagEnvironment, Step
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rollout.protocol import Append
from rrl.runs.workdir import refuse_other_config
from rrl.sft import cold_start, stages
from rrl.sft.cold_start import ColdStartSettings, select_pairs
from rrl.sft.demonstrations import demonstration_examples
from rrl.sft.pairs import PairsConfig, load_pairs
from rrl.sft.teacher import EndpointTeacher
from rrl.text.chat import chat_ids
from rrl.train import experiment
from tests.train import made
from tests.train.made import ROOT, save_random_policy, shrink_cold_start


def config(arg="", name="r3rag_cold_start"):
    return made.config(name, arg)


class ScriptedService:
    """A service that answers like the scripted expert, except at some temperatures.

    At temperature 0.4 the final answer is wrong, at 0.7 the second step is malformed, and at 1.0 it searches without end.
    `before` is called with each request.
    """

    def __init__(self, items):
        self.plans = {item.question.text: item for item in items}
        self.asked = collections.Counter()
        self.before = lambda text: None
        self.cut = lambda said: False
        self.refused = lambda body: False

    def answer(self, body):
        text = body["messages"][-1]["content"]
        if body["model"] == "j":
            return "Hm."
        (question,) = re.findall(r"Current Input: The question: (.*?)(?:\. The Previous Steps:|\n)", text)
        self.asked[question] += 1
        self.before(text)
        item, number = self.plans[question], text.count("The retrieval documents:") + 1
        hops, temperature = item.plan.hops, body["temperature"]
        if temperature == 0.7 and number == 2:
            return "I give up."
        if number <= len(hops) or temperature == 1.0:
            return Step("Go on.", query=hops[min(number, len(hops)) - 1].query).to_text(number)
        answer = "Nobody" if temperature == 0.4 else item.question.answers[0]
        return Step("That is it.", answer=answer).to_text(number)


@pytest.fixture
def service():
    found = ScriptedService(mixed_questions(generate("train", 0, 200, 1), 2, KINDS, 0))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if found.refused(body):
                self.send_error(400, "too long")
                return
            try:
                said = found.answer(body)
            except ConnectionError:
                self.close_connection = True
                return
            choice = {"message": {"content": said}, "finish_reason": "length" if found.cut(said) else "stop"}
            data = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield found
    server.shutdown()
    server.server_close()


def settings(service, cache, more="", **sampling):
    made = config(f"model={service.url},model_name=m,retriever=bm25,prompt=paper{more}")
    made.data.update({"train_worlds": 1, "train_per_kind": 2})
    made.sampling.update({"block": 4, "questions": 10, **sampling})
    made.endpoint.update({"cache": str(cache), "retries": 0, "time_out": 5.0})
    return made


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_correct_and_well_formed_trajectories_are_accepted_and_others_counted_by_reason(
    service, tmp_path, capsys
):
    made = settings(service, tmp_path / "cache", temperatures=(0.1, 0.1, 0.4, 0.7, 1.0), keep=0)
    report = cold_start.run(made, tmp_path / "run")
    steps = sum(len(item.plan.hops) + 1 for item in service.plans.values())
    assert report == cold_start.ColdStartReport(
        questions=10,
        trajectories=50,
        kept=10,
        answered=10,
        pairs=steps,
        fell={"duplicate": 10, "incorrect": 10, "malformed": 10, "unanswered": 10},
        by_temperature={"0.1": (10, 20), "0.4": (0, 10), "0.7": (0, 10), "1.0": (0, 10)},
    )
    assert "10 kept (20.0 %), of 10 questions" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "report.json").read_text())["fell"]["malformed"] == 10
    pairs = lines(tmp_path / "run" / "pairs.jsonl")
    assert len(pairs) == steps
    first = pairs[0]
    assert first["step"] == 1 and first["input"].startswith("The question: ")  # and no figure
    assert first["output"].startswith("Step 1:\nThe problem analysis: Go on.\nThe retrieval query: ")
    later = pairs[1]
    assert later["input"].startswith(
        f"{first['input']}\n{first['output']}\nThe retrieval documents: (Title: "
    )
    records = [r for file in sorted((tmp_path / "run" / "blocks").iterdir()) for r in lines(file)]
    assert len(records) == 50 and all(record["said"] for record in records)


def test_cut_steps_are_malformed_and_refusals_and_unparsed_judgements_are_counted(
    service, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(service, "cut", lambda said: "The final answer:" in said)
    report = cold_start.run(settings(service, tmp_path / "a", temperatures=(0.1,)), tmp_path / "cut")
    assert report.fell == {"malformed": 10} and report.unread == 0
    assert "could not be parsed" not in capsys.readouterr().out

    # A refused request ends its trajectory.
    monkeypatch.setattr(service, "cut", lambda said: False)
    monkeypatch.setattr(service, "refused", lambda body: "Previous Steps:" in body["messages"][-1]["content"])
    report = cold_start.run(settings(service, tmp_path / "c", temperatures=(0.1,)), tmp_path / "refused")
    assert report.fell == {"refused": 10}

    monkeypatch.setattr(service, "refused", lambda body: False)
    judge = f",judge={service.url},judge_model=j"
    made = settings(service, tmp_path / "b", judge, temperatures=(0.4,), questions=2)
    made.judge_endpoint.update({"cache": str(tmp_path / "b"), "retries": 0, "time_out": 5.0})
    report = cold_start.run(made, tmp_path / "unread")
    assert report.fell == {"incorrect": 2} and report.unread == 2
    assert "2 answers of the judge could not be parsed" in capsys.readouterr().out


def test_a_run_interrupted_by_its_service_continues_to_the_result_of_an_uninterrupted_run(service, tmp_path):
    whole = cold_start.run(settings(service, tmp_path / "a"), tmp_path / "whole")
    service.asked.clear()

    def break_down(text):
        if service.asked.total() > 60:
            raise ConnectionError

    service.before = break_down
    made = settings(service, tmp_path / "b")
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        cold_start.run(made, tmp_path / "broken")
    done = len(list((tmp_path / "broken" / "blocks").iterdir()))
    assert 0 < done < 3 and not (tmp_path / "broken" / "pairs.jsonl").exists()
    before, service.before = service.asked.copy(), lambda text: None
    service.asked.clear()
    assert cold_start.run(made, tmp_path / "broken") == whole
    for name in ("pairs.jsonl", "report.json", "blocks/00000008.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    finished = {record["question"] for record in lines(tmp_path / "broken" / "blocks" / "00000000.jsonl")}
    assert finished and not finished & service.asked.keys() and finished <= before.keys()
    assert cold_start.run(made, tmp_path / "broken") == whole  # a finished run only reports


def test_a_run_stopped_by_sigterm_continues_to_the_result_of_an_uninterrupted_run(service, tmp_path):
    whole = cold_start.run(settings(service, tmp_path / "other"), tmp_path / "whole")
    service.before = lambda text: os.kill(os.getpid(), signal.SIGTERM)
    made = settings(service, tmp_path / "cache")
    assert cold_start.run(made, tmp_path / "run") is None
    assert not list((tmp_path / "run" / "blocks").iterdir())
    service.before = lambda text: None
    assert cold_start.run(made, tmp_path / "run").trajectories == whole.trajectories == 40
    pairs = [(tmp_path / name / "pairs.jsonl").read_bytes() for name in ("run", "whole")]
    assert pairs[0] == pairs[1]


def test_a_workdir_of_another_config_is_refused(service, tmp_path):
    cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path / "run")
    with pytest.raises(UserError, match="holds a run of another config"):
        cold_start.run(settings(service, tmp_path / "cache", questions=2), tmp_path / "run")


def test_a_locked_workdir_is_refused(service, tmp_path):
    (tmp_path / "run").mkdir()
    with (
        exclusive_lock(tmp_path / "run", ""),
        pytest.raises(UserError, match=r"run: another process works there\. Wait"),
    ):
        cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path / "run")
    assert not service.asked


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2]])
def test_an_incomplete_block_is_sampled_again(service, tmp_path, damage, capsys):
    made, file = settings(service, tmp_path / "cache"), tmp_path / "run" / "blocks" / "00000004.jsonl"
    report = cold_start.run(made, tmp_path / "run")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert cold_start.run(made, tmp_path / "run") == report and file.read_bytes() == whole
    assert "of 16 trajectories: its questions are sampled again" in capsys.readouterr().err


@pytest.mark.parametrize("line", [b'{"number": 0,', b'{"id": "\xff"}', b"7"])
def test_the_error_for_a_damaged_block_names_its_line(service, tmp_path, line):
    made, file = settings(service, tmp_path / "cache", questions=1), tmp_path / "run/blocks/00000000.jsonl"
    cold_start.run(made, tmp_path / "run")
    kept = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([kept[0], line, *kept[2:]]))
    with pytest.raises(UserError, match=r"00000000\.jsonl, line 2: .*; delete that file"):
        cold_start.run(made, tmp_path / "run")


def test_after_an_error_about_long_prompts_the_same_workdir_accepts_a_longer_context(tmp_path):
    made = config("model=assets/miniwiki-policy,retriever=bm25,questions=1")
    made.data.update({"train_worlds": 1, "train_per_kind": 1, "on_error": "stop"})
    made.rollout.update({"rows": 4, "context": 64, "wake_threshold": 4})
    with pytest.raises(UserError, match=r"rollout\.context"):
        cold_start.run(made, tmp_path / "run")
    made.rollout.context = 2048
    refuse_other_config(
        tmp_path / "run", json.loads(json.dumps(ColdStartSettings.from_config(made).identity()))
    )


@pytest.mark.parametrize("name", ["blocks", "report.json", "pairs.jsonl"])
def test_an_occupied_path_is_refused_before_anything_is_sampled(service, tmp_path, name):
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"{name} is a (file|folder), but the run needs .*; move it away"):
        cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path)
    assert not service.asked


def test_a_workdir_deleted_during_sampling_raises_a_save_error(service, tmp_path):
    service.before = lambda text: shutil.rmtree(tmp_path / "run", ignore_errors=True)
    with pytest.raises(SaveError, match=r"00000000\.jsonl could not be saved: the folder .* is gone"):
        cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path / "run")


def test_blocks_without_a_config_are_refused(service, tmp_path):
    made = settings(service, tmp_path / "cache", questions=1)
    cold_start.run(made, tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds sampled trajectories \(blocks\), but the config\.json"):
        cold_start.run(made, tmp_path / "run")


def test_a_repeated_temperature_uses_another_seed():
    endpoint = EndpointConfig(url="http://127.0.0.1:1", model="m")
    service = EndpointTeacher(endpoint, R3Rag(), None, 2, (0.5, 1.0, 0.5))
    assert [(e.config.temperature, e.config.seed) for e in service.endpoints] == [
        (0.5, None),
        (1.0, None),
        (0.5, 1),
    ]
    bodies = [e._body("x") for e in service.endpoints]
    assert "seed" not in bodies[0] and bodies[2]["seed"] == 1


def test_different_seeds_never_send_the_same_request():
    endpoint, temperatures = EndpointConfig(url="http://127.0.0.1:1", model="m"), (0.7, 0.7, 1.0)
    made = [EndpointTeacher(endpoint, R3Rag(), None, 2, temperatures, seed).endpoints for seed in range(4)]
    asked = [(e.config.temperature, e.config.seed) for endpoints in made for e in endpoints]
    assert len(set(asked)) == len(asked)


def test_the_limit_per_question_may_change_after_sampling(service, tmp_path):
    first = cold_start.run(settings(service, tmp_path / "cache", keep=1), tmp_path / "run")
    blocks = [file.read_bytes() for file in sorted((tmp_path / "run" / "blocks").iterdir())]
    again = cold_start.run(settings(service, tmp_path / "cache", keep=0), tmp_path / "run")
    assert first.kept <= again.kept and first.trajectories == again.trajectories
    assert blocks == [file.read_bytes() for file in sorted((tmp_path / "run" / "blocks").iterdir())]


def test_a_protocol_that_appends_to_a_context_is_refused_for_a_service(service, tmp_path):
    class Growing:
        """A recipe with the prompt of Figure 6 and an environment that appends."""

        prompt = R3Rag(environment=R3RagEnvironment(opening="paper")).prompt
        environment = SimpleNamespace(step=lambda episode, text, stop: Append("more"))

    (item, *_) = service.plans.values()
    endpoint = EndpointConfig(url=service.url, model="m", cache=str(tmp_path))
    with pytest.raises(UserError, match="cannot continue after Append"):
        EndpointTeacher(endpoint, Growing(), None, 2, (0.1,)).sample([item.question], 0)


def record(number, *outputs, fault="", temperature=0.1):
    pairs = [] if fault else [[f"in {i}", text] for i, text in enumerate(outputs)]
    fields = {"temperature": temperature, "fault": fault, "unread": 0}
    return {"number": number, "id": f"q{number}", "pairs": pairs, **fields}


def test_the_first_distinct_trajectories_of_a_question_are_selected():
    records = [
        record(0, "a", "b"),
        record(0, "a ", " b"),
        record(0, "c"),
        record(1, fault="incorrect"),
        record(1, "a", "b", temperature=1.0),
    ]
    pairs, report = select_pairs(records, 1, 2)
    assert [(p["id"], p["step"], p["output"]) for p in pairs] == [
        ("q0", 1, "a"),
        ("q0", 2, "b"),
        ("q1", 1, "a"),
        ("q1", 2, "b"),
    ]
    assert report.fell == {"duplicate": 1, "more than are kept of its question": 1, "incorrect": 1}
    assert (report.kept, report.answered, report.pairs) == (2, 2, 4)
    _, both = select_pairs(records, 0, 2)
    assert both.kept == 3 and both.fell == {"duplicate": 1, "incorrect": 1}


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


# -- training on pairs (3.2.2) ------------------------------------------------------------------------------------------


def write_pairs(path, questions=6):
    rows = [
        {"id": f"q{q}", "step": s, "input": f"The question: {q}?{s}", "output": f"Step {s}:\nsaid {q}"}
        for q in range(questions)
        for s in (1, 2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_the_loss_is_on_outputs_only_and_training_shares_no_question_with_held_out(tmp_path):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    rows = write_pairs(tmp_path / "pairs.jsonl")
    train, held_out = load_pairs(PairsConfig(path=str(tmp_path / "pairs.jsonl"), held_out=2), tokenizer, 500)
    assert (len(train), len(held_out)) == (8, 4)
    for example, row in zip([*train, *held_out], rows, strict=True):
        prompt = chat_ids(tokenizer, row["input"])
        np.testing.assert_array_equal(example.tokens[: len(prompt)], prompt)
        assert not example.loss[: len(prompt)].any() and example.loss[len(prompt) :].all()
        targets = example.tokens[example.loss]
        assert tokenizer.decode(targets[:-1]) == row["output"] and targets[-1] == tokenizer.eos_token_id


def test_pairs_are_tokenised_like_demonstrations(tmp_path):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    wiki = generate("train", 0, 200)
    items = wiki.questions("two_hop", 2, 0)
    recipe = R3Rag()

    class Retriever:
        needs_embeddings = False

        def search(self, queries, k, vectors):
            hit = type("Hit", (), {"passage": wiki.passages[0]})
            return [[hit] for _ in queries]

    demonstrated = demonstration_examples(recipe, tokenizer, items, Retriever(), 1)
    rows = []
    for item in items:
        prompts = [recipe.prompt(item.question)]
        for segment in recipe.demonstrate(item, lambda query: [wiki.passages[0]]):
            if isinstance(segment, str):
                rows.append({"id": item.question.id, "input": prompts[-1], "output": segment})
            else:
                prompts.append(segment.prompt)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held_out = load_pairs(PairsConfig(path=str(tmp_path / "p.jsonl"), held_out=1), tokenizer, 1000)
    for one, other in zip([*train, *held_out], demonstrated, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.loss, other.loss)


def test_long_pairs_are_dropped_and_a_file_with_too_few_pairs_is_refused(tmp_path, capsys):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    path = tmp_path / "pairs.jsonl"
    write_pairs(path)
    with path.open("a") as stream:
        stream.write(json.dumps({"id": "q0", "input": "long " * 300, "output": "x"}) + "\n")
    train, _ = load_pairs(PairsConfig(path=str(path), held_out=1), tokenizer, 300)
    assert len(train) == 10 and "1 longer than 300 tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match="leave 0 pairs to train on"):
        load_pairs(PairsConfig(path=str(path), held_out=6), tokenizer, 300)
    path.write_text('{"input": "a"}\n')
    with pytest.raises(UserError, match="line 1: output: missing"):
        load_pairs(PairsConfig(path=str(path)), tokenizer, 300)
    with pytest.raises(UserError, match="is not a file; give the pairs"):
        PairsConfig(path=str(tmp_path / "none"))


def test_training_on_pairs_uses_the_settings_of_the_paper():
    # SPEC.md 2: lr 1e-5 / 7e-6, batch 8 / 16, at most 4,096 tokens (appendix C: Llama, Qwen)
    qwen, llama = config("size=7b", "r3rag_sft"), config("size=8b", "r3rag_sft")
    assert (qwen.optim.lr, qwen.train.rows, qwen.train.row_length) == (7e-6, 16, 4096)
    assert (llama.optim.lr, llama.train.rows, llama.train.row_length) == (1e-5, 8, 4096)


@pytest.mark.slow
def test_cold_start_pairs_sft_and_ppo_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    save_random_policy(tmp_path / "random")
    cold = config(
        f"recipe=r3rag,init={tmp_path}/random,retriever=bm25,steps=1,demonstrations=5", "miniwiki_cold_start"
    )
    assert stages.run(shrink_cold_start(cold), tmp_path / "cold").stopped == "done"

    data = config(f"model={tmp_path}/cold/model,retriever=bm25,questions=3")
    data.data.update({"train_worlds": 1, "train_per_kind": 1})
    data.rollout.update({"rows": 4, "context": 256, "wake_threshold": 4})
    data.recipe.environment.turn_tokens = 8
    report = cold_start.run(data, tmp_path / "data")  # an untrained policy writes no well-formed step
    assert report.trajectories == 12 and report.fell == {"malformed": 12}
    assert (tmp_path / "data" / "pairs.jsonl").read_text() == ""

    write_pairs(tmp_path / "pairs.jsonl")
    pairs_sft = config(
        f"size=tiny,pairs={tmp_path}/pairs.jsonl,init={tmp_path}/cold/model,steps=2,held_out=2", "r3rag_sft"
    )
    pairs_sft.train.update({"rows": 1, "row_length": 128})
    assert stages.run(pairs_sft, tmp_path / "taught").stopped == "done"
    card = read_card(tmp_path / "taught" / "model")
    assert card.recipe == "r3rag" and card.make().environment.turn_tokens == 128

    run = config(f"policy={tmp_path}/taught/model,retriever=bm25,steps=1", "r3rag_ppo")
    run.data.update({"train_worlds": 1, "held_out_worlds": 1, "held_out_per_kind": 1, "train_per_kind": 4})
    run.train.update({"questions": 2, "eval_every": 0})
    run.rollout.update({"rows": 8, "context": 512, "wake_threshold": 4})
    run.objective.row_lengths = (512,)
    run.critic.layers = 1  # as many as the policy has
    run.recipe.environment.turn_tokens = 8
    outcome = experiment.run(run, tmp_path / "run")
    assert outcome.step == 1 and outcome.final_metrics["eval/em"] == 0
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "reward/format" in written and "critic/loss" in written
    assert (tmp_path / "run" / "trajectories.html").exists()
