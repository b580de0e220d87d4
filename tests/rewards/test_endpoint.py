"""The endpoint against a local HTTP service that fails in many ways: complete answers, one request each, and no leaked key."""

import contextlib
import http.server
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.rewards.chat_requests import TOKEN_LIMIT_FIELDS, EndpointReply, request_body
from rrl.rewards.endpoint import Endpoint
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rewards.judge import ModelJudge
from rrl.rewards.judge_prompts import Correctness
from rrl.stopping import ServiceUnavailable, stop_requested
from rrl.text.chat import Prompt

KEY = "sk-secret-0123456789"


class Service:
    """A service that answers with the prompt's last word in capitals, after the failures in its script."""

    def __init__(self):
        self.script = []  # one failure per request: (status, headers, body), or a function of the handler
        self.requests, self.headers = [], []
        self.busy = self.most_busy = 0
        self.seconds = 0.0
        self.lock = threading.Lock()

    def answer(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.requests.append(body)
            self.headers.append(dict(handler.headers))
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            failure = self.script.pop(0) if self.script else None
        time.sleep(self.seconds)
        with self.lock:
            self.busy -= 1
        if callable(failure):
            return failure(handler)
        if failure is not None:
            return reply(handler, *failure)
        text = body["messages"][-1]["content"].split()[-1].upper()
        return reply(handler, 200, {}, json.dumps({"choices": [{"message": {"content": text}}]}))


def reply(handler, status, headers, body):
    data = body.encode()
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(data))} | headers).items():
        handler.send_header(name, value)
    handler.end_headers()
    with contextlib.suppress(OSError):
        handler.wfile.write(data)


@pytest.fixture
def service(monkeypatch, tmp_path):
    service = Service()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            service.answer(self)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("RRL_TEST_KEY", KEY)
    service.config = lambda **more: EndpointConfig(
        **{
            "url": f"http://127.0.0.1:{server.server_port}/v1",
            "model": "m",
            "key_variable": "RRL_TEST_KEY",
            "backoff": 0.01,
            "time_out": 5.0,
            "cache": str(tmp_path / "answers"),
        }
        | more
    )
    yield service
    server.shutdown()
    server.server_close()


def test_prompts_are_sent_as_messages_and_answers_keep_their_order(service):
    endpoint = Endpoint(service.config(concurrency=1, temperature=0.5, answer_tokens=7))
    assert endpoint.answers([Prompt("say one", system="Be loud."), "say two"]) == ["ONE", "TWO"]
    assert service.requests[0] == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be loud."}, {"role": "user", "content": "say one"}],
        "max_tokens": 7,
        "temperature": 0.5,
    }
    assert service.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("thinking", [False, True])
def test_thinking_is_sent_only_if_set_and_is_part_of_the_cache_key(service, thinking):
    Endpoint(service.config()).answers(["say one"])
    Endpoint(service.config(thinking=thinking)).answers(["say one"])
    without, with_thinking = service.requests
    assert "chat_template_kwargs" not in without
    assert with_thinking == without | {"chat_template_kwargs": {"enable_thinking": thinking}}


def test_no_key_is_sent_if_the_variable_is_not_set(service, monkeypatch):
    monkeypatch.delenv("RRL_TEST_KEY")
    Endpoint(service.config()).answers(["a"])
    assert "Authorization" not in service.headers[0]


def test_equal_prompts_are_sent_once_and_concurrency_is_limited(service):
    service.seconds = 0.05
    endpoint = Endpoint(service.config(concurrency=3))
    prompts = [f"word{i % 9}" for i in range(27)]
    assert endpoint.answers(prompts) == [p.upper() for p in prompts]
    assert len(service.requests) == endpoint.sent == 9
    assert 1 < service.most_busy <= 3


def drop(handler):
    handler.close_connection = True
    handler.connection.close()


@pytest.mark.parametrize(
    "failure",
    [
        (500, {}, "down"),
        (503, {"Retry-After": "0"}, "busy"),
        (429, {"Retry-After": "0.01"}, "slow down"),
        (429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, ""),
        (429, {"Retry-After": "soon"}, ""),
        (200, {}, "no json"),
        (200, {}, '{"choices": []}'),
        (200, {"Content-Length": "1000"}, "half of it"),
        drop,
    ],
)
def test_transient_failures_are_retried(service, failure):
    service.script = [failure, failure]
    assert Endpoint(service.config(time_out=1.0)).answers(["say one"]) == ["ONE"]
    assert len(service.requests) == 3


def test_backoff_doubles_and_retry_after_replaces_it_up_to_the_maximum(service):
    waited = []
    stop = types.SimpleNamespace(is_set=lambda: False, wait=waited.append)
    endpoint = Endpoint(service.config(backoff=1.0, max_backoff=5.0, retries=5))
    busy = (500, {}, "")
    service.script = [busy, busy, busy, busy, (429, {"Retry-After": "3"}, "")]
    endpoint._send_with_retries(request_body(endpoint.config, "a"), stop)
    low, high = 0.75, 1.25
    assert all(low * 2**i <= waited[i] <= high * 2**i for i in range(2)), waited
    assert 3.0 <= waited[2] <= 5.0 and waited[3] == 5.0 and waited[4] == 3.0
    service.script, waited[:] = [(429, {"Retry-After": "3600"}, "")], []
    endpoint._send_with_retries(request_body(endpoint.config, "b"), stop)
    assert waited == [5.0]


def test_an_attempt_that_exceeds_the_time_out_is_retried(service):
    over = threading.Event()

    def sleep(handler):
        over.wait(60)

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        send_until_over(handler, b" ")

    def drip_headers(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        send_until_over(handler, b"X-Slow: 1\r\n")

    def send_until_over(handler, data):
        with contextlib.suppress(OSError):
            while not over.wait(0.1):
                handler.wfile.write(data)
                handler.wfile.flush()

    service.script = [sleep, drip, drip_headers]
    answers = Endpoint(service.config(time_out=0.5, retries=20)).answers(["say one"])
    over.set()
    assert answers == ["ONE"] and len(service.requests) >= 4


def test_a_refusal_without_its_body_is_still_a_refusal(service):
    over = threading.Event()

    def dangle(handler):
        handler.send_response(401)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        over.wait(60)

    service.script = [dangle] * 20
    with pytest.raises(UserError, match="answered 401"):
        Endpoint(service.config(time_out=0.5, retries=19)).answers(["a"])
    over.set()


def test_a_stop_signal_ends_hanging_requests(service):
    over, asked = threading.Event(), threading.Barrier(2)

    def hang(handler):
        if asked.wait(60) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        over.wait(60)

    service.script = [hang] * 4
    with stop_requested() as stop:
        with pytest.raises(ServiceUnavailable, match="the run must stop"):
            Endpoint(service.config(time_out=60.0, concurrency=2)).answers(["a", "b", "c", "d"])
        assert stop and not over.is_set() and len(service.requests) == 2
    over.set()


def test_the_first_failure_of_a_call_is_logged_once(service, caplog):
    service.script = [(503, {}, "warming up")] * 2
    assert Endpoint(service.config(retries=4)).answers(["a"]) == ["A"]
    assert caplog.text.count("answered 503") == 1 and "warming up; up to 4 attempts follow" in caplog.text


def test_parts_of_an_answer_are_joined_and_an_empty_answer_is_not_cached(service):
    parts = [{"type": "text", "text": "yes, "}, {"type": "image"}, {"type": "text", "text": "1"}]
    service.script = [
        (200, {}, json.dumps({"choices": [{"message": {"content": content}}]})) for content in (parts, None)
    ]
    assert Endpoint(service.config()).answers(["a"]) == ["yes, 1"]
    assert Endpoint(service.config()).answers(["b"]) == [""]
    assert Endpoint(service.config()).answers(["a", "b"]) == ["yes, 1", "B"]


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:port/v1", "http://ho st/v1", "https:///v1"])
def test_a_url_without_a_valid_host_is_refused(url):
    with pytest.raises(UserError, match="must name a host, and a port in digits if any"):
        EndpointConfig(url=url, model="m")


def test_a_url_that_contains_a_key_is_refused_and_not_shown():
    with pytest.raises(UserError, match="must not contain a user name, password, query") as error:
        EndpointConfig(url=f"http://host/v1?api-key={KEY}", model="m")
    assert KEY not in str(error.value)


def test_a_service_that_stays_down_ends_the_call_for_all_prompts(service):
    service.script = [(500, {}, "down")] * 1000
    endpoint = Endpoint(service.config(retries=2, concurrency=2))
    with pytest.raises(OSError, match=r"/v1/chat/completions answered 500 .*down \(after 3 attempts\)"):
        endpoint.answers([f"word {i}" for i in range(50)])
    assert len(service.requests) < 12


def test_a_waiting_retry_ends_when_another_prompt_fails(service):
    later = (429, {"Retry-After": "30"}, "busy")
    service.script = [later, later, (401, {}, "no")]
    began = time.monotonic()
    with pytest.raises(UserError, match="answered 401"):
        Endpoint(service.config(concurrency=3)).answers(["a", "b", "c"])
    assert time.monotonic() - began < 25


def test_a_refused_connection_is_reported_with_the_address(service):
    with pytest.raises(
        OSError, match=r"http://127\.0\.0\.1:9/v1: URLError: .*refused.* \(after 1 attempts\)"
    ):
        Endpoint(service.config(url="http://127.0.0.1:9/v1", retries=0)).answers(["a"])


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_a_refused_request_is_a_user_error_and_is_not_retried(service, status):
    service.script = [(status, {"Location": "http://127.0.0.1:9/elsewhere"}, "no")]
    with pytest.raises(UserError, match=rf"answered {status} .*model='m' and the key .* RRL_TEST_KEY"):
        Endpoint(service.config()).answers(["a"])
    assert len(service.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_prompt_gets_no_answer_and_the_others_do(service, status, caplog):
    service.script = [(status, {}, "context length exceeded")]
    endpoint = Endpoint(service.config(concurrency=1))
    assert endpoint.replies(["a", "say two"]) == [EndpointReply(refused=True), EndpointReply("TWO")]
    assert endpoint.refused == 1 and "context length exceeded" in caplog.text
    assert endpoint.answers(["a"]) == ["A"]  # the refusal was not cached


def test_refusing_all_of_eight_prompts_is_a_user_error(service):
    unknown = (400, {}, "max_tokens is not supported")
    prompts = [f"say {n}" for n in range(10)]
    service.script = [unknown] * 8
    with pytest.raises(UserError, match=r"not supported; all 8 .*model='m', answer_tokens=1024"):
        Endpoint(service.config()).answers(prompts[:8])
    service.script = [unknown] * 7
    assert Endpoint(service.config()).answers(prompts[:7]) == [""] * 7
    endpoint = Endpoint(service.config(concurrency=1))
    assert endpoint.answers(prompts[:1]) == ["0"]
    service.script = [unknown] * 9
    assert endpoint.answers(prompts[1:]) == [""] * 9  # because it has answered another prompt


def error(code, words):
    return (400, {}, json.dumps({"error": {"message": words, "code": code, "param": words.split()[0]}}))


@pytest.mark.parametrize("retries", [0, 2])
def test_max_completion_tokens_is_sent_to_a_service_that_refuses_max_tokens(service, retries):
    service.script = [error("unsupported_parameter", "max_tokens is not taken; send max_completion_tokens")]
    config = service.config(concurrency=1, retries=retries, answer_tokens=9)
    endpoint = Endpoint(config)
    assert endpoint.replies(["say one", "say two"]) == [EndpointReply("ONE"), EndpointReply("TWO")]
    limits = [{name: body[name] for name in TOKEN_LIMIT_FIELDS if name in body} for body in service.requests]
    assert limits == [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_completion_tokens": 9}]
    assert Endpoint(config).answers(["say one"]) == ["ONE"] and len(service.requests) == 3, (
        "the reply was cached"
    )


def test_a_refused_setting_is_a_user_error(service):
    service.script = [error("unsupported_value", "temperature does not support 0 with this model")]
    with pytest.raises(UserError, match=r"temperature does not support 0.*model='m', temperature=0.0"):
        Endpoint(service.config()).answers(["a"])
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"content": None, "refusal": "I can't judge that. True"}, "finish_reason": "stop"},
        {"message": {"refusal": "no"}},
        {"message": {"content": "True, but"}, "finish_reason": "content_filter"},
    ],
)
def test_a_refusal_by_the_model_is_no_answer_and_is_not_cached(service, choice, caplog):
    service.script = [(200, {}, json.dumps({"choices": [choice]}))]
    endpoint = Endpoint(service.config())
    assert endpoint.replies(["a"]) == [EndpointReply(refused=True)]
    assert endpoint.refused == 1 and "a prompt gets no answer" in caplog.text
    assert endpoint.answers(["a"]) == ["A"]


def test_an_answer_without_text_is_empty(service):
    service.script = [(200, {}, '{"choices": [{"message": {"content": null}}]}')]
    assert Endpoint(service.config()).answers(["a"]) == [""]


def test_a_truncated_answer_is_marked_also_in_the_cache(service):
    def half(ended):
        choice = {"message": {"content": "half"}, "finish_reason": ended}
        return (200, {}, json.dumps({"choices": [choice]}))

    service.script = [half("length"), half("stop")]
    first = Endpoint(service.config(concurrency=1)).replies(["a", "b", "c"])
    assert first == [
        EndpointReply("half", truncated=True),
        EndpointReply("half"),
        EndpointReply("C"),
    ]  # some services send no finish_reason
    endpoint = Endpoint(service.config())
    assert endpoint.replies(["a", "b", "c"]) == first and endpoint.answers(["a", "b"]) == ["", "half"]
    assert len(service.requests) == 3


def test_other_processes_read_the_cache(service):
    config = service.config()
    Endpoint(config).answers(["say one", "say two"])
    endpoint = Endpoint(config)
    assert endpoint.answers(["say two", "say one"]) == ["TWO", "ONE"]
    program = (
        "import sys; from rrl.rewards.endpoint import Endpoint; from rrl.rewards.endpoint_config import EndpointConfig; "
        "print(Endpoint(EndpointConfig(url=sys.argv[1], model='m', cache=sys.argv[2])).answers(['say one']))"
    )
    command = [sys.executable, "-c", program, config.url, config.cache]
    assert "['ONE']" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(service.requests) == 2 and endpoint.cached == 2


@pytest.mark.parametrize("more", [{"model": "n"}, {"answer_tokens": 3}, {"temperature": 1.0}])
def test_model_and_sampling_are_part_of_the_cache_key(service, more):
    Endpoint(service.config()).answers(["a"])
    Endpoint(service.config(**more)).answers(["a"])
    assert len(service.requests) == 2


def test_a_broken_cache_file_is_replaced(service, tmp_path):
    Endpoint(service.config()).answers(["a"])
    (file,) = (tmp_path / "answers").rglob("*.json")
    file.write_text('{"model": "m", "ans')
    assert Endpoint(service.config()).answers(["a"]) == Endpoint(service.config()).answers(["a"]) == ["A"]
    assert len(service.requests) == 2


def test_a_cache_that_cannot_be_written_is_only_a_warning(service, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert Endpoint(service.config(cache=str(tmp_path / "file"))).answers(["a"]) == ["A"]
    assert "cannot write to the cache" in caplog.text


def test_the_key_is_in_no_message_log_file_or_attribute(service, caplog, tmp_path, capfd):
    caplog.set_level(logging.DEBUG)
    leak = f"bad key {KEY}"
    messages = []
    for script, retries in (
        ([(401, {}, leak)], 0),
        ([(500, {}, leak)] * 3, 2),
        ([(400, {}, leak)], 0),
        ([(200, {}, leak)], 0),
        ([(200, {}, json.dumps({"choices": [{"message": {"content": leak}}]}))], 0),
        ([(200, {}, "[" * 200_000)], 0),
    ):
        service.script = script
        endpoint = Endpoint(service.config(retries=retries))
        try:
            endpoint.answers([f"prompt {len(messages)}"])
        except (UserError, OSError) as error:
            messages.append(f"{error!r} {error.__cause__!r} {error.__context__!r}")
        messages.append(f"{endpoint.__dict__} {endpoint.client.__dict__}")
    output = capfd.readouterr()
    files = [file.read_text() for file in (tmp_path / "answers").rglob("*.json")]
    assert "bad key ***" in caplog.text and "".join(messages).count("bad key ***") >= 2
    assert KEY not in "".join([*messages, *files, caplog.text, output.out, output.err])


def test_the_key_is_removed_before_a_reason_is_truncated(service):
    for padding in range(300 - len(KEY), 301):
        service.script = [(401, {}, f"{'x' * padding}{KEY} is no key")]
        with pytest.raises(UserError) as error:
            Endpoint(service.config(retries=0, concurrency=1)).answers([f"prompt {padding}"])
        assert KEY[:4] not in str(error.value)
        assert "is no key" not in str(error.value) or padding < 300


def test_retry_after_zero_does_not_shorten_the_backoff(service):
    service.script = [(429, {"Retry-After": "0"}, "slow down")] * 2
    begun = time.monotonic()
    assert Endpoint(service.config(backoff=0.2, retries=3)).answers(["a"]) == ["A"]
    assert time.monotonic() - begun >= 0.75 * (0.2 + 0.4)


@pytest.mark.parametrize("key", ["sk\nx: y", "sk-ключ"])
def test_a_key_that_a_header_cannot_hold_is_refused_and_not_shown(service, monkeypatch, key):
    monkeypatch.setenv("RRL_TEST_KEY", key)
    with pytest.raises(UserError, match="RRL_TEST_KEY holds characters") as error:
        Endpoint(service.config()).answers(["a"])
    assert key not in str(error.value) and not service.requests


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"url": "localhost:8000"}, r"url='localhost:8000' must begin with http"),
        ({"model": ""}, "model='' is empty"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"time_out": 0.0}, r"time_out=0\.0 must be above 0"),
        ({"retries": -1}, "retries=-1 must be at least 0"),
    ],
)
def test_wrong_fields_are_named(service, more, message):
    with pytest.raises(UserError, match=message):
        service.config(**more)


@pytest.mark.parametrize(
    "more", [{"key_variable": KEY}, {"key_variable": ""}, {"url": f"http://me:{KEY}@127.0.0.1:9/v1"}], ids=str
)
def test_a_key_in_a_visible_field_is_refused_and_not_shown(service, more):
    with pytest.raises(UserError, match="environment variable") as error:
        service.config(**more)
    assert KEY not in str(error.value)


def test_a_model_judge_parses_the_replies_of_an_endpoint(service):
    service.script = [
        (200, {}, json.dumps({"choices": [{"message": {"content": text}}]}))
        for text in ("True", "False", "perhaps")
    ]
    judge = ModelJudge(Endpoint(service.config(concurrency=1)).answers)
    cases = [Correctness(Question("q", "Who?", ("x",)), str(i)) for i in range(3)]
    assert judge.grade(cases) == [1.0, 0.0, None]
