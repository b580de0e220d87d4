"""Search an index: `python launch/search.py --index=FOLDER [--encoder=FOLDER] [--k=5] [--html=FILE] "query" …`."""

import sys
from collections.abc import Sequence

from absl import flags

from rrl.errors import UserError
from rrl.train import launcher

_INDEX = flags.DEFINE_string(
    "index", None, "Folder that launch/build_index.py wrote, or http://… of a service."
)
_ENCODER = flags.DEFINE_string("encoder", None, "Folder of the encoder it was built with.")
_FORM = flags.DEFINE_enum(
    "form", "search-r1", ["search-r1", "flashrag", "r1-searcher"], "What a service speaks."
)
_K = flags.DEFINE_integer("k", 5, "Passages for each query.")
_HTML = flags.DEFINE_string("html", None, "File of a page to write in place of printing.")
flags.mark_flags_as_required(["index"])


def main(argv: Sequence[str]) -> None:
    """Searches and prints."""
    from rrl.eval.search_results import as_text, write_page
    from rrl.retrieval.index import open_with_encoder
    from rrl.retrieval.remote import open_remote

    queries = list(argv[1:])
    if not queries:
        raise UserError('no query: give at least one after the flags, such as "capital of Norway"')
    index = _INDEX.value or ""
    remote = index.startswith("http")
    for flag in (_ENCODER,) if remote else (_FORM,):
        if flag.present:
            raise UserError(f"--{flag.name} has no meaning with --index={index}; leave it out")
    retriever = open_remote(index, _FORM.value) if remote else open_with_encoder(index, _ENCODER.value)
    found = retriever.search(queries, _K.value)
    if _HTML.value:
        try:
            write_page(_HTML.value, queries, found, f"{retriever.kind} index {index}")
        except OSError as error:
            raise UserError(
                f"--html={_HTML.value}: cannot be written ({error}); give another file"
            ) from error
        print(_HTML.value)
    else:
        print(as_text(queries, found))
    print(retriever.stats, file=sys.stderr)


if __name__ == "__main__":
    launcher.run(main, callbacks=False)
