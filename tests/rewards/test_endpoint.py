"""A service that fails, hurries us, dawdles and gossips: answers come whole, once, and the key stays ours."""

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
from rrl.rewards.endpoint import TOKEN_LIMIT_FIELDS, Endpoint, EndpointConfig, EndpointReply
from rrl.rewards.judge import ModelJudge
from rrl.rewards.judge_prompts import Correctness
from rrl.stopping import ServiceUnavailable, stop_requested
from rrl.text.chat import Prompt

KEY = "sk-secret-0123456789"


class Service:
    """An endpoint that says a prompt's last word in capitals, after the misfortunes of its script."""

    def __init__(self):
        self.script = []  # (status, headers, body) or a callable on the handler; one a request, then all goes well
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
            mishap = self.script.pop(0) if self.script else None
        time.sleep(self.seconds)
        with self.lock:
            self.busy -= 1
        if callable(mishap):
            return mishap(handler)
        if mishap is not None:
            return reply(handler, *mishap)
        said = body["messages"][-1]["content"].split()[-1].upper()
        return reply(handler, 200, {}, json.dumps({"choices": [{"message": {"content": said}}]}))


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
    found = Service()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            found.answer(self)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("RRL_TEST_KEY", KEY)
    found.config = lambda **more: EndpointConfig(
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
    yield found
    server.shutdown()
    server.server_close()


def test_prompts_become_messages_and_answers_come_in_their_order(service):
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
def test_whether_a_model_thinks_is_sent_where_it_is_said_and_makes_another_answer(service, thinking):
    Endpoint(service.config()).answers(["say one"])
    Endpoint(service.config(thinking=thinking)).answers(["say one"])
    silent, told = service.requests
    assert "chat_template_kwargs" not in silent
    assert told == silent | {"chat_template_kwargs": {"enable_thinking": thinking}}


def test_no_key_is_sent_where_there_is_none(service, monkeypatch):
    monkeypatch.delenv("RRL_TEST_KEY")
    Endpoint(service.config()).answers(["a"])
    assert "Authorization" not in service.headers[0]


def test_equal_prompts_are_asked_once_and_so_many_at_a_time(service):
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
    "mishap",
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
def test_what_may_pass_is_tried_again(service, mishap):
    service.script = [mishap, mishap]
    assert Endpoint(service.config(time_out=1.0)).answers(["say one"]) == ["ONE"]
    assert len(service.requests) == 3


def test_pauses_double_and_a_service_that_asks_for_time_gets_it_within_bounds(service):
    waited = []
    stop = types.SimpleNamespace(is_set=lambda: False, wait=waited.append)
    endpoint = Endpoint(service.config(backoff=1.0, max_backoff=5.0, retries=5))
    busy = (500, {}, "")
    service.script = [busy, busy, busy, busy, (429, {"Retry-After": "3"}, "")]
    endpoint._ask(endpoint._body("a"), stop)
    low, high = 0.75, 1.25
    assert all(low * 2**i <= waited[i] <= high * 2**i for i in range(2)), waited
    assert 3.0 <= waited[2] <= 5.0 and waited[3] == 5.0 and waited[4] == 3.0
    service.script, waited[:] = [(429, {"Retry-After": "3600"}, "")], []
    endpoint._ask(endpoint._body("b"), stop)
    assert waited == [5.0]


def test_a_slow_service_is_given_up_and_asked_again(service):
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


def test_a_refusal_whose_reason_never_comes_is_one_all_the_same(service):
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


def test_a_run_that_is_to_stop_does_not_wait_for_a_service_that_hangs(service):
    over, asked = threading.Event(), threading.Barrier(2)

    def hang(handler):
        if asked.wait(60) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        over.wait(60)

    service.script = [hang] * 4
    with stop_requested() as stop:
        with pytest.raises(ServiceUnavailable, match="the run is to stop"):
            Endpoint(service.config(time_out=60.0, concurrency=2)).answers(["a", "b", "c", "d"])
        assert stop and not over.is_set() and len(service.requests) == 2
    over.set()


def test_the_first_failure_is_told_before_it_is_tried_again(service, caplog):
    service.script = [(503, {}, "warming up")] * 2
    assert Endpoint(service.config(retries=4)).answers(["a"]) == ["A"]
    assert caplog.text.count("answered 503") == 1 and "warming up; up to 4 attempts follow" in caplog.text


def test_an_answer_in_parts_is_their_text_and_an_empty_one_is_asked_again(service):
    parts = [{"type": "text", "text": "yes, "}, {"type": "image"}, {"type": "text", "text": "1"}]
    service.script = [
        (200, {}, json.dumps({"choices": [{"message": {"content": content}}]})) for content in (parts, None)
    ]
    assert Endpoint(service.config()).answers(["a"]) == ["yes, 1"]
    assert Endpoint(service.config()).answers(["b"]) == [""]
    assert Endpoint(service.config()).answers(["a", "b"]) == ["yes, 1", "B"]


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:port/v1", "http://ho st/v1", "https:///v1"])
def test_an_address_without_a_host_is_refused_at_once(url):
    with pytest.raises(UserError, match="must name a host, and a port in digits if any"):
        EndpointConfig(url=url, model="m")


def test_an_address_that_holds_a_key_is_refused_and_not_shown():
    with pytest.raises(UserError, match="must hold no name, password, query") as found:
        EndpointConfig(url=f"http://host/v1?api-key={KEY}", model="m")
    assert KEY not in str(found.value)


def test_a_service_that_stays_down_ends_the_call_and_the_other_prompts_with_it(service):
    service.script = [(500, {}, "down")] * 1000
    endpoint = Endpoint(service.config(retries=2, concurrency=2))
    with pytest.raises(OSError, match=r"/v1/chat/completions answered 500 .*down \(after 3 attempts\)"):
        endpoint.answers([f"word {i}" for i in range(50)])
    assert len(service.requests) < 12


def test_who_waits_for_a_retry_is_called_back_when_another_fails_for_good(service):
    later = (429, {"Retry-After": "30"}, "busy")
    service.script = [later, later, (401, {}, "no")]
    began = time.monotonic()
    with pytest.raises(UserError, match="answered 401"):
        Endpoint(service.config(concurrency=3)).answers(["a", "b", "c"])
    assert time.monotonic() - began < 25


def test_nobody_there_is_said_with_the_address(service):
    with pytest.raises(
        OSError, match=r"http://127\.0\.0\.1:9/v1: URLError: .*refused.* \(after 1 attempts\)"
    ):
        Endpoint(service.config(url="http://127.0.0.1:9/v1", retries=0)).answers(["a"])


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_a_refusal_of_us_is_wrong_input_and_not_repeated(service, status):
    service.script = [(status, {"Location": "http://127.0.0.1:9/elsewhere"}, "no")]
    with pytest.raises(UserError, match=rf"answered {status} .*model='m' and the key .* RRL_TEST_KEY"):
        Endpoint(service.config()).answers(["a"])
    assert len(service.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_is_refused_gets_no_answer_and_the_others_theirs(service, status, caplog):
    service.script = [(status, {}, "context length exceeded")]
    endpoint = Endpoint(service.config(concurrency=1))
    assert endpoint.replies(["a", "say two"]) == [EndpointReply(refused=True), EndpointReply("TWO")]
    assert endpoint.refused == 1 and "context length exceeded" in caplog.text
    assert endpoint.answers(["a"]) == ["A"]  # it was not kept


def test_a_service_that_refuses_every_prompt_refuses_us(service):
    unknown = (400, {}, "max_tokens is not supported")
    prompts = [f"say {n}" for n in range(10)]
    service.script = [unknown] * 8
    with pytest.raises(UserError, match=r"not supported; all of 8 .*model='m', answer_tokens=1024"):
        Endpoint(service.config()).answers(prompts[:8])
    service.script = [unknown] * 7
    assert Endpoint(service.config()).answers(prompts[:7]) == [""] * 7
    endpoint = Endpoint(service.config(concurrency=1))
    assert endpoint.answers(prompts[:1]) == ["0"]
    service.script = [unknown] * 9
    assert endpoint.answers(prompts[1:]) == [""] * 9  # it answers others


def error(code, words):
    return (400, {}, json.dumps({"error": {"message": words, "code": code, "param": words.split()[0]}}))


@pytest.mark.parametrize("retries", [0, 2])
def test_a_model_that_takes_only_max_completion_tokens_is_asked_with_that(service, retries):
    service.script = [error("unsupported_parameter", "max_tokens is not taken; send max_completion_tokens")]
    config = service.config(concurrency=1, retries=retries, answer_tokens=9)
    endpoint = Endpoint(config)
    assert endpoint.replies(["say one", "say two"]) == [EndpointReply("ONE"), EndpointReply("TWO")]
    limits = [{name: body[name] for name in TOKEN_LIMIT_FIELDS if name in body} for body in service.requests]
    assert limits == [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_completion_tokens": 9}]
    assert Endpoint(config).answers(["say one"]) == ["ONE"] and len(service.requests) == 3, "it was kept"


def test_a_refused_setting_is_wrong_input_and_no_refused_prompt(service):
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
def test_a_refusal_of_the_model_is_no_answer_and_is_not_kept(service, choice, caplog):
    service.script = [(200, {}, json.dumps({"choices": [choice]}))]
    endpoint = Endpoint(service.config())
    assert endpoint.replies(["a"]) == [EndpointReply(refused=True)]
    assert endpoint.refused == 1 and "a prompt gets no answer" in caplog.text
    assert endpoint.answers(["a"]) == ["A"]


def test_an_answer_without_text_is_an_empty_one(service):
    service.script = [(200, {}, '{"choices": [{"message": {"content": null}}]}')]
    assert Endpoint(service.config()).answers(["a"]) == [""]


def test_an_answer_that_was_cut_is_known_as_one_then_and_later(service):
    def said(ended):
        choice = {"message": {"content": "half"}, "finish_reason": ended}
        return (200, {}, json.dumps({"choices": [choice]}))

    service.script = [said("length"), said("stop")]
    first = Endpoint(service.config(concurrency=1)).replies(["a", "b", "c"])
    assert first == [
        EndpointReply("half", truncated=True),
        EndpointReply("half"),
        EndpointReply("C"),
    ]  # not every service says how it ended
    endpoint = Endpoint(service.config())
    assert endpoint.replies(["a", "b", "c"]) == first and endpoint.answers(["a", "b"]) == ["", "half"]
    assert len(service.requests) == 3


def test_what_was_answered_is_never_asked_again_by_any_process(service):
    config = service.config()
    Endpoint(config).answers(["say one", "say two"])
    endpoint = Endpoint(config)
    assert endpoint.answers(["say two", "say one"]) == ["TWO", "ONE"]
    program = (
        "import sys; from rrl.rewards.endpoint import Endpoint, EndpointConfig; "
        "print(Endpoint(EndpointConfig(url=sys.argv[1], model='m', cache=sys.argv[2])).answers(['say one']))"
    )
    command = [sys.executable, "-c", program, config.url, config.cache]
    assert "['ONE']" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(service.requests) == 2 and endpoint.cached == 2


@pytest.mark.parametrize("more", [{"model": "n"}, {"answer_tokens": 3}, {"temperature": 1.0}])
def test_another_model_or_sampling_is_another_answer(service, more):
    Endpoint(service.config()).answers(["a"])
    Endpoint(service.config(**more)).answers(["a"])
    assert len(service.requests) == 2


def test_a_broken_file_of_the_cache_is_asked_anew_and_mended(service, tmp_path):
    Endpoint(service.config()).answers(["a"])
    (file,) = (tmp_path / "answers").rglob("*.json")
    file.write_text('{"model": "m", "ans')
    assert Endpoint(service.config()).answers(["a"]) == Endpoint(service.config()).answers(["a"]) == ["A"]
    assert len(service.requests) == 2


def test_a_cache_that_cannot_be_written_costs_only_what_it_would_have_saved(service, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert Endpoint(service.config(cache=str(tmp_path / "file"))).answers(["a"]) == ["A"]
    assert "could not be kept" in caplog.text


def test_the_key_is_in_no_message_log_file_or_attribute(service, caplog, tmp_path, capfd):
    caplog.set_level(logging.DEBUG)
    gossip = f"bad key {KEY}"
    messages = []
    for script, retries in (
        ([(401, {}, gossip)], 0),
        ([(500, {}, gossip)] * 3, 2),
        ([(400, {}, gossip)], 0),
        ([(200, {}, gossip)], 0),
        ([(200, {}, json.dumps({"choices": [{"message": {"content": gossip}}]}))], 0),
        ([(200, {}, "[" * 200_000)], 0),
    ):
        service.script = script
        endpoint = Endpoint(service.config(retries=retries))
        try:
            endpoint.answers([f"prompt {len(messages)}"])
        except (UserError, OSError) as error:
            messages.append(f"{error!r} {error.__cause__!r} {error.__context__!r}")
        messages.append(f"{endpoint.__dict__}")
    said = capfd.readouterr()
    files = [file.read_text() for file in (tmp_path / "answers").rglob("*.json")]
    assert "bad key ***" in caplog.text and "".join(messages).count("bad key ***") >= 2
    assert KEY not in "".join([*messages, *files, caplog.text, said.out, said.err])


def test_a_refusal_is_cut_after_the_key_was_taken_out(service):
    for padding in range(300 - len(KEY), 301):
        service.script = [(401, {}, f"{'x' * padding}{KEY} is no key")]
        with pytest.raises(UserError) as found:
            Endpoint(service.config(retries=0, concurrency=1)).answers([f"prompt {padding}"])
        assert KEY[:4] not in str(found.value)
        assert "is no key" not in str(found.value) or padding < 300


def test_a_service_that_asks_for_no_wait_is_asked_again_as_slowly_as_any(service):
    service.script = [(429, {"Retry-After": "0"}, "slow down")] * 2
    begun = time.monotonic()
    assert Endpoint(service.config(backoff=0.2, retries=3)).answers(["a"]) == ["A"]
    assert time.monotonic() - begun >= 0.75 * (0.2 + 0.4)


@pytest.mark.parametrize("key", ["sk\nx: y", "sk-ключ"])
def test_a_key_that_no_header_holds_is_refused_without_being_shown(service, monkeypatch, key):
    monkeypatch.setenv("RRL_TEST_KEY", key)
    with pytest.raises(UserError, match="RRL_TEST_KEY holds characters") as found:
        Endpoint(service.config()).answers(["a"])
    assert key not in str(found.value) and not service.requests


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"url": "localhost:8000"}, r"url='localhost:8000' must begin with http"),
        ({"model": ""}, "model='' names no model"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"time_out": 0.0}, r"time_out=0\.0 must be above 0"),
        ({"retries": -1}, "retries=-1 must be at least 0"),
    ],
)
def test_wrong_settings_are_named(service, more, message):
    with pytest.raises(UserError, match=message):
        service.config(**more)


@pytest.mark.parametrize(
    "more", [{"key_variable": KEY}, {"key_variable": ""}, {"url": f"http://me:{KEY}@127.0.0.1:9/v1"}], ids=str
)
def test_a_key_that_stands_where_all_can_read_it_is_refused_without_being_shown(service, more):
    with pytest.raises(UserError, match="environment variable") as found:
        service.config(**more)
    assert KEY not in str(found.value)


def test_a_judge_over_it_reads_what_it_says(service):
    service.script = [
        (200, {}, json.dumps({"choices": [{"message": {"content": text}}]}))
        for text in ("True", "False", "perhaps")
    ]
    judge = ModelJudge(Endpoint(service.config(concurrency=1)).answers)
    cases = [Correctness(Question("q", "Who?", ("x",)), str(i)) for i in range(3)]
    assert judge.grade(cases) == [1.0, 0.0, None]
