"""The curriculum of R2AG (Algorithm 1): a forest of retrieval trees, which grows from the policy's own rollouts."""

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
"""`Trajectory.ended` of an episode whose policy gave the stop signal."""


@dataclasses.dataclass(frozen=True, slots=True)
class RetrievalTree(Question):
    """A tree that the policy expands next: its question, and the documents it keeps after pruning.

    It is a `Question`, so a curriculum can return it and `Trajectory.question` can hold it.
    """

    tree: int = 0
    """Number of the tree: the index of its question in the run."""
    documents: tuple[Passage, ...] = ()
    """The gold documents found so far."""

    @classmethod
    def of(cls, question: Question, tree: int = 0, documents: Iterable[Passage] = ()) -> "RetrievalTree":
        """Return the tree of a question with these documents."""
        values = {field.name: getattr(question, field.name) for field in dataclasses.fields(Question)}
        return cls(**values, tree=tree, documents=tuple(documents))

    @property
    def key(self) -> tuple[int, frozenset[str]]:
        """Identity of the tree: its question and the titles of its documents."""
        return self.tree, frozenset(title_key(document.title) for document in self.documents)


def pruned(tree: RetrievalTree, results: Iterable[Sequence[Passage]]) -> RetrievalTree:
    """Return the tree after an expansion, pruned to gold documents.

    Only the top passage of each query counts (Hit@Top-1). Of passages with the same title, the first is used.

    Args:
      tree: the tree that was expanded.
      results: the passages of each query, best first.
    """
    gold = {title_key(title) for title in tree.gold}
    documents = {title_key(document.title): document for document in tree.documents}
    for passages in results:
        for passage in passages[:1]:
            if title_key(passage.title) in gold:
                documents.setdefault(title_key(passage.title), passage)
    return dataclasses.replace(tree, documents=tuple(documents.values()))


class Forest:
    """Trees that grow level by level; implements `rrl.rollout.curriculum.Curriculum`.

    The policy expands all trees of a level. The pruned results are the trees of the next level, without duplicates: two trees
    are equal if they have the same question and the same gold documents. A tree is finished if it has all gold documents
    and the policy gave the stop signal. After the last level, or when all trees are finished, the next questions start.
    """

    def __init__(
        self, questions: Sequence[Question], *, trees: int = 0, expansions: int = 5, seed: int = 0
    ) -> None:
        """Make a forest.

        Args:
          questions: the questions of the run.
          trees: number of trees (questions) that grow at the same time; 0: all.
          expansions: maximum number of expansions of a tree, the number of levels.
          seed: random seed of the order of the questions, and of the trees in a level.

        Raises UserError for a question that names no gold passages.
        """
        for question in questions:
            if not question.gold:
                raise UserError(
                    f"question {question.id!r} names no gold passages, but R2AG rewards a tree for finding them: give data "
                    "with supporting facts, such as HotpotQA, 2WikiMultihopQA or MuSiQue"
                )
        self.questions, self.trees, self.expansions, self.seed = questions, trees, expansions, seed
        self.rounds = 0
        """Number of times that `select` has started the trees of the next questions."""
        self.level = 0
        """Number of expansions that led to the trees of the current level."""
        self.current: list[RetrievalTree] = []
        """Trees of the current level that `select` has not returned yet."""
        self.next: dict[Any, RetrievalTree] = {}
        """Trees of the next level by `RetrievalTree.key`."""

    def select(self, step: int, number: int, count: int) -> list[Question]:
        """Return the next trees of the level, at most `count`, in random order. `step` and `number` are not used."""
        if not self.current:
            self._advance()
        selected, self.current = self.current[:count], self.current[count:]
        return list(selected)

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Prune each expanded tree and add the unfinished ones to the next level. Each trajectory is one sampled expansion."""
        for trajectory in trajectories:
            tree = trajectory.question
            assert isinstance(tree, RetrievalTree)
            grown = pruned(tree, [search.passages for search in trajectory.searches])
            complete = len(grown.documents) == len({title_key(title) for title in tree.gold})
            if not (complete and trajectory.ended == STOP):
                self.next.setdefault(grown.key, grown)

    def _advance(self) -> None:
        self.level += 1
        trees = list(self.next.values())
        if not trees or self.level >= self.expansions:
            count = len(self.questions)
            order = question_order(count, self.trees or count, self.seed, self.rounds)
            trees = [RetrievalTree.of(self.questions[i], int(i)) for i in order]
            self.rounds, self.level = self.rounds + 1, 0
        shuffled = np.random.default_rng((self.seed, self.rounds, self.level)).permutation(len(trees))
        self.current, self.next = [trees[i] for i in shuffled], {}

    @property
    def state(self) -> Mapping[str, Any]:
        indices: dict[Passage, int] = {}  # each document is stored once

        def encode(trees: Iterable[RetrievalTree]) -> list[Any]:
            return [[t.tree, [indices.setdefault(d, len(indices)) for d in t.documents]] for t in trees]

        trees = {"now": encode(self.current), "next": encode(self.next.values())}
        documents = [[document.id, document.title, document.text] for document in indices]
        # "planted" and "now" are the names of `rounds` and `current` in checkpoints.
        return {"planted": self.rounds, "level": self.level, **trees, "documents": documents}

    def restore(self, state: Mapping[str, Any]) -> None:
        documents = [Passage(*fields) for fields in state["documents"]]

        def decode(trees: Iterable[Any]) -> list[RetrievalTree]:
            return [
                RetrievalTree.of(self.questions[tree], tree, (documents[i] for i in stored))
                for tree, stored in trees
            ]

        self.rounds, self.level = state["planted"], state["level"]
        self.current, self.next = decode(state["now"]), {tree.key: tree for tree in decode(state["next"])}
