"""A `Retriever` over an HTTP search service (see `wire` for the formats)."""

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
from rrl.retrieval.wire import FORMS, parse_response, request_body

log = logging.getLogger(__name__)

TIME_OUT = 30.0
"""Default time limit of connecting to a service and of each read of its answer, in seconds."""


class RemoteIndex:
    """An index behind a search service, or behind several that serve one shard of the corpus each; their rankings are merged.

    Every passage that a service has returned stays in memory, about a kilobyte each. The ids in a ranking are
    positions in `passages`.
    """

    kind = "http"
    needs_embeddings = False

    def __init__(self, urls: Sequence[str], form: str = "search-r1", time_out: float = TIME_OUT):
        """Make an index over the services at `urls`.

        Args:
          urls: addresses of the services, with or without the path of `form`.
          form: name of the format of requests and answers, one of `FORMS`.
          time_out: time limit of connecting and of each read of an answer, in seconds.

        Raises UserError for an unknown form, or a url that is not http or https.
        """
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
        """Number of documents left out because they had neither title nor text."""
        self._positions: dict[Passage, int] = {}
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], k: int, embeddings: None = None) -> Ranking:
        """Merge the rankings of the services by score; equal scores keep the order of `urls`.

        Raises OSError if a service does not answer, and ValueError if its answer has another format.
        """

        def ask(url: str) -> list[list[tuple[Passage, float]]]:
            answer = parse_response(
                self.form, self._post(url, request_body(self.form, queries, k)), len(queries)
            )
            self._count_skipped(url, sum(hit is None for row in answer for hit in row))
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
                    position = self._positions.setdefault(passage, len(self.passages))
                    ids[row, column], scores[row, column] = position, score
                    if position == len(self.passages):
                        self.passages.append(passage)
        return ids, scores

    def _count_skipped(self, url: str, skipped: int) -> None:
        with self._lock:
            is_first = skipped > 0 and self.skipped == 0
            self.skipped += skipped
        if is_first:
            log.warning(
                "%s returned a document with neither title nor text; such documents are left out", url
            )

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        # A Python string may hold a lone surrogate; ASCII escapes can represent it.
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers), timeout=self.time_out
            ) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                reply_text = error.read(200).decode("utf-8", "replace")
            raise OSError(f"{url} answered {error.code} {error.reason}: {reply_text}") from error
        except urllib.error.URLError as error:
            raise OSError(f"{url} does not answer: {error.reason}") from error


def open_remote(url: str, form: str = "search-r1", retry_policy: RetryPolicy | None = None) -> Retriever:
    """Return a retriever over the service at `url`. No request is sent yet.

    Args:
      url: address of the service; or several, separated by commas, of the shards of one corpus (`BuildOptions.shard`).
      form: the format of requests and answers, one of `FORMS`.
      retry_policy: None: a failed search is tried three times in all.

    Raises UserError for an unknown form, or a url that is not http or https.
    """
    retry_policy = retry_policy or RetryPolicy(retries=2)
    index = RemoteIndex(url.split(","), form, retry_policy.time_out or TIME_OUT)
    return Retriever(index.passages, index, retry_policy=retry_policy)
