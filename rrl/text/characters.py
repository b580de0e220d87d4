"""Make texts encodable as UTF-8, and bring them into a canonical Unicode form."""

import html
import re
import unicodedata

_HTML_REFERENCE = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[A-Za-z]\w*);")


def replace_lone_surrogates(text: str) -> str:
    """Replace each lone surrogate by "?". JSON and Python allow them, but tokenizers and UTF-8 files do not."""
    return text.encode("utf-8", "replace").decode()


def canonical_unicode(text: str) -> str:
    """Return the text in NFKC with HTML character references such as `&amp;` resolved.

    In this form, texts from sources that encode the same characters differently compare as equal.
    """
    if "&" in text:
        text = _HTML_REFERENCE.sub(lambda match: html.unescape(match[0]), text)
    return text if text.isascii() else unicodedata.normalize("NFKC", text)
