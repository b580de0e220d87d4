"""The address of a model behind an OpenAI-compatible endpoint, its request settings and the retry policy."""

import dataclasses
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rrl.errors import UserError, at_least

KEY_VARIABLE = "OPENAI_API_KEY"
"""The default environment variable of the API key."""


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    """The address of the model, the request settings, and the retry policy."""

    url: str = ""
    """The address up to the version, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    """The name of the model at the service."""
    key_variable: str = KEY_VARIABLE
    """The environment variable with the API key. If it is not set, no key is sent (for your own service)."""
    answer_tokens: int = 1024
    """Maximum number of tokens of an answer."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int | None = None
    """The sampling seed, sent if given. Another seed gives another sample at the same temperature."""
    thinking: bool | None = None
    """Whether a model that can think before it answers does so. If given, it is sent as the variable enable_thinking of the
    chat template; vLLM and SGLang support this, other services may refuse it."""
    concurrency: int = 16
    """Concurrent requests, over all processes of a run."""
    time_out: float = 120.0
    """Seconds after which an attempt is given up, even if data still arrives."""
    retries: int = 6
    """Maximum number of attempts after the first."""
    backoff: float = 1.0
    """Seconds before the first retry, doubled before each further one up to `max_backoff`, with random jitter. A Retry-After
    of the service replaces it, up to the same maximum."""
    max_backoff: float = 60.0
    """Maximum seconds between two attempts."""
    cache: str = ""
    """Folder of the cache; empty: ~/.cache/rrl/answers."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(
                f"url={self.url!r} must begin with http:// or https://, such as http://127.0.0.1:8000/v1"
            )
        # The message does not show the URL, which holds a password or a key.
        if "@" in self.url.split("/")[2] or "?" in self.url or "#" in self.url:
            raise UserError(
                "url must not contain a user name, password, query (?) or fragment (#), because messages and logs show it; put "
                f"the key into the environment variable {KEY_VARIABLE}, or name another with key_variable"
            )
        if not _has_host(self.url):
            raise UserError(
                f"url={self.url!r} must name a host, and a port in digits if any, such as http://127.0.0.1:8000/v1"
            )
        name = self.key_variable  # messages do not show it: it may be the key itself
        if not (name.isascii() and name.isidentifier()):
            raise UserError(
                "key_variable must be the name of an environment variable (letters, digits and underscores) that holds the key, "
                f"not the key itself; such as {KEY_VARIABLE}"
            )
        if not self.model:
            raise UserError("model='' is empty; give the name of the model at the service")
        at_least(1, self, "answer_tokens", "concurrency")
        at_least(0, self, "temperature", "retries", "backoff", "max_backoff")
        if not self.time_out > 0:
            raise UserError(f"time_out={self.time_out} must be above 0 seconds")

    @property
    def identity(self) -> dict[str, Any]:
        """The fields on which a reply depends, besides its prompt. They exclude the address: two services may serve one model."""
        fields = {name: getattr(self, name) for name in ("model", "answer_tokens", "temperature")}
        return fields | {
            name: value for name in ("seed", "thinking") if (value := getattr(self, name)) is not None
        }


def _has_host(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        parts.port  # noqa: B018 (raises if it is not a number)
    except ValueError:
        return False
    return bool(parts.hostname) and not any(letter.isspace() for letter in url)
