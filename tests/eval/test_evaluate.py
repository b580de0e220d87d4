"""Evaluations of the shipped models: a killed run continues to the same result, and files are written completely."""

import dataclasses
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval import evaluate, run_identity
from rrl.eval.comparison import comparison_rows
from rrl.eval.comparison_tables import cost_table
from rrl.eval.dataset import Dataset
from rrl.eval.evaluation_run import load_run
from rrl.eval.results import ResultLines, read_lines
from rrl.eval.settings import EvaluationSettings
from rrl.files import SaveError, exclusive_lock
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.prompted.catalogue import METHODS
from rrl.runs.launcher import load_config
from tests.eval.runs import QUESTIONS
from tests.memory import limit_memory

SMALL = ("rollout.rows=8", "data.worlds=1")


def config(arg: str, *fields: str):
    return load_config(f"configs/eval.py:{arg}", [*SMALL, *fields])


def answers(folder: Path) -> dict[str, str]:
    return {line["id"]: line["segments"][-1][1] for line in read_lines(folder / "results.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("arg", ["method=rsearch", "method=iter_retgen,policy=assets/miniwiki-reader"])
def test_a_killed_run_continues_to_the_same_answers(
    tmp_path: Path, arg: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    sampled = config(f"{arg},questions=20,temperature=1.0", "rollout.context=1024")
    evaluate.run(sampled, tmp_path / "whole")
    append, written = ResultLines.append, []

    def killed(lines: ResultLines, record: dict) -> None:
        append(lines, record)
        written.append(record["id"])
        if len(written) == 7:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(ResultLines, "append", killed)
        with pytest.raises(RuntimeError, match="killed"):
            evaluate.run(sampled, tmp_path / "parts")
    with pytest.raises(UserError, match=r"not finished \(7 questions are answered\)"):
        load_run(tmp_path / "parts")
    file = tmp_path / "parts/results.jsonl"
    file.write_bytes(file.read_bytes() + b'{"id": "half a line')
    evaluate.run(sampled, tmp_path / "parts")
    assert (
        answers(tmp_path / "parts") == answers(tmp_path / "whole") and len(answers(tmp_path / "whole")) == 20
    )
    whole, parts = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "parts"))
    for part in ("metrics", "by_kind", "retrieval", "cost", "ended"):
        assert whole[part] == parts[part]
    assert whole["timed"] == 20 and parts["timed"] == 13
    output = capsys.readouterr().out
    assert "20 questions, percent" in output and output.count("(measured on 13 of them)") == 1


@pytest.mark.slow
def test_a_run_records_its_setting_and_can_be_judged_later_without_answering_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate.run(config("method=rsearch,questions=10"), tmp_path, ["python", "x"])
    run = load_run(tmp_path)
    card = run.card
    assert card.method == "rsearch" and card.dataset == "miniwiki test, seed 1" and card.questions == 10
    assert card.passages == 200 and card.top_k == 2 and card.retriever["kind"] == "scann"
    assert card.limits == {"max_searches": 4, "turn_tokens": 128, "observation_tokens": 256, "context": 1024}
    assert card.command == "python x" and card.judge == "" and len(card.model_sha256) == 64
    assert run.report["seconds"]["answer"] > 0 and set(run.report["ended"]) <= {
        "answer",
        "no_action",
        "length",
        "turn_limit",
        "search_limit",
        "context_limit",
    }
    assert {"tokens", "prompt_tokens", "environment_tokens", "searches", "turns"} <= set(run.report["cost"])
    assert (tmp_path / "trajectories.html").stat().st_size > 10_000

    assert card.compute == {"dtype": "float32", "attention": "auto"} and len(card.gold_sha256) == 64

    monkeypatch.setattr(evaluate, "answer_questions", lambda *_: None)
    monkeypatch.setattr(run_identity, "current_commit", lambda: "a later one")
    evaluate.run(config("method=rsearch,questions=10,judge=oracle,normalization=triviaqa"), tmp_path)
    judged = load_run(tmp_path)
    assert judged.card.commit == card.commit != "a later one"  # the commit of the code that answered
    # The oracle's verdict is cover exact match.
    assert judged.metrics["judge"].tolist() == judged.metrics["cem"].tolist()
    assert json.loads(judged.card.judge) == {"kind": "oracle", "prompt": "tiresrag"}
    assert judged.card.normalization == "triviaqa"

    monkeypatch.undo()
    with pytest.raises(UserError, match=r"holds a run of another config .*rollout\.top_k: 2 there, 3 now"):
        evaluate.run(config("method=rsearch,questions=10,top_k=3"), tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds answers \(results\.jsonl\), but the config\.json"):
        evaluate.run(config("method=rsearch,questions=10,top_k=3"), tmp_path)


@pytest.fixture
def service() -> Iterator[tuple[str, list[str]]]:
    """The address of a service that judges every answer with an "a" as right, and the prompts that it received."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body["messages"][-1]["content"])
            verdict = "True" if "a" in requests[-1].rpartition("Predicted Answer:")[2] else "False"
            text = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_judging_by_a_service_or_a_model_is_recorded_in_the_card(
    tmp_path: Path, service: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, requests = service
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    folder, cache = tmp_path / "run", f"judge_endpoint.cache={tmp_path / 'cache'}"
    judged = f"method=rsearch,questions=5,judge={url},judge_model=m"
    evaluate.run(config(judged, cache), folder)
    run, predictions = (
        load_run(folder),
        {line["id"]: line["prediction"] for line in read_lines(folder / "results.jsonl")},
    )
    assert len(requests) == sum(map(bool, predictions.values())) > 0
    assert run.metrics["judge"].tolist() == ["a" in predictions[question.id] for question in run.questions()]
    assert json.loads(run.card.judge)["model"] == "m" and run.report["judge_unparsed"] == 0
    assert run.report["seconds"]["judge"] > 0
    assert not any(b"sk-secret" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    monkeypatch.setattr(evaluate, "answer_questions", lambda *_: None)
    requests.clear()
    evaluate.run(config(judged, cache), folder)
    assert not requests  # the verdicts are reused

    short = ("judge_rollout.context=1024", "judge.answer_tokens=8", "judge_rollout.rows=8")
    evaluate.run(config("method=rsearch,questions=5,judge=assets/miniwiki-policy", *short), folder)
    run = load_run(folder)
    card = json.loads(run.card.judge)
    assert card["kind"] == "model" and card["folder"] == run.card.model_sha256
    # A small model does not follow the prompt of the paper: its replies cannot be parsed, and count as wrong.
    assert run.report["judge_unparsed"] + run.metrics["judge"].sum() <= 5 and "judge" in run.report["metrics"]


def test_models_larger_than_memory_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "load_language_model", lambda *_: pytest.fail("nothing may be loaded"))
    limit_memory(monkeypatch, tmp_path, 2**20)
    arguments = "method=r2ag,questions=5,reader=assets/miniwiki-reader,judge=assets/miniwiki-judge"
    parts = "parameters of policy .*, parameters of reader .*, parameters of judge.folder .*, KV cache"
    with pytest.raises(UserError, match=f"policy='assets/miniwiki-policy'.* are available: {parts}"):
        evaluate.run(config(arguments), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arg", "fields", "words"),
    [
        ("method=nope", [], "method='nope' is unknown; recipes are"),
        ("method=react", ["method.steps=0"], "react.steps=0 must be a whole number above 0"),
        ("method=r2ag,reader=/none", [], "reader='/none' is no Hugging Face folder"),
        ("reader=x", [], "reader='x' needs a recipe .* \\(r2ag\\); rsearch answers itself"),
        ("method=cot,reader=x", [], "reader='x' needs a recipe .*; cot answers itself"),
        ("policy=/none", [], "policy='/none' is no Hugging Face folder"),
        ("dataset=/none,policy=assets/miniwiki-policy", [], "data.path='/none' is not miniwiki"),
        ("normalization=squat", [], "normalization='squat' is unknown"),
        ("judge_prompt=x", [], "eval.judge_prompt='x' is unknown; choose one of tiresrag, r2ag"),
        ("judge=/none", [], "judge.folder='/none' is no Hugging Face folder"),
        ("retriever=exact", ["retriever.encoder="], "retriever.kind=exact needs retriever.encoder"),
        ("temperature=-1", [], "eval.temperature=-1.0 must be at least 0"),
        ("questions=1,top_k=0", [], "rollout.top_k=0 must be at least 1"),
        ("questions=20", ["rollout.context=5000"], "context of 5000 tokens is more than the model's"),
    ],
)
def test_wrong_input_raises_before_anything_is_written(
    tmp_path: Path, arg: str, fields: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        evaluate.run(config(arg, *fields), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", evaluate.FILES)
def test_a_folder_in_place_of_a_file_is_rejected_before_loading(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "with_retriever", lambda *_: pytest.fail("loads"))
    monkeypatch.setattr(evaluate, "refuse_other_config", lambda *_: None)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} is a folder, but the run needs a file there; move it away"):
        evaluate.run(config("method=direct,questions=2"), tmp_path)


def test_a_locked_workdir_is_rejected_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "with_retriever", lambda *_: pytest.fail("loads"))
    with exclusive_lock(tmp_path, ""), pytest.raises(UserError, match=r"another process works there\. Wait"):
        evaluate.run(config("method=direct,questions=2"), tmp_path)


def test_deleting_the_workdir_during_a_run_raises_save_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = ResultLines.append

    def deleted(lines: ResultLines, record: dict) -> None:
        append(lines, record)
        shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(ResultLines, "append", deleted)
    with pytest.raises(SaveError, match=r"could not be saved: the folder .*run is gone\. Put it back"):
        evaluate.run(config("method=direct,questions=2"), tmp_path / "run")


def test_the_error_names_an_unknown_field_or_argument() -> None:
    for call, words in (
        (lambda: config("method=react,metod=x"), "unknown config argument 'metod'. Did you mean 'method'"),
        (
            lambda: config("method=react", "method.rounds=2"),
            "has no field 'rounds'; its fields are name, steps",
        ),
        (lambda: config("method=react", "method.steps=x"), "config.method.steps='x' must be a whole number"),
        (
            lambda: config("dataset=dev.jsonl"),
            "policy='': the shipped policy works in the built-in world only",
        ),
        (lambda: config("judge=oracle,judge_model=x"), "judge_model='x' names a service's model"),
    ):
        with pytest.raises(UserError, match=words):
            call()


def test_a_service_of_the_built_in_world_needs_no_encoder_to_be_left_out() -> None:
    assert config("method=rsearch,index=http://127.0.0.1:9").retriever.encoder == ""
    assert config("method=rsearch").retriever.encoder == "assets/miniwiki-encoder"


@pytest.mark.parametrize("name", [*RECIPES, *METHODS])
def test_every_recipe_and_method_has_valid_settings(name: str) -> None:
    settings = EvaluationSettings.parse(config(f"method={name}"))
    assert json.loads(json.dumps(settings.method.identity)) and settings.method.limits
    assert settings.method.name == name and settings.searches == (name not in ("direct", "cot"))


def test_r3rag_has_the_papers_limits_on_real_questions() -> None:
    """R3-RAG: top-k 5 and at most 5 steps; documents are cut to 512 characters only "in RL training"."""
    made = config("method=r3rag,dataset=dev.jsonl,corpus=wiki.jsonl,policy=FOLDER")
    assert made.rollout.top_k == 5
    environment = make_recipe("r3rag", {}, dict(made.recipe.environment)).environment
    assert (environment.document_characters, environment.max_steps) == (0, 5)
    assert (
        config("method=r3rag").recipe.environment.document_characters == 512
    )  # the same as in training in the built-in world


def test_gold_passages_are_part_of_the_identity_of_an_evaluation() -> None:
    """R2AG's trees and the diagnosis use the gold passages, so they matter even for the same questions."""
    settings = EvaluationSettings.parse(config("method=rsearch"))
    data = Dataset("four", QUESTIONS, corpus_sha256="c" * 64)
    moved = [dataclasses.replace(question, gold=("Rome",)) for question in QUESTIONS]
    other = dataclasses.replace(data, questions=moved)
    one, two = (run_identity.identity_of(settings, some) for some in (data, other))
    assert [name for name in one if one[name] != two[name]] == ["gold"]


@pytest.mark.slow
def test_a_policy_of_another_recipe_logs_a_warning_and_the_card_names_the_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    evaluate.run(config("method=r2ag,questions=5,reader=assets/miniwiki-reader"), tmp_path)
    warning = "warning: policy assets/miniwiki-policy was trained with the recipe rsearch, and is evaluated with r2ag"
    assert warning in capsys.readouterr().err
    run = load_run(tmp_path)
    cost, card = run.report["cost"], run.card
    assert 40 < cost["reader_prompt_tokens"] <= 512 and 1 <= cost["reader_tokens"] <= 32
    _, row = cost_table(comparison_rows([run]))
    assert f"{cost['reader_prompt_tokens']:.2f}" in row
    assert card.reader == "assets/miniwiki-reader" and len(card.reader_sha256) == 64
    assert card.limits["reader_context"] == 512 and card.models["reader"].startswith(
        "assets/miniwiki-reader ("
    )
