"""What identifies an evaluation: the settings that determine its answers, and its result card.

Read `identity_of` and `make_result_card` first.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.eval.dataset import Dataset
from rrl.eval.provenance import current_commit, installed_versions
from rrl.eval.result_card import BM25_FIELDS, ResultCard, gold_fingerprint, questions_fingerprint
from rrl.eval.settings import EvaluationSettings
from rrl.eval.timing import read_timing
from rrl.models.hf import folder_hash
from rrl.retrieval.bm25 import Bm25Config
from rrl.rollout.config import RESULT_INVARIANT_FIELDS, EngineConfig
from rrl.runs.retriever import encoder_folder


def identity_of(settings: EvaluationSettings, data: Dataset) -> dict[str, Any]:
    """Return what determines the answers: models and data by content, not by path. Scoring and judging are not part of it."""
    encoder = encoder_folder(settings.retriever) if settings.searches else ""
    return {
        "way": settings.method.identity,  # "way" is a former name of methods, kept for existing folders
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
        **(_reader_identity(settings.reader_rollout) if settings.reader else {}),
        "compute": dataclasses.asdict(settings.compute),
        "temperature": settings.eval.temperature,
        "seed": settings.eval.seed,
    }


def _reader_identity(rollout: EngineConfig) -> dict[str, Any]:
    """Return the settings of the reader that determine its answers. Folders of older versions lack `weights`, as with "auto"."""
    return {"reader_context": rollout.context} | (
        {"reader_weights": rollout.weights} if rollout.weights != "auto" else {}
    )


def make_result_card(
    settings: EvaluationSettings, data: Dataset, command: Sequence[str] = (), workdir: Path | None = None
) -> ResultCard:
    """Return the result card. Commits and number formats with which it was answered are read from timing.jsonl in `workdir`."""
    batches = [line for line in read_timing(workdir) if "commit" in line] if workdir else []
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
        judge=_judge_for_card(settings),
        temperature=settings.eval.temperature,
        seed=settings.eval.seed,
        gold_sha256=gold_fingerprint(data.questions),
        compute={"dtype": settings.compute.dtype, "attention": settings.compute.attention},
        policy_format=_distinct(batches, "policy_format"),
        reader_format=_distinct(batches, "reader_format"),
        commit=_distinct(batches, "commit") or current_commit(),
        versions=batches[-1].get("versions", {}) if batches else installed_versions(),
        command=shlex.join(command or ["python", *sys.argv]),
    )


def _distinct(batches: Sequence[Mapping[str, Any]], field: str) -> str:
    """Return the values of a field in timing.jsonl, joined by commas; "" if a batch lacks it, because older code answered it."""
    return (
        ", ".join(dict.fromkeys(line[field] for line in batches)) if all(field in b for b in batches) else ""
    )


def _judge_for_card(settings: EvaluationSettings) -> str:
    """Return the judge as JSON, and whether EM and F1 are computed on short forms that it extracts; "" without a judge."""
    if settings.judge is None:
        return ""
    short_forms = {"short_answers": True} if settings.method.judges_short_forms else {}
    return json.dumps(settings.judge.identity() | {"prompt": settings.eval.judge_prompt} | short_forms)


def _retriever_for_card(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a retriever for the result card.

    If the config opens an existing index, its settings are taken from the index. An index that is built during the run with the
    same settings gives the same entry.
    """
    index = identity.get("index")
    if not isinstance(index, Mapping):
        return dict(identity)
    defaults = dataclasses.asdict(Bm25Config())
    bm25 = {
        name: value
        for name, value in (index["bm25"] or {}).items()
        if name in BM25_FIELDS or value != defaults.get(name)
    }
    titles = {"title_weight": index["title_weight"]} if "title_weight" in index else {}
    return {"kind": index["kind"]} | bm25 | titles
