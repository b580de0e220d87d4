"""The forest of retrieval trees that a run grows (R2AG, Algorithm 1): what is expanded next, and what became of it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.rollout.curriculum import question_order
from rrl.text.normalize import title_key

STOP = "stop"
"""Why an episode ended whose policy gave the stop signal."""


@dataclasses.dataclass(frozen=True, slots=True)
class RetrievalTree(Question):
    """A tree that is to be expanded once: its question, with the documents that are kept of it."""

    tree: int = 0
    """Number of the question in the run."""
    documents: tuple[Passage, ...] = ()

    @classmethod
    def of(cls, question: Question, tree: int = 0, documents: Iterable[Passage] = ()) -> "RetrievalTree":
        """The tree of a question, pruned to these documents."""
        values = {field.name: getattr(question, field.name) for field in dataclasses.fields(Question)}
        return cls(**values, tree=tree, documents=tuple(documents))

    @property
    def key(self) -> tuple[int, frozenset[str]]:
        """Trees with the same key are the same tree."""
        return self.tree, frozenset(title_key(document.title) for document in self.documents)


def pruned(node: RetrievalTree, found: Iterable[Sequence[Passage]]) -> RetrievalTree:
    """The tree after an expansion that found these passages, the best of each query first, pruned to gold documents.

    Only the best of each query counts (Hit@Top-1), and of passages with one title the first.
    """
    gold = {title_key(title) for title in node.gold}
    kept = {title_key(document.title): document for document in node.documents}
    for passages in found:
        for passage in passages[:1]:
            if title_key(passage.title) in gold:
                kept.setdefault(title_key(passage.title), passage)
    return dataclasses.replace(node, documents=tuple(kept.values()))


class Forest:
    """Trees that grow level by level: a curriculum (see `rrl.rollout.curriculum.Curriculum`).

    All trees of a level are expanded, then what became of them; a tree whose gold documents are all there and whose policy
    stopped is finished. Equal trees (one question, the same gold documents kept) are one. After the last level, or when all
    are finished, the next questions are planted.
    """

    def __init__(
        self, questions: Sequence[Question], *, trees: int = 0, expansions: int = 5, seed: int = 0
    ) -> None:
        """`trees` questions are planted at a time (0: all of them), and each is expanded `expansions` times at most.

        Raises UserError for a question that names no gold passages.
        """
        for question in questions:
            if not question.gold:
                raise UserError(
                    f"question {question.id!r} names no gold passages, which a retrieval tree is rewarded by: give data "
                    "with supporting facts (such as HotpotQA's, 2Wiki's or MuSiQue's)"
                )
        self.questions, self.trees, self.expansions, self.seed = questions, trees, expansions, seed
        self.planted = 0
        """Times that trees were planted."""
        self.level = 0
        """Expansions of the trees that are asked now."""
        self.now: list[RetrievalTree] = []
        """Those of the level that are still to be asked."""
        self.next: dict[Any, RetrievalTree] = {}
        """Those of the next level."""

    def select(self, step: int, number: int, count: int) -> list[Question]:
        """The next trees of the level, in a random order; where few are left, these."""
        if not self.now:
            self._advance()
        asked, self.now = self.now[:count], self.now[count:]
        return list(asked)

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Each trajectory is a copy of its tree, grown by one expansion: what is unfinished is pruned and carried over."""
        for trajectory in trajectories:
            node = trajectory.question
            assert isinstance(node, RetrievalTree)
            grown = pruned(node, [search.passages for search in trajectory.searches])
            complete = len(grown.documents) == len({title_key(title) for title in node.gold})
            if not (complete and trajectory.ended == STOP):
                self.next.setdefault(grown.key, grown)

    def _advance(self) -> None:
        self.level += 1
        trees = list(self.next.values())
        if not trees or self.level >= self.expansions:
            count = len(self.questions)
            order = question_order(count, self.trees or count, self.seed, self.planted)
            trees = [RetrievalTree.of(self.questions[i], int(i)) for i in order]
            self.planted, self.level = self.planted + 1, 0
        mixed = np.random.default_rng((self.seed, self.planted, self.level)).permutation(len(trees))
        self.now, self.next = [trees[i] for i in mixed], {}

    @property
    def state(self) -> Mapping[str, Any]:
        places: dict[Passage, int] = {}

        def written(nodes: Iterable[RetrievalTree]) -> list[Any]:
            return [[n.tree, [places.setdefault(d, len(places)) for d in n.documents]] for n in nodes]

        trees = {"now": written(self.now), "next": written(self.next.values())}
        documents = [[document.id, document.title, document.text] for document in places]
        return {"planted": self.planted, "level": self.level, **trees, "documents": documents}

    def restore(self, state: Mapping[str, Any]) -> None:
        documents = [Passage(*fields) for fields in state["documents"]]

        def read(nodes: Iterable[Any]) -> list[RetrievalTree]:
            return [
                RetrievalTree.of(self.questions[tree], tree, (documents[i] for i in kept))
                for tree, kept in nodes
            ]

        self.planted, self.level = state["planted"], state["level"]
        self.now, self.next = read(state["now"]), {node.key: node for node in read(state["next"])}
