"""Tests of seqio tasks: the order of questions, shards, metrics, and the papers' mixtures."""

import importlib
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rrl.data.questions import Question, load_questions, save_questions
from rrl.errors import UserError
from rrl.miniwiki import questions_by_split
from tests.shared_data import shared

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "assets/miniwiki-tokenizer"
QUESTIONS = [
    Question("a", "Who wrote Ærø?", ("Ada Berg", "A. Berg"), "bridge", ("T", "U"), 2),
    Question("b", "Is it?", ("yes",)),
    *[Question(f"c{at}", f"Which is {at}?", (str(at),)) for at in range(8)],
]
CHOICES = [Question("m", "Which?", ("B",), choices=("red", "blue"))]


def test_only_one_module_imports_seqio_and_no_module_imports_it() -> None:
    imports = re.compile(
        r"^\s*(?:import|from) (?:seqio|tensorflow)\b|import.* seqio_tasks|seqio_tasks import", re.M
    )
    files = [file for top in ("rrl", "launch", "configs") for file in (ROOT / top).rglob("*.py")]
    found = [file.name for file in files if imports.search(file.read_text())]
    assert found == ["seqio_tasks.py"]


def test_the_error_without_seqio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "seqio", None)
    monkeypatch.delitem(sys.modules, "rrl.data.seqio_tasks", raising=False)
    with pytest.raises(
        UserError, match=r"needs seqio, which cannot be imported .*pip install -e '.\[seqio\]'"
    ):
        importlib.import_module("rrl.data.seqio_tasks")


@pytest.fixture(scope="module")
def tasks() -> Any:
    if importlib.util.find_spec("seqio") is None:
        pytest.skip("seqio is not installed: pip install -e '.[seqio]'")
    from rrl.data import seqio_tasks

    return seqio_tasks


@pytest.fixture(scope="module")
def vocabulary(tasks: Any) -> Any:
    return tasks.TokenizerVocabulary(TOKENIZER)


def ids(data: Any) -> list[str]:
    return [example["id"].decode() for example in data.as_numpy_iterator()]


def test_the_vocabulary_has_the_ids_of_the_tokenizer(tasks: Any, vocabulary: Any) -> None:
    text = "Who wrote Ærø?"
    known = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    assert vocabulary.encode(text) == vocabulary.encode_tf(text).numpy().tolist() == known
    # seqio stops after the first end token and passes on the rest as padding.
    padded = [*known, vocabulary.eos_id, *known, 0]
    assert vocabulary.decode(padded) == text
    both = vocabulary.decode_tf(tasks.tf.constant([padded, [*known, *[0] * (len(padded) - len(known))]]))
    assert [row.decode() for row in both.numpy()] == [text, text]
    assert vocabulary.decode_tf(tasks.tf.constant(known)).numpy().decode() == text
    assert vocabulary == tasks.TokenizerVocabulary(TOKENIZER) and vocabulary != 1
    assert vocabulary.vocab_size == max(vocabulary.tokenizer.get_vocab().values()) + 1


def test_tokens_after_the_end_are_ignored_even_if_id_0_is_text(tasks: Any, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"!": 0, "yes": 1, "<end>": 2}, unk_token="!"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path / "a")
    assert tasks.TokenizerVocabulary(tmp_path / "a").decode_tf(tasks.tf.constant([1, 2, 1])).numpy() == b"yes"
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "b")
    with pytest.raises(UserError, match=r"b: no eos_token; set it in its tokenizer_config.json"):
        tasks.TokenizerVocabulary(tmp_path / "b")


def test_a_task_yields_the_tokens_of_its_questions(tasks: Any, tmp_path: Path) -> None:
    save_questions(tmp_path / "q.jsonl", QUESTIONS)
    task = tasks.add_task("rrl_task", {"dev": tmp_path / "q.jsonl"}, TOKENIZER)
    vocabulary = task.output_features["inputs"].vocabulary
    examples = list(task.get_dataset(None, "dev", shuffle=False).as_numpy_iterator())
    assert [tasks.question_of(example) for example in examples] == QUESTIONS
    assert examples[0]["inputs"].tolist() == vocabulary.encode(QUESTIONS[0].text)
    assert examples[0]["targets"].tolist() == [*vocabulary.encode("Ada Berg"), vocabulary.eos_id]
    assert examples[0]["inputs"].dtype == np.int32
    assert examples[0]["targets_pretokenized"].decode() == "Ada Berg"
    cut = next(task.get_dataset({"inputs": 3, "targets": 2}, "dev", shuffle=False).as_numpy_iterator())
    assert len(cut["inputs"]) == 3 and cut["targets"].tolist()[1:] == [vocabulary.eos_id]
    assert task.num_input_examples("dev") == len(QUESTIONS)
    tasks.add_task("rrl_task", {"dev": CHOICES}, vocabulary)  # replaced
    (example,) = tasks.seqio.get_mixture_or_task("rrl_task").get_dataset(None, "dev").as_numpy_iterator()
    assert example["inputs_pretokenized"].decode().startswith("Which?\n(A) red\n(B) blue\n")
    assert tasks.questions_of("rrl_task", "dev") == [tasks.question_of(example)] == CHOICES


def test_the_order_is_that_of_the_file_or_seed_and_shards_partition_it(tasks: Any, vocabulary: Any) -> None:
    task = tasks.add_task("rrl_order", {"train": QUESTIONS}, vocabulary)
    shards = [tasks.seqio.ShardInfo(at, 3) for at in range(3)]
    whole = [question.id for question in QUESTIONS]
    parts = [ids(task.get_dataset(None, shuffle=False, shard_info=shard)) for shard in shards]
    assert parts == [whole[0::3], whole[1::3], whole[2::3]]
    drawn = [ids(task.get_dataset(None, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and sorted(drawn[0]) == sorted(drawn[2]) == sorted(whole)
    mixed = [ids(task.get_dataset(None, seed=1, shard_info=shard)) for shard in shards]
    assert [set(part) for part in mixed] == [set(part) for part in parts] and mixed != parts


@pytest.mark.slow
def test_the_seqio_evaluator_reports_the_metrics_of_rrl(tasks: Any, vocabulary: Any) -> None:
    tasks.add_task("rrl_free", {"dev": QUESTIONS[:2]}, vocabulary, "hotpotqa")
    tasks.add_task("rrl_choice", {"dev": CHOICES}, vocabulary)
    predictions = {"rrl_free": ["a berg!", "yes it is"], "rrl_choice": ["The answer is (B)"]}
    for name, texts in predictions.items():
        rows = [[*vocabulary.encode(text), vocabulary.eos_id] for text in texts]
        width = max(map(len, rows))
        padded = [(at, row + [0] * (width - len(row))) for at, row in enumerate(rows)]
        evaluator = tasks.seqio.Evaluator(
            name, tasks.seqio.EncDecFeatureConverter(pack=False), eval_split="dev"
        )
        found, _ = evaluator.evaluate(compute_metrics=True, step=0, predict_fn=lambda *_, rows=padded: rows)
        # HotpotQA's rule: a yes is scored only as a whole.
        free = {"em": 0.5, "f1": 0.5, "cem": 1.0}
        assert found.result()[name] == (free if name == "rrl_free" else {"acc": 1.0})


@pytest.mark.slow
def test_a_mixture_has_the_papers_sizes_and_proportions(tasks: Any, vocabulary: Any) -> None:
    files = {
        name: [Question(f"{name} {at}", "?", ("x",)) for at in range(200)]
        for name in ("hotpotqa", "2wiki", "musique")
    }
    mixture = tasks.add_mixture("rrl_r2ag", "r2ag", files, vocabulary, scale=0.05)
    assert {task.name: task.num_input_examples("train") for task in mixture.tasks} == {
        "rrl_r2ag_2wiki": 150,
        "rrl_r2ag_hotpotqa": 25,
        "rrl_r2ag_musique": 59,
    }
    rates = {task.name: mixture.get_rate(task) / mixture.total_rate for task in mixture.tasks}
    assert rates["rrl_r2ag_2wiki"] == pytest.approx(3000 / 4674, abs=0.005)
    drawn = tasks.questions_of("rrl_r2ag", count=400, seed=1)
    often = Counter(question.id.split()[0] for question in drawn)
    assert often["2wiki"] / 400 == pytest.approx(3000 / 4674, abs=0.07)
    assert often["hotpotqa"] / 400 == pytest.approx(500 / 4674, abs=0.05)
    train, held = tasks.questions_of("rrl_r2ag"), tasks.questions_of("rrl_r2ag", "validation")
    assert len(train) == 234 and len(held) == 16 and {q.id for q in drawn} <= {q.id for q in train}
    assert not {q.id for q in train} & {q.id for q in held}
    assert tasks.questions_of("rrl_r2ag", count=50, seed=1) == drawn[:50]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "truth", "count"),
    [
        ("hotpotqa/train_100.json.gz", None, 100),
        ("2wiki/dev_1000.json.gz", None, 1000),
        ("2wiki/train_500_with_context.json.gz", None, 500),
        ("musique/train_100.json.gz", None, 100),
        ("bamboogle/test_125.jsonl", None, 125),
        ("nq/NQ-open.dev.jsonl.gz", None, 3610),
        ("nq/sample_1000.jsonl", None, 1000),
        ("triviaqa/sample_1000.jsonl.gz", None, 1000),
        ("popqa/sample_1000.jsonl.gz", None, 1000),
        ("multihop_rag/queries_500.json", "multihop_rag/ground_truth_500.json.gz", 500),
    ],
)
def test_every_real_question_file_makes_a_task(
    tasks: Any, vocabulary: Any, name: str, truth: str | None, count: int
) -> None:
    questions = load_questions(shared(name), truth=shared(truth) if truth else None)
    task = tasks.add_task("rrl_real", {"all": questions if truth else shared(name)}, vocabulary)
    examples = list(task.source.get_dataset("all", shuffle=False).as_numpy_iterator())
    assert len(examples) == count and [tasks.question_of(example) for example in examples] == questions


@pytest.mark.slow
def test_real_files_make_the_mixture_of_a_paper(tasks: Any, vocabulary: Any) -> None:
    files = {
        "hotpotqa": shared("hotpotqa/train_100.json.gz"),
        "2wiki": shared("2wiki/train_500_with_context.json.gz"),
        "musique": shared("musique/train_100.json.gz"),
    }
    mixture = tasks.add_mixture("rrl_real_r2ag", "r2ag", files, vocabulary, scale=0.05)
    assert mixture.num_input_examples("train") == 234
    examples = mixture.get_dataset({"inputs": 64, "targets": 16}, seed=1).take(5).as_numpy_iterator()
    assert all(set(example) == {"inputs", "targets"} for example in examples)


def test_the_built_in_world_makes_a_task(tasks: Any, vocabulary: Any) -> None:
    splits = questions_by_split(("dev", "test"), worlds=1, per_kind=3)
    task = tasks.add_task("rrl_miniwiki", splits, vocabulary)
    assert task.num_input_examples("test") == 15 and sorted(task.splits) == ["dev", "test"]
    assert Counter(question.kind for question in splits["dev"]).most_common(1)[0][1] == 3


@pytest.mark.parametrize(
    ("call", "fields", "words"),
    [
        ("add_task", {"name": "a-b"}, r"name='a-b': seqio allows only letters, digits"),
        ("add_task", {"splits": {}}, r"task rrl_bad: splits is empty"),
        ("add_task", {"splits": {"dev": []}}, r"the split 'dev' has no questions"),
        (
            "add_task",
            {"splits": {"dev": [*QUESTIONS, *CHOICES]}},
            r"some questions are multiple-choice and others are not",
        ),
        ("add_task", {"normalization": "x"}, r"normalization='x' is unknown"),
        ("add_task", {"tokenizer": "/none"}, r"tokenizer folder /none: not a folder"),
        ("add_mixture", {"paper": "x"}, r"paper='x' is unknown; choose one of rsearch"),
        ("add_mixture", {"paper": "r2ag"}, r"r2ag is trained on hotpotqa, 2wiki, musique; got 2wiki"),
        ("add_mixture", {"scale": 0.01}, r"rsearch, 2wiki: 10 questions, but 0 to train on"),
        ("add_mixture", {"name": "a b"}, r"name='a b': seqio allows"),
    ],
)
def test_errors_of_invalid_arguments_name_them(
    tasks: Any, vocabulary: Any, call: str, fields: dict[str, Any], words: str
) -> None:
    more = (
        {"splits": {"dev": QUESTIONS}}
        if call == "add_task"
        else {"paper": "rsearch", "files": {"2wiki": QUESTIONS}}
    )
    with pytest.raises(UserError, match=words):
        getattr(tasks, call)(**({"name": "rrl_bad", "tokenizer": vocabulary} | more | fields))
    assert "rrl_bad" not in tasks.seqio.TaskRegistry.names()


def test_broken_files_and_unknown_names_are_refused(tasks: Any, vocabulary: Any, tmp_path: Path) -> None:
    file = tmp_path / "dev.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": "x"}) + '\n{"question": "?"}\n')
    with pytest.raises(UserError, match=r"dev.jsonl, line 2: no gold answer"):
        tasks.add_task("rrl_broken", {"dev": file}, vocabulary)
    with pytest.raises(UserError, match=r"name='rrl_broken' is neither a registered task nor a mixture"):
        tasks.questions_of("rrl_broken")
    tasks.add_task("rrl_few", {"dev": QUESTIONS}, vocabulary)
    with pytest.raises(UserError, match=r"split='train' is not a split of rrl_few; it has dev"):
        tasks.questions_of("rrl_few")
