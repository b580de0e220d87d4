"""Arguments of config files: types, choices, errors, and names of run folders."""

import pytest

from rrl.config.arguments import parse, run_name
from rrl.errors import UserError


def test_defaults_determine_types():
    arg = parse(
        "steps=2,lr=1e-3,data=a/b=c,size=3b,quick",
        steps=80,
        lr=1.0,
        data="",
        size=("tiny", "3b"),
        quick=False,
    )
    assert (arg.steps, arg.lr, arg.data, arg.size, arg.quick) == (2, 1e-3, "a/b=c", "3b", True)


def test_an_argument_declared_by_its_type_defaults_to_none():
    assert parse("", steps=int).steps is None
    assert parse("steps=-5", steps=int).steps == -5
    with pytest.raises(UserError, match=r"steps='x'.*whole number"):
        parse("steps=x", steps=int)
    with pytest.raises(UserError, match="defaults: steps=, seed=0"):
        parse("step=1", steps=int, seed=0)


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_text_gives_the_defaults(empty):
    arg = parse(empty, steps=80, size=("tiny", "3b"), quick=True)
    assert (arg.steps, arg.size, arg.quick) == (80, "tiny", True)


def test_a_choice_keeps_its_type():
    assert parse("bits=8", bits=(4, 8)).bits == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step=2", ["'step'", "'steps'", "size=tiny"]),
        ("steps=2.5", ["steps", "'2.5'", "whole number"]),
        ("steps", ["steps=VALUE"]),
        ("size=4b", ["size", "'4b'", "tiny, 3b"]),
        ("quick=maybe", ["quick", "'maybe'", "true or false"]),
        ("steps=1,steps=2", ["steps", "twice"]),
    ],
)
def test_the_error_for_a_wrong_argument_names_argument_value_and_what_is_allowed(text, words):
    with pytest.raises(UserError) as error:
        parse(text, steps=80, size=("tiny", "3b"), quick=False)
    assert all(word in str(error.value) for word in words)


def test_a_default_of_an_unsupported_type_raises_type_error():
    with pytest.raises(TypeError):
        parse("", data=None)


def test_a_long_run_name_is_shortened_and_stays_unique():
    assert run_name("eval", "method=rsearch,policy=a/b c") == "eval-method=rsearch-policy=a-b-c"
    longest = "x" * 250
    assert run_name("eval", longest) == f"eval-{longest}"  # 255 bytes
    first, second = (run_name("eval", f"policy={'é/' * 200}{end}") for end in "ab")
    assert first != second and first.startswith("eval-policy=é-é-")
    assert all(250 <= len(name.encode()) <= 255 for name in (first, second))
    assert first == run_name("eval", f"policy={'é/' * 200}a")
