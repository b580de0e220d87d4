"""Send one chat request to an OpenAI-compatible endpoint (POST URL/chat/completions) and read its reply.

Read `ChatClient.send` first. The API key is read from an environment variable for each request. It is never stored in an
attribute, message, log or file.
"""

import dataclasses
import email.utils
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from rrl.errors import UserError
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.text.chat import Prompt

MAX_REPLY_BYTES = 16 << 20
"""Maximum number of bytes of a reply; a longer one is an error."""
MAX_ERROR_BYTES = 1 << 16
"""Maximum number of bytes that are read of an error body; error messages show its first 300 characters."""
PROMPT_REFUSAL_STATUSES = (400, 413, 422)
"""HTTP statuses of a refusal of one prompt (too long, filtered). It gets no answer, and the other prompts continue."""
SETTING_REFUSAL_CODES = ("unsupported_parameter", "unsupported_value", "unknown_parameter")
"""Error codes that refuse a setting of the request, whatever its prompt."""
TOKEN_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
"""Names of the field that limits the tokens of an answer. Services that refuse the first take the second (OpenAI's reasoning
models)."""
POLL_SECONDS = 0.1
"""Seconds between two checks whether to give up an attempt."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointReply:
    """The reply of a service to a prompt."""

    text: str = ""
    truncated: bool = False
    """Whether it reached `EndpointConfig.answer_tokens`."""
    refused: bool = False
    """Whether the service rejected the prompt (too long, filtered), or its model declined to answer."""


class PromptRefused(Exception):
    """The reply is a refusal: its content was filtered, or the model declined to answer."""


class HttpStatusError(Exception):
    """The service answered with an HTTP error status."""

    def __init__(self, status: int, message: str, retry_after: float | None, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds of the Retry-After header."""
        self.body = body
        """The body of the reply, which states the reason."""

    @property
    def code(self) -> str:
        """The error code in OpenAI's form; "" if there is none."""
        try:
            return str(json.loads(self.body)["error"]["code"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""

    @property
    def refuses_prompt(self) -> bool:
        """Whether the service refuses this prompt, and not a setting of all requests."""
        return self.status in PROMPT_REFUSAL_STATUSES and self.code not in SETTING_REFUSAL_CODES


def request_body(config: EndpointConfig, prompt: str | Prompt) -> dict[str, Any]:
    """Return the JSON object of a chat request."""
    if isinstance(prompt, str):
        prompt = Prompt(prompt)
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages.append({"role": "user", "content": prompt.user_message})
    body: dict[str, Any] = {
        "model": config.model,
        "messages": messages,
        TOKEN_LIMIT_FIELDS[0]: config.answer_tokens,
        "temperature": config.temperature,
    }
    if config.seed is not None:
        body["seed"] = config.seed
    if config.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": config.thinking}
    return body


class ChatClient:
    """Makes single attempts of chat requests. Thread-safe."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self._token_limit_field = TOKEN_LIMIT_FIELDS[0]
        """The name in `TOKEN_LIMIT_FIELDS` that requests use."""
        # By default urllib sends the key to the target of a redirect.
        self._open = urllib.request.build_opener(_NoRedirect).open

    def send(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """Make one attempt; if the service asks for the other name in `TOKEN_LIMIT_FIELDS`, make a second one with it.

        Raises:
          HttpStatusError: the service answered with an error status.
          PromptRefused: the reply is a refusal.
          UserError: the API key cannot be sent.
          OSError, http.client.HTTPException, ValueError, RecursionError: any other failure, such as a time-out or `stop`.
        """
        field, other = self._token_limit_field, TOKEN_LIMIT_FIELDS[1]
        try:
            return self._post_with_time_out(_with_token_limit_field(body, field), stop)
        except HttpStatusError as error:
            if field == other or error.status not in PROMPT_REFUSAL_STATUSES or other not in error.body:
                raise
            self._token_limit_field = other
            return self._post_with_time_out(_with_token_limit_field(body, other), stop)

    def hide_key(self, text: str) -> str:
        """Return a text without the API key, because services may repeat what they received."""
        key = os.environ.get(self.config.key_variable, "").strip()
        return text.replace(key, "***") if key else text

    def _post_with_time_out(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """Call `_post`, and give up after `time_out` seconds or as soon as `stop` is set, wherever it hangs."""
        outcome: Future[EndpointReply] = Future()
        statuses: list[HttpStatusError] = []

        def post() -> None:
            try:
                outcome.set_result(self._post(body, statuses.append))
            except BaseException as failure:
                outcome.set_exception(failure)

        # A daemon thread, so that an abandoned attempt does not keep the program alive.
        threading.Thread(target=post, name="rrl-endpoint", daemon=True).start()
        deadline = time.monotonic() + self.config.time_out
        while not outcome.done():
            if stop.is_set():
                raise TimeoutError("given up, because another prompt failed or the run must stop")
            if (left := deadline - time.monotonic()) <= 0:
                if statuses:  # an error status arrived, but its body did not
                    raise statuses[0]
                raise TimeoutError(f"no complete reply within time_out={self.config.time_out:g} seconds")
            wait([outcome], min(left, POLL_SECONDS))
        return outcome.result()

    def _post(
        self, body: Mapping[str, Any], on_error_status: Callable[[HttpStatusError], None]
    ) -> EndpointReply:
        """Send the request and read the reply. Raises the errors of `send`.

        `on_error_status` is called with an HTTP error before its body is read, because that read may hang. The error is then
        known even if its body never arrives.
        """
        config = self.config
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        url = config.url.rstrip("/") + "/chat/completions"
        # A lone surrogate is legal in a Python string; JSON with ASCII escapes can encode it.
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + config.time_out
        try:
            with self._open(request, timeout=config.time_out) as reply:
                return self._parse(json.loads(_read(reply, deadline)), url)
        except urllib.error.HTTPError as error:
            status, retry_after = error.code, _retry_after_seconds(error.headers.get("Retry-After"))
            message = self.hide_key(f"{url} answered {status} {error.reason}")
            on_error_status(HttpStatusError(status, message, retry_after))
            with error:
                error_body = _read_error_body(error, deadline)
            # Hide the key before the text is truncated: a truncated key would not be found.
            error_body = self.hide_key(error_body)
            raise HttpStatusError(status, f"{message}: {error_body[:300]}", retry_after, error_body) from None

    def _parse(self, content: Any, url: str) -> EndpointReply:
        """Return the reply in the JSON value that the service sent. Raises PromptRefused, or ValueError for another format."""
        try:
            choice = content["choices"][0]
            message, finish_reason = choice["message"], choice.get("finish_reason")
            refusal = message.get("refusal")
            answer = None if refusal else message["content"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError("the reply has no choices[0].message.content") from None
        if refusal or finish_reason == "content_filter":
            raise PromptRefused(self.hide_key(f"{url}: {refusal or 'filtered'}")[:300])
        return EndpointReply(self.hide_key(_join_parts(answer)), finish_reason == "length")

    def _key(self) -> str:
        """Return the API key. Raises UserError for characters that a header cannot hold; the message does not show the key."""
        key = os.environ.get(self.config.key_variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"the environment variable {self.config.key_variable} holds characters that no API key has; set it again"
            )
        return key


def describe_failure(failure: Exception) -> str:
    """Return the type and the message of a failed attempt."""
    reason = failure.reason if isinstance(failure, urllib.error.URLError) else failure
    return f"{type(failure).__name__}: {reason}"


def _with_token_limit_field(body: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the request with its token limit under `field`, in the same place."""
    return {field if name == TOKEN_LIMIT_FIELDS[0] else name: value for name, value in body.items()}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # urllib then raises HTTPError


def _read(reply: Any, deadline: float, max_bytes: int = MAX_REPLY_BYTES) -> bytes:
    """Return the body of a reply. A socket's time-out is per chunk, so a slow stream of chunks would never reach it."""
    parts, size = [], 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the reply takes longer than time_out")
        if size > max_bytes:
            raise ValueError(f"the reply has more than {max_bytes} bytes")
    return b"".join(parts)


def _read_error_body(error: urllib.error.HTTPError, deadline: float) -> str:
    """Return the body of an HTTP error, or why it could not be read."""
    try:
        return _read(error, deadline, MAX_ERROR_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as failure:
        return f"({describe_failure(failure)})"


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
