"""Answers questions with a trained policy and a search index. Read `Agent.load` and `Agent.ask` first."""

import dataclasses
import pathlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.models.hf import load_language_model, read_decoder_config
from rrl.parallel.mesh import make_mesh
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import Recipe, ScoringContext, check_tags, uses_chat
from rrl.recipes.card import RecipeCard, make_card, read_card, require_policy
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.episodes import question_requests
from rrl.retrieval.index import open_with_encoder
from rrl.retrieval.retriever import Retriever
from rrl.rewards.reader import Reader
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.memory import require_inference_memory
from rrl.serve.display import DisplayedTrajectory
from rrl.serve.events import Event, ObservedEnvironment

READER_CONTEXT = 1024
"""Maximum tokens of the reader's prompt and answer."""
DEFAULT_CONTEXT = 4096
"""Maximum tokens of a trajectory, for a policy without a recipe card (`rrl_recipe.json`, which
states the recipe and the settings of its training)."""


class Agent:
    """Answers questions by searching. All calls share one engine; calls from several threads run one after
    another."""

    def __init__(
        self,
        engine: Engine,
        params: Any,
        recipe: Recipe,
        *,
        reader: Reader | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.engine, self.params, self.recipe, self.reader = engine, params, recipe, reader
        self.temperature = temperature
        self._key = jax.random.key(seed)
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        policy: str | pathlib.Path,
        recipe: str | Recipe = "rsearch",
        index: str | pathlib.Path | Retriever | None = None,
        *,
        encoder: str | pathlib.Path | None = None,
        reader: str | pathlib.Path | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        context: int | None = None,
        rows: int = 8,
        seed: int = 0,
    ) -> "Agent":
        """Load a policy's Hugging Face folder and an index.

        Args:
          policy: the folder. If it holds a recipe card, the card states how the policy was trained.
          recipe: name of a recipe, or a recipe object. If the card has this name, the settings of the recipe are the
            card's. If the card has another name, the whole card is ignored. With an object, the card gives only the
            defaults of `top_k` and `context`.
          index: an index folder, or a retriever. If None, every search returns no passages.
          encoder: folder of the query encoder, for an index over embeddings.
          reader: folder of a model that answers from what the policy collected. For R2AG (its generator) this
            is the trajectory's `answer`; for R-Search (Eq. 4, from the evidence alone) it is `reader_answer`.
          temperature: sampling temperature; 0 is greedy.
          top_k: passages per search; None: as in the card, or 3 without a card.
          context: maximum tokens of a trajectory; None: as in the card, or `DEFAULT_CONTEXT` without a card.
            It never exceeds the policy's maximum number of positions.
          rows: number of questions that `ask_all` processes at once.
          seed: seed of the sampling.

        Raises:
          UserError: a folder or recipe does not exist, or they do not fit together.
        """
        require_policy(policy)
        enable_compilation_cache()
        recipe, card = _recipe_and_card(policy, recipe)
        max_context = read_decoder_config(policy).max_context
        config = EngineConfig(
            rows=rows,
            context=min(context or card.context or DEFAULT_CONTEXT, max_context),
            wake_threshold=min(rows, 16),  # a number of paused slots; there are only `rows` slots
            top_k=top_k or card.top_k,
        )
        reader_config = None
        if reader is not None:
            reader_context = min(READER_CONTEXT, read_decoder_config(reader).max_context)
            reader_config = EngineConfig(rows=rows, context=reader_context)
        _require_memory(policy, config, reader, reader_config)
        decoder, tokenizer = load_language_model(policy, "policy", chat=uses_chat(recipe))
        check_tags(recipe, tokenizer)
        engine = Engine(decoder, tokenizer, config, retriever=_retriever(index, encoder))
        loaded_reader = None
        if reader is not None and reader_config is not None:
            loaded_reader = Reader(*load_language_model(reader, "reader"), reader_config)
        return cls(
            engine, nnx.state(decoder), recipe, reader=loaded_reader, temperature=temperature, seed=seed
        )

    def close(self) -> None:
        """Release the engines' compiled programs, after the running call has ended.

        Later calls raise UserError. A `with` block calls `close` when it ends.
        """
        with self._lock:
            self.engine.close()
            if self.reader is not None:
                self.reader.close()

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: str | Question, sample: int = 0) -> DisplayedTrajectory:
        """Answer one question.

        Args:
          question: a text, or a `Question`. If it has gold answers, the trajectory carries rewards and
            metrics.
          sample: index of the sample; with a temperature above 0, different indices give different
            trajectories.
        """
        return self.ask_all([question], sample)[0]

    def ask_all(self, questions: Sequence[str | Question], sample: int = 0) -> list[DisplayedTrajectory]:
        """Answer several questions, `rows` at a time. The trajectories are the same as those of single calls of `ask`."""
        return self._run(questions, sample, self.recipe.environment)

    def stream(self, question: str | Question, sample: int = 0) -> Iterator[Event]:
        """Yield events as they happen; `Event.kind` lists the kinds.

        The last event is "end"; it carries the trajectory.
        """
        events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        observed = ObservedEnvironment(self.recipe.environment, self.recipe.tags, events.put)

        def work() -> None:
            try:
                (trajectory,) = self._run([question], sample, observed)
                events.put(Event("end", trajectory.ended, trajectory=trajectory))
            except BaseException as error:  # raised again below, in the caller's thread
                events.put(error)

        threading.Thread(target=work, name="rrl-agent", daemon=True).start()
        while True:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if event.kind == "end":
                return

    def _run(
        self, questions: Sequence[str | Question], sample: int, environment: Any
    ) -> list[DisplayedTrajectory]:
        parsed = [q if isinstance(q, Question) else Question(str(n), q, ()) for n, q in enumerate(questions)]
        for number, question in enumerate(parsed):
            if not question.text.strip():
                raise UserError(f"question {number} is empty; give a text")
        requests = [
            dataclasses.replace(request, seed=sample)
            for request in question_requests(self.engine, self.recipe, parsed, (self.temperature,))
        ]
        with self._lock:
            trajectories = self.engine.run(self.params, requests, environment, self._key)
            self._score(trajectories)
        return [
            DisplayedTrajectory.of(trajectory, self.recipe.tags, self.engine.bytes)
            for trajectory in trajectories
        ]

    def _score(self, trajectories: Sequence[Trajectory]) -> None:
        """Score trajectories whose questions have gold answers. For the others only extract answer and evidence.

        A recipe needs some gold answer to score. The others therefore get an empty one, and their scores are discarded.
        """
        without_gold = [(t, t.question) for t in trajectories if not t.question.answers]
        for trajectory, question in without_gold:
            trajectory.question = dataclasses.replace(question, answers=("",))
        self.recipe.score(trajectories, ScoringContext(reader=self.reader.answers if self.reader else None))
        for trajectory, question in without_gold:
            trajectory.question = question
            trajectory.rewards, trajectory.metrics = {}, {}


def _recipe_and_card(policy: str | pathlib.Path, recipe: str | Recipe) -> tuple[Recipe, RecipeCard]:
    """Return the recipe, and the card with the defaults of `top_k` and `context`, as `Agent.load` describes them."""
    card = read_card(policy)
    if not isinstance(recipe, str):
        return recipe, card or RecipeCard("")
    if card is None or card.recipe != recipe:
        card = make_card(make_recipe(recipe), context=0, top_k=3)
    return card.make(), card


def _require_memory(
    policy: str | pathlib.Path,
    config: EngineConfig,
    reader: str | pathlib.Path | None,
    reader_config: EngineConfig | None,
) -> None:
    """Raise UserError, with the numbers, if the models need more memory than there is."""
    models = {"policy": (policy, config)}
    if reader is not None and reader_config is not None:
        models["reader"] = (reader, reader_config)
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    require_inference_memory(
        models,
        mesh,
        "float32",
        "use a smaller model, fewer rows or a smaller context (Agent.load's arguments)",
    )


def _retriever(
    index: str | pathlib.Path | Retriever | None, encoder: str | pathlib.Path | None
) -> Retriever | None:
    if index is None or isinstance(index, Retriever):
        return index
    return open_with_encoder(index, encoder)
