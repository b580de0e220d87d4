"""Tests of prompts in chat templates: messages, prefills, truncation and errors."""

import pytest

from rrl.errors import UserError
from rrl.models.tokenizer import load_tokenizer, train_tokenizer
from rrl.text.chat import (
    Prompt,
    chat_ids,
    chat_text,
    end_of_turn,
    fitting_ids,
    template_adds_think_tag,
    trailing_think_tag,
)
from rrl.text.encoding import text_ids


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("assets/miniwiki-tokenizer")


def test_a_plain_string_is_the_user_message(tokenizer):
    assert chat_text(tokenizer, "Who?") == chat_text(tokenizer, Prompt("Who?"))
    assert chat_text(tokenizer, "Who?").endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")


def test_a_lone_surrogate_is_encoded_as_a_question_mark(tokenizer):
    assert chat_ids(tokenizer, "half \ud83d").tolist() == chat_ids(tokenizer, "half ?").tolist()


@pytest.mark.parametrize(
    "earlier", [{}, {"padding": "max_length", "max_length": 100}, {"truncation": True, "max_length": 4}]
)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_encoding_ignores_truncation_and_padding_of_earlier_calls(earlier, before, split):
    used, fresh = (load_tokenizer("assets/miniwiki-tokenizer") for _ in range(2))
    text = "<|im_start|>Who lived in a town, and when?\n"
    used.split_special_tokens = before
    used(["a b c d e f g h"], **earlier)
    used.split_special_tokens = fresh.split_special_tokens = split
    ids = text_ids(used, text).tolist()
    assert ids == fresh.encode(text, add_special_tokens=False)
    assert (fresh.convert_tokens_to_ids("<|im_start|>") in ids) != split


def test_a_prompt_may_have_a_system_message_and_a_prefill(tokenizer):
    text = chat_text(tokenizer, Prompt("Who", " did", " it?", system="Be brief.", prefill="<think>"))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho did it?<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )


def test_a_prompt_without_chat_needs_no_template():
    tokenizer = train_tokenizer(["who did it"], 300)
    tokenizer.chat_template = None
    prompt = Prompt("Question: who?\n", prefill="<think>", chat=False)
    assert chat_text(tokenizer, prompt) == "Question: who?\n<think>"
    with pytest.raises(UserError, match="has no chat_template"):
        chat_text(tokenizer, Prompt("who?"))


@pytest.mark.parametrize("body", ["old. " * 200 + "new.", "ü" * 300 + "new.", "🙂" * 100 + " new."])
def test_a_long_prompt_is_truncated_at_the_front_of_its_body(tokenizer, body):
    prompt = Prompt("Question\n", body, "\nScore:", system="Judge.")
    ids = fitting_ids(tokenizer, prompt, 60)
    text = tokenizer.decode(ids)
    assert 50 < len(ids) <= 60
    assert text.startswith("<|im_start|>system\nJudge.") and "user\nQuestion\n" in text
    assert "new.\nScore:<|im_end|>" in text and "\ufffd" not in text


def test_a_prompt_that_fits_is_unchanged_and_one_without_body_loses_its_first_tokens(tokenizer):
    prompt = Prompt("Question\n", "body", "\nScore:")
    assert fitting_ids(tokenizer, prompt, 100).tolist() == chat_ids(tokenizer, prompt).tolist()
    without = chat_ids(tokenizer, Prompt("Question\n", "", "\nScore:")).tolist()
    assert fitting_ids(tokenizer, prompt, 8).tolist() == without[-8:]
    assert (
        fitting_ids(tokenizer, "a text " * 50, 8).tolist()
        == chat_ids(tokenizer, "a text " * 50).tolist()[-8:]
    )


OPENING = "<|im_start|>assistant\n"


@pytest.fixture
def changed():
    """A fresh tokenizer whose template a test may change."""
    return load_tokenizer("assets/miniwiki-tokenizer")


def test_special_token_names_in_messages_are_plain_text(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    named = Prompt("Who<|im_end|>?", "a\ufdd0<|im_start|>b", "c", system="Be <|im_end|> brief.", prefill="So")
    ids = chat_ids(tokenizer, named).tolist()
    assert ids.count(end) == 2, "only the two of the template"
    assert tokenizer.decode(ids) == chat_text(tokenizer, named)
    assert tokenizer.decode(fitting_ids(tokenizer, named, len(ids) - 2)).count("<|im_end|>") == 4
    for prompt in (Prompt(named.before, chat=False), Prompt("|im_end|>", system="a<", chat=False)):
        assert end not in chat_ids(tokenizer, prompt)
    assert chat_ids(tokenizer, Prompt("Who<|im_", "end", "|>")).tolist().count(end) == 1, (
        "also if a name spans two parts"
    )


def test_a_prompt_without_special_token_names_has_the_ids_of_its_text(tokenizer):
    prompt = Prompt("Who?", "text", system="Be brief.", prefill="<think>")
    expected = tokenizer.encode(chat_text(tokenizer, prompt), add_special_tokens=False)
    assert chat_ids(tokenizer, prompt).tolist() == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message here') }}{% endif %}",
        "{% set messages = messages | selectattr('role', 'ne', 'system') | list %}",
    ],
)
def test_a_template_without_system_messages_gets_the_text_in_the_user_message(changed, template):
    changed.chat_template = template + changed.chat_template
    text = chat_text(changed, Prompt("Who?", system="Be brief."))
    assert text == f"<|im_start|>user\nBe brief.\n\nWho?<|im_end|>\n{OPENING}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ({"rag": "x", "tool_use": "x"}, "multiple chat templates"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% if %}", "Syntax"),
        ("{{ messages[7]['content'] }}", "Undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_every_template_error_names_the_folder_and_the_fix(changed, template, reason):
    changed.chat_template = template
    with pytest.raises(UserError, match=rf"miniwiki-tokenizer'.*{reason}.*Fix chat_template.jinja") as caught:
        chat_text(changed, Prompt("Who?", system="Be brief."))
    assert "\n" not in str(caught.value)


def test_a_thought_is_not_opened_twice_by_template_and_prefill(changed):
    assert not template_adds_think_tag(changed, "Who?")
    changed.chat_template = changed.chat_template.replace("assistant\n'", "assistant\n<think>\n'")
    for prompt in (Prompt("Who?"), Prompt("Who?", prefill="<think>")):
        assert chat_text(changed, prompt).endswith(f"{OPENING}<think>\n")
    assert template_adds_think_tag(changed, "Who?") and not template_adds_think_tag(
        changed, Prompt("", prefill="<think>")
    )
    assert chat_text(changed, Prompt("Who?", prefill="Answer:")).endswith(f"{OPENING}<think>\nAnswer:")
    assert [trailing_think_tag(text) for text in ("x<think>\n", "<think> x", "<think>\n\n</think>\n\n")] == [
        "<think>\n",
        "",
        "",
    ]


def test_end_of_turn_is_the_token_after_the_assistant_message(changed):
    assert changed.convert_ids_to_tokens(end_of_turn(changed)) == "<|im_end|>"
    for template in (
        None,
        "{{ raise_exception('x') }}",
        "{{ messages[0]['content'] }}",
        "{{ 'Yes.\\nUser:' }}",
    ):
        changed.chat_template = template
        assert end_of_turn(changed) is None
