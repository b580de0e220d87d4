"""Prompts in a chat template: who says what, what is opened for the assistant, and what gives way where room is short."""

import pytest

from rrl.data.tokenizer import load_tokenizer, train_tokenizer
from rrl.errors import UserError
from rrl.text.chat import Prompt, chat_ids, chat_text, fitting_ids, text_ids


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("assets/miniwiki-tokenizer")


def test_a_text_is_what_the_user_says(tokenizer):
    assert chat_text(tokenizer, "Who?") == chat_text(tokenizer, Prompt("Who?"))
    assert chat_text(tokenizer, "Who?").endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")


def test_half_a_character_is_a_question_mark(tokenizer):
    assert chat_ids(tokenizer, "half \ud83d").tolist() == chat_ids(tokenizer, "half ?").tolist()


@pytest.mark.parametrize(
    "asked", [{}, {"padding": "max_length", "max_length": 100}, {"truncation": True, "max_length": 4}]
)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_text_has_all_of_its_tokens_whatever_the_tokenizer_was_asked_before(asked, before, split):
    used, fresh = (load_tokenizer("assets/miniwiki-tokenizer") for _ in range(2))
    text = "<|im_start|>Who lived in a town, and when?\n"
    used.split_special_tokens = before
    used(["a b c d e f g h"], **asked)
    used.split_special_tokens = fresh.split_special_tokens = split
    ids = text_ids(used, text).tolist()
    assert ids == fresh.encode(text, add_special_tokens=False)
    assert (fresh.convert_tokens_to_ids("<|im_start|>") in ids) != split


def test_the_system_speaks_first_and_the_assistants_turn_may_be_opened(tokenizer):
    text = chat_text(tokenizer, Prompt("Who", " did", " it?", system="Be brief.", prefill="<think>"))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho did it?<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )


def test_a_base_model_reads_plain_text_and_needs_no_template():
    tokenizer = train_tokenizer(["who did it"], 300)
    tokenizer.chat_template = None
    prompt = Prompt("Question: who?\n", prefill="<think>", chat=False)
    assert chat_text(tokenizer, prompt) == "Question: who?\n<think>"
    with pytest.raises(UserError, match="has no chat_template"):
        chat_text(tokenizer, Prompt("who?"))


@pytest.mark.parametrize("body", ["old. " * 200 + "new.", "ü" * 300 + "new.", "🙂" * 100 + " new."])
def test_only_the_body_gives_way_and_at_its_front(tokenizer, body):
    prompt = Prompt("Question\n", body, "\nScore:", system="Judge.")
    ids = fitting_ids(tokenizer, prompt, 60)
    text = tokenizer.decode(ids)
    assert 50 < len(ids) <= 60
    assert text.startswith("<|im_start|>system\nJudge.") and "user\nQuestion\n" in text
    assert "new.\nScore:<|im_end|>" in text and "\ufffd" not in text


def test_what_fits_is_left_alone_and_what_cannot_fit_is_cut_at_the_front(tokenizer):
    prompt = Prompt("Question\n", "body", "\nScore:")
    assert fitting_ids(tokenizer, prompt, 100).tolist() == chat_ids(tokenizer, prompt).tolist()
    without = chat_ids(tokenizer, Prompt("Question\n", "", "\nScore:")).tolist()
    assert fitting_ids(tokenizer, prompt, 8).tolist() == without[-8:]
    assert (
        fitting_ids(tokenizer, "a text " * 50, 8).tolist()
        == chat_ids(tokenizer, "a text " * 50).tolist()[-8:]
    )
