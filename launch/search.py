"""Searches an index: `python launch/search.py --index=FOLDER [--encoder=FOLDER] [--k=5] [--html=FILE] "query" ...`.

With `--questions=FILE --k=1,5,20 [--by=hops]` instead of queries, it prints how well the index finds the gold passages.
"""

import sys
from collections.abc import Sequence

from absl import flags

from rrl.errors import UserError
from rrl.runs import launcher

_INDEX = flags.DEFINE_string(
    "index", None, "Folder that launch/build_index.py wrote, or the http address of a service."
)
_ENCODER = flags.DEFINE_string("encoder", None, "Folder of the encoder that built the index.")
_FORM = flags.DEFINE_enum(
    "form", "search-r1", ["search-r1", "flashrag", "r1-searcher"], "Protocol of the service."
)
_K = flags.DEFINE_list(
    "k", ["5"], "Passages per query; with --questions, the ranks at which recall is measured."
)
_QUESTIONS = flags.DEFINE_string(
    "questions", None, "File of questions with gold ids, gold titles or answers, to measure recall on."
)
_BY = flags.DEFINE_enum(
    "by", None, ["kind", "hops"], "With --questions: group the table by kind or by number of hops."
)
_HTML = flags.DEFINE_string("html", None, "HTML file to write instead of printing.")
flags.mark_flags_as_required(["index"])


def _parse_ks(texts: Sequence[str]) -> list[int]:
    """Return the values of --k. Raises UserError for anything but positive whole numbers."""
    if not texts or not all(text.strip().isdecimal() and int(text) > 0 for text in texts):
        raise UserError(f"--k={','.join(texts)} must be whole numbers from 1 on, such as 5 or 1,5,20")
    return list(map(int, texts))


def main(argv: Sequence[str]) -> None:
    """Search and print, or measure retrieval."""
    from rrl.report.search_results import as_text, write_page
    from rrl.retrieval.index import open_with_encoder
    from rrl.retrieval.remote import open_remote

    queries, ks = list(argv[1:]), _parse_ks(_K.value or [])
    if _QUESTIONS.value and (queries or _HTML.value):
        raise UserError("--questions reads the queries from a file; leave out queries and --html")
    if _BY.value and not _QUESTIONS.value:
        raise UserError("--by groups the questions of --questions; give --questions too")
    if not queries and not _QUESTIONS.value:
        raise UserError('no query: give at least one after the flags, such as "capital of Norway"')
    index = _INDEX.value or ""
    remote = index.startswith("http")
    unused_flags = (_ENCODER,) if remote else (_FORM,)
    for flag in unused_flags:
        if flag.present:
            raise UserError(f"--{flag.name} does not apply to --index={index}; leave it out")
    retriever = open_remote(index, _FORM.value) if remote else open_with_encoder(index, _ENCODER.value)
    if _QUESTIONS.value:
        from rrl.data.questions import lacks_answers, load_questions
        from rrl.eval.retrieval_report import retrieval_report

        # Files of retrieval benchmarks have gold ids and no answers.
        questions = load_questions(_QUESTIONS.value, answers_optional=lacks_answers(_QUESTIONS.value))
        print(retrieval_report(retriever, questions, ks, _BY.value or "").as_text())
        return
    if len(ks) > 1:
        raise UserError(f"--k={','.join(_K.value or [])}: several numbers need --questions; give one")
    hits = retriever.search(queries, ks[0])
    if _HTML.value:
        try:
            write_page(_HTML.value, queries, hits, f"{retriever.kind} index {index}")
        except OSError as error:
            raise UserError(
                f"--html={_HTML.value}: cannot be written ({error}); give another file"
            ) from error
        print(_HTML.value)
    else:
        print(as_text(queries, hits))
    print(retriever.stats, file=sys.stderr)


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
