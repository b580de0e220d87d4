"""The prompted methods by name."""

import dataclasses
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.recipes.prompted import iterative, single
from rrl.recipes.prompted.base import PromptedResult, PromptedSettings, PromptedWorkflow, with_record
from rrl.rollout.workflow import Completion, WorkflowRequest


@dataclasses.dataclass(frozen=True)
class PromptedMethod:
    """One prompted method."""

    run: Callable[..., PromptedWorkflow]
    """Called with a question, the settings and the options."""
    source: str
    """The paper."""
    searches: bool = True
    """False: the method never searches and needs no retriever."""
    stops: tuple[tuple[str, ...], ...] = ()
    """The sets of stop strings that its requests use."""
    options: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    """Options that differ from the defaults of `run`."""

    def workflow(
        self, question: Question, settings: PromptedSettings
    ) -> Generator[WorkflowRequest | Sequence[WorkflowRequest], Any, PromptedResult]:
        """Return the workflow of one question, for `Engine.run_workflows`."""
        return with_record(self.run(question, settings, **self.options))

    def completion(self, settings: PromptedSettings) -> Completion:
        """Return the stop strings and the token limit that the engine needs to run this method."""
        return Completion(stop_sets=self.stops, turn_tokens=settings.tokens)

    @property
    def option_values(self) -> dict[str, int | float]:
        """All options of `run` with their values: the defaults of `run`, replaced by `options`."""
        options = {
            name: parameter.default
            for name, parameter in inspect.signature(self.run).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        return options | dict(self.options)


METHODS: Mapping[str, PromptedMethod] = {
    "direct": PromptedMethod(single.direct, "prompting", searches=False),
    "cot": PromptedMethod(single.cot, "Kojima et al., 2022", searches=False),
    "naive_rag": PromptedMethod(single.naive_rag, "Lewis et al., 2020"),
    "rag_cot": PromptedMethod(single.rag_cot, "R3-RAG, 2025, section 4.2"),
    "sure": PromptedMethod(single.sure, "Kim et al., 2024"),
    "react": PromptedMethod(iterative.react, "Yao et al., 2023", stops=((iterative.OBSERVATION,),)),
    "self_ask": PromptedMethod(iterative.self_ask, "Press et al., 2023", stops=((iterative.INTERMEDIATE,),)),
    "ircot": PromptedMethod(iterative.ircot, "Trivedi et al., 2023"),
    "iter_retgen": PromptedMethod(iterative.iter_retgen, "Shao et al., 2023"),
    "flare": PromptedMethod(iterative.flare, "Jiang et al., 2023"),
    "adaptive_rag": PromptedMethod(iterative.adaptive_rag, "Jeong et al., 2024"),
    "search_o1": PromptedMethod(iterative.search_o1, "Li et al., 2025", stops=((iterative.END_QUERY,),)),
    "decomposition": PromptedMethod(iterative.decomposition, "after RQ-RAG, Chan et al., 2024"),
}
"""Method by name, as in configs and commands."""


def make_prompted_method(name: str, options: Mapping[str, int | float] | None = None) -> PromptedMethod:
    """Return a method with changed options.

    Raises UserError for an unknown method or option, and names the known ones. Raises UserError also for a value that is not
    positive or has the wrong type.
    """
    if name not in METHODS:
        raise UserError(f"method={name!r} is unknown; choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    for option, value in (options or {}).items():
        known = method.option_values
        if option not in known:
            raise UserError(
                f"{name}.{option} is not an option of the method; its options are {', '.join(known) or 'none'}"
            )
        whole = isinstance(known[option], int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
            raise UserError(
                f"{name}.{option}={value!r} must be a {'whole number' if whole else 'number'} above 0"
            )
    return dataclasses.replace(method, options=dict(options or {}))
