"""The page of trajectories shows everything, loads nothing, and escapes all text."""

import dataclasses
import re
import time
from html.parser import HTMLParser

import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, Search
from rrl.report.article import HELD_OUT, TRAINING, UNUSED, article, correctness
from rrl.report.trajectories_html import fragment, write_html
from tests.eval.fakes import FakeTokens, direct, malformed, many, spouse, winter
from tests.report.browser import BROWSER, title_of

HOSTILE = "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028\x00"


class Balanced(HTMLParser):
    """Collects texts and tags, and fails on a closing tag without an opening one."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parse(text):
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


@pytest.fixture
def page(tmp_path):
    def write(trajectories, **options):
        write_html(trajectories, tmp_path / "trajectories.html", **options)
        return (tmp_path / "trajectories.html").read_text()

    return write


def test_page_is_self_contained(page):
    text = page(many(8), title="R-Search")
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", text.replace("// The list", ""))
    assert "default-src 'none'" in text
    parsed = parse(text)
    assert not [attrs for tag, attrs in parsed.tags if "src" in attrs or tag in ("link", "iframe", "img")]


def test_an_article_shows_question_answers_rewards_and_searches():
    words = " ".join(parse(article(spouse())).words)
    for expected in (
        *(
            "Who is the spouse of the director of Silver Harbour?",
            "Maren Tolvik-Asch",
            "Edda Tolvik",
            "partly right",
        ),
        *(
            "two hop",
            "gave an answer",
            "director of Silver Harbour",
            "Harbour Lights",
            "not found: Jonas Asch",
        ),
        *("1.40", "0.50", "1 of 2 gold passages found", "sampled"),
    ):
        assert expected in words


def test_gold_titles_are_marked_and_others_not():
    marked = re.findall(r'<span class="gold(?: again)?">(.*?)</span>', article(spouse()))
    assert marked == ["Silver Harbour", "Silver Harbour"]


def test_only_policy_text_is_shaded_as_sampled():
    text = article(winter())
    assert len(re.findall(r"class='segment|class=\"segment", text)) == 5 + 4 + 4 + 1 + 1
    assert not re.search(r"(observation|message|prompt) sampled", text)
    assert "observation given" in text and "reasoning sampled" in text


@pytest.mark.parametrize(("source", "trained"), [("", 0), (HELD_OUT, 0), (TRAINING, 1), (UNUSED, 0)])
def test_only_training_trajectories_are_labelled_as_trained_on(source, trained):
    text = article(winter(), source=source)
    assert text.count("trained on") == trained
    assert text.count(f'<span class="chip">{source}</span>') == bool(source)
    assert "trained on" not in fragment(winter())


def test_a_page_is_filtered_by_source(page):
    text = page(many(3), sources=[HELD_OUT, TRAINING, UNUSED])
    (box,) = re.findall(r'<select data-field="source".*?</select>', text)
    assert re.findall(r'<option value="(.*?)">', box) == ["", HELD_OUT, TRAINING, UNUSED]
    assert re.findall(r'id="t\d" data-source="(.*?)"', text) == [HELD_OUT, TRAINING, UNUSED]
    assert 'data-field="source"' not in page(many(3))
    with pytest.raises(ValueError, match="zip"):
        page(many(3), sources=[HELD_OUT])


def test_tokens_show_their_log_probability():
    tokens = FakeTokens()
    trajectory = winter(tokens=tokens)
    text = article(trajectory, token_bytes=tokens.bytes)
    assert f'title="{trajectory.logps.min():.2f}"' in text


def test_markup_in_texts_is_escaped(page):
    question = Question(HOSTILE, HOSTILE, (HOSTILE,), HOSTILE, (HOSTILE,))
    evil = dataclasses.replace(
        direct(),
        question=question,
        segments=[
            (POLICY, f"{HOSTILE}<search>{HOSTILE}</search>"),
            (ENVIRONMENT, f"(Title: {HOSTILE}) {HOSTILE}"),
        ],
        searches=[Search(0, HOSTILE, (HOSTILE,))],
        answer=HOSTILE,
        evidence=HOSTILE,
        reader_answer=HOSTILE,
        ended=HOSTILE,
        rewards={HOSTILE: 1.0},
        metrics={"em": 0.0, HOSTILE: 0.0},
    )
    text = page([evil], title=HOSTILE, sources=[HOSTILE])
    tags = [tag for tag, _ in parse(text).tags]
    assert tags.count("script") == 1 and "img" not in tags
    assert not [name for _, attrs in parse(text).tags for name in attrs if name.startswith("on")]


def test_a_page_of_500_trajectories_is_small_and_fast_to_write(page):
    tokens = FakeTokens()
    trajectories = many(500, tokens)
    start = time.process_time()
    text = page(trajectories, token_bytes=tokens.bytes)
    assert time.process_time() - start < 10
    assert len(text) < 6_000_000
    assert text.count("<article>") == 500


def test_a_page_without_trajectories_is_valid(page):
    parse(page([]))


def test_correctness_is_right_partly_wrong_or_unscored():
    assert [correctness(make()) for make in (winter, spouse, malformed, direct)] == [
        "right",
        "partly",
        "wrong",
        "wrong",
    ]
    assert correctness(dataclasses.replace(direct(), metrics={})) == "unscored"


def test_a_fragment_is_one_styled_trajectory_without_script():
    tags = [tag for tag, _ in parse(fragment(direct())).tags]
    assert tags.count("article") == 1 and "style" in tags and "script" not in tags


def rules(css):
    """Return (selector, declarations) of each rule, including those in media queries."""
    return [(selector.strip(), body) for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css)]


def test_a_fragment_resets_the_styles_of_its_page():
    css = re.search(r"<style>(.*?)</style>", fragment(winter()), re.DOTALL)[1]
    (first, body), *others = rules(css)
    assert first == ".rrl.rrl.rrl *" and body.strip() == "all: revert;"
    selectors = [part for selector, _ in others for part in selector.split(",")]
    assert all(".rrl.rrl.rrl.rrl" in part for part in selectors), selectors


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_fragment_follows_the_theme_of_its_notebook(theme):
    css = re.search(r"<style>(.*?)</style>", fragment(winter()), re.DOTALL)[1]
    paper = {"light": "#fbfaf8", "dark": "#17181a"}[theme]
    mark = f'[data-jp-theme-light="{str(theme == "light").lower()}"]'
    assert any(mark in selector and paper in body for selector, body in rules(css))


NOTEBOOK = """<body data-jp-theme-light="%s"><style>
.jp-RenderedHTMLCommon { color: red; line-height: 3; }
.jp-RenderedHTMLCommon dt { float: left; clear: left; width: 1em; }
.jp-RenderedHTMLCommon table { table-layout: fixed; width: 4em; border: 9px solid red; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: red; }
.jp-RenderedHTMLCommon td { text-align: right; max-width: 1em; padding: 2em; }
.jp-RenderedHTMLCommon h2 { margin: 4em; font-size: 60px; }
</style><div class="%s">%s</div><script>
document.title = JSON.stringify([...document.querySelectorAll(".rrl *")].map(part => {
  const style = getComputedStyle(part), box = part.getBoundingClientRect();
  return [part.tagName, style.color, style.backgroundColor, Math.round(box.width), Math.round(box.height)];
}));
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("light", ["true", "false"])
def test_a_fragment_looks_the_same_in_a_notebook_as_alone(tmp_path, light):
    looks = []
    for name in ("jp-RenderedHTMLCommon", "plain"):
        looks.append(title_of(NOTEBOOK % (light, name, fragment(winter())), tmp_path / name))
    assert looks[0] == looks[1]
