"""The papers' training sets: how many questions each paper draws from which datasets, and how."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rrl.data.questions import Question
from rrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class MixturePart:
    """The questions that a paper takes from the training file of one dataset."""

    train: int = 0
    """Number of training questions; 0: all that remain."""
    validation: int = 0
    """Number of questions held out from the same file, disjoint from the training questions."""
    skip_first: int = 0
    """Number of questions to skip at the beginning of the file."""
    in_order: bool = False
    """True: take the first questions of the file. False: draw them without replacement."""


PAPERS: Mapping[str, Mapping[str, MixturePart]] = {
    "rsearch": {"2wiki": MixturePart()},
    "r3rag": {"hotpotqa": MixturePart(8192, skip_first=30_000)},
    "r3rag_cold_start": {
        "hotpotqa": MixturePart(30_000, in_order=True),
        "2wiki": MixturePart(15_000),
        "musique": MixturePart(19_937),
    },
    "tiresrag": {"hotpotqa": MixturePart(4561), "2wiki": MixturePart(3587)},
    "r2ag": {
        "hotpotqa": MixturePart(500),
        "2wiki": MixturePart(3000, 150),
        "musique": MixturePart(1174, 150),
    },
}
"""Training sets by paper and dataset.

- R-Search, section 4.3: "only the 2WikiMQA training set".
- R3-RAG, section 4.1 and appendix C: the cold start samples trajectories for the first 30,000 questions of HotpotQA, 15,000 of
  2Wiki and 19,937 of MuSiQue (51,254 trajectories were correct). Reinforcement learning uses 8,192 of the remaining HotpotQA
  questions.
- TIRESRAG-R1, section 5 and appendix B: R1-Searcher's selection of 4,561 HotpotQA and 3,587 2Wiki questions, 8,148 in total.
  From a file with exactly these questions, all are taken. From the dataset's whole file, the same number is drawn at random.
- R2AG, appendix B.2: 4,674 questions drawn at random, and 300 more for validation.
"""


def paper_parts(paper: str) -> Mapping[str, MixturePart]:
    """Return what a paper trains on, by dataset. Raises UserError if the name is not in `PAPERS`."""
    if paper not in PAPERS:
        raise UserError(f"paper={paper!r} is unknown; choose one of {', '.join(PAPERS)}")
    return PAPERS[paper]


def draw_part(
    questions: Sequence[Question],
    part: MixturePart,
    seed: int = 0,
    scale: float = 1.0,
    name: str = "questions",
) -> dict[str, list[Question]]:
    """Draw the questions of "train" and, if the part has any, of "validation", each in the order of the file.

    Args:
      questions: all questions of the training file.
      part: how many to take.
      seed: seed of the draw; the same arguments give the same questions.
      scale: factor in (0, 1] by which every number of the part is multiplied and then rounded; it gives a smaller set of the same
        proportions. If the part takes all questions, it is the share of them that is taken.
      name: what error messages call the questions.

    Raises:
      UserError: `scale` is out of range, or no question is left at this scale, or there are too few questions.
    """
    if not 0 < scale <= 1:
        raise UserError(f"scale={scale} must be above 0 and at most 1")
    skip, train, validation = (round(scale * n) for n in (part.skip_first, part.train, part.validation))
    remaining = len(questions) - skip
    if not part.train:
        train = round(scale * remaining) - validation
    if train < 1 or train + validation > remaining or (part.validation and not validation):
        required = f"{train} to train on" + (f" and {validation} for validation" if part.validation else "")
        raise UserError(
            f"{name}: {max(remaining, 0)} questions"
            + (f" after the first {skip}" if skip else "")
            + f", but {required} are required (scale={scale:g}); give the dataset's whole training file, or another scale"
        )
    order = np.arange(remaining) if part.in_order else np.random.default_rng(seed).permutation(remaining)
    taken = {"train": order[:train], "validation": order[train : train + validation]}
    return {
        split: [questions[skip + index] for index in np.sort(indices).tolist()]
        for split, indices in taken.items()
        if len(indices)
    }
