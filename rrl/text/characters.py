"""Texts as every tokenizer and every UTF-8 file takes them."""


def whole_characters(text: str) -> str:
    """The text, with "?" for half a surrogate pair, which JSON and Python allow, but no tokenizer and no UTF-8 file takes."""
    return text.encode("utf-8", "replace").decode()
