"""The judge card: a file in a judge's folder that says on which prompts the judge was trained, and whether with instructions.

A small judge cannot follow the papers' instructions, so it is trained without them. A judge without a card gets every prompt as
the paper prints it.
"""

import dataclasses
import json
import pathlib

from rrl.errors import UserError, at_least
from rrl.files import shipped, write_atomically
from rrl.rewards.judge_prompts import JudgePrompt
from rrl.text.chat import Prompt

FILE = "rrl_judge.json"


@dataclasses.dataclass(frozen=True)
class JudgeCard:
    """The content of `rrl_judge.json`."""

    instructions: bool = True
    """Whether prompts have their system message, which holds the paper's criteria. False: the judge was trained without it."""
    context: int = 8192
    """Maximum number of tokens of a prompt and its reply."""
    answer_tokens: int = 1024
    """Maximum number of tokens of a reply. TIRESRAG-R1's sufficiency prompt asks for reasoning before the score."""
    cases: tuple[str, ...] = ()
    """The kinds of judge prompts that the judge was trained on, as names of classes in `rrl.rewards.judge_prompts`, such as
    "Sufficiency". Other kinds raise an error. Empty: all."""

    def __post_init__(self) -> None:
        for name, expected in (("instructions", bool), ("context", int), ("answer_tokens", int)):
            if not isinstance(getattr(self, name), expected):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a {expected.__name__}")
        object.__setattr__(self, "cases", tuple(self.cases))  # JSON has a list
        at_least(1, self, "context", "answer_tokens")

    def prompt_for(self, judge_prompt: JudgePrompt) -> Prompt:
        """Return the prompt, without its system message if `instructions` is False. Raises the error of `require_trained_on`."""
        self.require_trained_on(type(judge_prompt))
        prompt = judge_prompt.prompt
        return prompt if self.instructions else dataclasses.replace(prompt, system="")

    def require_trained_on(self, *kinds: type) -> None:
        """Raise UserError for a kind of prompt that the judge was not trained on."""
        for kind in kinds:
            if self.cases and kind.__name__ not in self.cases:
                raise UserError(
                    f"this judge was trained only on {', '.join(self.cases)} ({FILE} in its folder), but is asked for "
                    f"{kind.__name__}: choose another judge, or a recipe or method that does not need {kind.__name__}"
                )


def write_judge_card(folder: str | pathlib.Path, card: JudgeCard) -> None:
    """Write the card into a judge's folder."""
    text = json.dumps(dataclasses.asdict(card), indent=2)
    write_atomically(pathlib.Path(folder, FILE), text + "\n")


def read_judge_card(folder: str | pathlib.Path) -> JudgeCard | None:
    """Return the card of a judge's folder, or None if it has none. Raises UserError if the card cannot be read."""
    file = shipped(folder) / FILE  # finds a folder that comes with rrl from any current folder
    if not file.is_file():
        return None
    try:
        return JudgeCard(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file}: not a judge card ({error}); make the folder again, or remove the card"
        ) from error
