"""A model behind an OpenAI-compatible endpoint (POST URL/chat/completions), with concurrent requests, retries and a cache.

Replies are cached on disk. The cache key is a hash of the request, so a resumed or repeated run does not send an equal request
again. The API key is read from an environment variable for each request. It is never stored in an attribute, message, log
or file.
"""

import dataclasses
import email.utils
import hashlib
import http.client
import json
import logging
import os
import pathlib
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from rrl.errors import UserError
from rrl.files import write_atomically
from rrl.parallel.gather import gather_objects
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.stopping import ServiceUnavailable, on_stop
from rrl.text.chat import Prompt

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 16 << 20
"""Maximum number of bytes of a reply; a longer one is an error."""
MAX_REFUSAL_BYTES = 1 << 16
"""Maximum number of bytes that are read of an error body; error messages show its first 300 characters."""
TRANSIENT_STATUSES = (408, 409, 425, 429)
"""HTTP statuses below 500 that are retried. All statuses from 500 on are retried too."""
PROMPT_REFUSAL_STATUSES = (400, 413, 422)
"""HTTP statuses of a refusal of one prompt (too long, filtered). It gets no answer, and the other prompts continue."""
SETTING_REFUSAL_CODES = ("unsupported_parameter", "unsupported_value", "unknown_parameter")
"""Error codes that refuse a setting of the request, whatever its prompt."""
TOKEN_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
"""Names of the field that limits the tokens of an answer. Services that refuse the first take the second (OpenAI's reasoning
models)."""
MIN_REFUSED_PROMPTS = 8
"""If at least this many prompts are refused and none is answered, the settings are wrong, not the prompts."""
POLL_SECONDS = 0.1
"""Seconds between two checks whether to give up an attempt."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointReply:
    """The reply of a service to a prompt."""

    text: str = ""
    truncated: bool = False
    """Whether it reached `EndpointConfig.answer_tokens`."""
    refused: bool = False
    """Whether the service or its model refused to answer this prompt (too long, filtered, a refusal)."""


class Endpoint:
    """Answers prompts like `rrl.rewards.reader.Reader`, by requests to a service."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.cache = pathlib.Path(config.cache or "~/.cache/rrl/answers").expanduser()
        self.sent = self.cached = self.refused = 0
        """Number of prompts of this process that were sent, answered from the cache, and refused by the service."""
        self._last_refusal = ""
        """The message of the last refused prompt."""
        self._token_limit_field = TOKEN_LIMIT_FIELDS[0]
        """The name in `TOKEN_LIMIT_FIELDS` that requests use."""
        self._warned = False
        """Whether the current call has logged a failed attempt."""
        self._lock = threading.Lock()
        # By default urllib sends the key to the target of a redirect.
        self._open = urllib.request.build_opener(_NoRedirect).open

    def answers(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """Return the answer to each prompt, in order; "" if the service refuses the prompt or the answer was truncated.

        A truncated answer is not used, because the complete one may reach another conclusion. Raises the errors of `replies`.
        """
        return ["" if reply.truncated else reply.text for reply in self.replies(prompts)]

    def replies(self, prompts: Sequence[str | Prompt]) -> list[EndpointReply]:
        """Return the reply to each prompt, in order, with the flags for truncated and refused ones.

        Equal prompts are sent once. With several processes each one sends a part of the prompts, and all get every reply.

        Raises:
          UserError: the service refuses the request (key, model, address, or a setting that it does not support).
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

    # -- one prompt --------------------------------------------------------------------------------------------------

    def _cached_or_sent(self, prompt: str | Prompt, stop: threading.Event) -> EndpointReply:
        """Return the reply from the cache, or send the prompt and cache the reply."""
        body = self._body(prompt)
        file = self._file(body)
        if (reply := _read_cached(file)) is not None:
            with self._lock:
                self.cached += 1
            return reply
        with self._lock:
            self.sent += 1
        reply = self._send_with_retries(body, stop)
        if reply.refused:
            with self._lock:
                self.refused += 1
            return reply
        if reply.text or reply.truncated:  # an empty reply is not cached: it may be a passing fault
            _write_cached(file, self.config.model, reply)
        return reply

    def _body(self, prompt: str | Prompt) -> dict[str, Any]:
        if isinstance(prompt, str):
            prompt = Prompt(prompt)
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages.append({"role": "user", "content": prompt.user_message})
        config = self.config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "max_tokens": config.answer_tokens,
            "temperature": config.temperature,
        }
        if config.seed is not None:
            body["seed"] = config.seed
        if config.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": config.thinking}
        return body

    def _file(self, body: Mapping[str, Any]) -> pathlib.Path:
        """Return the cache file of a request. It does not depend on the address: another service may have the same model."""
        text = json.dumps(body, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        return self.cache / name[:2] / f"{name[2:]}.json"

    def _send_with_retries(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """Send a request until there is a reply or the service refuses the prompt."""
        config = self.config
        message = ""
        for attempt in range(config.retries + 1):
            if stop.is_set():
                raise ServiceUnavailable(
                    f"{config.url}: given up, because another prompt failed or the run must stop"
                )
            retry_after: float | None = None
            try:
                return self._send(body, stop)
            except _RefusedRequest as refusal:
                message, retry_after = str(refusal), refusal.retry_after
                if refusal.status in PROMPT_REFUSAL_STATUSES and refusal.code not in SETTING_REFUSAL_CODES:
                    return self._record_refusal(message)
                if refusal.status < 500 and refusal.status not in TRANSIENT_STATUSES:
                    raise self._request_error(refusal) from None
            except UserError:
                raise
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as failure:
                message = self._clean(f"{config.url}: {_describe(failure)}")
            if attempt < config.retries and not stop.is_set():
                with self._lock:
                    warned, self._warned = self._warned, True
                if not warned:
                    log.warning("%s; up to %d attempts follow", message, config.retries)
                doubled = config.backoff * 2**attempt * random.uniform(0.75, 1.25)
                # "Retry-After: 0" or a past date must not replace the backoff, or all attempts would happen at once.
                stop.wait(min(retry_after or doubled, config.max_backoff))
        raise ServiceUnavailable(
            f"{message} (after {attempt + 1} attempts); check the address and the service of model={config.model!r}. The "
            "answers received so far are cached"
        )

    def _request_error(self, refusal: "_RefusedRequest") -> UserError:
        """Return the error for a request that the service refuses whatever the prompt."""
        config, settings = self.config, ""
        if refusal.code in SETTING_REFUSAL_CODES:
            settings = f", temperature={config.temperature}, seed={config.seed}, thinking={config.thinking}"
        return UserError(
            f"{refusal}; check the address, model={config.model!r}{settings} and the key in the environment variable "
            f"{config.key_variable}"
        )

    def _record_refusal(self, message: str) -> EndpointReply:
        log.warning("a prompt gets no answer: %s", message)
        self._last_refusal = message
        return EndpointReply(refused=True)

    def _send(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """Call `_post_with_time_out` with the token limit under the name in `TOKEN_LIMIT_FIELDS` that the service supports."""
        name = self._token_limit_field
        try:
            return self._post_with_time_out(_renamed(body, name), stop)
        except _RefusedRequest as refusal:
            if (
                name == TOKEN_LIMIT_FIELDS[1]
                or refusal.status not in PROMPT_REFUSAL_STATUSES
                or TOKEN_LIMIT_FIELDS[1] not in refusal.reason
            ):
                raise
            self._token_limit_field = TOKEN_LIMIT_FIELDS[1]
            return self._post_with_time_out(_renamed(body, TOKEN_LIMIT_FIELDS[1]), stop)

    def _post_with_time_out(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """Call `_post`, and give up after `time_out` seconds or as soon as `stop` is set, wherever it hangs."""
        outcome: Future[EndpointReply] = Future()
        refusals: list[_RefusedRequest] = []

        def post() -> None:
            try:
                outcome.set_result(self._post(body, refusals.append))
            except BaseException as failure:
                outcome.set_exception(failure)

        # A daemon thread, so that an abandoned attempt does not keep the program alive.
        threading.Thread(target=post, name="rrl-endpoint", daemon=True).start()
        until = time.monotonic() + self.config.time_out
        while not outcome.done():
            if stop.is_set():
                raise TimeoutError("given up, because another prompt failed or the run must stop")
            if (left := until - time.monotonic()) <= 0:
                if refusals:  # the body with the reason did not arrive
                    raise refusals[0]
                raise TimeoutError(f"no complete reply within time_out={self.config.time_out:g} seconds")
            wait([outcome], min(left, POLL_SECONDS))
        return outcome.result()

    def _post(
        self, body: Mapping[str, Any], on_refusal: Callable[["_RefusedRequest"], None]
    ) -> EndpointReply:
        """Make one attempt.

        Args:
          body: the request.
          on_refusal: receives an HTTP error without its reason, before its body is read. The read may hang.

        Raises _RefusedRequest for a refusal, and OSError or ValueError for any other failure.
        """
        config = self.config
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        url = config.url.rstrip("/") + "/chat/completions"
        # A lone surrogate is legal in a Python string; JSON with ASCII escapes can encode it.
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        until = time.monotonic() + config.time_out
        try:
            with self._open(request, timeout=config.time_out) as reply:
                content = json.loads(_read(reply, until))
        except urllib.error.HTTPError as error:
            status, retry_after = error.code, _retry_after_seconds(error.headers.get("Retry-After"))
            text = self._clean(f"{url} answered {status} {error.reason}")
            on_refusal(_RefusedRequest(status, text, retry_after))
            with error:
                reason = _read_reason(error, until)
            # Remove the key before the text is truncated: a truncated key would not be found.
            reason = self._clean(reason)
            raise _RefusedRequest(status, f"{text}: {reason[:300]}", retry_after, reason) from None
        try:
            choice = content["choices"][0]
            message, finish_reason = choice["message"], choice.get("finish_reason")
            refusal = message.get("refusal")
            answer = None if refusal else message["content"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError("the reply has no choices[0].message.content") from None
        if refusal or finish_reason == "content_filter":
            return self._record_refusal(self._clean(f"{url}: {refusal or 'filtered'}")[:300])
        return EndpointReply(self._clean(_join_parts(answer)), finish_reason == "length")

    def _key(self) -> str:
        """Return the API key. Raises UserError for characters that a header cannot hold; the message does not show the key."""
        key = os.environ.get(self.config.key_variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"the environment variable {self.config.key_variable} holds characters that no API key has; set it again"
            )
        return key

    def _clean(self, text: str) -> str:
        """Return a text without the API key, because services may repeat what they received."""
        key = os.environ.get(self.config.key_variable, "").strip()
        return text.replace(key, "***") if key else text


class _RefusedRequest(Exception):
    """The service answered with an HTTP error status."""

    def __init__(self, status: int, text: str, retry_after: float | None, reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after
        """Seconds of the Retry-After header."""
        self.reason = reason
        """The body of the reply."""

    @property
    def code(self) -> str:
        """The error code in OpenAI's form; "" if there is none."""
        try:
            return str(json.loads(self.reason)["error"]["code"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""


def _renamed(body: Mapping[str, Any], limit_field: str) -> dict[str, Any]:
    """Return the request with its token limit under another name of `TOKEN_LIMIT_FIELDS`."""
    return {limit_field if name == TOKEN_LIMIT_FIELDS[0] else name: value for name, value in body.items()}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # urllib then raises HTTPError


def _read(reply: Any, until: float, largest: int = MAX_REPLY_BYTES) -> bytes:
    """Return the body of a reply. A socket's time-out is per chunk, so a slow stream of chunks would never reach it."""
    parts, size = [], 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > until:
            raise TimeoutError("the reply takes longer than time_out")
        if size > largest:
            raise ValueError(f"the reply has more than {largest} bytes")
    return b"".join(parts)


def _read_reason(error: urllib.error.HTTPError, until: float) -> str:
    """Return the reason of a refusal, or why it could not be read."""
    try:
        return _read(error, until, MAX_REFUSAL_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as failure:
        return f"({_describe(failure)})"


def _join_parts(content: Any) -> str:
    """Return the text of a message's content; some services send a list of parts."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def _retry_after_seconds(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None if it has neither."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None


def _describe(failure: Exception) -> str:
    reason = failure.reason if isinstance(failure, urllib.error.URLError) else failure
    return f"{type(failure).__name__}: {reason}"


def _read_cached(file: pathlib.Path) -> EndpointReply | None:
    """Return a cached reply; None if the file is missing or broken."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        text, truncated = stored["answer"], stored["cut"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return EndpointReply(text, truncated) if isinstance(text, str) and isinstance(truncated, bool) else None


def _write_cached(file: pathlib.Path, model: str, reply: EndpointReply) -> None:
    """Write a reply to the cache, atomically: other processes may write the same file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"model": model, "answer": reply.text, "cut": reply.truncated}))
    except OSError as error:
        log.warning("cannot write to the cache %s: %s", file.parent, error)
