"""BM25: scores against the formula and rank_bm25, text analysis against Lucene's rules, recall against published numbers."""

import itertools
import json
import math
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from rrl.data.folder import load_folder
from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.retrieval.bm25 import PUBLISHED_K1_B, Bm25Config, Bm25Index, analyse
from rrl.retrieval.build import build_index
from rrl.retrieval.index import make_retriever, open_index
from rrl.retrieval.ranking import NO_PASSAGE
from rrl.sft.encoder_recall import recall_at
from tests.shared_data import shared

CORPUS = [
    Passage("0", "", "red red fox"),
    Passage("1", "", "red hen"),
    Passage("2", "", "blue hen sings"),
    Passage("3", "", "red hen"),
]


def by_hand(query: str, k1: float, b: float) -> np.ndarray:
    """Lucene's BM25, from the formula: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), tf / (tf + k1 (1 - b + b L / avg))."""
    documents = [passage.text.split() for passage in CORPUS]
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for word in query.split():
            n = sum(word in other for other in documents)
            tf = words.count(word)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            score += idf * tf / (tf + k1 * (1 - b + b * len(words) / average))
        scores.append(score)
    return np.array(scores)


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (1.2, 0.0)])
@pytest.mark.parametrize("query", ["red", "red hen", "blue fox red", "hen hen"])
def test_scores_equal_the_formula_and_ties_are_ordered_by_position(query: str, k1: float, b: float) -> None:
    ids, scores = Bm25Index.build(CORPUS, Bm25Config(k1, b)).search([query], 4)
    expected = by_hand(query.replace("sings", "sing"), k1, b)
    order = [i for i in sorted(range(4), key=lambda i: (-round(expected[i], 6), i)) if expected[i] > 0]
    assert ids[0].tolist() == order + [NO_PASSAGE] * (4 - len(order))
    np.testing.assert_allclose(scores[0, : len(order)], expected[order], rtol=1e-5)


def test_analysis_matches_lucene() -> None:
    assert analyse("The Director's films, and O’Brien’s 1931 CITIES") == [
        "director",
        "film",
        "o'brien",
        "1931",
        "citi",
    ]
    assert analyse("") == analyse("the of ?!") == []


# Text, and its words by the word boundary rules of UAX #29 (revision 45), lower case, without stop words and stems.
UAX_29 = [
    ("well-known (AC/DC)", ["well", "known", "ac", "dc"]),  # WB999
    ("can't o’clock rock'n'roll 'quoted'", ["can't", "o'clock", "rock'n'roll", "quoted"]),  # WB6, WB7
    ("U.S.A. e.g. a:b example.com", ["u.s.a", "e.g", "a:b", "example.com"]),  # WB6, WB7
    (
        "3.14 12,500.5 10;20 1'000 7. 1990-1995",
        ["3.14", "12,500.5", "10;20", "1'000", "7", "1990", "1995"],
    ),  # WB11, WB12
    (
        "3..14 3.a a.3 1990's",
        ["3", "14", "3", "3", "1990", "s"],
    ),  # WB6, WB7 and WB11, WB12 ask for one kind on both sides
    ("A4 3D x_1 _x ___", ["a4", "3d", "x_1", "_x"]),  # WB9, WB10, WB13a, WB13b
    ("हिन्दी में किताब", ["हिन्दी", "में", "किताब"]),  # WB4: vowel signs and virama stay with their letters
    ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),  # WB4
    ("שָׁלוֹם צה״ל", ["שָׁלוֹם", "צה״ל"]),  # WB4, WB7b, WB7c
    ("東湖大橋は長い", ["東", "湖", "大", "橋", "は", "長", "い"]),  # WB999
    ("ラーメンの", ["ラーメン", "の"]),  # WB13
    ("한국어 단어", ["한국어", "단어"]),  # WB5
    # Lucene keeps runs of scripts that UAX #29 leaves to a dictionary.
    ("สวัสดีครับ โลก", ["สวัสดีครับ", "โลก"]),
    ("ភាសាខ្មែរ abcไทย", ["ភាសាខ្មែរ", "abc", "ไทย"]),
    ("co\u00adoperate", ["cooperate"]),
]


@pytest.mark.parametrize(("text", "words"), UAX_29)
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_word_boundaries_follow_uax_29_in_each_unicode_form(text: str, words: list[str], form: str) -> None:
    expected = [unicodedata.normalize("NFKC", word) for word in words]
    assert analyse(unicodedata.normalize(form, text), stem=False) == expected


def test_ascii_words_are_split_the_same_with_and_without_other_characters() -> None:
    signs = "ab1._:,;'` -"
    texts = ["".join(letters) for letters in itertools.product(signs, repeat=4)]
    # The last word has a letter outside ASCII, so the general pattern is used.
    assert [[*analyse(text), "é"] for text in texts] == [analyse(f"{text} é") for text in texts]


def test_full_width_and_composed_characters_equal_the_plain_ones() -> None:
    assert (
        analyse("Ｒｉｖｅｒ １９１３ ﬁlm Zoe\u0301")
        == analyse("River 1913 film Zoé")
        == ["river", "1913", "film", "zoé"]
    )


def test_a_query_matches_a_passage_in_another_unicode_form_and_in_chinese() -> None:
    corpus = [
        Passage("1", "", unicodedata.normalize("NFD", "Zoé Lévêque a dessiné le viaduc.")),
        Passage("2", "", "东湖大桥由工程师林远设计，于一九一三年建成。"),
    ]
    index = Bm25Index.build(corpus)
    assert index.search(["Lévêque", "东湖大桥是谁设计的？"], 1)[0].tolist() == [[0], [1]]


def test_an_index_of_an_older_analysis_is_rejected(tmp_path: Path) -> None:
    Bm25Index.build(CORPUS).save(tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    del settings["analysis"]
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"version 1 .* version 3.* Build the index again"):
        Bm25Index.load(tmp_path)


def test_title_weight_raises_the_rank_of_the_passage_with_that_title() -> None:
    passages = [
        Passage("0", "Oslo Mill", "Bergen lies near. Bergen is wet. Bergen is old."),
        Passage("1", "Bergen", "A town of fish, rain and mountains in the west."),
    ]
    weighted = Bm25Index.build(passages, Bm25Config(title_weight=3))
    assert weighted.search(["Bergen"], 2)[0].tolist() == [[1, 0]]
    assert Bm25Index.build(passages, Bm25Config(title_weight=0)).search(["Bergen"], 2)[0].tolist() == [
        [0, NO_PASSAGE]
    ]


@pytest.mark.parametrize("settings", [{"k1": -1}, {"b": 1.5}, {"title_weight": -1}])
def test_settings_out_of_range_are_rejected(settings: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(settings))}=.* must"):
        Bm25Config(**settings)


def test_a_saved_index_ranks_the_same(tmp_path: Path) -> None:
    index = Bm25Index.build(CORPUS, Bm25Config(title_weight=2))
    index.save(tmp_path / "bm25")
    opened = Bm25Index.load(tmp_path / "bm25")
    assert opened.config == index.config
    for before, after in zip(index.search(["red hen", "none"], 3), opened.search(["red hen", "none"], 3)):
        np.testing.assert_array_equal(before, after)


def test_passages_without_words_are_never_returned() -> None:
    texts = ["the of", "", "red", "?"]
    index = Bm25Index.build([Passage(str(i), "", text) for i, text in enumerate(texts)])
    assert index.search(["red the"], 3)[0].tolist() == [[2, NO_PASSAGE, NO_PASSAGE]]
    with pytest.raises(UserError, match="no passage has a word"):
        Bm25Index.build([Passage("0", "", "the of"), Passage("1", "", "")])


# Recall@2 and @5 of 2WikiMultiHopQA's gold titles (1,000 questions, 6,119 passages), k1 0.9, b 0.4. Two independent
# implementations have 57.1-57.5 and 67.5-67.6 over title + text, and 51.7 and 63.9 over the text alone, without stems.
RECALL_ON_2WIKI = [
    (Bm25Config(), 57.475, 67.15),
    (Bm25Config(stem=False), 57.875, 67.55),
    (Bm25Config(title_weight=0, stem=False), 51.775, 64.325),
]


@pytest.mark.parametrize(("config", "at_2", "at_5"), RECALL_ON_2WIKI)
def test_recall_on_2wiki_stays_what_it_is(config: Bm25Config, at_2: float, at_5: float) -> None:
    folder = load_folder(shared("2wiki"))
    questions = folder.questions("dev")
    retriever = make_retriever(folder.passages, "bm25", bm25=config)
    for k, expected in ((2, at_2), (5, at_5)):
        recall = 100 * recall_at(retriever, [q.text for q in questions], [q.gold for q in questions], k)
        assert recall == pytest.approx(expected, abs=0.001)


def test_published_settings_have_the_published_values() -> None:
    assert Bm25Config() == Bm25Config(*PUBLISHED_K1_B["pyserini"])
    assert all(Bm25Config(*settings) for settings in PUBLISHED_K1_B.values())


def test_stemming_can_be_switched_off() -> None:
    assert analyse("The Director's films", stem=False) == ["director", "films"]
    index = Bm25Index.build([Passage("0", "", "many films")], Bm25Config(stem=False))
    assert index.search(["film", "films"], 1)[0].tolist() == [[NO_PASSAGE], [0]]


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ("lucene", ["cat", "sat", "u.s.a"]),
        ("whitespace", ["the", "cats", "sat,", "u.s.a."]),
        ("words", ["the", "cats", "sat", "u", "s", "a"]),
    ],
)
def test_whitespace_and_word_tokens_are_only_lower_cased(tmp_path, tokens, found) -> None:
    config = Bm25Config(tokens=tokens)
    assert config.analyse("The cats sat, U.S.A.") == found
    passages = [Passage("a", "", "The cats sat,"), Passage("b", "", "a dog"), Passage("c", "", "a cow")]
    build_index(passages, tmp_path / "index", "bm25", bm25=config)
    index = open_index(tmp_path / "index")
    hits = [len(index.search([query], 3)[0]) for query in ("sat", "sat,", "cat")]
    assert hits == {"lucene": [1, 1, 1], "whitespace": [0, 1, 0], "words": [1, 1, 0]}[tokens]


def test_an_unknown_tokenization_is_rejected() -> None:
    with pytest.raises(UserError, match="tokens='bytes'"):
        Bm25Config(tokens="bytes")


RANK_BM25 = {
    "the red house": [0.873753, 1.548485, 0.361162, 0.716813, 0.334499, 0.341373],
    "the king": [0.334499, 0.836989, 0.823986, 0.0, 0.334499, 0.341373],
    "red wine the": [0.873753, 0.249202, 0.361162, 2.301304, 0.334499, 0.341373],
}
"""Scores of `BM25Okapi` of rank_bm25 0.2.2 with its own k1 1.5 and b 0.75 over the texts below, split at spaces in lower case;
"the" is in five of six."""


def test_okapi_scores_equal_those_of_rank_bm25(tmp_path: Path) -> None:
    texts = [
        "The red house, near the river.",
        "A house of the king",
        "The king and the queen of the river",
        "Red, red wine",
        "the old man and the sea",
        "the end",
    ]
    passages = [Passage(str(at), "the king", text) for at, text in enumerate(texts)]
    config = Bm25Config(*PUBLISHED_K1_B["bm25s"], title_weight=0, tokens="whitespace", idf="okapi")
    build_index(passages, tmp_path / "index", "bm25", bm25=config)
    for retriever in (make_retriever(passages, "bm25", bm25=config), open_index(tmp_path / "index")):
        for query, expected in RANK_BM25.items():
            (hits,) = retriever.search([query], 6)
            # As Lucene, without the constant factor k1 + 1.
            scores = {int(hit.passage.id): (config.k1 + 1) * hit.score for hit in hits}
            np.testing.assert_allclose([scores.get(at, 0) for at in range(6)], expected, atol=2e-6)


def test_an_unknown_idf_is_rejected() -> None:
    with pytest.raises(UserError, match="idf='atire'"):
        Bm25Config(idf="atire")
