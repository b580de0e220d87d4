"""What a judge's folder says about how it is asked, kept beside its weights: a small model cannot follow the papers' words.

A folder without a card is asked in those words, whatever the case.
"""

import dataclasses
import json
import pathlib

from rrl.errors import UserError, at_least
from rrl.files import write_atomically
from rrl.rewards.judge_prompts import JudgePrompt
from rrl.text.chat import Prompt

FILE = "rrl_judge.json"


@dataclasses.dataclass(frozen=True)
class JudgeCard:
    """What `rrl_judge.json` holds."""

    instructions: bool = True
    """False: the system's turn, in which the papers say what to judge by, is left out: the judge was trained without."""
    context: int = 8192
    """Most tokens of a prompt and its answer."""
    answer_tokens: int = 1024
    """Most tokens of an answer. TIRESRAG-R1's sufficiency prompt has it reason first."""
    cases: tuple[str, ...] = ()
    """Classes of `rrl.rewards.judge_prompts` that it was trained on, and judges no other; empty: all."""

    def __post_init__(self) -> None:
        for name, kind in (("instructions", bool), ("context", int), ("answer_tokens", int)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name}={getattr(self, name)!r} is no {kind.__name__}")
        object.__setattr__(self, "cases", tuple(self.cases))  # a list, as JSON has it
        at_least(1, self, "context", "answer_tokens")

    def prompt_for(self, case: JudgePrompt) -> Prompt:
        """What the judge is asked about a case. Raises UserError for a kind of case that it was not trained on."""
        self.check(type(case))
        return case.prompt if self.instructions else dataclasses.replace(case.prompt, system="")

    def check(self, *kinds: type) -> None:
        """Raises UserError for a kind of case that the judge was not trained on."""
        for kind in kinds:
            if self.cases and kind.__name__ not in self.cases:
                raise UserError(
                    f"this judge was trained on {', '.join(self.cases)} alone ({FILE} in its folder), and is asked for "
                    f"{kind.__name__}: choose another judge, or a recipe or method that does not ask for it"
                )


def write_judge_card(folder: str | pathlib.Path, card: JudgeCard) -> None:
    """Writes the card into a judge's folder."""
    text = json.dumps(dataclasses.asdict(card), indent=2)
    write_atomically(pathlib.Path(folder, FILE), text + "\n")


def read_judge_card(folder: str | pathlib.Path) -> JudgeCard | None:
    """The card of a judge's folder, or None where there is none. Raises UserError for one that cannot be read."""
    file = pathlib.Path(folder, FILE)
    if not file.is_file():
        return None
    try:
        return JudgeCard(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file}: not a judge's card ({error}); make the folder again, or remove it"
        ) from error
