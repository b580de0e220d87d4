"""Draw names of the built-in world: composed of reusable parts, unique within a call, disjoint between splits.

Some names come in pairs that differ in one part only, such as the first names of two persons with one surname. Such names are
called namesakes here, although they are never the same.

Read `draw_names` first.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

from rrl.errors import UserError


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAME = _words("""
Marta Ivo Lena Tomas Greta Anders Nadia Oskar Petra Bruno Selma Viktor Alma Jonas Ingrid Pavel Clara Emil Rosa
Henrik Vera Milan Edith Lukas Sonja Hugo Tilda Arno Wanda Felix Irma Nora Stefan Elsa Mateo Doris Anton Freda
Leon Hilda Marek Agnes Otto Paula Simon Gerda Rafael Thea Konrad Livia Albin Ernst Boris Helga Dario Maren Yusuf
Iris Filip Runa Walter Celia Axel Bianca Roman Tessa Gustav Mira Astrid Nils Olga Theo Renata Samir Linnea Karl
Elias Flora Jakob Martin Ruben Amina Edgar Katrin Lars Magda Noel Sven Ursula Ivan Kira Luis Sara Timo Vilma
Zoran
""")
"""First names of persons."""

WORD_START = _words("""
Vel Dan Kor Mar Bel Tor Hal Ros Fen Gar Lin Bor Cal Dor Fal Gren Hol Jar Kel Lam Mor Nor Or Pal Ran Sal Tal Ul
Ver Wal Zan Bran Cor Del Er Fos Gil Har Is Jon Kar Lor Mel Nav Oth Pol Rem Sol Tam Ur Vas Wen Yor Zel Alb Bren
Car Dun El Fer Gol Hem Il Jun Kir Lan Mun Nel Ost Per Rav Ser Tel Und Vin Wil Yar Zor Arn Bas Cran Dem Est Flor
Gav Helm Ing Jess Kost Lund Mir Nes Ob Prin Rud Stav Tren
""")
"""Starts of surnames, company names and city names."""

WORD_MIDDLE = _words("""
a e i o u am an ar el em en er il im in ir ol om on or ul um un ur and end ind ond und ath eth oth
""")
"""Optional syllables between the start and the end of a surname, company name or city name."""

SURNAME_END = _words("""
ikov ner sen dal mann berg ini escu ovic ley ton stad kin ard ius ez ova ström off ein ero wick low ham quist
gren lund holt ssen ert aro ten vik lan mont dov bert roth nik sov
""")

CITY_END = _words("""
ford mouth bury haven field ville port gate minster stead by wick holm stow moor bridge dale grad burg mere
polis cester ness thorpe wold beck ton ham fell shaw combe lea
""")

CITY_PREFIX = _words("""
New Port North East Upper Saint West South Old Lower Great Fort
""")
"""Optional first words of city names."""

COMPANY_WORD_END = _words("""
ax ix o ex yn era ico ium ant ent ora os us yx ian est al ar en is et on am ul
""")
"""Ends of the first word of a company name, such as "ax" in "Velax Motors"."""

COMPANY_KIND = _words("""
Motors Foods Steel Press Airlines Bank Energy Systems Textiles Chemicals Shipping Studios Hotels Mining Paper
Insurance
""")
"""Last words of company names."""

ADJECTIVE = _words("""
Silver Golden Quiet Broken Hidden Distant Crimson Hollow Frozen Burning Silent Last Lost Secret Wild Bitter
Gentle Ancient Empty Endless Scarlet Pale Dark Bright Deep Narrow Lonely Sacred Savage Faded Stolen Painted Iron
Velvet Winter Summer Autumn Midnight Morning Restless Patient Honest Crooked Final Forgotten Promised Borrowed
Wandering Sleeping Dancing Falling Rising Drowned Shining Broad Blue Green White Black Grey Amber Copper Marble
Paper Glass Wooden Stone Salted Sweet Proud Brave Royal Strange Simple Open Closed Little Great Tall Late
""")

NOUN = _words("""
Harbour Garden River Mountain Letter Promise Shadow Mirror Island Forest Castle Bridge Window Lantern Winter
Summer Kingdom Orchard Valley Desert Ocean Tower Station Journey Sister Brother Daughter Soldier Sailor Painter
Doctor Teacher Hunter Widow Prince Thief Dancer Singer Horse Raven Tiger Wolf Rose Lily Willow Maple Crown Sword
Arrow Candle Clock Map Key Door Road Street Market Palace Temple Cabin Prison Shore Lake Meadow Cave Storm
Thunder Rain Snow Fire Flame Ember Ash Dust Stone Star Moon Sun Sky Cloud Wind Tide Wave Dream Memory Silence
Echo Song Dance Story Secret Signal Message Diary Harvest Feast Wedding Game Trial Return
""")

COUNTRY = _words("""
Norvia Estland Calder Morania Sulvia Tarkand Ostria Belmark Veronia Ludania Gorland Pelia Ardovia Kestria Zamora
Ilyria Dravia Westmark Halvia Corenia Rundia Sarnia Tolmark Ulmia
""")

SPLITS = ("train", "dev", "test")
_SHARES = (0.5, 0.25, 0.25)
"""Share of all names in each split."""
_PARTITION_KEY = 20250601
"""Key of the random partition of names into splits. Another value gives another data set."""

_NAMESAKE_EVERY = 5
"""`draw_names` draws groups of names. Every fifth group has two namesakes, the others have one name."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern of names: one part from each table, formatted by `form`.

    *Namesakes* are two names that differ only in part {0}, which companies and cities have at the end. One has entry i of its
    table, the other has entry i + half the length of the table. They are always in the same split.
    """

    form: str
    """A format string whose fields {0}, {1}, ... are the parts."""
    parts: tuple[tuple[str, ...], ...]
    """One table of words for each part."""
    share: float = 1.0
    """Each pattern provides this share of the groups of names (see `draw_names`) that remain after the patterns before it. A
    pattern with too few names provides all it has."""

    @property
    def pairs(self) -> int:
        """Total number of pairs of namesakes in all splits."""
        return math.prod(len(part) for part in self.parts) // 2

    def pair_range(self, split: str) -> tuple[int, int]:
        """Return (first, last + 1) of the pair numbers of `split`.

        `render` permutes the numbers, so the names of a split are a random part of all names.
        """
        i = SPLITS.index(split)
        edges = np.cumsum((0.0, *_SHARES)) * self.pairs
        return int(edges[i]), int(edges[i + 1])

    def render(self, pair: Int[np.ndarray, "n"], second: Int[np.ndarray, "n"]) -> list[str]:
        """Return the names of the given pair numbers: the first of a pair where `second` is 0, its namesake where it is 1."""
        head, *rest = self.parts
        half = len(head) // 2
        number = permute(pair, self.pairs, _PARTITION_KEY)
        columns = [np.asarray(head, object)[number % half + half * second]]
        number = number // half
        for part in rest:
            columns.append(np.asarray(part, object)[number % len(part)])
            number = number // len(part)
        return [self.form.format(*row) for row in zip(*columns, strict=True)]


def _parts(*tables: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the tables, the first one truncated to even length, so that it has two halves."""
    return (tables[0][: len(tables[0]) // 2 * 2], *tables[1:])


PATTERNS: dict[str, tuple[Pattern, ...]] = {
    "person": (
        Pattern("{0} {1}{2}", _parts(FIRST_NAME, WORD_START, SURNAME_END), share=0.9),
        Pattern("{0} {1}{2}{3}", _parts(FIRST_NAME, WORD_START, WORD_MIDDLE, SURNAME_END)),
    ),
    "work": (
        Pattern("{0} {1}", _parts(ADJECTIVE, NOUN), share=0.8),
        Pattern("{0} {2} {1}", _parts(ADJECTIVE, NOUN, NOUN), share=0.75),
        Pattern("The {1} of the {0} {2}", _parts(ADJECTIVE, NOUN, NOUN), share=0.95),
        Pattern("The {0} {1} and the {2} {3}", _parts(ADJECTIVE, NOUN, ADJECTIVE, NOUN)),
    ),
    "company": (
        Pattern("{1}{2} {0}", _parts(COMPANY_KIND, WORD_START, COMPANY_WORD_END), share=0.9),
        Pattern("{1}{2}{3} {0}", _parts(COMPANY_KIND, WORD_START, WORD_MIDDLE, COMPANY_WORD_END)),
    ),
    "city": (
        Pattern("{1}{0}", _parts(CITY_END, WORD_START), share=0.8),
        Pattern("{1}{2}{0}", _parts(CITY_END, WORD_START, WORD_MIDDLE), share=0.95),
        Pattern("{3} {1}{2}{0}", _parts(CITY_END, WORD_START, WORD_MIDDLE, CITY_PREFIX)),
    ),
}
"""Patterns of each family of names. A family is a set of entity types whose names are drawn together.

Films and books share the family "work": their names are similar and never the same.
"""


def permute(number: Int[np.ndarray, "n"], size: int, key: int) -> Int[np.ndarray, "n"]:
    """Return the images of `number` under a keyed permutation of 0..size-1 (four Feistel rounds with cycle walking)."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = np.random.Generator(np.random.PCG64(key)).integers(1, 2**63, 4, dtype=np.uint64) | np.uint64(1)

    def rounds(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for k in keys:
            mixed = (right + np.uint64(0x9E3779B9)) * k
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(17) & mask)
        return (left << shift) | right

    result = rounds(np.asarray(number, np.uint64))
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = rounds(result[outside])
    return result.astype(np.int64)


def draw_names(family: str, count: int, split: str, seed: int) -> list[str]:
    """Draw `count` different names of a split. Namesakes (similar names, see `Pattern`) are next to each other.

    Args:
      family: a key of PATTERNS.
      count: number of names.
      split: "train", "dev" or "test"; their names never overlap.
      seed: seed of the draw.

    Raises:
      UserError: the split has too few names of this family.
    """
    rng = np.random.default_rng((seed, *family.encode()))
    # Group g has one name, or two namesakes if g is a multiple of _NAMESAKE_EVERY.
    groups = -(-count * _NAMESAKE_EVERY // (_NAMESAKE_EVERY + 1)) + 1
    sizes = 1 + (np.arange(groups) % _NAMESAKE_EVERY == 0)
    patterns, group_counts = PATTERNS[family], _groups_by_pattern(family, groups, split)
    pattern_of_group = rng.permutation(np.repeat(np.arange(len(patterns)), group_counts))
    group = np.repeat(np.arange(groups), sizes)
    # 0 for the first name of a group, 1 for its namesake.
    second = np.concatenate([[0], (group[1:] == group[:-1]).astype(np.int64)])
    names = np.empty(len(group), object)
    for i, pattern in enumerate(patterns):
        low, high = pattern.pair_range(split)
        key = int(rng.integers(2**62))
        # Number of the pair of namesakes from which each group takes its name or names.
        pair = np.zeros(groups, np.int64)
        pair[pattern_of_group == i] = (
            low + permute(np.arange(group_counts[i]), high - low, key) if group_counts[i] else 0
        )
        positions = np.flatnonzero(pattern_of_group[group] == i)
        names[positions] = pattern.render(pair[group[positions]], second[positions])
    return names[:count].tolist()


def _groups_by_pattern(family: str, groups: int, split: str) -> list[int]:
    """Return how many of the groups of names each pattern of a family provides. Raises UserError if they are too few."""
    remaining, group_counts = groups, []
    for pattern in PATTERNS[family]:
        low, high = pattern.pair_range(split)
        group_counts.append(min(high - low, math.ceil(remaining * pattern.share)))
        remaining -= group_counts[-1]
    if remaining:
        raise UserError(
            f"passages: the split {split!r} of miniwiki has too few names of the family {family!r}: "
            f"{sum(group_counts)} groups of one or two namesakes, but {groups} are required; give fewer passages"
        )
    return group_counts
