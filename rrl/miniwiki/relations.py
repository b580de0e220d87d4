"""Relations of the built-in world, and the templates of the sentences that state them."""

import dataclasses

TYPES = ("person", "film", "book", "company", "city")
"""Types of entities."""


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
    """A relation, such as "director": each entity of `subject_type` has at most one value."""

    name: str
    subject_type: str
    """Entity type of the subject."""
    value_type: str
    """Entity type of the value, or "year" or "country"."""
    phrases: tuple[str, ...]
    """Noun phrases for the value in longer questions; "{}" is the subject."""
    questions: tuple[str, ...]
    """Whole questions for the value; "{}" is the subject."""
    years: tuple[int, int] = (0, 0)
    """First and last possible year, if the value is a year."""

    def query(self, subject: str) -> str:
        """Return the search query for this fact; its wording is the same everywhere."""
        return f"{self.name} of {subject}"


RELATIONS = (
    Relation("director", "film", "person", ("the director of {}", "the person who directed {}"),
             ("Who directed {}?", "Who is the director of {}?", "Who was {} directed by?")),
    Relation("release year", "film", "year", ("the release year of {}",),
             ("When was {} released?", "In which year did {} come out?", "What is the release year of {}?"), (1930, 2019)),
    Relation("author", "book", "person", ("the author of {}", "the person who wrote {}"),
             ("Who wrote {}?", "Who is the author of {}?", "Who was {} written by?")),
    Relation("publication year", "book", "year", ("the publication year of {}",),
             ("When was {} published?", "In which year was {} published?", "What is the publication year of {}?"), (1900, 2019)),
    Relation("founder", "company", "person", ("the founder of {}", "the person who founded {}"),
             ("Who founded {}?", "Who is the founder of {}?", "By whom was {} founded?")),
    Relation("headquarters", "company", "city", ("the city where {} is based", "the headquarters city of {}"),
             ("Where is {} based?", "In which city is {} based?", "Where are the headquarters of {}?")),
    Relation("founding year", "company", "year", ("the founding year of {}",),
             ("When was {} founded?", "In which year was {} founded?", "What is the founding year of {}?"), (1850, 1999)),
    Relation("country", "city", "country", ("the country of {}",),
             ("In which country is {}?", "Which country is {} in?", "In what country does {} lie?")),
    Relation("founding year", "city", "year", ("the founding year of {}",),
             ("When was {} founded?", "In which year was {} founded?", "What is the founding year of {}?"), (1000, 1899)),
    Relation("mayor", "city", "person", ("the mayor of {}",),
             ("Who is the mayor of {}?", "What is the name of the mayor of {}?", "Who governs {} as mayor?")),
    Relation("birth year", "person", "year", ("the birth year of {}",),
             ("When was {} born?", "In which year was {} born?", "What is the birth year of {}?"), (1900, 1989)),
    Relation("birthplace", "person", "city", ("the city where {} was born", "the birthplace of {}"),
             ("Where was {} born?", "In which city was {} born?", "What is the birthplace of {}?")),
    Relation("spouse", "person", "person", ("the spouse of {}", "the person married to {}"),
             ("Who is the spouse of {}?", "Who is {} married to?", "To whom is {} married?")),
    Relation("employer", "person", "company", ("the employer of {}", "the company {} works for"),
             ("Who does {} work for?", "Which company does {} work for?", "What is the employer of {}?")),
)  # fmt: skip

RELATION_BY_KEY = {(relation.subject_type, relation.name): relation for relation in RELATIONS}
"""Relations by (subject type, name)."""

MENTION = {
    "person": ("{}",),
    "film": ("the film {}", "{}"),
    "book": ("the book {}", "{}"),
    "company": ("{}", "the company {}"),
    "city": ("{}", "the city of {}"),
}
"""Phrases by which a question mentions an entity of each type."""


@dataclasses.dataclass(frozen=True, slots=True)
class SentenceSlot:
    """One sentence of every passage of a type: the relations that it states, and its possible wordings.

    Templates name the subject before its values. A causal model of a few layers learns within minutes to look up what follows
    a name, but hardly learns to look up what precedes it.
    """

    relations: tuple[str, ...]
    """Names of the relations; their values are {1}, {2} in the templates."""
    templates: tuple[str, ...]
    """Wordings of the sentence; {0} is the subject."""


SENTENCE_SLOTS: dict[str, tuple[SentenceSlot, ...]] = {
    "film": (
        SentenceSlot(("director",), ("{0} is a film directed by {1}.", "The film {0} was directed by {1}.",
                                     "The director of the film {0} is {1}.", "{0} is a film made by the director {1}.")),
        SentenceSlot(("release year",), ("{0} was released in {1}.", "{0} came out in {1}.",
                                         "The release year of {0} is {1}.", "The film {0} was first shown in {1}.")),
    ),
    "book": (
        SentenceSlot(("author",), ("{0} is a book written by {1}.", "The book {0} was written by {1}.",
                                   "The author of the book {0} is {1}.", "{0} is a book by the author {1}.")),
        SentenceSlot(("publication year",), ("{0} was published in {1}.", "{0} appeared in {1}.",
                                             "The publication year of {0} is {1}.", "The book {0} was first printed in {1}.")),
    ),
    "company": (
        SentenceSlot(("founder", "founding year"), ("{0} is a company founded by {1} in {2}.",
                                                    "{0}, a company, was founded by {1} in {2}.",
                                                    "The company {0} was founded in {2} by {1}.",
                                                    "The founder of {0} is {1}, and the founding year is {2}.")),
        SentenceSlot(("headquarters",), ("{0} is based in {1}.", "{0} has its headquarters in {1}.",
                                         "The headquarters of {0} are in {1}.", "The city where {0} is based is {1}.")),
    ),
    "city": (
        SentenceSlot(("country", "founding year"), ("{0} is a city in {1}, founded in {2}.",
                                                    "{0}, a city in {1}, was founded in {2}.",
                                                    "The city of {0} in {1} was founded in {2}.",
                                                    "The country of {0} is {1}, and the founding year of the city is {2}.")),
        SentenceSlot(("mayor",), ("The mayor of {0} is {1}.", "The mayor of the city of {0} is {1}.",
                                  "{0} is governed by the mayor {1}.", "{0} has the mayor {1}.")),
    ),
    "person": (
        SentenceSlot(("birth year", "birthplace"), ("{0} was born in {1} in {2}.", "{0} was born in {2} in the year {1}.",
                                                    "The birthplace of {0} is {2}, and the birth year is {1}.",
                                                    "{0} was born in the city of {2} in {1}.")),
        SentenceSlot(("spouse",), ("{0} is married to {1}.", "The spouse of {0} is {1}.",
                                   "{0} is the spouse of {1}.", "{0} married {1}.")),
        SentenceSlot(("employer",), ("{0} works for {1}.", "{0} is employed by {1}.",
                                     "The employer of {0} is {1}.", "{0} has a job at {1}.")),
    ),
}  # fmt: skip
"""The sentences of the passages of each type. A passage may start with any of them and continues cyclically."""

SLOT_OF = {
    (entity_type, name): i
    for entity_type, slots in SENTENCE_SLOTS.items()
    for i, slot in enumerate(slots)
    for name in slot.relations
}
"""Index of the slot that states a relation, by (subject type, relation)."""

TEMPLATES_PER_SLOT = 4
"""Number of templates of each slot."""
