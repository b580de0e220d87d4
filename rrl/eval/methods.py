"""How an evaluation has questions answered: by a trained recipe or by a prompted method, with the same record of each."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import PyTree

from rrl.config.sections import build
from rrl.data.questions import Question, with_choices
from rrl.data.records import OnFault
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.data.trajectory_files import searches_as_json
from rrl.errors import UserError
from rrl.models.weights import folder_hash
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext, check_tags, uses_chat
from rrl.recipes.card import make_card
from rrl.recipes.catalogue import RECIPES, is_recipe, make_recipe
from rrl.recipes.episodes import find_long_prompts, question_requests, run_requests
from rrl.recipes.prompted.base import PromptedResult, PromptedSettings
from rrl.recipes.prompted.catalogue import METHODS, PromptedMethod, make_prompted_method
from rrl.rewards.reader import ReaderReply
from rrl.rollout.engine import Engine
from rrl.text.chat import Prompt, chat_ids
from rrl.text.metrics import cover_exact_match
from rrl.text.spans import Tag

NumberedQuestions = Sequence[tuple[int, Question]]
"""Questions with their places in the dataset, which are their sampling seeds."""
OnRecord = Callable[[dict[str, Any]], None]
"""Is given the record of each question as soon as it is answered, from inside the engine's loop: it must not touch JAX."""


ENGINE_BATCH = 4096
"""Questions that are handed to the engine at once: many times its rows, so that they stay busy to the end."""
READER_BATCH = 256
"""The same where another model answers when all of them have ended: a kill loses no more."""


class AnsweringMethod(Protocol):
    """One way to answer questions."""

    @property
    def name(self) -> str:
        """What a result card says of it: its name, and what was set in it."""

    @property
    def together(self) -> int:
        """Questions that are to be handed to `ask` at once."""

    @property
    def searches(self) -> bool:
        """False where nothing is ever searched."""

    @property
    def chat(self) -> bool:
        """Whether it needs a tokenizer with a chat template."""

    @property
    def tags(self) -> dict[Tag, str]:
        """As `Recipe.tags`."""

    @property
    def long_answers(self) -> bool:
        """Whether it answers in sentences, whose short forms a judge extracts for EM and F1 (R3-RAG, 4.1)."""

    @property
    def limits(self) -> dict[str, int]:
        """Most searches, turns, tokens, ...: what a result card says."""

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides its answers, for JSON."""

    def check(
        self, engine: Engine, questions: Sequence[Question], on_error: OnFault, say: Callable[[str], None]
    ) -> None:
        """Says how many questions are too long for the context; UserError for one where `on_error` is "stop"."""

    def ask(
        self,
        engine: Engine,
        params: PyTree,
        questions: NumberedQuestions,
        key: jax.Array,
        temperature: float,
        keep: OnRecord,
    ) -> None:
        """Has the questions answered."""


def make_answering_method(
    method: Mapping[str, Any],
    recipe: Mapping[str, Any] | None,
    prompted: Mapping[str, Any] | None,
    reader: str = "",
) -> AnsweringMethod:
    """The way that the sections of a config tell of.

    Args:
      method: name, and of a prompted method its options.
      recipe: of a recipe, what is changed in it, its environment's under "environment".
      prompted: of a prompted method, fields of `rrl.recipes.prompted.base.PromptedSettings`.
      reader: of a recipe, the folder of the model that answers from what was found.

    Raises UserError for an unknown name, with what there is, for a reader that is no use, and as `make_recipe` and
    `make_prompted_method`.
    """
    options = dict(method)
    name = options.pop("name")
    alone = f"reader={reader!r} goes with a recipe that leaves the answer to another model (r2ag); {name} answers by itself"
    if name in METHODS:
        if reader:
            raise UserError(alone)
        return PromptedAgent(
            name, make_prompted_method(name, options), build(PromptedSettings, prompted or {}, "prompted")
        )
    if not is_recipe(name):
        raise UserError(
            f"method={name!r} is unknown; recipes are {', '.join(RECIPES)} and MODULE:CLASS; prompted methods "
            f"{', '.join(METHODS)}"
        )
    fields = dict(recipe or {})
    environment = fields.pop("environment", {})
    found = make_recipe(name, fields, environment)
    if reader and not getattr(found, "answers_with_reader", False):
        raise UserError(alone)
    return TrainedAgent(found, reader)


@dataclasses.dataclass
class AnswerModel:
    """The model that answers from what a recipe found: how long it has read, and what it said last."""

    ask: Callable[[Sequence[str | Prompt]], list[ReaderReply]]
    seconds: float = 0.0
    last: Sequence[ReaderReply] = ()

    def __call__(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """Its answers to the prompts."""
        began = time.perf_counter()
        self.last = self.ask(prompts)
        self.seconds += time.perf_counter() - began
        return [said.text for said in self.last]


@dataclasses.dataclass(frozen=True)
class TrainedAgent:
    """A recipe's protocol, whose policy was trained for it (or is tried without)."""

    recipe: Recipe
    reader_name: str = ""
    """Folder of the model that answers from what was found, for recipes that leave that to another (R2AG)."""
    reader: AnswerModel | None = None
    """That model."""

    @property
    def together(self) -> int:
        return ENGINE_BATCH if self.reader is None else READER_BATCH

    @property
    def _card(self) -> dict[str, Any]:
        return dataclasses.asdict(make_card(self.recipe, 0, 0))

    @property
    def recipe_name(self) -> str:
        """In the catalogue."""
        return self._card["recipe"]

    @property
    def name(self) -> str:
        # Numbers of the environment are among the limits. No text stands for none: small policies were shown no instruction.
        around = {k: v for k, v in self._card["environment"].items() if k not in self.limits}
        changed = {k: _short(v) for k, v in {**self._card["fields"], **around}.items() if v != ""}
        return _named(self.recipe_name, changed | ({"reader": self.reader_name} if self.reader_name else {}))

    @property
    def searches(self) -> bool:
        return True

    @property
    def chat(self) -> bool:
        return uses_chat(self.recipe)

    @property
    def tags(self) -> dict[Tag, str]:
        return self.recipe.tags

    @property
    def long_answers(self) -> bool:
        return bool(getattr(self.recipe, "short_answers", False))

    @property
    def limits(self) -> dict[str, int]:
        fields: Any = self.recipe.environment
        values = {field.name: getattr(fields, field.name) for field in dataclasses.fields(fields)}
        return {name: value for name, value in values.items() if type(value) is int}

    @property
    def identity(self) -> dict[str, Any]:
        recipe: Any = self.recipe
        reader = folder_hash(self.reader_name) if self.reader_name else ""
        return {"recipe": self.recipe_name, "reader": reader} | dataclasses.asdict(recipe)

    def check(
        self, engine: Engine, questions: Sequence[Question], on_error: OnFault, say: Callable[[str], None]
    ) -> None:
        check_tags(self.recipe, engine.tokenizer)
        find_long_prompts(engine, self.recipe, questions, on_error, say)

    def ask(
        self,
        engine: Engine,
        params: PyTree,
        questions: NumberedQuestions,
        key: jax.Array,
        temperature: float,
        keep: OnRecord,
    ) -> None:
        numbers = [number for number, _ in questions]
        requests = question_requests(
            engine, self.recipe, [question for _, question in questions], (temperature,), numbers
        )

        def ended(place: int, trajectory: Trajectory) -> None:
            self.recipe.score([trajectory], NO_MODELS)
            keep(of_trajectory(trajectory))

        if self.reader is None:
            run_requests(engine, params, requests, self.recipe, key, on_finish=ended)
            return
        # A model that is asked cannot be asked from inside the loop.
        trajectories = run_requests(engine, params, requests, self.recipe, key)
        self.recipe.score(trajectories, ScoringContext(self.reader))
        for trajectory, said in zip(trajectories, self.reader.last, strict=True):
            read = {"reader_prompt_tokens": said.prompt_tokens, "reader_tokens": said.answer_tokens}
            keep(of_trajectory(trajectory) | read)


@dataclasses.dataclass(frozen=True)
class PromptedAgent:
    """A prompted method."""

    method_name: str
    method: PromptedMethod
    settings: PromptedSettings
    together = ENGINE_BATCH
    long_answers = False

    @property
    def name(self) -> str:
        return _named(self.method_name, {k: v for k, v in self.method.options.items() if v != self._usual[k]})

    @property
    def _usual(self) -> dict[str, int | float]:
        return METHODS[self.method_name].defaults

    @property
    def searches(self) -> bool:
        return self.method.searches

    @property
    def chat(self) -> bool:
        return True

    @property
    def tags(self) -> dict[Tag, str]:
        return {}

    @property
    def limits(self) -> dict[str, int]:
        options = {name: value for name, value in self.method.defaults.items() if type(value) is int}
        shown = {"tokens": self.settings.tokens}
        if self.searches:
            shown |= {"most_passages": self.settings.most_passages}
        if self.searches and self.settings.passage_chars:
            shown |= {"passage_chars": self.settings.passage_chars}
        return options | shown

    @property
    def identity(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self.settings)
        del settings["token_bytes"]
        return {"method": self.method_name} | self.method.defaults | settings

    def check(
        self, engine: Engine, questions: Sequence[Question], on_error: OnFault, say: Callable[[str], None]
    ) -> None:
        """A prompt that outgrows the context costs its question the answer only; how many did is said at the end."""
        if on_error == "stop":
            for question in questions:
                engine.check_prompt(question, chat_ids(engine.tokenizer, with_choices(question)))

    def ask(
        self,
        engine: Engine,
        params: PyTree,
        questions: NumberedQuestions,
        key: jax.Array,
        temperature: float,
        keep: OnRecord,
    ) -> None:
        settings = dataclasses.replace(self.settings, temperature=temperature, token_bytes=engine.bytes)
        by_number = dict(questions)
        engine.run_workflows(
            params,
            [self.method.workflow(question, settings) for question in by_number.values()],
            self.method.completion(settings),
            key,
            numbers=list(by_number),
            on_finish=lambda number, outcome: keep(of_outcome(by_number[number], outcome)),
        )


def of_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The record of a finished episode, scored."""
    roles = trajectory.roles
    counts = {role: int((roles == role).sum()) for role in (PROMPT, POLICY, ENVIRONMENT)}
    turns = len(np.unique(trajectory.turns[roles == POLICY]))
    return _record(
        trajectory.question,
        trajectory.answer,
        trajectory.ended,
        trajectory.segments,
        trajectory.searches,
        turns,
        counts,
    )


def of_outcome(question: Question, outcome: PromptedResult) -> dict[str, Any]:
    """The record of what came of a prompted method: what it asked its model later stands where an environment would speak."""
    segments: list[tuple[int, str]] = []
    for said in outcome.generations:
        for role, text in said.trajectory.segments:
            segments.append((ENVIRONMENT if role == PROMPT and segments else role, text))
    searches = [Search.of(turn, query, passages) for turn, (query, passages) in enumerate(outcome.searches)]
    counts = {PROMPT: outcome.prompt_tokens, POLICY: outcome.sampled_tokens, ENVIRONMENT: 0}
    turns = len(outcome.generations)
    return _record(question, outcome.answer, outcome.ended, segments, searches, turns, counts)


def _record(
    question: Question,
    answer: str,
    ended: str,
    segments: Sequence[tuple[int, str]],
    searches: Sequence[Search],
    turns: int,
    tokens: Mapping[int, int],
) -> dict[str, Any]:
    """A line of results.jsonl: a prediction (`rrl.eval.predictions`) and a trajectory (`rrl.data.trajectory_files`) in one."""
    return {
        "id": question.id,
        "prediction": answer,
        "question": dataclasses.asdict(question),
        "segments": list(segments),
        "searches": searches_as_json(searches),
        "answer": answer,
        "ended": ended,
        "rewards": {},
        "metrics": {},
        "turns": turns,
        "tokens": tokens[POLICY],
        "prompt_tokens": tokens[PROMPT],
        "environment_tokens": tokens[ENVIRONMENT],
        "answer_rank": _answer_rank(question, searches),
    }


def _answer_rank(question: Question, searches: Sequence[Search]) -> int | None:
    """Rank, counted from 1 among texts that differ, of the first passage that holds a gold answer; 0 where none does.

    None where gold passages are known, which tell more, and for a multiple choice, whose answers are letters.
    """
    if question.gold or question.gold_ids or question.choices:
        return None
    texts = dict.fromkeys(passage.text for search in searches for passage in search.passages)
    return next((at for at, text in enumerate(texts, 1) if cover_exact_match(text, question.answers)), 0)


def _short(value: Any) -> Any:
    """A value that a name has room for; a page, such as an instruction, is known by its hash."""
    told = json.dumps(value, ensure_ascii=False, default=str)
    return value if len(told) <= 24 else f"#{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _named(name: str, changed: Mapping[str, Any]) -> str:
    return name + (f" ({', '.join(f'{key}={value}' for key, value in changed.items())})" if changed else "")
