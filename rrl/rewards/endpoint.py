"""A model behind an OpenAI-compatible endpoint, with concurrent requests, retries and a cache. Read `Endpoint.replies` first.

Replies are cached on disk. The cache key is a hash of the request, so a resumed or repeated run does not send an equal request
again.
"""

import http.client
import logging
import pathlib
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from rrl.errors import UserError
from rrl.parallel.gather import gather_objects
from rrl.rewards.chat_requests import (
    SETTING_REFUSAL_CODES,
    ChatClient,
    EndpointReply,
    HttpStatusError,
    PromptRefused,
    describe_failure,
    request_body,
)
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rewards.reply_cache import ReplyCache
from rrl.stopping import ServiceUnavailable, on_stop
from rrl.text.chat import Prompt

log = logging.getLogger(__name__)

TRANSIENT_STATUSES = (408, 409, 425, 429)
"""HTTP statuses below 500 that are retried. All statuses from 500 on are retried too."""
MIN_REFUSED_PROMPTS = 8
"""If at least this many prompts were sent, the service refused all of them, and no prompt was answered from the cache,
UserError is raised: the settings must be wrong."""


class Endpoint:
    """Answers prompts like `rrl.rewards.reader.Reader`, by requests to a service."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.client = ChatClient(config)
        self.cache = ReplyCache(pathlib.Path(config.cache or "~/.cache/rrl/answers").expanduser())
        self.sent = self.cached = self.refused = 0
        """Number of prompts of this process that were sent, answered from the cache, and refused by the service."""
        self._last_refusal = ""
        """The message of the last refused prompt."""
        self._warned = False
        """Whether the current call has logged a failed attempt."""
        self._lock = threading.Lock()

    def answers(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """Return the answer to each prompt, in order; "" if the service refuses the prompt or the answer was truncated.

        A truncated answer is not used, because the complete one may reach another conclusion. Raises the errors of `replies`.
        """
        return ["" if reply.truncated else reply.text for reply in self.replies(prompts)]

    def replies(self, prompts: Sequence[str | Prompt]) -> list[EndpointReply]:
        """Return the reply to each prompt, in order; its flags state whether it was truncated or refused.

        Equal prompts are sent once. With several processes each one sends a part of the prompts, and all get every reply.

        Raises:
          UserError: the service refuses every prompt, or the request (key, model, address, unsupported setting).
          ServiceUnavailable: the service does not answer after all retries, or the run must stop (`rrl.stopping`).
        """
        distinct = list(dict.fromkeys(prompts))
        rank, count = jax.process_index(), jax.process_count()
        own_prompts = distinct[rank::count]
        own_replies: list[EndpointReply] = []
        errors: list[Exception] = []
        stop = threading.Event()
        self._warned = False

        def answer_or_stop(prompt: str | Prompt) -> EndpointReply:
            try:
                return self._cached_or_sent(prompt, stop)
            except Exception as failure:
                errors.append(failure)
                stop.set()  # the other prompts must not keep trying
                return EndpointReply()

        with on_stop(stop.set), ThreadPoolExecutor(max(1, self.config.concurrency // count)) as pool:
            try:
                own_replies = list(pool.map(answer_or_stop, own_prompts))
            finally:
                stop.set()
        if not errors and self.refused == self.sent >= MIN_REFUSED_PROMPTS and not self.cached:
            errors.append(
                UserError(
                    f"{self._last_refusal}; all {self.sent} prompts were refused: check model={self.config.model!r}, "
                    f"answer_tokens={self.config.answer_tokens} and temperature={self.config.temperature}"
                )
            )
        error = errors[0] if errors else None
        parts = gather_objects((dict(zip(own_prompts, own_replies)), error and repr(error)))
        if error is not None:
            raise error
        if remote_errors := [message for _, message in parts if message]:
            raise ServiceUnavailable(
                f"a request to {self.config.url} failed in another process: {remote_errors[0]}"
            )
        replies = {prompt: reply for part, _ in parts for prompt, reply in part.items()}
        return [replies[prompt] for prompt in prompts]

    def _cached_or_sent(self, prompt: str | Prompt, stop: threading.Event) -> EndpointReply:
        """Return the reply from the cache, or send the prompt and cache the reply."""
        body = request_body(self.config, prompt)
        if (reply := self.cache.read(body)) is not None:
            with self._lock:
                self.cached += 1
            return reply
        with self._lock:
            self.sent += 1
        reply = self._send_with_retries(body, stop)
        if reply.refused:
            with self._lock:
                self.refused += 1
        elif reply.text or reply.truncated:  # an empty reply is not cached: it may be a passing fault
            self.cache.write(body, reply)
        return reply

    def _send_with_retries(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """Send a request until there is a reply or the prompt is refused."""
        config = self.config
        message = ""
        for attempt in range(config.retries + 1):
            if stop.is_set():
                raise ServiceUnavailable(
                    f"{config.url}: given up, because another prompt failed or the run must stop"
                )
            retry_after: float | None = None
            try:
                return self.client.send(body, stop)
            except PromptRefused as refusal:
                return self._record_refusal(str(refusal))
            except HttpStatusError as error:
                message, retry_after = str(error), error.retry_after
                if error.refuses_prompt:
                    return self._record_refusal(message)
                if error.status < 500 and error.status not in TRANSIENT_STATUSES:
                    raise self._request_error(error) from None
            except UserError:
                raise
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as failure:
                message = self.client.hide_key(f"{config.url}: {describe_failure(failure)}")
            if attempt < config.retries and not stop.is_set():
                self._warn_once(message)
                backoff = config.backoff * 2**attempt * random.uniform(0.75, 1.25)
                # "Retry-After: 0" or a past date must not replace the backoff, or all attempts would happen at once.
                stop.wait(min(retry_after or backoff, config.max_backoff))
        raise ServiceUnavailable(
            f"{message} (after {attempt + 1} attempts); check the address and the service of model={config.model!r}. The "
            "answers received so far are cached"
        )

    def _warn_once(self, message: str) -> None:
        """Log the first failed attempt of the current call of `replies`."""
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            log.warning("%s; up to %d attempts follow", message, self.config.retries)

    def _request_error(self, error: HttpStatusError) -> UserError:
        """Return the error for a request that the service refuses whatever the prompt."""
        config, settings = self.config, ""
        if error.code in SETTING_REFUSAL_CODES:
            settings = f", temperature={config.temperature}, seed={config.seed}, thinking={config.thinking}"
        return UserError(
            f"{error}; check the address, model={config.model!r}{settings} and the key in the environment variable "
            f"{config.key_variable}"
        )

    def _record_refusal(self, message: str) -> EndpointReply:
        """Log a refused prompt; return its reply, which has no text."""
        log.warning("a prompt gets no answer: %s", message)
        self._last_refusal = message
        return EndpointReply(refused=True)
