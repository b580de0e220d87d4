"""A model behind an OpenAI-compatible endpoint (POST URL/chat/completions), asked many prompts at a time.

Answers are kept on disk, by everything that they depend on, so that a run that continues, or another that asks the same,
pays for nothing twice. The key is read from an environment variable when something is asked; it is in no attribute, message,
log or file of ours.
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

from rrl.errors import UserError, at_least
from rrl.files import write_atomically
from rrl.parallel.gather import gather_objects
from rrl.stopping import ServiceUnavailable, on_stop
from rrl.text.chat import Prompt

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 16 << 20
"""Bytes of a reply beyond which it is no answer."""
MAX_REFUSAL_BYTES = 1 << 16
"""Bytes that are read of why a prompt was refused; 300 characters are shown."""
TRANSIENT_STATUSES = (408, 409, 425, 429)
"""Refusals that may pass; so may all from 500 on."""
PROMPT_REFUSALS = (400, 413, 422)
"""Refusals of this prompt (too long, filtered): it gets no answer, and the others go on."""
SETTING_REFUSALS = ("unsupported_parameter", "unsupported_value", "unknown_parameter")
"""Codes of an error that refuse a setting of ours, whatever the prompt is."""
TOKEN_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
"""Names of the most tokens of an answer: services that refuse the first ask for the second (OpenAI's reasoning models)."""
MIN_REFUSED_PROMPTS = 8
"""Prompts refused, and none ever answered, after which it is not the prompts."""
POLL_SECONDS = 0.1
"""Seconds between two looks at whether an attempt is to be given up."""
KEY_VARIABLE = "OPENAI_API_KEY"
"""Where the key is looked for."""


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    """Where the model is, and how patiently it is asked."""

    url: str = ""
    """Up to the version, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    """The name by which the service knows it."""
    key_variable: str = KEY_VARIABLE
    """Environment variable that holds the key; where it is not set, none is sent (a service of one's own)."""
    answer_tokens: int = 1024
    """Most tokens of an answer."""
    temperature: float = 0.0
    seed: int | None = None
    """Sent where it is given: another one asks for another sample at the same temperature."""
    thinking: bool | None = None
    """Whether a model that may think before it answers does: sent, where it is given, as the variable enable_thinking of its chat
    template, which vLLM and SGLang pass on and other services may refuse."""
    concurrency: int = 16
    """Prompts asked at a time, over all processes of a run."""
    time_out: float = 120.0
    """Seconds from the start of an attempt after which it is given up, whatever still comes."""
    retries: int = 6
    """Attempts after the first."""
    backoff: float = 1.0
    """Seconds before the first retry, doubled before each further one, up to `max_backoff`; a part of it is random. What
    the service asks for (Retry-After) is waited for instead, within the same bound."""
    max_backoff: float = 60.0
    cache: str = ""
    """Folder for answers; empty: ~/.cache/rrl/answers."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(
                f"url={self.url!r} must begin with http:// or https://, such as http://127.0.0.1:8000/v1"
            )
        # Not shown: it holds a password or a key.
        if "@" in self.url.split("/")[2] or "?" in self.url or "#" in self.url:
            raise UserError(
                "url must hold no name, password, query (?) or fragment (#), for it stands in messages and logs; put the key "
                f"into the environment variable {KEY_VARIABLE}, or name another with key_variable"
            )
        if not _has_host(self.url):
            raise UserError(
                f"url={self.url!r} must name a host, and a port in digits if any, such as http://127.0.0.1:8000/v1"
            )
        name = self.key_variable  # not shown: it may be the key itself
        if not (name.isascii() and name.isidentifier()):
            raise UserError(
                "key_variable must be the name of an environment variable (letters, digits and underscores) that holds the key, "
                f"not the key itself; such as {KEY_VARIABLE}"
            )
        if not self.model:
            raise UserError("model='' names no model; give the name by which the service knows it")
        at_least(1, self, "answer_tokens", "concurrency")
        at_least(0, self, "temperature", "retries", "backoff", "max_backoff")
        if not self.time_out > 0:
            raise UserError(f"time_out={self.time_out} must be above 0 seconds")

    @property
    def identity(self) -> dict[str, Any]:
        """What an answer depends on, apart from its prompt."""
        found = {name: getattr(self, name) for name in ("model", "answer_tokens", "temperature")}
        return found | {
            name: value for name in ("seed", "thinking") if (value := getattr(self, name)) is not None
        }


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointReply:
    """What a service says to a prompt."""

    text: str = ""
    truncated: bool = False
    """Whether it ended at `EndpointConfig.answer_tokens`."""
    refused: bool = False
    """Whether the service or its model would not answer this prompt (too long, filtered, a refusal)."""


class Endpoint:
    """Answers prompts as `rrl.rewards.reader.Reader` does, by asking a service."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.cache = pathlib.Path(config.cache or "~/.cache/rrl/answers").expanduser()
        self.sent = self.cached = self.refused = 0
        """Prompts of this process that were sent, that were found in the cache, and that the service would not answer."""
        self._refusal = ""
        self._limit = TOKEN_LIMIT_FIELDS[0]
        self._warned = False
        """Whether the log says of this call that an attempt failed."""
        self._lock = threading.Lock()
        # urllib would send the key on to wherever a redirect points.
        self._open = urllib.request.build_opener(_NoRedirect).open

    def answers(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """The model's answer to each prompt, in their order; "" where the service refuses a prompt, or where an answer was cut:
        what half an answer says is not what the whole one would have said.

        Raises as `replies`.
        """
        return ["" if reply.truncated else reply.text for reply in self.replies(prompts)]

    def replies(self, prompts: Sequence[str | Prompt]) -> list[EndpointReply]:
        """The same, and whether an answer was cut or refused.

        Equal prompts are asked once. In several processes each asks a share, and all get every answer.

        Raises UserError where the service refuses us (key, model, address, a setting that it does not take), Unavailable where
        it does not answer in spite of all retries, or where the run is to stop (`rrl.stopping`): then at once.
        """
        wanted = list(dict.fromkeys(prompts))
        rank, count = jax.process_index(), jax.process_count()
        mine = wanted[rank::count]
        found: list[EndpointReply] = []
        errors: list[Exception] = []
        stop = threading.Event()
        self._warned = False

        def one(prompt: str | Prompt) -> EndpointReply:
            try:
                return self._answer(prompt, stop)
            except Exception as failure:
                errors.append(failure)
                stop.set()  # the others shall not go on trying
                return EndpointReply()

        with on_stop(stop.set), ThreadPoolExecutor(max(1, self.config.concurrency // count)) as pool:
            try:
                found = list(pool.map(one, mine))
            finally:
                stop.set()
        if not errors and self.refused == self.sent >= MIN_REFUSED_PROMPTS and not self.cached:
            errors.append(
                UserError(
                    f"{self._refusal}; all of {self.sent} prompts were refused so: check model={self.config.model!r}, "
                    f"answer_tokens={self.config.answer_tokens} and temperature={self.config.temperature}"
                )
            )
        error = errors[0] if errors else None
        parts = gather_objects((dict(zip(mine, found)), error and repr(error)))
        if error is not None:
            raise error
        if elsewhere := [words for _, words in parts if words]:
            raise ServiceUnavailable(f"asking {self.config.url} failed in another process: {elsewhere[0]}")
        known = {prompt: reply for part, _ in parts for prompt, reply in part.items()}
        return [known[prompt] for prompt in prompts]

    # -- one prompt --------------------------------------------------------------------------------------------------

    def _answer(self, prompt: str | Prompt, stop: threading.Event) -> EndpointReply:
        body = self._body(prompt)
        file = self._file(body)
        if (reply := _read_cached(file)) is not None:
            with self._lock:
                self.cached += 1
            return reply
        with self._lock:
            self.sent += 1
        reply = self._ask(body, stop)
        if reply.refused:
            with self._lock:
                self.refused += 1
            return reply
        if (
            reply.text or reply.truncated
        ):  # a service that says nothing may say something when it is asked again
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
        """Where the answer to a request is kept. The address is no part of it: the same model may be served elsewhere."""
        text = json.dumps(body, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        return self.cache / name[:2] / f"{name[2:]}.json"

    def _ask(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """Asks until there is an answer, or the service refuses this prompt."""
        config = self.config
        why = ""
        for attempt in range(config.retries + 1):
            if stop.is_set():
                raise ServiceUnavailable(
                    f"{config.url}: given up, since another prompt failed or the run is to stop"
                )
            asked: float | None = None
            try:
                return self._attempt_by_either_name(body, stop)
            except _Refused as refusal:
                why, asked = str(refusal), refusal.wait
                if refusal.status in PROMPT_REFUSALS and refusal.code not in SETTING_REFUSALS:
                    return self._refused(why)
                if refusal.status < 500 and refusal.status not in TRANSIENT_STATUSES:
                    raise self._refuses_us(refusal) from None
            except UserError:
                raise
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as failure:
                why = self._clean(f"{config.url}: {_words(failure)}")
            if attempt < config.retries and not stop.is_set():
                with self._lock:
                    told, self._warned = self._warned, True
                if not told:
                    log.warning("%s; up to %d attempts follow", why, config.retries)
                doubled = config.backoff * 2**attempt * random.uniform(0.75, 1.25)
                # "Retry-After: 0", or a date that is past, names no time: all attempts would be made at once.
                stop.wait(min(asked or doubled, config.max_backoff))
        raise ServiceUnavailable(
            f"{why} (after {attempt + 1} attempts); check the address and the service of model={config.model!r}. Answers that "
            "came are kept"
        )

    def _refuses_us(self, refusal: "_Refused") -> UserError:
        config, settings = self.config, ""
        if refusal.code in SETTING_REFUSALS:
            settings = f", temperature={config.temperature}, seed={config.seed}, thinking={config.thinking}"
        return UserError(
            f"{refusal}; check the address, model={config.model!r}{settings} and the key in the environment variable "
            f"{config.key_variable}"
        )

    def _refused(self, why: str) -> EndpointReply:
        log.warning("a prompt gets no answer: %s", why)
        self._refusal = why
        return EndpointReply(refused=True)

    def _attempt_by_either_name(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """`_attempt`, with the limit of the answer under the name of `TOKEN_LIMIT_FIELDS` that the service takes."""
        name = self._limit
        try:
            return self._attempt(_renamed(body, name), stop)
        except _Refused as refusal:
            if (
                name == TOKEN_LIMIT_FIELDS[1]
                or refusal.status not in PROMPT_REFUSALS
                or TOKEN_LIMIT_FIELDS[1] not in refusal.reason
            ):
                raise
            self._limit = TOKEN_LIMIT_FIELDS[1]
            return self._attempt(_renamed(body, TOKEN_LIMIT_FIELDS[1]), stop)

    def _attempt(self, body: Mapping[str, Any], stop: threading.Event) -> EndpointReply:
        """`_post`, given up after `time_out` seconds, or as soon as `stop` is set, wherever it hangs."""
        ended: Future[EndpointReply] = Future()
        refused: list[_Refused] = []

        def post() -> None:
            try:
                ended.set_result(self._post(body, refused.append))
            except BaseException as failure:
                ended.set_exception(failure)

        # A daemon, so that what was given up does not keep the program from ending.
        threading.Thread(target=post, name="rrl-endpoint", daemon=True).start()
        until = time.monotonic() + self.config.time_out
        while not ended.done():
            if stop.is_set():
                raise TimeoutError("given up, since another prompt failed or the run is to stop")
            if (left := until - time.monotonic()) <= 0:
                if refused:  # its reason never came
                    raise refused[0]
                raise TimeoutError(f"no whole reply within time_out={self.config.time_out:g} seconds")
            wait([ended], min(left, POLL_SECONDS))
        return ended.result()

    def _post(self, body: Mapping[str, Any], refused: Callable[["_Refused"], None]) -> EndpointReply:
        """One attempt. Raises _Refused for a refusal, which `refused` is told of before its reason is read, and OSError or
        ValueError for anything else that is no answer."""
        config = self.config
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        url = config.url.rstrip("/") + "/chat/completions"
        # Half a surrogate pair is legal in Python; ASCII escapes carry it.
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        until = time.monotonic() + config.time_out
        try:
            with self._open(request, timeout=config.time_out) as reply:
                said = json.loads(_read(reply, until))
        except urllib.error.HTTPError as error:
            status, again = error.code, _wait(error.headers.get("Retry-After"))
            text = self._clean(f"{url} answered {status} {error.reason}")
            refused(_Refused(status, text, again))
            with error:
                words = _refusal(error, until)
            # Cleaned before it is cut: half a key is no key that could be found.
            words = self._clean(words)
            raise _Refused(status, f"{text}: {words[:300]}", again, words) from None
        try:
            choice = said["choices"][0]
            message, ended = choice["message"], choice.get("finish_reason")
            refusal = message.get("refusal")
            content = None if refusal else message["content"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError("the reply has no choices[0].message.content") from None
        if refusal or ended == "content_filter":
            return self._refused(self._clean(f"{url}: {refusal or 'filtered'}")[:300])
        return EndpointReply(self._clean(_text(content)), ended == "length")

    def _key(self) -> str:
        """The key. Raises UserError for one that no header can hold; the message does not show it."""
        key = os.environ.get(self.config.key_variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"the environment variable {self.config.key_variable} holds characters that no key has; set it again"
            )
        return key

    def _clean(self, text: str) -> str:
        """A message without the key: services repeat what they were sent."""
        key = os.environ.get(self.config.key_variable, "").strip()
        return text.replace(key, "***") if key else text


class _Refused(Exception):
    """The service answered with an HTTP status that is no success."""

    def __init__(self, status: int, text: str, wait: float | None, reason: str = "") -> None:
        super().__init__(text)
        self.status, self.wait, self.reason = status, wait, reason
        """`reason`: the body of the refusal."""

    @property
    def code(self) -> str:
        """The code of the error, where the service gives one in OpenAI's form."""
        try:
            return str(json.loads(self.reason)["error"]["code"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""


def _renamed(body: Mapping[str, Any], limit: str) -> dict[str, Any]:
    return {limit if name == TOKEN_LIMIT_FIELDS[0] else name: value for name, value in body.items()}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # which makes it an HTTPError


def _read(reply: Any, until: float, largest: int = MAX_REPLY_BYTES) -> bytes:
    """The body of a reply. A socket's time-out is for each piece: a service that drips would never meet it."""
    parts, size = [], 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > until:
            raise TimeoutError("the reply takes longer than time_out")
        if size > largest:
            raise ValueError(f"the reply has more than {largest} bytes")
    return b"".join(parts)


def _refusal(error: urllib.error.HTTPError, until: float) -> str:
    """Why something was refused, or as much of it as comes."""
    try:
        return _read(error, until, MAX_REFUSAL_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as failure:
        return f"({_words(failure)})"


def _text(content: Any) -> str:
    """What an answer says; some services send it in parts."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def _has_host(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        parts.port  # noqa: B018 (raises for one that is no number)
    except ValueError:
        return False
    return bool(parts.hostname) and not any(letter.isspace() for letter in url)


def _wait(header: str | None) -> float | None:
    """Seconds that Retry-After asks for: a number, or a date."""
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


def _words(failure: Exception) -> str:
    reason = failure.reason if isinstance(failure, urllib.error.URLError) else failure
    return f"{type(failure).__name__}: {reason}"


def _read_cached(file: pathlib.Path) -> EndpointReply | None:
    """A kept answer; None where there is none, or only half of one."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        text, cut = kept["answer"], kept["cut"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return EndpointReply(text, cut) if isinstance(text, str) and isinstance(cut, bool) else None


def _write_cached(file: pathlib.Path, model: str, reply: EndpointReply) -> None:
    """Keeps an answer, whole or not at all, whoever else writes the same one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"model": model, "answer": reply.text, "cut": reply.truncated}))
    except OSError as error:
        log.warning("an answer could not be kept in %s: %s", file.parent, error)
