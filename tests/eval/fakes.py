"""Hand-written trajectories in the style of R-Search's Tables 8 and 9, with made-up tokens and log-probabilities."""

import re

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.text.metrics import exact_match, token_f1

PROMPT_TEXT = (
    "Reason about the question step by step. To search, write <search> query </search>; results come back inside "
    "<observation> and </observation>. Then write what supports the answer inside <original_evidence> and "
    "</original_evidence>, and the answer inside <answer> and </answer>.\nQuestion: {}\n"
)


class FakeTokens:
    """A tokenizer whose tokens are words with their leading space; ids are assigned in order of appearance."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = [b""]

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in re.findall(r"\s*[^\s<>]+|\s*[<>]/?|\s+$", text):
            if word.encode() not in self.bytes:
                self.bytes.append(word.encode())
            ids.append(self.bytes.index(word.encode()))
        return ids


def observation(*passages: tuple[str, str]) -> str:
    lines = "\n".join(f"(Title: {title}) {text}" for title, text in passages)
    return f"\n<observation>\n{lines}\n</observation>\n"


def fake(
    question: Question,
    parts: list[str],
    searches: list[Search],
    *,
    answer: str = "",
    evidence: str = "",
    reader: str = "",
    rewards: dict[str, float] | None = None,
    ended: str = "answer",
    request: int = 0,
    tokens: FakeTokens | None = None,
) -> Trajectory:
    """Return a trajectory. `parts` alternate between the policy and the environment, starting with the policy."""
    tokens = tokens or FakeTokens()
    segments = [(PROMPT, PROMPT_TEXT.format(question.text))]
    segments += [(ENVIRONMENT if at % 2 else POLICY, part) for at, part in enumerate(parts)]
    ids, roles, turns = [], [], []
    for at, (role, text) in enumerate(segments):
        new = tokens.encode(text)
        ids += new
        roles += [role] * len(new)
        turns += [max(0, (at - 1) // 2)] * len(new)
    rng = np.random.default_rng(request)
    sampled = np.array(roles) == POLICY
    logps = np.where(sampled, -(rng.exponential(0.35, len(ids)) ** 2), 0.0).astype(np.float32)
    return Trajectory(
        question=question,
        request=request,
        group=request // 4,
        tokens=np.array(ids, np.int32),
        roles=np.array(roles, np.int32),
        logps=logps,
        sampled_logps=logps,
        turns=np.array(turns, np.int32),
        segments=segments,
        searches=searches,
        ended=ended,
        rewards=rewards or {},
        metrics={
            "em": exact_match(answer, question.answers),
            "f1": token_f1(answer, question.answers),
            "searches": float(len(searches)),
        },
        answer=answer,
        evidence=evidence,
        reader_answer=reader,
    )


def winter(request: int = 0, tokens: FakeTokens | None = None) -> Trajectory:
    """Return a right answer after four searches (R-Search, Table 8)."""
    question = Question(
        "2wiki-41",
        "Which film whose director is younger, My Baby's Daddy or A Tale of Winter?",
        ("My Baby's Daddy",),
        "bridge_comparison",
        ("My Baby's Daddy", "A Tale of Winter", "Cheryl Dunye", "Eric Rohmer"),
    )
    evidence = (
        '\n- "My Baby\'s Daddy" was directed by Cheryl Dunye, born in 1966.\n'
        '- "A Tale of Winter" was directed by Eric Rohmer, born in 1920.\n'
    )
    parts = [
        "To determine which film has the younger director, we need to identify the directors of both films and compare "
        "their ages.\n\nFirst, let's identify the director of \"My Baby's Daddy\".\n\n"
        "<search> Who directed My Baby's Daddy? </search>",
        observation(
            ("My Baby's Daddy", "My Baby's Daddy is a 2004 American comedy film, directed by Cheryl Dunye."),
            ("Alec Mapa: Baby Daddy", "Alec Mapa: Baby Daddy is a 2013 one-man show by Alec Mapa."),
            (
                "Who's Your Daddy? (film)",
                "Who's Your Daddy? is a 2002 American comedy film directed by Andy Fickman.",
            ),
        ),
        'The director of "My Baby\'s Daddy" is Cheryl Dunye.\n\n'
        'Next, let\'s identify the director of "A Tale of Winter".'
        "\n\n<search> Who directed A Tale of Winter? </search>",
        observation(
            (
                "A Tale of Winter",
                "A Tale of Winter is a 1992 French drama film directed by Eric Rohmer, and starring Charlotte Véry, "
                "Frédéric van den Driessche and Michael Voletti. It is the second of Rohmer's \"Tales of the Four "
                'Seasons" '
                '("Contes des quatre saisons").',
            ),
            ("My Baby's Daddy", "My Baby's Daddy is a 2004 American comedy film, directed by Cheryl Dunye."),
            (
                "A Summer's Tale",
                "A Summer's Tale is a 1996 French romance film written and directed by Éric Rohmer.",
            ),
        ),
        'The director of "A Tale of Winter" is Eric Rohmer. Now the birth dates of the two.\n\n'
        "<search> When was Cheryl Dunye born? </search>",
        observation(
            (
                "Cheryl Dunye",
                "Cheryl Dunye (born May 13, 1966) is a Liberian-American film director, producer, screenwriter, editor "
                "and actress.",
            ),
            ("Dunye (surname)", "Dunye is a surname."),
        ),
        "Cheryl Dunye was born on May 13, 1966.\n\n<search> When was Eric Rohmer born? </search>",
        observation(
            (
                "Eric Rohmer",
                "Jean Marie Maurice Schérer, known as Éric Rohmer (21 March 1920 – 11 January 2010), was a French film "
                "director, film critic, journalist, novelist, screenwriter, and teacher.",
            ),
            ("Eric Rohmer filmography", "This is a list of films by the French director Eric Rohmer."),
        ),
        "Eric Rohmer was born on March 21, 1920. Cheryl Dunye (1966) is younger than Eric Rohmer (1920). "
        "Therefore, the "
        'film "My Baby\'s Daddy" has the younger director.\n\n'
        f"<original_evidence>{evidence}</original_evidence>\n<answer> My Baby's Daddy </answer>",
    ]
    titles = [re.findall(r"^\(Title: (.*?)\) (?=[A-Z])", part, re.MULTILINE) for part in parts[1::2]]
    queries = [re.search(r"<search> (.*) </search>", part)[1] for part in parts[:-1:2]]
    searches = [Search(turn, query, tuple(found)) for turn, (query, found) in enumerate(zip(queries, titles))]
    return fake(
        question,
        parts,
        searches,
        answer="My Baby's Daddy",
        evidence=evidence.strip(),
        reader="My Baby's Daddy",
        rewards={"answer": 1.0, "evidence": 1.0, "format": 0.4, "total": 2.4},
        request=request,
        tokens=tokens,
    )


def spouse(request: int = 1, tokens: FakeTokens | None = None) -> Trajectory:
    """Return a partly right answer: the second gold passage was never retrieved."""
    question = Question(
        "mini-7",
        "Who is the spouse of the director of Silver Harbour?",
        ("Maren Tolvik", "Maren Tolvik-Asch"),
        "two_hop",
        ("Silver Harbour", "Jonas Asch"),
    )
    evidence = " Silver Harbour was directed by Jonas Asch. Jonas Tolm is married to Edda Tolvik. "
    parts = [
        "I need the director of Silver Harbour. <search> director of Silver Harbour </search>",
        observation(
            (
                "Silver Harbour",
                "Silver Harbour is a film of 1962. Silver Harbour was directed by Jonas Asch.",
            ),
            ("Silver Ridge", "Silver Ridge is a film of 1962. Silver Ridge was directed by Ida Marn."),
            ("Harbour Lights", "Harbour Lights is a novel by Petra Marn."),
        ),
        "The director is Jonas Asch. Now the spouse. <search> spouse of Jonas </search>",
        observation(
            ("Jonas Tolm", "Jonas Tolm was born in Velden in 1931. Jonas Tolm is married to Edda Tolvik."),
            ("Jonas Reel", "Jonas Reel founded Reel & Sons in 1950."),
            (
                "Silver Harbour",
                "Silver Harbour is a film of 1962. Silver Harbour was directed by Jonas Asch.",
            ),
        ),
        f"<original_evidence>{evidence}</original_evidence><answer> Edda Tolvik </answer>",
    ]
    searches = [
        Search(0, "director of Silver Harbour", ("Silver Harbour", "Silver Ridge", "Harbour Lights")),
        Search(1, "spouse of Jonas", ("Jonas Tolm", "Jonas Reel", "Silver Harbour")),
    ]
    return fake(
        question,
        parts,
        searches,
        answer="Edda Tolvik",
        evidence=evidence.strip(),
        reader="Edda Tolvik",
        rewards={"answer": 0.5, "evidence": 0.5, "format": 0.4, "total": 1.4},
        request=request,
        tokens=tokens,
    )


def malformed(request: int = 2, tokens: FakeTokens | None = None) -> Trajectory:
    """Return an episode without an answer: a tag is not closed, the environment corrects, a search fails, the turns run out."""
    question = Question(
        "mini-8", "Is Velden older than Marnfurt?", ("no",), "comparison", ("Velden", "Marnfurt")
    )
    parts = [
        "Velden was founded in <search> founding of Velden <answer> yes",
        "\nMy action is not correct. To search, I write the query between <search> and </search>. "
        "To answer, I write the answer between <answer> and </answer>.\n",
        "<search> founding year of Velden </search>",
        "\n<observation>\nThe search failed.\n</observation>\n",
        "The founding year of Velden is 1804 and Marnfurt",
    ]
    searches = [Search(1, "founding year of Velden", (), failed=True)]
    rewards = {"answer": 0.0, "evidence": 0.0, "format": 0.0, "total": 0.0}
    return fake(
        question, parts, searches, rewards=rewards, ended="turn_limit", request=request, tokens=tokens
    )


def direct(request: int = 3, tokens: FakeTokens | None = None) -> Trajectory:
    """Return a wrong answer without a search or evidence."""
    question = Question("mini-9", "In which year was Ida Marn born?", ("1947",), "one_hop", ("Ida Marn",))
    return fake(
        question,
        ["Ida Marn was born in 1931. <answer> 1931 </answer>"],
        [],
        answer="1931",
        rewards={"answer": 0.0, "evidence": 0.0, "format": 0.4, "total": 0.4},
        request=request,
        tokens=tokens,
    )


MAKERS = (winter, spouse, malformed, direct)


def many(count: int, tokens: FakeTokens | None = None) -> list[Trajectory]:
    return [MAKERS[at % len(MAKERS)](request=at, tokens=tokens) for at in range(count)]
