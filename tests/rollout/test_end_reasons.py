"""Every reason that an episode may end for is named in docs/metrics.md, and has words on a trajectory's page."""

import ast
import importlib
import pathlib
import re

from rrl.report.article import ENDINGS, EXPECTED

ROOT = pathlib.Path(__file__).parents[2]


def reasons(file):
    """What a file's code gives to `Finish`, `Scheduler._finish` or an outcome's `ended`: texts, and constants that are texts."""
    found = set()
    for call in ast.walk(ast.parse(file.read_text())):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        said = {"Finish": call.args, "_finish": call.args[2:], "Outcome": call.args[3:]}.get(name, [])
        said = [*said, *(keyword.value for keyword in call.keywords if keyword.arg in ("reason", "ended"))]
        for node in [node for part in said for node in ast.walk(part)]:
            if isinstance(node, ast.Constant):
                found.add(node.value)
            if isinstance(node, ast.Name) and node.id.isupper():
                module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
                found.add(getattr(module, node.id))
    return {
        text for text in found if re.fullmatch(r"\w+", str(text))
    }  # not EOS and its like, which choose among them


def test_every_reason_is_in_the_table_and_has_words():
    files = [
        file
        for file in (ROOT / "rrl").rglob("*.py")
        if "Finish(" in file.read_text() or "_finish(" in file.read_text()
    ]
    given = set().union(*map(reasons, [*files, ROOT / "rrl/recipes/prompted/base.py"]))
    table = (ROOT / "docs/metrics.md").read_text().partition("## How an episode ends")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == given
    assert {"answer", "length", "stop", "context_limit", "eos"} <= given  # from several forms of code
    assert ENDINGS.keys() == given - {"eos"} and set(EXPECTED) < given
