"""Run one evaluation from its config: answer the questions with the engine, judge the answers, and write a report.

Read `run` first. A run's folder holds:

- config.json: everything that determines the answers; the folder accepts no other config;
- questions.jsonl: the questions;
- results.jsonl: a line per answer, in the order in which they arrived;
- verdicts-*.jsonl: verdicts of a judge, and its scores of the short forms that it extracts from long answers;
- timing.jsonl: seconds of each batch of questions, by stage;
- card.json, scores.jsonl, trajectories.html and, last, metrics.json, once every question is answered.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rrl.data.questions import save_questions
from rrl.errors import UserError
from rrl.eval.dataset import Dataset, load_dataset, with_retriever
from rrl.eval.evaluation_report import report_evaluation
from rrl.eval.judging import Judgements, judge_correctness, score_short_answers, verdicts_file
from rrl.eval.methods import AnsweringMethod, TimedReader
from rrl.eval.provenance import current_commit
from rrl.eval.result_card import ResultCard
from rrl.eval.results import ResultLines, read_lines
from rrl.eval.run_identity import identity_of, make_result_card
from rrl.eval.score_report import as_text
from rrl.eval.settings import EvaluationSettings
from rrl.eval.timing import append_timing
from rrl.files import saving, write_atomically
from rrl.models.hf import load_language_model
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.card import read_card
from rrl.rewards.judge import Judge
from rrl.rewards.reader import Reader
from rrl.rollout.engine import Engine
from rrl.rollout.memory import require_inference_memory
from rrl.runs.progress import Progress
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import refuse_other_config
from rrl.runs.workdir_lock import lock_workdir, refuse_occupied
from rrl.text.metrics import AnswerScores, exact_match
from rrl.text.normalize import rule_named
from rrl.text.short_answers import choice_correct

FOLDERS = ("indexes",)
"""Folders that a run creates in its workdir."""
FILES = (
    *("questions.jsonl", "results.jsonl", "timing.jsonl", "card.json", "scores.jsonl", "trajectories.html"),
    "metrics.json",
)
"""Files that a run creates, in addition to config.json and the files of verdicts."""


def run(config: Mapping[str, Any], workdir: str | Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """Run an evaluation into `workdir` and return its report, which metrics.json has too.

    The same call continues an interrupted evaluation.

    Args:
      config: see configs/eval.py.
      workdir: folder of the run.
      command: the command in the result card; empty: that of this process.

    Raises:
      UserError: wrong input, another process uses the workdir, or a file in the workdir is damaged.
      SaveError: the workdir cannot be written.
    """
    log, workdir = TimedLog(), Path(workdir)
    if jax.process_count() > 1:
        raise UserError("an evaluation runs in one process, over all devices of its host: start it once")
    settings = EvaluationSettings.parse(config)
    enable_compilation_cache()
    data = load_dataset(settings.data, settings.retriever, settings.searches, log)
    _warn_of_other_recipe(settings, log)
    identity = identity_of(settings, data)
    refuse_other_config(workdir, identity)
    refuse_occupied(workdir, FOLDERS, FILES)
    _require_memory(settings)
    data = with_retriever(data, settings.retriever, settings.rollout.search_seconds, workdir, log)
    judge = (
        settings.judge.load(data.questions, settings.compute, settings.mesh.make())
        if settings.judge
        else None
    )
    engine, params = _engine(settings, data, log)
    settings.method.check(engine, data.questions, settings.data.on_error, log)
    with lock_workdir(workdir):
        with saving(workdir / "config.json"):
            write_atomically(workdir / "config.json", json.dumps(identity, indent=2) + "\n")
        with saving(workdir / "questions.jsonl"):
            save_questions(workdir / "questions.jsonl", data.questions)
        answer_questions(settings, _with_reader(settings), data, engine, params, workdir)
        judgements = _judge_answers(settings, judge, data, workdir)
        card = make_result_card(settings, data, command, workdir)
        summary = report_evaluation(workdir, card, data.questions, settings, judgements)
    print(as_text(summary))
    if share := summary["ended"].get("context_limit", 0.0):
        print(
            f"\n{100 * share:.1f}% of the questions filled the context of {settings.rollout.context} tokens without an answer: "
            "show fewer or shorter passages, or raise --config.rollout.context"
        )
    print(f"\n{_settings_text(card)}\n{workdir}")
    return summary


def _warn_of_other_recipe(settings: EvaluationSettings, log: TimedLog) -> None:
    """Log a warning if the policy was trained with another recipe than the one it is evaluated with."""
    policy_card, recipe_name = read_card(settings.policy), settings.method.recipe_name
    if policy_card is not None and recipe_name and policy_card.recipe != recipe_name:
        log(
            f"warning: policy {settings.policy} was trained with the recipe {policy_card.recipe}, and is evaluated with "
            f"{recipe_name}, whose protocol it was not trained on; method={policy_card.recipe} is its recipe"
        )


def _judge_answers(
    settings: EvaluationSettings, judge: Judge | None, data: Dataset, workdir: Path
) -> Judgements:
    """Judge all answers in results.jsonl, if there is a judge."""
    if judge is None or settings.judge is None:
        return Judgements()
    short_scores: dict[str, AnswerScores | None] = {}
    lines = read_lines(workdir / "results.jsonl", "id", "prediction")
    answers = {line["id"]: line["prediction"] for line in lines}
    file = verdicts_file(workdir, settings.judge.identity() | {"prompt": settings.eval.judge_prompt}, answers)
    verdicts_name, began = file.name, time.perf_counter()
    judged_before = len(read_lines(file))
    verdicts = judge_correctness(file, judge, settings.eval.judge_prompt, data.questions, answers)
    if settings.method.judges_short_forms and not any(question.choices for question in data.questions):
        name = settings.eval.normalization
        file = verdicts_file(workdir, settings.judge.identity() | {"short_answers": name}, answers)
        short_scores = score_short_answers(file, judge, rule_named(name), data.questions, answers)
    append_timing(workdir, len(verdicts) - judged_before, verdicts_name, judge=time.perf_counter() - began)
    return Judgements(verdicts, short_scores, verdicts_name)


def _require_memory(settings: EvaluationSettings) -> None:
    """Raise UserError, with the numbers, if the models need more memory than there is."""
    judge = settings.judge
    require_inference_memory(
        {
            "policy": (settings.policy, settings.rollout),
            "reader": (settings.reader, settings.reader_rollout),
        }
        | (
            {"judge.folder": (judge.judge.folder, judge.rollout)}
            if judge and judge.judge.kind == "model"
            else {}
        ),
        settings.mesh.make(),
        settings.compute.dtype,
        "use a smaller model, fewer --config.rollout.rows, a smaller --config.rollout.context or, on a CPU, "
        "--config.rollout.weights=unpacked",
    )


def _engine(settings: EvaluationSettings, data: Dataset, log: TimedLog) -> tuple[Engine, Any]:
    mesh, compute = settings.mesh.make(), settings.compute
    device = mesh.devices.flat[0]
    log(f"policy {settings.policy}, on {mesh.size} of {len(jax.devices())} devices ({device.device_kind})")
    decoder, tokenizer = load_language_model(
        settings.policy,
        "policy",
        chat=settings.method.chat,
        context=settings.rollout.context,
        dtype=jnp.dtype(compute.dtype),
        param_dtype=jnp.dtype(compute.dtype),
        mesh=mesh if mesh.size > 1 else None,
        attention=compute.backend(device.platform),
    )
    engine = Engine(decoder, tokenizer, settings.rollout, retriever=data.retriever, mesh=mesh)
    return engine, nnx.state(decoder)


def _with_reader(settings: EvaluationSettings) -> AnsweringMethod:
    """Return the method, with its reader model loaded if it has one."""
    if not settings.reader:
        return settings.method
    mesh = settings.mesh.make()
    decoder, tokenizer = load_language_model(
        settings.reader,
        "reader",
        context=settings.reader_rollout.context,
        dtype=jnp.dtype(settings.compute.dtype),
        param_dtype=jnp.dtype(settings.compute.dtype),
        mesh=mesh if mesh.size > 1 else None,
    )
    reader = Reader(decoder, tokenizer, settings.reader_rollout, mesh=mesh)
    return settings.method.with_reader(TimedReader(reader.replies, reader.engine.product_format))


def answer_questions(
    settings: EvaluationSettings,
    method: AnsweringMethod,
    data: Dataset,
    engine: Engine,
    params: Any,
    workdir: Path,
) -> None:
    """Answer all questions that results.jsonl lacks, and append each answer as soon as it is finished."""
    count = len(data.questions)
    lines = ResultLines(workdir / "results.jsonl", (question.id for question in data.questions))
    todo = [(at, question) for at, question in enumerate(data.questions) if question.id not in lines.ids]
    right = answered = 0.0
    with Progress(count, start=len(lines.ids), label=settings.method.name.split(" ")[0]) as progress:

        def on_record(record: dict[str, Any]) -> None:
            nonlocal right, answered
            lines.append(record)
            fields = record["question"]
            right += _correctness(record["prediction"], fields["answers"], fields["choices"])
            answered += 1
            tokens = record["tokens"] + record["environment_tokens"]
            progress.update(len(lines.ids), {"right": f"{100 * right / answered:.1f}%"}, tokens)

        for start in range(0, len(todo), method.batch_size):
            batch = todo[start : start + method.batch_size]
            key = jax.random.key(settings.eval.seed)
            seconds_before = method.reader.seconds if method.reader else 0.0
            origin: dict[str, Any] = {
                "commit": current_commit(),
                "policy_format": engine.product_format,
                "reader_format": method.reader.product_format if method.reader else "",
            }
            append_timing(
                workdir, 0, **origin
            )  # before the first answer, since the process may be killed within the batch
            method.answer(engine, params, batch, key, settings.eval.temperature, on_record)
            stats = engine.stats
            reader_seconds: dict[str, Any] = (
                {"read": method.reader.seconds - seconds_before} if method.reader else {}
            )
            append_timing(
                workdir,
                len(batch),
                **origin,
                answer=stats.seconds,
                search=stats.retrieval_seconds,
                **reader_seconds,
            )


def _correctness(prediction: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    return choice_correct(prediction, answers, choices) if choices else exact_match(prediction, answers)


def _settings_text(card: ResultCard) -> str:
    setting = card.setting | {"method": card.method} | card.models
    return "\n".join(f"{name}: {value}" for name, value in setting.items())
