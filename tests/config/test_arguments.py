"""String arguments of configs are strict and typed."""

import pytest

from rrl.config.arguments import parse, run_name
from rrl.errors import UserError


def test_defaults_fix_types():
    arg = parse(
        "steps=2,lr=1e-3,data=a/b=c,size=3b,quick",
        steps=80,
        lr=1.0,
        data="",
        size=("tiny", "3b"),
        quick=False,
    )
    assert (arg.steps, arg.lr, arg.data, arg.size, arg.quick) == (2, 1e-3, "a/b=c", "3b", True)


def test_a_type_alone_is_none_unless_given():
    assert parse("", steps=int).steps is None
    assert parse("steps=-5", steps=int).steps == -5
    with pytest.raises(UserError, match=r"steps='x'.*whole number"):
        parse("steps=x", steps=int)
    with pytest.raises(UserError, match="defaults: steps=, seed=0"):
        parse("step=1", steps=int, seed=0)


@pytest.mark.parametrize("empty", ["", None])
def test_no_argument_gives_the_defaults(empty):
    arg = parse(empty, steps=80, size=("tiny", "3b"), quick=True)
    assert (arg.steps, arg.size, arg.quick) == (80, "tiny", True)


def test_choices_keep_their_type():
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
def test_wrong_argument_names_itself_its_value_and_what_is_allowed(text, words):
    with pytest.raises(UserError) as error:
        parse(text, steps=80, size=("tiny", "3b"), quick=False)
    assert all(word in str(error.value) for word in words)


def test_default_of_unknown_type_is_a_mistake_of_the_config():
    with pytest.raises(TypeError):
        parse("", data=None)


def test_a_name_that_is_too_long_is_shortened_and_stays_one_arguments_own():
    assert run_name("eval", "method=rsearch,policy=a/b c") == "eval-method=rsearch-policy=a-b-c"
    longest = "x" * 250
    assert run_name("eval", longest) == f"eval-{longest}"  # 255 bytes
    first, second = (run_name("eval", f"policy={'é/' * 200}{end}") for end in "ab")
    assert first != second and first.startswith("eval-policy=é-é-")
    assert all(250 <= len(name.encode()) <= 255 for name in (first, second))
    assert first == run_name("eval", f"policy={'é/' * 200}a")
