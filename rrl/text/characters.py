"""Texts as every tokenizer and every UTF-8 file takes them, and texts in one Unicode form."""

import html
import re
import unicodedata

_REFERENCE = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[A-Za-z]\w*);")


def replace_lone_surrogates(text: str) -> str:
    """The text, with "?" for half a surrogate pair, which JSON and Python allow, but no tokenizer and no UTF-8 file takes."""
    return text.encode("utf-8", "replace").decode()


def canonical_unicode(text: str) -> str:
    """The text in NFKC, HTML character references such as `&amp;` resolved: what is compared where two texts may come from
    sources that write the same characters otherwise."""
    if "&" in text:
        text = _REFERENCE.sub(lambda found: html.unescape(found[0]), text)
    return text if text.isascii() else unicodedata.normalize("NFKC", text)
