"""Register question files as seqio tasks, and the papers' training sets as seqio mixtures. Read `add_task` first.

This is the only module of rrl that imports seqio and TensorFlow (the extra `[seqio]`). Importing it registers no task.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rrl.data.mixtures import draw_part, paper_parts
from rrl.data.questions import Question, load_questions, with_choices
from rrl.errors import UserError
from rrl.models.tokenizer import load_tokenizer
from rrl.text.encoding import text_ids
from rrl.text.metrics import score_answers
from rrl.text.normalize import RRL_RULE, AnswerRule, rule_named
from rrl.text.short_answers import choice_correct

try:
    import seqio
    import tensorflow as tf
except ImportError as error:
    raise UserError(
        f"rrl.data.seqio_tasks needs seqio, which cannot be imported ({error}): install the extra, pip install -e '.[seqio]'"
    ) from error

FIELDS = tuple(field.name for field in dataclasses.fields(Question))
"""Fields of a question that an example holds in addition to "inputs" and "targets"."""

Source: TypeAlias = str | Path | Sequence[Question]
"""Questions, or a question file in any format of `load_questions`."""


class TokenizerVocabulary(seqio.Vocabulary):
    """A Hugging Face tokenizer as a seqio vocabulary with the same token ids.

    seqio's feature converters pad with id 0 and mask the loss of targets with id 0. Id 0 is the padding token of the shipped
    tokenizers. If it is text (in Qwen2.5 it is "!"), use the examples of a task without a feature converter.
    """

    def __init__(self, folder: str | Path) -> None:
        """`folder`: a Hugging Face folder. Raises UserError as `load_tokenizer`, and if the tokenizer has no eos_token."""
        super().__init__()
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"tokenizer folder {folder}: no eos_token; set it in its tokenizer_config.json")
        self._size = max(self.tokenizer.get_vocab().values()) + 1
        self._identity = hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    @property
    def bos_id(self) -> int | None:
        """The tokenizer's token for the beginning of a text; it is never added."""
        return self.tokenizer.bos_token_id

    @property
    def eos_id(self) -> int:
        """The token that ends a target."""
        return self.tokenizer.eos_token_id

    @property
    def unk_id(self) -> None:
        """None, because byte-level tokenizers encode every text."""

    @property
    def _base_vocab_size(self) -> int:
        return self._size

    def _encode(self, s: str) -> list[int]:
        return text_ids(self.tokenizer, s).tolist()

    def _decode(self, ids: Sequence[int]) -> str:
        ids = list(ids)
        end = ids.index(self.eos_id) if self.eos_id in ids else len(ids)  # padding of any value may follow
        return self.tokenizer.decode(ids[:end], skip_special_tokens=True)

    def _encode_tf(self, s: Any) -> Any:
        def encode(text: Any) -> np.ndarray:
            # `text` is bytes in a graph, and an array of bytes in eager mode.
            return np.array(self._encode(np.asarray(text, object).item().decode()), np.int32)

        ids = tf.numpy_function(encode, [tf.convert_to_tensor(s)], tf.int32, stateful=False)
        ids.set_shape([None])
        return ids

    def _decode_tf(self, ids: Any) -> Any:
        def decode(ids: np.ndarray) -> np.ndarray:
            texts = [self._decode(row).encode() for row in ids.reshape(-1, ids.shape[-1]).tolist()]
            return np.array(texts, object).reshape(ids.shape[:-1])

        texts = tf.numpy_function(decode, [ids], tf.string, stateful=False)
        texts.set_shape(ids.shape[:-1])
        return texts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenizerVocabulary) and other._identity == self._identity

    def __hash__(self) -> int:
        return hash(self._identity)


class QuestionSource(seqio.DataSource):
    """A seqio data source of questions in memory, by split.

    Questions come in the order of their file, or shuffled in an order that depends on the seed alone. Shard i of n holds every
    n-th question of the file, beginning at the i-th, whether shuffled or not; the shards partition the questions.
    """

    def __init__(self, splits: Mapping[str, Sequence[Question]]) -> None:
        super().__init__(
            splits=list(splits),
            num_input_examples={split: len(questions) for split, questions in splits.items()},
            caching_permitted=False,
        )
        self.questions = splits

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """True: a shard is selected before its examples are built."""
        return True

    def list_shards(self, split: str) -> list[str]:
        """Return one shard, the whole split."""
        return [split]

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: Any = None,
        shard_info: Any = None,
        **unused: Any,
    ) -> Any:
        """Return the examples of a split or of one of its shards."""
        questions = self.questions[split]
        if shard_info is not None:
            questions = questions[shard_info.index :: shard_info.num_shards]
        if shuffle:
            order = np.random.default_rng(None if seed is None else int(seed)).permutation(len(questions))
            questions = [questions[at] for at in order.tolist()]
        return tf.data.Dataset.from_tensor_slices(_columns(questions))


def _columns(questions: Sequence[Question]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "inputs": tf.constant([with_choices(question) for question in questions], tf.string),
        "targets": tf.constant([question.answers[0] for question in questions], tf.string),
    }
    for field in FIELDS:
        values = [getattr(question, field) for question in questions]
        if field == "hops":
            columns[field] = tf.constant(values, tf.int32)
        elif field in ("id", "text", "kind"):
            columns[field] = tf.constant(values, tf.string)
        else:
            flat = tf.constant([text for texts in values for text in texts], tf.string)
            lengths = tf.constant([len(texts) for texts in values], tf.int64)
            columns[field] = tf.RaggedTensor.from_row_lengths(flat, lengths)
    return columns


def add_task(
    name: str,
    splits: Mapping[str, Source],
    tokenizer: str | Path | TokenizerVocabulary,
    normalization: str = "squad",
) -> seqio.Task:
    """Register the questions of a dataset as a task, and return the task.

    An example has "inputs", the token ids (int32) of the question with its choices; "targets", the token ids of its main answer
    and the eos token; their texts ("inputs_pretokenized", ...); and the fields of the question (`FIELDS`), from which
    `question_of_example` rebuilds it. Predictions are scored against all gold answers: em, f1 and cem, or acc for multiple-choice
    questions, each in [0, 1].

    Args:
      name: the name in seqio's registry; an existing task of this name is replaced.
      splits: a question file or a sequence of questions for each split, such as the result of `rrl.miniwiki.questions_by_split`.
        If the answers are in another file (MultiHop-RAG), pass the result of `load_questions(..., truth=...)`.
      tokenizer: a Hugging Face folder, or its vocabulary, which tasks may share.
      normalization: the normalisation of the metrics, a name in `rrl.text.normalize.RULES`.

    Raises:
      UserError: the name has characters other than letters, digits and `_.:#`; there are no splits; a split has no questions;
        only some questions are multiple-choice; the normalisation is unknown; or as `load_questions` and `TokenizerVocabulary`.
    """
    _check_name(name)
    rule = rule_named(normalization)
    if not splits:
        raise UserError(f"task {name}: splits is empty; give a question file for one split or more")
    questions = {split: _load(source) for split, source in splits.items()}
    for split, split_questions in questions.items():
        if not split_questions:
            raise UserError(
                f"task {name}: the split {split!r} has no questions; give some, or omit the split"
            )
    has_choices = {
        bool(question.choices) for split_questions in questions.values() for question in split_questions
    }
    if len(has_choices) > 1:
        raise UserError(
            f"task {name}: some questions are multiple-choice and others are not; register two tasks"
        )
    if not isinstance(tokenizer, TokenizerVocabulary):
        tokenizer = TokenizerVocabulary(tokenizer)
    seqio.TaskRegistry.remove(name)
    return seqio.TaskRegistry.add(
        name,
        source=QuestionSource(questions),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={
            "inputs": seqio.Feature(tokenizer, add_eos=False),
            "targets": seqio.Feature(tokenizer, add_eos=True),
        },
        postprocess_fn=_postprocess,
        metric_fns=[choice_accuracy if has_choices == {True} else functools.partial(mean_scores, rule=rule)],
    )


def add_mixture(
    name: str,
    paper: str,
    files: Mapping[str, Source],
    tokenizer: str | Path | TokenizerVocabulary,
    seed: int = 0,
    scale: float = 1.0,
    normalization: str = "squad",
) -> seqio.Mixture:
    """Register the training set of a paper as a mixture, and return the mixture.

    It has one task for each dataset, named `name`_`dataset`, with a rate proportional to its number of questions in the paper.
    The mixture of R2AG also has the split "validation".

    Args:
      name: the name in seqio's registry; an existing mixture of this name is replaced.
      paper: a key of `rrl.data.mixtures.PAPERS`, which has the numbers and their source.
      files: the training questions of each of the paper's datasets.
      tokenizer: a Hugging Face folder, or its vocabulary.
      seed: seed of the draw of questions from each file.
      scale: factor in (0, 1] for the paper's numbers; it gives a smaller mixture of the same proportions.
      normalization: the normalisation of the metrics, a name in `rrl.text.normalize.RULES`.

    Raises:
      UserError: the paper is unknown, or `files` has other datasets than the paper; or as `add_task` and
        `rrl.data.mixtures.draw_part`.
    """
    _check_name(name)
    parts = paper_parts(paper)
    if files.keys() != parts.keys():
        raise UserError(
            f"files: {paper} is trained on {', '.join(parts)}; got {', '.join(files) or 'none'}. Give one file for each dataset"
        )
    vocabulary = tokenizer if isinstance(tokenizer, TokenizerVocabulary) else TokenizerVocabulary(tokenizer)
    drawn = {
        dataset: draw_part(_load(files[dataset]), part, seed, scale, f"{paper}, {dataset}")
        for dataset, part in parts.items()
    }
    tasks = [
        add_task(f"{name}_{dataset}", splits, vocabulary, normalization) for dataset, splits in drawn.items()
    ]
    seqio.MixtureRegistry.remove(name)
    return seqio.MixtureRegistry.add(
        name, [(task.name, float(task.num_input_examples("train"))) for task in tasks]
    )


def questions_of(name: str, split: str = "train", count: int = 0, seed: int = 0) -> list[Question]:
    """Return questions of a registered task or mixture; `save_questions` writes them to a file.

    Args:
      name: a registered task or mixture.
      split: one of its splits.
      count: number of questions, shuffled, in the proportions of the mixture; once all questions of a task are used, they repeat.
        0: every question once, in the order of the files, task after task.
      seed: seed of the order if `count` is given.

    Raises:
      UserError: the name is not registered, or has no such split.
    """
    if name not in (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()):
        raise UserError(
            f"name={name!r} is neither a registered task nor a mixture; register it with add_task or add_mixture"
        )
    provider = seqio.get_mixture_or_task(name)
    if split not in provider.splits:
        raise UserError(
            f"split={split!r} is not a split of {name}; it has {', '.join(sorted(provider.splits))}"
        )
    mixture = isinstance(provider, seqio.Mixture)
    if not count:
        tasks = [task for task in (provider.tasks if mixture else [provider]) if split in task.splits]
        return [question for task in tasks for question in task.source.questions[split]]
    options = {"passthrough_features": FIELDS} if mixture else {}
    data = provider.get_dataset(None, split, shuffle=True, seed=seed, num_epochs=None, **options)
    return [question_of_example(example) for example in data.take(count).as_numpy_iterator()]


def question_of_example(example: Mapping[str, Any]) -> Question:
    """Return the question of an example whose tensors are NumPy arrays.

    Examples of a mixture have the fields only if its dataset was made with `passthrough_features=FIELDS`.
    """

    def texts(field: str) -> tuple[str, ...]:
        return tuple(text.decode() for text in example[field].tolist())

    return Question(
        id=example["id"].decode(),
        text=example["text"].decode(),
        answers=texts("answers"),
        kind=example["kind"].decode(),
        gold=texts("gold"),
        hops=int(example["hops"]),
        choices=texts("choices"),
        gold_ids=texts("gold_ids"),
    )


def mean_scores(
    targets: Sequence[Mapping[str, Any]], predictions: Sequence[str], rule: AnswerRule = RRL_RULE
) -> dict[str, float]:
    """Return the means of exact match, token F1 and cover exact match, in [0, 1], each for the best gold answer.

    Targets are the postprocessed examples of a task: {"answers": gold answers, "choices": choices}. The default `rule` is that of
    training metrics; `add_task` passes the one that it is given.
    """
    scores = score_answers(predictions, [target["answers"] for target in targets], rule)
    return dict(zip(("em", "f1", "cem"), np.mean(scores, axis=0).tolist(), strict=True))


def choice_accuracy(targets: Sequence[Mapping[str, Any]], predictions: Sequence[str]) -> dict[str, float]:
    """Return the share of multiple-choice questions answered with a correct letter; targets as in `mean_scores`."""
    correct = [
        choice_correct(prediction, target["answers"], target["choices"])
        for prediction, target in zip(predictions, targets, strict=True)
    ]
    return {"acc": float(np.mean(correct))}


def _postprocess(text: str, example: Mapping[str, Any] | None = None, is_target: bool = False) -> Any:
    """seqio's postprocessing: gold answers and choices for a target, the text for a prediction."""
    if not is_target or example is None:
        return text
    question = question_of_example(example)
    return {"answers": list(question.answers), "choices": list(question.choices)}


def _load(source: Source) -> Sequence[Question]:
    return load_questions(source) if isinstance(source, str | Path) else source


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[\w.:#]+", name):
        raise UserError(f"name={name!r}: seqio allows only letters, digits and _ . : #")
