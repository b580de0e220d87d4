"""A `Retriever` whose index is somebody's HTTP search service (see `wire`)."""

import heapq
import itertools
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rrl.data.passages import Passage
from rrl.errors import UserError, one_of
from rrl.retrieval.ranking import Ranking, empty_ranking
from rrl.retrieval.retriever import Retriever, RetryPolicy
from rrl.retrieval.wire import FORMS, read_answer, request

log = logging.getLogger(__name__)

TIME_OUT = 30.0


class RemoteIndex:
    """Asks a service, or several that hold a part of the corpus each and whose rankings are merged.

    Every passage that was ever returned is kept, about a kilobyte each, and its place is its id here.
    """

    kind = "http"
    needs_embeddings = False

    def __init__(self, urls: Sequence[str], form: str = "search-r1", time_out: float = TIME_OUT):
        self.form = form
        one_of(FORMS, self, "form")
        for url in urls or [""]:
            if not url.startswith(("http://", "https://")):
                raise UserError(
                    f"url={url!r} must begin with http:// or https://, such as http://127.0.0.1:8000"
                )
        path = FORMS[form]
        self.urls = [url if url.endswith(path) else url.rstrip("/") + path for url in urls]
        self.time_out = time_out
        self.passages: list[Passage] = []
        self.skipped = 0
        """Documents left out, which had neither title nor text."""
        self._places: dict[Passage, int] = {}
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], k: int, embeddings: None = None) -> Ranking:
        """As the services rank, equal scores in the order of the services; OSError or ValueError where one does not
        answer, or not in its form.
        """

        def ask(url: str) -> list[list[tuple[Passage, float]]]:
            answer = read_answer(self.form, self._post(url, request(self.form, queries, k)), len(queries))
            self._count(url, sum(hit is None for row in answer for hit in row))
            return [[hit for hit in row if hit is not None] for row in answer]

        with ThreadPoolExecutor(len(self.urls)) as pool:
            answers = list(pool.map(ask, self.urls))
        merged = [
            list(itertools.islice(heapq.merge(*parts, key=lambda hit: -hit[1]), k)) for parts in zip(*answers)
        ]
        ids, scores = empty_ranking(len(queries), max(map(len, merged), default=0))
        with self._lock:
            for row, hits in enumerate(merged):
                for column, (passage, score) in enumerate(hits):
                    ids[row, column] = place = self._places.setdefault(passage, len(self.passages))
                    scores[row, column] = score
                    if place == len(self.passages):
                        self.passages.append(passage)
        return ids, scores

    def _count(self, url: str, skipped: int) -> None:
        with self._lock:
            first, self.skipped = skipped and not self.skipped, self.skipped + skipped
        if first:
            log.warning(
                "%s returned a document with neither title nor text; such documents are left out", url
            )

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        # Half a surrogate pair is legal in Python; ASCII escapes carry it.
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers), timeout=self.time_out
            ) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(200).decode("utf-8", "replace")
            raise OSError(f"{url} answered {error.code} {error.reason}: {said}") from error
        except urllib.error.URLError as error:
            raise OSError(f"{url} does not answer: {error.reason}") from error


def open_remote(url: str, form: str = "search-r1", retry_policy: RetryPolicy | None = None) -> Retriever:
    """A retriever over a service at `url`, of one of the `FORMS`. Nothing is asked of it yet.

    Several addresses with commas between are the parts of one corpus, which `build_index` divides by `shard`.

    Raises UserError for another form or no http address. A search that fails is tried three times unless `retry_policy`
    says otherwise.
    """
    retry_policy = retry_policy or RetryPolicy(retries=2)
    index = RemoteIndex(url.split(","), form, retry_policy.time_out or TIME_OUT)
    return Retriever(index.passages, index, retry_policy=retry_policy)
