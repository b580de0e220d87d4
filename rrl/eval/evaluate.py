"""One evaluation from its config: questions asked through the engine, each kept as it is answered, then judged and reported.

A run's folder holds

- config.json: all that decides the answers; another config is refused there;
- questions.jsonl and results.jsonl: what was asked, and a line for each answer, in the order in which they came;
- verdicts-*.jsonl: what a judge said, of right and wrong and of short forms;
- timing.jsonl: how long each stretch of questions took, by stage;
- card.json, scores.jsonl, trajectories.html, and at last metrics.json, once every question is answered.
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
from ml_collections import ConfigDict

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_defaults, refuse_unknown_fields
from rrl.data.questions import Question, save_questions
from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import load_trajectories
from rrl.errors import UserError, at_least, at_most, one_of
from rrl.eval.dataset import Dataset, DatasetConfig, load_dataset, with_retriever
from rrl.eval.judging import PROMPTS, judgement_file, short_scores, verdicts
from rrl.eval.methods import AnsweringMethod, AnswerModel, TrainedAgent, make_answering_method
from rrl.eval.predictions import load_predictions
from rrl.eval.result_card import (
    BM25,
    ResultCard,
    commit_here,
    gold_fingerprint,
    questions_fingerprint,
    save_card,
    versions_here,
)
from rrl.eval.results import ResultLines, read_lines
from rrl.eval.scoring import CUTS, Scores, as_text, matched, report, score, write_report
from rrl.eval.timing import append_timing, latency, read_timing
from rrl.files import saving, write_atomically
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.hf import folder_hash, load_language_model
from rrl.models.weights import require_folder
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.card import read_card, require_policy
from rrl.recipes.catalogue import is_recipe, make_recipe
from rrl.recipes.prompted.base import PromptedSettings
from rrl.recipes.prompted.catalogue import METHODS, make_prompted_method
from rrl.report.trajectories_html import write_html
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.gold import hits_at
from rrl.rewards.judge_settings import SECTIONS as JUDGE
from rrl.rewards.judge_settings import JudgeSettings
from rrl.rewards.reader import Reader
from rrl.rollout.config import RESULT_INVARIANT_FIELDS, EngineConfig
from rrl.rollout.engine import Engine
from rrl.runs.datasets import RetrieverConfig, encoder_folder
from rrl.runs.progress import Progress
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import lock_workdir, refuse_locked, refuse_other_config
from rrl.text.metrics import AnswerScores, exact_match
from rrl.text.normalize import rule_named
from rrl.text.short_answers import choice_correct

FOLDERS = ("indexes",)
"""Folders that a run makes in its workdir."""
FILES = (
    *("questions.jsonl", "results.jsonl", "timing.jsonl", "card.json", "scores.jsonl", "trajectories.html"),
    "metrics.json",
)
"""Files that it makes, beside config.json and those of verdicts."""
SHOWN = 100
"""Trajectories on a run's own page."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How answers are sampled and scored."""

    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Of sampling; the bootstrap has it too."""
    normalization: str = "squad"
    """A name of `rrl.text.normalize.RULES`."""
    judge_prompt: str = "tiresrag"
    """What a judge is asked: tiresrag (Figure 13) or r2ag (Figure A.4)."""
    level: float = 0.95
    """Of the intervals."""

    def __post_init__(self) -> None:
        at_least(0, self, "temperature", "seed", "level")
        at_most(2**32 - 1, self, "seed")
        one_of(PROMPTS, self, "judge_prompt")
        rule_named(self.normalization)
        if not 0 < self.level < 1:
            raise UserError(f"level={self.level} must lie between 0 and 1, such as 0.95")


SECTIONS: Mapping[str, type] = {
    "eval": EvalConfig,
    "data": DatasetConfig,
    "retriever": RetrieverConfig,
    "rollout": EngineConfig,
    "reader_rollout": EngineConfig,
    "mesh": MeshConfig,
    "compute": ComputeConfig,
}
"""The dataclass behind each section of a config that every method has."""


def with_defaults(config: ConfigDict) -> ConfigDict:
    """A config of this form (see configs/eval.py) with every field there is, so that each can be overridden."""
    rename_config(config)
    for name, kind in SECTIONS.items():
        fill_defaults(config[name], kind)
    if "judge" in config:
        for name, kind in JUDGE.items():
            if name not in config:
                config[name] = ConfigDict()
            fill_defaults(config[name], kind)
    name = config.method.name
    if name in METHODS:
        for option, value in make_prompted_method(name).defaults.items():
            if option not in config.method:
                config.method[option] = value
        fill_defaults(config.prompted, PromptedSettings)
        for field in ("temperature", "token_bytes"):  # the evaluation's, and the tokenizer's
            del config.prompted[field]
    elif is_recipe(name):
        recipe = make_recipe(name)
        fill_defaults(config.recipe, type(recipe))
        if "environment" not in config.recipe:
            config.recipe.environment = ConfigDict()
        fill_defaults(config.recipe.environment, type(recipe.environment))
    return config


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """A config, checked and typed."""

    name: str
    policy: str
    way: AnsweringMethod
    eval: EvalConfig
    data: DatasetConfig
    retriever: RetrieverConfig
    rollout: EngineConfig
    reader_rollout: EngineConfig
    mesh: MeshConfig
    compute: ComputeConfig
    reader: str = ""
    """Folder of the model that answers from what a recipe has found."""
    judge: JudgeSettings | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "EvaluationSettings":
        """Checks a config (see configs/eval.py for its form) and that its folders are there; loads nothing yet."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        names = ("name", "policy", "reader", "method", "recipe", "prompted")
        refuse_unknown_fields([*SECTIONS, *JUDGE, *names], values, "config")
        reader = values.get("reader", "")
        way = make_answering_method(values["method"], values.get("recipe"), values.get("prompted"), reader)
        if not values["name"]:
            raise UserError("name='' names no run; give a name, from which comes its folder")
        require_policy(values["policy"])
        if reader:
            require_folder("reader", reader)
        sections: dict[str, Any] = {name: build(kind, values[name], name) for name, kind in SECTIONS.items()}
        judge = JudgeSettings.parse(values) if "judge" in values else None
        folders = {"policy": values["policy"], "reader": reader}
        settings = cls(name=values["name"], way=way, judge=judge, **folders, **sections)
        if settings.judge is not None:
            settings.judge.check()
        if settings.searches:
            encoder_folder(settings.retriever)
            settings.retriever.identity()  # its index, where it has one
        return dataclasses.replace(settings, compute=settings.compute.for_platform(jax.default_backend()))

    @property
    def searches(self) -> bool:
        """Whether anything is searched."""
        return self.way.searches and self.retriever.kind != "off"


def run(config: Mapping[str, Any], workdir: str | Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluates as the config says, into `workdir`, and returns the report; metrics.json holds it too.

    The same call again goes on where the last one ended, however it ended. `command` is what the result card says; by default
    that of this process. Raises UserError for wrong input, and a workdir that another process holds, before anything is written;
    SaveError where the workdir cannot be written.
    """
    say, workdir = TimedLog(), Path(workdir)
    if jax.process_count() > 1:
        raise UserError("an evaluation runs in one process, over all devices of its host: start it once")
    settings = EvaluationSettings.of(config)
    enable_compilation_cache()
    data = load_dataset(settings.data, settings.retriever, settings.searches, say)
    own = read_card(settings.policy)
    if own is not None and isinstance(settings.way, TrainedAgent) and own.recipe != settings.way.recipe_name:
        say(
            f"warning: policy {settings.policy} was trained as {own.recipe}, and is evaluated as {settings.way.recipe_name}, "
            f"whose form it was not shown; method={own.recipe} is its own"
        )
    identity = identity_of(settings, data)
    refuse_other_config(workdir, identity)
    refuse_locked(workdir, FOLDERS, FILES)
    data = with_retriever(data, settings.retriever, settings.rollout.search_seconds, workdir, say)
    judge = (
        settings.judge.load(data.questions, settings.compute, settings.mesh.make())
        if settings.judge
        else None
    )
    engine, params = _engine(settings, data, say)
    settings.way.check(engine, data.questions, settings.data.on_error, say)
    with lock_workdir(workdir):
        with saving(workdir / "config.json"):
            write_atomically(workdir / "config.json", json.dumps(identity, indent=2) + "\n")
        with saving(workdir / "questions.jsonl"):
            save_questions(workdir / "questions.jsonl", data.questions)
        answer(settings, _with_reader(settings), data, engine, params, workdir)
        said: dict[str, bool | None] = {}
        short: dict[str, AnswerScores | None] = {}
        judged = ""
        if judge is not None and settings.judge is not None:
            lines = read_lines(workdir / "results.jsonl", "id", "prediction")
            answers = {line["id"]: line["prediction"] for line in lines}
            file = judgement_file(
                workdir, settings.judge.identity() | {"prompt": settings.eval.judge_prompt}, answers
            )
            judged, began = file.name, time.perf_counter()
            before = len(read_lines(file))
            said = verdicts(file, judge, settings.eval.judge_prompt, data.questions, answers)
            if settings.way.long_answers and not any(question.choices for question in data.questions):
                name = settings.eval.normalization
                file = judgement_file(workdir, settings.judge.identity() | {"short_answers": name}, answers)
                short = short_scores(file, judge, rule_named(name), data.questions, answers)
            append_timing(workdir, len(said) - before, judged, judge=time.perf_counter() - began)
        card = card_of(settings, data, command, workdir)
        found = finish(workdir, card, data.questions, settings, said, short, judged)
    print(as_text(found))
    if cut := found["ended"].get("context_limit", 0.0):
        print(
            f"\n{100 * cut:.1f}% of the questions ended at the context of {settings.rollout.context} tokens, without an answer: "
            "show fewer passages or less of each, or give --config.rollout.context"
        )
    print(f"\n{_setting(card)}\n{workdir}")
    return found


def identity_of(settings: EvaluationSettings, data: Dataset) -> dict[str, Any]:
    """What decides the answers: models and data by content, not by path. Scoring and judging decide none of them."""
    encoder = encoder_folder(settings.retriever) if settings.searches else ""
    return {
        "way": settings.way.identity,
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


def _engine(settings: EvaluationSettings, data: Dataset, say: TimedLog) -> tuple[Engine, Any]:
    mesh, compute = settings.mesh.make(), settings.compute
    device = mesh.devices.flat[0]
    say(f"policy {settings.policy}, on {mesh.size} of {len(jax.devices())} devices ({device.device_kind})")
    decoder, tokenizer = load_language_model(
        settings.policy,
        "policy",
        chat=settings.way.chat,
        context=settings.rollout.context,
        dtype=jnp.dtype(compute.dtype),
        param_dtype=jnp.dtype(compute.dtype),
        mesh=mesh if mesh.size > 1 else None,
        attention=compute.backend(device.platform),
    )
    engine = Engine(decoder, tokenizer, settings.rollout, retriever=data.retriever, mesh=mesh)
    return engine, nnx.state(decoder)


def _with_reader(settings: EvaluationSettings) -> AnsweringMethod:
    """The way, with the model loaded that answers for it, where it has one."""
    if not (settings.reader and isinstance(settings.way, TrainedAgent)):
        return settings.way
    frozen = load_language_model(
        settings.reader,
        "reader",
        context=settings.reader_rollout.context,
        dtype=jnp.dtype(settings.compute.dtype),
        param_dtype=jnp.dtype(settings.compute.dtype),
    )
    return dataclasses.replace(
        settings.way, reader=AnswerModel(Reader(*frozen, settings.reader_rollout).replies)
    )


def answer(
    settings: EvaluationSettings,
    way: AnsweringMethod,
    data: Dataset,
    engine: Engine,
    params: Any,
    workdir: Path,
) -> None:
    """Has all questions answered that results.jsonl does not hold yet; each is there as soon as it is answered."""
    count = len(data.questions)
    reader = way.reader if isinstance(way, TrainedAgent) else None
    lines = ResultLines(workdir / "results.jsonl", (question.id for question in data.questions))
    todo = [(at, question) for at, question in enumerate(data.questions) if question.id not in lines.done]
    right = asked = 0.0
    with Progress(count, start=len(lines.done), label=settings.way.name.split(" ")[0]) as progress:

        def keep(record: dict[str, Any]) -> None:
            nonlocal right, asked
            lines.append(record)
            fields = record["question"]
            right += _right(record["prediction"], fields["answers"], fields["choices"])
            asked += 1
            tokens = record["tokens"] + record["environment_tokens"]
            progress.update(len(lines.done), {"right": f"{100 * right / asked:.1f}%"}, tokens)

        for start in range(0, len(todo), way.together):
            some = todo[start : start + way.together]
            key = jax.random.key(settings.eval.seed)
            before = reader.seconds if reader else 0.0
            way.ask(engine, params, some, key, settings.eval.temperature, keep)
            stats = engine.stats
            read: dict[str, Any] = {"read": reader.seconds - before} if reader else {}
            append_timing(
                workdir,
                len(some),
                commit=commit_here(),
                answer=stats.seconds,
                search=stats.retrieval_seconds,
                **read,
            )


def _right(prediction: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    return choice_correct(prediction, answers, choices) if choices else exact_match(prediction, answers)


def card_of(
    settings: EvaluationSettings, data: Dataset, command: Sequence[str] = (), workdir: Path | None = None
) -> ResultCard:
    """What the result says of itself; whose code answered is in `workdir`'s timing, where there is one."""
    answered = [line for line in read_timing(workdir) if "commit" in line] if workdir else []
    judge = settings.judge
    shortened = {"short_answers": True} if settings.way.long_answers else {}
    encoder = encoder_folder(settings.retriever) if settings.searches else ""
    retriever = _searched_by(settings.retriever.identity()) | {
        "encoder": encoder and folder_hash(encoder)[:12]
    }
    return ResultCard(
        method=settings.way.name,
        dataset=data.name,
        questions=len(data.questions),
        questions_sha256=questions_fingerprint(data.questions),
        corpus=data.corpus,
        corpus_sha256=data.corpus_sha256,
        passages=len(data.passages),
        retriever=retriever if data.corpus else {},
        top_k=settings.rollout.top_k if data.corpus else 0,
        limits=settings.way.limits
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


def _searched_by(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says of a retriever. Of an index that was opened these are its own settings, whatever the config has; the same
    settings built in a run make the same words."""
    index = identity.get("index")
    if not isinstance(index, Mapping):
        return dict(identity)
    usual = dataclasses.asdict(Bm25Config())
    chosen = index["bm25"] or {}
    words = {n: value for n, value in chosen.items() if n in BM25 or value != usual.get(n)}
    titles = {name: index[name] for name in ("title_weight",) if name in index}
    return {"kind": index["kind"]} | words | titles


def finish(
    workdir: Path,
    card: ResultCard,
    questions: Sequence[Question],
    settings: EvaluationSettings,
    said: Mapping[str, bool | None],
    short: Mapping[str, AnswerScores | None],
    judged: str = "",
) -> dict[str, Any]:
    """Scores what results.jsonl holds and writes the report; `said` is in the file of verdicts `judged`."""
    scores = scores_of(workdir, questions, card.normalization, said, short)
    found: dict[str, Any] = {"normalization": card.normalization}
    found |= report(scores, seed=settings.eval.seed, level=settings.eval.level)
    if short:
        found["short_unread"] = sum(score is None for score in short.values())
    if not card.corpus:  # nothing was looked for
        for name in ("retrieval", "retrieval_by", "retrieval_warning", "retrieval_intervals"):
            found.pop(name, None)
    lines = read_lines(workdir / "results.jsonl", "answer_rank", "ended")
    ranks = [line["answer_rank"] for line in lines if line["answer_rank"] is not None]
    # Beside questions with gold passages, those without have no answer that could be found.
    if ranks and card.corpus and "retrieval" not in found:
        whole = hits_at(ranks).report(CUTS)
        found["retrieval_by_answer"] = {k: v for k, v in whole.items() if k.startswith(("hits", "mrr"))}
    endings = collections.Counter(line["ended"] for line in lines)
    found["ended"] = {name: often / len(lines) for name, often in endings.most_common()}
    found["seconds"] = latency(workdir, judged)
    found["timed"] = sum(line["questions"] for line in read_timing(workdir) if "answer" in line)
    # A tag may be a pair of markers, which is no name in JSON.
    found["tags"] = list(settings.way.tags.items())
    found["card"] = dataclasses.asdict(card)
    shown, page = scored_trajectories(workdir, scores)[:SHOWN], workdir / "trajectories.html"
    with saving(page):
        write_html(shown, page, f"{card.method}: {card.dataset}", tags=settings.way.tags)
    with saving(workdir / "card.json"):
        save_card(workdir / "card.json", card)
    write_report(workdir, found, scores)
    return found


def scores_of(
    workdir: Path,
    questions: Sequence[Question],
    normalization: str,
    said: Mapping[str, bool | None],
    short: Mapping[str, AnswerScores | None],
) -> Scores:
    """The scores of all questions, with a judge's verdicts where there are any, and those of short forms in place of those of
    the answers as they stand, where they are known.

    Raises UserError for an answer that is missing, there twice, or none of theirs, with its line.
    """
    file = workdir / "results.jsonl"
    predictions = load_predictions(file, "prediction")
    if said:
        predictions = [dataclasses.replace(p, verdict=said[p.id or ""]) for p in predictions]
    pairs = matched(predictions, questions, str(file), str(workdir / "questions.jsonl"))
    scores = score(pairs, questions, rule_named(normalization), judged=bool(said))
    return with_short_forms(scores, short) if short else scores


def with_short_forms(scores: Scores, short: Mapping[str, AnswerScores | None]) -> Scores:
    """The same with the scores of short forms, by id, in place of em, f1 and cem; None changes nothing."""
    metrics = dict(scores.metrics)
    for name in AnswerScores._fields:
        plain = scores.metrics[name].tolist()
        known = [short[question.id] for question in scores.questions]
        metrics[name] = np.array(
            [value if of is None else getattr(of, name) for value, of in zip(plain, known, strict=True)]
        )
    return dataclasses.replace(scores, metrics=metrics)


def scored_trajectories(workdir: Path, scores: Scores) -> list[Trajectory]:
    """The trajectories in the order of the questions, with their scores as metrics."""
    by_id = {t.question.id: t for t in load_trajectories(workdir / "results.jsonl")}
    found = []
    for at, question in enumerate(scores.questions):
        trajectory = by_id[question.id]
        trajectory.metrics = {name: float(values[at]) for name, values in scores.metrics.items()}
        if "acc" in trajectory.metrics:  # what pages of trajectories tell right from wrong by
            trajectory.metrics["em"] = trajectory.metrics["acc"]
        found.append(trajectory)
    return found


def _setting(card: ResultCard) -> str:
    setting = card.setting | {"method": card.method} | card.models
    return "\n".join(f"{name}: {value}" for name, value in setting.items())
