"""The papers' training sets: how many questions of which datasets' training files, and which of them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rrl.data.questions import Question
from rrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class MixturePart:
    """What a paper takes from the training file of one dataset."""

    train: int = 0
    """Questions to train on; 0: all that are left."""
    validation: int = 0
    """Questions held out from the same file, none of them a training question."""
    skip_first: int = 0
    """So many at the beginning of the file are left out."""
    in_order: bool = False
    """The first questions of the file; otherwise they are drawn without replacement."""


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
"""By paper and dataset.

- R-Search, section 4.3: "only the 2WikiMQA training set".
- R3-RAG, section 4.1 and appendix C: reinforcement learning on 8,192 of the HotpotQA questions that remain after the first
  30,000; those, 15,000 of 2Wiki and 19,937 of MuSiQue are what its cold start was sampled for (51,254 trajectories were right).
- TIRESRAG-R1, section 5 and appendix B (8,148 together): R1-Searcher's selection of 4,561 and 3,587 questions; files that hold
  just these are taken whole, from others as many are drawn.
- R2AG, appendix B.2: 4,674 in all, drawn at random, and 300 more for validation.
"""


def paper_parts(paper: str) -> Mapping[str, MixturePart]:
    """What a paper trains on, by dataset; UserError for a name that is none of `PAPERS`."""
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
    """The questions of "train" and, where the part has any, of "validation", each in the order of the file.

    The same arguments give the same questions. `scale` multiplies every number of the part, rounded, for a smaller set of the
    same proportions; where the part takes all, it takes that share of them. `name` stands for the questions in errors.

    Raises UserError for a scale that is not above 0 and at most 1, or under which nothing is left, and for fewer questions than
    are to be taken.
    """
    if not 0 < scale <= 1:
        raise UserError(f"scale={scale} must be above 0 and at most 1")
    after, train, validation = (round(scale * n) for n in (part.skip_first, part.train, part.validation))
    left = len(questions) - after
    if not part.train:
        train = round(scale * left) - validation
    if train < 1 or train + validation > left or (part.validation and not validation):
        wanted = f"{train} to train on" + (f" and {validation} for validation" if part.validation else "")
        raise UserError(
            f"{name}: {max(left, 0)} questions"
            + (f" after the first {after}" if after else "")
            + f", of which {wanted} are to be taken (scale={scale:g}); give the dataset's whole training file, or another scale"
        )
    order = np.arange(left) if part.in_order else np.random.default_rng(seed).permutation(left)
    taken = {"train": order[:train], "validation": order[train : train + validation]}
    return {
        split: [questions[after + at] for at in np.sort(places).tolist()]
        for split, places in taken.items()
        if len(places)
    }
