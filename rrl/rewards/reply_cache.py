"""A cache of endpoint replies on disk: one JSON file per request."""

import hashlib
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from rrl.files import write_atomically
from rrl.rewards.chat_requests import EndpointReply

log = logging.getLogger(__name__)


class ReplyCache:
    """Replies by request. Threads and processes may share the folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def file(self, body: Mapping[str, Any]) -> pathlib.Path:
        """Return the file of a request. It does not depend on the address: two services may serve one model."""
        text = json.dumps(body, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.json"

    def read(self, body: Mapping[str, Any]) -> EndpointReply | None:
        """Return the reply to a request; None if its file is missing or broken."""
        try:
            stored = json.loads(self.file(body).read_text(encoding="utf-8"))
            text, truncated = stored["answer"], stored["cut"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if isinstance(text, str) and isinstance(truncated, bool):
            return EndpointReply(text, truncated)
        return None

    def write(self, body: Mapping[str, Any], reply: EndpointReply) -> None:
        """Store the reply to a request, atomically: other processes may write the same file. Log a warning if that fails."""
        file = self.file(body)
        stored = {"model": body["model"], "answer": reply.text, "cut": reply.truncated}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(stored))
        except OSError as error:
            log.warning("cannot write to the cache %s: %s", file.parent, error)
