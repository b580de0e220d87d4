"""docs/metrics.md lists every reason for the end of an episode, and trajectory pages have a text for each."""

import ast
import importlib
import pathlib
import re

from rrl.report.article import ENDINGS, NORMAL_ENDINGS

ROOT = pathlib.Path(__file__).parents[2]


def reasons(file):
    """Return the end reasons in a file: what it passes to `Finish`, `Scheduler._finish` or `ended`, as string or constant."""
    texts = set()
    for call in ast.walk(ast.parse(file.read_text())):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        values = {"Finish": call.args, "_finish": call.args[2:], "Outcome": call.args[3:]}.get(name, [])
        values = [
            *values,
            *(keyword.value for keyword in call.keywords if keyword.arg in ("reason", "ended")),
        ]
        for node in [node for value in values for node in ast.walk(value)]:
            if isinstance(node, ast.Constant):
                texts.add(node.value)
            if isinstance(node, ast.Name) and node.id.isupper():
                module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
                texts.add(getattr(module, node.id))
    return {
        text for text in texts if re.fullmatch(r"\w+", str(text))
    }  # not EOS and the other pauses, from which environments choose a reason


def test_every_end_reason_is_documented_and_has_a_text_on_the_page():
    files = [
        file
        for file in (ROOT / "rrl").rglob("*.py")
        if "Finish(" in file.read_text() or "_finish(" in file.read_text()
    ]
    given = set().union(*map(reasons, [*files, ROOT / "rrl/recipes/prompted/base.py"]))
    table = (ROOT / "docs/metrics.md").read_text().partition("## How an episode ends")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == given
    assert {
        "answer",
        "length",
        "stop",
        "context_limit",
        "eos",
    } <= given  # one for each form of code that is searched
    assert ENDINGS.keys() == given - {"eos"} and set(NORMAL_ENDINGS) < given
