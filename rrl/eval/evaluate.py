"""Run one evaluation from its config: answer the questions with the engine, judge the answers, and write a report.

Read `run` first. A run's folder holds:

- config.json: everything that determines the answers; the folder accepts no other config;
- questions.jsonl: the questions;
- results.jsonl: a line per answer, in the order in which they arrived;
- verdicts-*.jsonl: verdicts of a judge, and its scores of short forms;
- timing.jsonl: seconds of each batch of questions, by stage;
- card.json, scores.jsonl, trajectories.html and, last, metrics.json, once every question is answered.
"""

import collections
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rrl.data.questions import Question, save_questions
from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import load_trajectories
from rrl.errors import UserError
from rrl.eval.dataset import Dataset, load_dataset, with_retriever
from rrl.eval.judging import judge_correctness, score_short_answers, verdicts_file
from rrl.eval.methods import AnsweringMethod, TimedReader, TrainedAgent
from rrl.eval.predictions import load_predictions
from rrl.eval.result_card import (
    BM25_FIELDS,
    ResultCard,
    commit_here,
    gold_fingerprint,
    questions_fingerprint,
    save_card,
    versions_here,
)
from rrl.eval.results import ResultLines, read_lines
from rrl.eval.scoring import CUTS, Scores, as_text, match_predictions, report, score, write_report
from rrl.eval.settings import EvaluationSettings
from rrl.eval.timing import append_timing, latency, read_timing
from rrl.files import saving, write_atomically
from rrl.models.hf import folder_hash, load_language_model
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.card import read_card
from rrl.report.trajectories_html import write_html
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.gold import hits_from_ranks
from rrl.rewards.judge import Judge
from rrl.rewards.reader import Reader
from rrl.rollout.config import RESULT_INVARIANT_FIELDS
from rrl.rollout.engine import Engine
from rrl.runs.progress import Progress
from rrl.runs.retriever import encoder_folder
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
MAX_SHOWN = 100
"""Largest number of trajectories on a run's page."""


def run(config: Mapping[str, Any], workdir: str | Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """Run an evaluation into `workdir` and return its report, which metrics.json has too.

    The same call continues an interrupted evaluation.

    Args:
      config: see configs/eval.py.
      workdir: folder of the run.
      command: the command in the result card; empty: that of this process.

    Raises:
      UserError: wrong input, or another process uses the workdir; raised before anything is written.
      SaveError: the workdir cannot be written.
    """
    log, workdir = TimedLog(), Path(workdir)
    if jax.process_count() > 1:
        raise UserError("an evaluation runs in one process, over all devices of its host: start it once")
    settings = EvaluationSettings.of(config)
    enable_compilation_cache()
    data = load_dataset(settings.data, settings.retriever, settings.searches, log)
    _warn_of_other_recipe(settings, log)
    identity = identity_of(settings, data)
    refuse_other_config(workdir, identity)
    refuse_occupied(workdir, FOLDERS, FILES)
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
        verdicts, short_scores, verdicts_name = _judge_answers(settings, judge, data, workdir)
        card = make_result_card(settings, data, command, workdir)
        summary = finish(workdir, card, data.questions, settings, verdicts, short_scores, verdicts_name)
    print(as_text(summary))
    if cut := summary["ended"].get("context_limit", 0.0):
        print(
            f"\n{100 * cut:.1f}% of the questions filled the context of {settings.rollout.context} tokens without an answer: "
            "show fewer or shorter passages, or raise --config.rollout.context"
        )
    print(f"\n{_settings_text(card)}\n{workdir}")
    return summary


def _warn_of_other_recipe(settings: EvaluationSettings, log: TimedLog) -> None:
    """Log a warning if the policy was trained with another recipe than the one it is evaluated with."""
    policy_card = read_card(settings.policy)
    if (
        policy_card is not None
        and isinstance(settings.method, TrainedAgent)
        and policy_card.recipe != settings.method.recipe_name
    ):
        log(
            f"warning: policy {settings.policy} was trained with the recipe {policy_card.recipe}, and is evaluated with "
            f"{settings.method.recipe_name}, whose protocol it was not trained on; method={policy_card.recipe} is its recipe"
        )


def _judge_answers(
    settings: EvaluationSettings, judge: Judge | None, data: Dataset, workdir: Path
) -> tuple[dict[str, bool | None], dict[str, AnswerScores | None], str]:
    """Judge all answers in results.jsonl, if there is a judge.

    Returns the verdicts, the scores of short forms (for methods with long answers), and the name of the verdicts' file.
    """
    if judge is None or settings.judge is None:
        return {}, {}, ""
    short_scores: dict[str, AnswerScores | None] = {}
    lines = read_lines(workdir / "results.jsonl", "id", "prediction")
    answers = {line["id"]: line["prediction"] for line in lines}
    file = verdicts_file(workdir, settings.judge.identity() | {"prompt": settings.eval.judge_prompt}, answers)
    verdicts_name, began = file.name, time.perf_counter()
    before = len(read_lines(file))
    verdicts = judge_correctness(file, judge, settings.eval.judge_prompt, data.questions, answers)
    if settings.method.judges_short_forms and not any(question.choices for question in data.questions):
        name = settings.eval.normalization
        file = verdicts_file(workdir, settings.judge.identity() | {"short_answers": name}, answers)
        short_scores = score_short_answers(file, judge, rule_named(name), data.questions, answers)
    append_timing(workdir, len(verdicts) - before, verdicts_name, judge=time.perf_counter() - began)
    return verdicts, short_scores, verdicts_name


def identity_of(settings: EvaluationSettings, data: Dataset) -> dict[str, Any]:
    """Return what determines the answers: models and data by content, not by path. Scoring and judging are not part of it."""
    encoder = encoder_folder(settings.retriever) if settings.searches else ""
    return {
        "way": settings.method.identity,
        "policy": folder_hash(settings.policy),
        "questions": questions_fingerprint(data.questions),
        "gold": gold_fingerprint(data.questions),
        "corpus": data.corpus_sha256,
        "retriever": settings.retriever.identity() | {"encoder": encoder and folder_hash(encoder)}
        if settings.searches
        else {},
        "rollout": {
            name: value
            for name, value in dataclasses.asdict(settings.rollout).items()
            if name not in RESULT_INVARIANT_FIELDS
        },
        **({"reader_context": settings.reader_rollout.context} if settings.reader else {}),
        "compute": dataclasses.asdict(settings.compute),
        "temperature": settings.eval.temperature,
        "seed": settings.eval.seed,
    }


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
    if not (settings.reader and isinstance(settings.method, TrainedAgent)):
        return settings.method
    decoder, tokenizer = load_language_model(
        settings.reader,
        "reader",
        context=settings.reader_rollout.context,
        dtype=jnp.dtype(settings.compute.dtype),
        param_dtype=jnp.dtype(settings.compute.dtype),
    )
    return dataclasses.replace(
        settings.method, reader=TimedReader(Reader(decoder, tokenizer, settings.reader_rollout).replies)
    )


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
    reader = method.reader if isinstance(method, TrainedAgent) else None
    lines = ResultLines(workdir / "results.jsonl", (question.id for question in data.questions))
    todo = [(at, question) for at, question in enumerate(data.questions) if question.id not in lines.done]
    right = answered = 0.0
    with Progress(count, start=len(lines.done), label=settings.method.name.split(" ")[0]) as progress:

        def on_record(record: dict[str, Any]) -> None:
            nonlocal right, answered
            lines.append(record)
            fields = record["question"]
            right += _correctness(record["prediction"], fields["answers"], fields["choices"])
            answered += 1
            tokens = record["tokens"] + record["environment_tokens"]
            progress.update(len(lines.done), {"right": f"{100 * right / answered:.1f}%"}, tokens)

        for start in range(0, len(todo), method.batch_size):
            batch = todo[start : start + method.batch_size]
            key = jax.random.key(settings.eval.seed)
            before = reader.seconds if reader else 0.0
            method.answer(engine, params, batch, key, settings.eval.temperature, on_record)
            stats = engine.stats
            read: dict[str, Any] = {"read": reader.seconds - before} if reader else {}
            append_timing(
                workdir,
                len(batch),
                commit=commit_here(),
                answer=stats.seconds,
                search=stats.retrieval_seconds,
                **read,
            )


def _correctness(prediction: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    return choice_correct(prediction, answers, choices) if choices else exact_match(prediction, answers)


def make_result_card(
    settings: EvaluationSettings, data: Dataset, command: Sequence[str] = (), workdir: Path | None = None
) -> ResultCard:
    """Return the result card. The commits of the code that answered are read from timing.jsonl in `workdir`, if given."""
    answered = [line for line in read_timing(workdir) if "commit" in line] if workdir else []
    judge = settings.judge
    shortened = {"short_answers": True} if settings.method.judges_short_forms else {}
    encoder = encoder_folder(settings.retriever) if settings.searches else ""
    retriever = _retriever_for_card(settings.retriever.identity()) | {
        "encoder": encoder and folder_hash(encoder)[:12]
    }
    return ResultCard(
        method=settings.method.name,
        dataset=data.name,
        questions=len(data.questions),
        questions_sha256=questions_fingerprint(data.questions),
        corpus=data.corpus,
        corpus_sha256=data.corpus_sha256,
        passages=len(data.passages),
        retriever=retriever if data.corpus else {},
        top_k=settings.rollout.top_k if data.corpus else 0,
        limits=settings.method.limits
        | {"context": settings.rollout.context}
        | ({"reader_context": settings.reader_rollout.context} if settings.reader else {}),
        model=settings.policy,
        model_sha256=folder_hash(settings.policy),
        normalization=settings.eval.normalization,
        reader=settings.reader,
        reader_sha256=folder_hash(settings.reader) if settings.reader else "",
        judge=json.dumps(judge.identity() | {"prompt": settings.eval.judge_prompt} | shortened)
        if judge
        else "",
        temperature=settings.eval.temperature,
        seed=settings.eval.seed,
        gold_sha256=gold_fingerprint(data.questions),
        compute={"dtype": settings.compute.dtype, "attention": settings.compute.attention},
        commit=", ".join(dict.fromkeys(line["commit"] for line in answered)) or commit_here(),
        versions=answered[-1].get("versions", {}) if answered else versions_here(),
        command=shlex.join(command or ["python", *sys.argv]),
    )


def _retriever_for_card(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a retriever for the result card.

    If the config opens an existing index, its settings are taken from the index. An index that is built during the run with the
    same settings gives the same entry.
    """
    index = identity.get("index")
    if not isinstance(index, Mapping):
        return dict(identity)
    defaults = dataclasses.asdict(Bm25Config())
    chosen = index["bm25"] or {}
    bm25 = {n: value for n, value in chosen.items() if n in BM25_FIELDS or value != defaults.get(n)}
    titles = {name: index[name] for name in ("title_weight",) if name in index}
    return {"kind": index["kind"]} | bm25 | titles


def finish(
    workdir: Path,
    card: ResultCard,
    questions: Sequence[Question],
    settings: EvaluationSettings,
    verdicts: Mapping[str, bool | None],
    short_scores: Mapping[str, AnswerScores | None],
    verdicts_name: str = "",
) -> dict[str, Any]:
    """Score the answers in results.jsonl, and write and return the report. `verdicts_name` is the name of the verdicts' file."""
    scores = scores_of(workdir, questions, card.normalization, verdicts, short_scores)
    summary: dict[str, Any] = {"normalization": card.normalization}
    summary |= report(scores, seed=settings.eval.seed, level=settings.eval.level)
    if short_scores:
        summary["short_unread"] = sum(score is None for score in short_scores.values())
    if not card.corpus:  # nothing was searched
        for name in ("retrieval", "retrieval_by", "retrieval_warning", "retrieval_intervals"):
            summary.pop(name, None)
    lines = read_lines(workdir / "results.jsonl", "answer_rank", "ended")
    ranks = [line["answer_rank"] for line in lines if line["answer_rank"] is not None]
    # If some questions have gold passages, retrieval is measured by these alone.
    if ranks and card.corpus and "retrieval" not in summary:
        means = hits_from_ranks(ranks).report(CUTS)
        summary["retrieval_by_answer"] = {k: v for k, v in means.items() if k.startswith(("hits", "mrr"))}
    endings = collections.Counter(line["ended"] for line in lines)
    summary["ended"] = {name: often / len(lines) for name, often in endings.most_common()}
    summary["seconds"] = latency(workdir, verdicts_name)
    summary["timed"] = sum(line["questions"] for line in read_timing(workdir) if "answer" in line)
    # A tag may be a pair of markers, which cannot be a key in JSON.
    summary["tags"] = list(settings.method.tags.items())
    summary["card"] = dataclasses.asdict(card)
    shown, page = scored_trajectories(workdir, scores)[:MAX_SHOWN], workdir / "trajectories.html"
    with saving(page):
        write_html(shown, page, f"{card.method}: {card.dataset}", tags=settings.method.tags)
    with saving(workdir / "card.json"):
        save_card(workdir / "card.json", card)
    write_report(workdir, summary, scores)
    return summary


def scores_of(
    workdir: Path,
    questions: Sequence[Question],
    normalization: str,
    verdicts: Mapping[str, bool | None],
    short_scores: Mapping[str, AnswerScores | None],
) -> Scores:
    """Return the scores of all questions, including a judge's verdicts if there are any.

    If the judge scored short forms of long answers (`short_scores`), those scores replace the scores of the full answers.

    Raises UserError, with the line, for a missing or repeated answer, or an answer to another question.
    """
    file = workdir / "results.jsonl"
    predictions = load_predictions(file, "prediction")
    if verdicts:
        predictions = [dataclasses.replace(p, verdict=verdicts[p.id or ""]) for p in predictions]
    pairs = match_predictions(predictions, questions, str(file), str(workdir / "questions.jsonl"))
    scores = score(pairs, questions, rule_named(normalization), judged=bool(verdicts))
    return with_short_forms(scores, short_scores) if short_scores else scores


def with_short_forms(scores: Scores, short_scores: Mapping[str, AnswerScores | None]) -> Scores:
    """Replace em, f1 and cem by the scores of short forms, given by id; None leaves the scores of a question unchanged."""
    metrics = dict(scores.metrics)
    for name in AnswerScores._fields:
        plain = scores.metrics[name].tolist()
        known = [short_scores[question.id] for question in scores.questions]
        metrics[name] = np.array(
            [
                value if scored is None else getattr(scored, name)
                for value, scored in zip(plain, known, strict=True)
            ]
        )
    return dataclasses.replace(scores, metrics=metrics)


def scored_trajectories(workdir: Path, scores: Scores) -> list[Trajectory]:
    """Return the trajectories in the order of the questions, with their scores as metrics."""
    by_id = {t.question.id: t for t in load_trajectories(workdir / "results.jsonl")}
    trajectories = []
    for at, question in enumerate(scores.questions):
        trajectory = by_id[question.id]
        trajectory.metrics = {name: float(values[at]) for name, values in scores.metrics.items()}
        if "acc" in trajectory.metrics:  # pages of trajectories mark right and wrong by "em"
            trajectory.metrics["em"] = trajectory.metrics["acc"]
        trajectories.append(trajectory)
    return trajectories


def _settings_text(card: ResultCard) -> str:
    setting = card.setting | {"method": card.method} | card.models
    return "\n".join(f"{name}: {value}" for name, value in setting.items())
