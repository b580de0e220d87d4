"""The prompted methods by name."""

import dataclasses
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.recipes.prompted import iterative, single
from rrl.recipes.prompted.base import Flow, Outcome, Settings, recorded
from rrl.rollout.workflow import Completion, WorkflowRequest


@dataclasses.dataclass(frozen=True)
class Method:
    """One prompted method."""

    run: Callable[..., Flow]
    source: str
    searches: bool = True
    """False where nothing is ever searched, so that no retriever is needed."""
    stops: tuple[tuple[str, ...], ...] = ()
    """The sets of strings that its generations stop at."""
    options: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    """What differs from the defaults of `run`."""

    def flow(
        self, question: Question, settings: Settings
    ) -> Generator[WorkflowRequest | Sequence[WorkflowRequest], Any, Outcome]:
        """The method at work on one question, for `Engine.run_workflows`."""
        return recorded(self.run(question, settings, **self.options))

    def completion(self, settings: Settings) -> Completion:
        """What the engine must be told before it runs this method."""
        return Completion(stop_sets=self.stops, turn_tokens=settings.tokens)

    @property
    def defaults(self) -> dict[str, int | float]:
        """The options of `run` and their values, changed ones included."""
        found = {
            name: parameter.default
            for name, parameter in inspect.signature(self.run).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        return found | dict(self.options)


METHODS: Mapping[str, Method] = {
    "direct": Method(single.direct, "prompting", searches=False),
    "cot": Method(single.cot, "Kojima et al., 2022", searches=False),
    "naive_rag": Method(single.naive_rag, "Lewis et al., 2020"),
    "rag_cot": Method(single.rag_cot, "R3-RAG, 2025, section 4.2"),
    "sure": Method(single.sure, "Kim et al., 2024"),
    "react": Method(iterative.react, "Yao et al., 2023", stops=((iterative.OBSERVATION,),)),
    "self_ask": Method(iterative.self_ask, "Press et al., 2023", stops=((iterative.INTERMEDIATE,),)),
    "ircot": Method(iterative.ircot, "Trivedi et al., 2023"),
    "iter_retgen": Method(iterative.iter_retgen, "Shao et al., 2023"),
    "flare": Method(iterative.flare, "Jiang et al., 2023"),
    "adaptive_rag": Method(iterative.adaptive_rag, "Jeong et al., 2024"),
    "search_o1": Method(iterative.search_o1, "Li et al., 2025", stops=((iterative.END_QUERY,),)),
    "decomposition": Method(iterative.decomposition, "after RQ-RAG, Chan et al., 2024"),
}
"""By the name a config or command gives them."""


def make_method(name: str, options: Mapping[str, int | float] | None = None) -> Method:
    """A method with some of its options changed.

    Raises UserError for an unknown method or option, with what there is, and for a value that is not positive or of another type.
    """
    if name not in METHODS:
        raise UserError(f"method={name!r} is unknown; there are {', '.join(METHODS)}")
    method = METHODS[name]
    for option, value in (options or {}).items():
        known = method.defaults
        if option not in known:
            raise UserError(
                f"{name}.{option} is no option of the method; its options are {', '.join(known) or 'none'}"
            )
        whole = isinstance(known[option], int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
            raise UserError(
                f"{name}.{option}={value!r} must be a {'whole number' if whole else 'number'} above 0"
            )
    return dataclasses.replace(method, options=dict(options or {}))
