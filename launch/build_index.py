"""Builds a search index: `python launch/build_index.py --corpus=FILE --out=FOLDER --retriever=scann --encoder=FOLDER`.

The same command continues a build that was stopped.
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from rrl.errors import UserError
from rrl.runs import launcher

_CORPUS = flags.DEFINE_string(
    "corpus", None, "Corpus: JSONL, JSON, TSV or CSV; plain, gzip or bzip2. See docs/retrieval.md."
)
_OUT = flags.DEFINE_string("out", None, "Folder to write; it must not exist yet.")
_RETRIEVER = flags.DEFINE_enum("retriever", "scann", ["scann", "bm25", "exact"], "Kind of index.")
_ENCODER = flags.DEFINE_string(
    "encoder", None, "Hugging Face folder of the text encoder, for scann and exact."
)
_MEMORY = flags.DEFINE_float(
    "memory_gb", None, "Memory for ScaNN, in 10^9 bytes (default: most of the machine's memory)."
)
_BM25 = flags.DEFINE_enum(
    "bm25",
    "pyserini",
    ["pyserini", "msmarco", "lucene", "bm25s"],
    "BM25: the source whose published k1 and b are used.",
)
_K1 = flags.DEFINE_float("k1", None, "BM25: term saturation; overrides the published value.")
_B = flags.DEFINE_float(
    "b", None, "BM25: strength of the length normalisation; overrides the published value."
)
_TITLE = flags.DEFINE_integer(
    "title_weight", 1, "How often the title is counted; 0: only the text is indexed. Above 1 for BM25 only."
)
_TOKENS = flags.DEFINE_enum(
    "tokens",
    "lucene",
    ["lucene", "whitespace", "words"],
    "BM25: Lucene's English analysis, lower-case words between spaces, or lower-case runs of letters and "
    "digits.",
)
_IDF = flags.DEFINE_enum(
    "idf",
    "lucene",
    ["lucene", "okapi"],
    "BM25: formula of the inverse document frequency, as in Lucene or in rank_bm25's BM25Okapi.",
)
_STEM = flags.DEFINE_bool("stem", True, "BM25: whether words are reduced to their stems.")
_SKIP = flags.DEFINE_bool("skip_broken", False, "Skip and count broken records instead of refusing the file.")
_COLUMNS = flags.DEFINE_list(
    "columns",
    [],
    "Content of each column of a TSV or CSV without a header, such as id,text,title; - skips a column.",
)
_SHARD = flags.DEFINE_string(
    "shard", "0/1", "i/n: index every n-th passage starting with the i-th, for a corpus split over n hosts."
)
flags.mark_flags_as_required(["corpus", "out"])

_FLAGS_BY_KIND = (
    (("bm25",), (_BM25, _K1, _B, _STEM, _TOKENS, _IDF)),
    (("scann", "exact"), (_ENCODER,)),
    (("scann",), (_MEMORY,)),
)
"""(kinds of index, flags that are valid only for these kinds)."""


class StageProgress:
    """Prints a progress line per stage, with passages/s and remaining time, at least every five seconds.

    While the total is unknown, it prints a line every 100,000 passages instead, without the remaining time.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._done_at_start = self._began = 0.0
        self._done, self._total = 0, 0  # a total of 0 is unknown
        self._line: Any = None
        self._lock = threading.Lock()
        threading.Thread(target=self._repeat, name="progress", daemon=True).start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Receive progress; see `rrl.retrieval.build_state.Progress`."""
        with self._lock:
            self._update(stage, done, total)

    def _repeat(self) -> None:
        while True:
            time.sleep(5)
            with self._lock:
                if self._total and self._done < self._total:
                    self._update(self._stage, self._done, self._total)

    def _update(self, stage: str, done: int, total: int) -> None:
        """Store the progress and print a line if one is due."""
        from rrl.runs.progress import Progress

        self._done, self._total = done, total
        if stage != self._stage:
            self._stage, self._done_at_start, self._began = stage, done, time.monotonic()
            self._line = Progress(total, start=done, label=stage, seconds=2)
        rate = (done - self._done_at_start) / max(1e-9, time.monotonic() - self._began)
        if total:
            self._line.update(done, {"passages/s": rate})
        elif done % 100_000 == 0:
            print(f"{stage}: {done} passages/s={rate:.0f}", file=sys.stderr)


def _parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of "i/n"."""
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit()):
        raise UserError(f"--shard={text} must be i/n, such as 0/4")
    return int(part), int(count)


def main(_: Sequence[str]) -> None:
    """Build the index and print its manifest."""
    import dataclasses

    from rrl.retrieval.bm25 import PUBLISHED_K1_B, Bm25Config
    from rrl.retrieval.build import build_index, check_kind
    from rrl.retrieval.build_state import BuildOptions

    assert _CORPUS.value is not None and _OUT.value is not None  # required flags
    for kinds, kind_flags in _FLAGS_BY_KIND:
        for flag in kind_flags:
            if flag.present and _RETRIEVER.value not in kinds:
                raise UserError(
                    f"--{flag.name} does not apply to --retriever={_RETRIEVER.value}, only to {' and '.join(kinds)}; "
                    "leave it out"
                )
    if _RETRIEVER.value != "bm25" and _TITLE.value not in (0, 1):
        raise UserError(
            f"--title_weight={_TITLE.value} must be 0 or 1 with --retriever={_RETRIEVER.value}: an embedding contains the "
            "title once or not at all"
        )
    k1, b = PUBLISHED_K1_B[_BM25.value]
    bm25 = Bm25Config(
        k1 if _K1.value is None else _K1.value,
        b if _B.value is None else _B.value,
        title_weight=_TITLE.value,
        stem=_STEM.value,
        tokens=_TOKENS.value or "lucene",
        idf=_IDF.value or "lucene",
    )
    encoder = None
    if _ENCODER.value:
        import jax

        from rrl.retrieval.encoder_folder import load_text_encoder

        devices = tuple(jax.local_devices())
        encoder = dataclasses.replace(
            load_text_encoder(_ENCODER.value), devices=devices, titles=bool(_TITLE.value)
        )
    check_kind(_RETRIEVER.value, encoder)
    manifest = build_index(
        _CORPUS.value,
        _OUT.value,
        _RETRIEVER.value,
        encoder,
        bm25,
        options=BuildOptions(
            memory_gb=_MEMORY.value,
            on_error="skip" if _SKIP.value else "refuse",
            columns=_COLUMNS.value,
            shard=_parse_shard(_SHARD.value),
        ),
        progress=StageProgress(),
    )
    print(json.dumps(manifest, indent=2))


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
