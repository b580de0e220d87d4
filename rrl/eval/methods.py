"""Answering methods of an evaluation: a trained recipe or a prompted method, with the same record for each question.

Read `AnsweringMethod` first; `make_answering_method` builds one from a config.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jaxtyping import PyTree

from rrl.config.sections import build
from rrl.data.questions import Question, with_choices
from rrl.data.records import RunOnError
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.eval.answer_records import record_of_result, record_of_trajectory
from rrl.models.weights import folder_hash
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext, check_tags, uses_chat
from rrl.recipes.card import make_card
from rrl.recipes.catalogue import RECIPES, is_recipe, make_recipe
from rrl.recipes.episodes import find_long_prompts, question_requests, run_requests
from rrl.recipes.prompted.base import PromptedSettings
from rrl.recipes.prompted.catalogue import METHODS, PromptedMethod, make_prompted_method
from rrl.rewards.reader import ReaderReply
from rrl.rollout.engine import Engine
from rrl.text.chat import Prompt, chat_ids
from rrl.text.spans import Tag

NumberedQuestions = Sequence[tuple[int, Question]]
"""Questions with their positions in the dataset, which are their sampling seeds."""
OnRecord = Callable[[dict[str, Any]], None]
"""Callback with the record of each answered question. It runs inside the engine's loop, so it must not call JAX."""


ENGINE_BATCH = 4096
"""Questions in one engine run: many times the decoding slots of the engine, so that few slots idle at the end of a run."""
READER_BATCH = 256
"""Questions in one engine run if a reader model answers after it. A killed process loses at most one such batch."""


class AnsweringMethod(Protocol):
    """A method of answering questions."""

    @property
    def name(self) -> str:
        """Its name in a result card, with the options that differ from their defaults."""

    @property
    def recipe_name(self) -> str:
        """Name of the recipe whose protocol it follows; "" for a prompted method."""

    @property
    def reader(self) -> "TimedReader | None":
        """The loaded reader, which answers from the passages that the method retrieved; None: the method answers itself."""

    def with_reader(self, reader: "TimedReader") -> "AnsweringMethod":
        """Return the method with a loaded reader. Only called if its config names one, which a prompted method refuses."""

    @property
    def batch_size(self) -> int:
        """Number of questions in one call of `answer`."""

    @property
    def searches(self) -> bool:
        """Whether the method ever searches."""

    @property
    def chat(self) -> bool:
        """Whether it needs a tokenizer with a chat template."""

    @property
    def tags(self) -> dict[Tag, str]:
        """Tags of its text, as in `Recipe.tags`."""

    @property
    def judges_short_forms(self) -> bool:
        """Whether it answers in sentences. A judge, if there is one, then extracts the short form of each answer for EM and F1
        (R3-RAG, 4.1)."""

    @property
    def limits(self) -> dict[str, int]:
        """Limits of searches, turns, tokens, ..., for the result card."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines its answers, as JSON values. A run is resumed only if this is unchanged."""

    def check(
        self, engine: Engine, questions: Sequence[Question], on_error: RunOnError, log: Callable[[str], None]
    ) -> None:
        """Check the method and the questions before any is answered. May log how many questions do not fit the context.

        Raises UserError for a question that is too long if `on_error` is "stop" (see `rrl.data.records.RunOnError`).
        """

    def answer(
        self,
        engine: Engine,
        params: PyTree,
        questions: NumberedQuestions,
        key: jax.Array,
        temperature: float,
        on_record: OnRecord,
    ) -> None:
        """Answer the questions, and call `on_record` with the record of each."""


def make_answering_method(
    method: Mapping[str, Any],
    recipe: Mapping[str, Any] | None,
    prompted: Mapping[str, Any] | None,
    reader: str = "",
) -> AnsweringMethod:
    """Return the method that a config describes.

    Args:
      method: its name, and the options of a prompted method.
      recipe: for a recipe: values of its fields; "environment" holds values of the fields of its environment.
      prompted: for a prompted method: fields of `rrl.recipes.prompted.base.PromptedSettings`.
      reader: for a recipe: the folder of the model that answers from the retrieved passages.

    Raises UserError for an unknown name, for a reader that the method does not use, and as `make_recipe` and
    `make_prompted_method` do.
    """
    options = dict(method)
    name = options.pop("name")
    unused_reader_error = f"reader={reader!r} needs a recipe whose answers come from another model (r2ag); {name} answers itself"
    if name in METHODS:
        if reader:
            raise UserError(unused_reader_error)
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
    recipe_object = make_recipe(name, fields, environment)
    if reader and not recipe_object.answers_with_reader:
        raise UserError(unused_reader_error)
    return TrainedAgent(recipe_object, reader)


@dataclasses.dataclass
class TimedReader:
    """A reader: a model that answers from the passages that a recipe retrieved. Measures the time of its calls."""

    reply: Callable[[Sequence[str | Prompt]], list[ReaderReply]]
    product_format: str = ""
    """Number format of its matrix products (`rrl.rollout.engine.Engine.product_format`)."""
    seconds: float = 0.0
    """Time of all calls so far."""
    last_replies: Sequence[ReaderReply] = ()
    """Replies of the last call."""

    def __call__(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """Return the answers to the prompts."""
        began = time.perf_counter()
        self.last_replies = self.reply(prompts)
        self.seconds += time.perf_counter() - began
        return [reply.text for reply in self.last_replies]


@dataclasses.dataclass(frozen=True)
class TrainedAgent:
    """A policy that follows a recipe's protocol, usually after training with it."""

    recipe: Recipe
    reader_name: str = ""
    """Folder of the reader model, for recipes whose answers come from another model (R2AG)."""
    reader: TimedReader | None = None
    """The loaded reader model."""

    def with_reader(self, reader: TimedReader) -> "TrainedAgent":
        return dataclasses.replace(self, reader=reader)

    @property
    def batch_size(self) -> int:
        return ENGINE_BATCH if self.reader is None else READER_BATCH

    @property
    def _recipe_card(self) -> dict[str, Any]:
        # Only the name and the changed fields are read, so context and top_k are 0.
        return dataclasses.asdict(make_card(self.recipe, 0, 0))

    @property
    def recipe_name(self) -> str:
        """Name of the recipe in the catalogue."""
        return self._recipe_card["recipe"]

    @property
    def name(self) -> str:
        # `limits` already has the integer fields of the environment.
        environment = {k: v for k, v in self._recipe_card["environment"].items() if k not in self.limits}
        fields = self._recipe_card["fields"] | environment
        # Empty texts, such as the instruction of a policy too small to follow one, are left out.
        changed = {name: _shorten(value) for name, value in fields.items() if value != ""}
        return _name_with_options(
            self.recipe_name, changed | ({"reader": self.reader_name} if self.reader_name else {})
        )

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
    def judges_short_forms(self) -> bool:
        return self.recipe.judges_short_forms

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
        self, engine: Engine, questions: Sequence[Question], on_error: RunOnError, log: Callable[[str], None]
    ) -> None:
        check_tags(self.recipe, engine.tokenizer)
        find_long_prompts(engine, self.recipe, questions, on_error, log)

    def answer(
        self,
        engine: Engine,
        params: PyTree,
        questions: NumberedQuestions,
        key: jax.Array,
        temperature: float,
        on_record: OnRecord,
    ) -> None:
        numbers = [number for number, _ in questions]
        requests = question_requests(
            engine, self.recipe, [question for _, question in questions], (temperature,), numbers
        )

        def on_finish(place: int, trajectory: Trajectory) -> None:
            self.recipe.score([trajectory], NO_MODELS)
            on_record(record_of_trajectory(trajectory))

        if self.reader is None:
            run_requests(engine, params, requests, self.recipe, key, on_finish=on_finish)
            return
        # The reader runs JAX, so it cannot be called inside the engine's loop.
        trajectories = run_requests(engine, params, requests, self.recipe, key)
        self.recipe.score(trajectories, ScoringContext(self.reader))
        for trajectory, reply in zip(trajectories, self.reader.last_replies, strict=True):
            counts = {"reader_prompt_tokens": reply.prompt_tokens, "reader_tokens": reply.answer_tokens}
            on_record(record_of_trajectory(trajectory) | counts)


@dataclasses.dataclass(frozen=True)
class PromptedAgent:
    """A prompted method: an untrained policy with a workflow of prompts."""

    method_name: str
    method: PromptedMethod
    settings: PromptedSettings
    batch_size = ENGINE_BATCH
    judges_short_forms = False
    recipe_name = ""
    reader = None

    def with_reader(self, reader: TimedReader) -> "PromptedAgent":
        raise NotImplementedError("a prompted method answers itself")

    @property
    def name(self) -> str:
        return _name_with_options(
            self.method_name, {k: v for k, v in self.method.options.items() if v != self._defaults[k]}
        )

    @property
    def _defaults(self) -> dict[str, int | float]:
        return METHODS[self.method_name].option_values

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
        options = {name: value for name, value in self.method.option_values.items() if type(value) is int}
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
        return {"method": self.method_name} | self.method.option_values | settings

    def check(
        self, engine: Engine, questions: Sequence[Question], on_error: RunOnError, log: Callable[[str], None]
    ) -> None:
        """If `on_error` is "stop", raise UserError for a question that is too long.

        Otherwise a prompt that outgrows the context leaves its question without an answer; the report counts these questions.
        """
        if on_error == "stop":
            for question in questions:
                engine.check_prompt(question, chat_ids(engine.tokenizer, with_choices(question)))

    def answer(
        self,
        engine: Engine,
        params: PyTree,
        questions: NumberedQuestions,
        key: jax.Array,
        temperature: float,
        on_record: OnRecord,
    ) -> None:
        settings = dataclasses.replace(self.settings, temperature=temperature, token_bytes=engine.bytes)
        by_number = dict(questions)
        engine.run_workflows(
            params,
            [self.method.workflow(question, settings) for question in by_number.values()],
            self.method.completion(settings),
            key,
            numbers=list(by_number),
            on_finish=lambda number, result: on_record(record_of_result(by_number[number], result)),
        )


def _shorten(value: Any) -> Any:
    """Return a value that fits into a name: long values, such as instructions, are replaced by a hash."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return value if len(text) <= 24 else f"#{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _name_with_options(name: str, changed: Mapping[str, Any]) -> str:
    return name + (f" ({', '.join(f'{key}={value}' for key, value in changed.items())})" if changed else "")
