import json
import logging
import os

import pytest

from gateway.config.models import LogConfig
from gateway.core.types import Caller, Endpoint, Outcome, RequestRecord, Usage, UsageSource
from gateway.observe.log import AccessLine, AccessLog, JsonFormatter, set_up_logging
from gateway.observe.outlet import Outlet

FIELDS = {
    "ts", "level", "event", "id", "client", "key_id", "tenant", "model", "pool", "fallback", "backend", "revision", "adapter", "endpoint", "stream",
    "outcome", "status", "code", "queue_s", "ttft_s", "duration_s", "prompt_tokens",
    "completion_tokens", "cached_tokens", "usage_source", "attempts", "resumed", "not_resumed", "engine_request_id", "bytes_out",
    "client_retry",
}  # fmt: skip


class HeldClock:
    def __init__(self):
        self.at = 1_700_000_000.0625

    def now(self):
        return 100.0

    def wall(self):
        return self.at


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def outlet(pipe):
    outlet = Outlet(pipe[1])
    yield outlet
    assert outlet.close()


@pytest.fixture
def written(pipe, outlet):
    """Return a function that gives what was written so far."""

    def read():
        assert outlet.flush()
        return os.read(pipe[0], 1_000_000).decode()

    return read


@pytest.fixture
def root():
    """Give the root logger to a test, and back as it was."""
    logger = logging.getLogger()
    names = ("httpx2", "httpcore2", "asyncio", "uvicorn.access")
    handlers, level = logger.handlers[:], logger.level
    levels = {name: logging.getLogger(name).level for name in names}
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def record(**more):
    fields = {
        "id": "req_1",
        "endpoint": Endpoint.CHAT,
        "received_at": 10.0,
        "caller": Caller("ab12", "alice's key", "team-a"),
        "model": "alias",
        "pool": "org/m",
        "backend_id": "org/m/b1",
        "attempts": 1,
        "resumed": 0,
        "not_resumed": None,
        "sent_at": 10.5,
        "first_byte_at": 11.2,
        "ended_at": 13.0,
        "status": 200,
        "outcome": Outcome.OK,
        "stream": True,
        "usage": Usage(7, 5, UsageSource.UPSTREAM, cached_tokens=3),
        "bytes_out": 1234,
        "engine_id": "0a1b",
        "client_retry": 1,
        "queue_s": 0.25,
        "client": "192.0.2.7",
    }
    return RequestRecord(**(fields | more))


# --- the access log -------------------------------------------------------------------------------


def test_a_line_has_exactly_the_allowed_fields(outlet, written):
    AccessLog(outlet, HeldClock()).write([record(adapter="lora-a")])
    assert set(AccessLine.__struct_fields__) == FIELDS
    assert json.loads(written()) == {
        "ts": "2023-11-14T22:11:53.062Z",
        "level": "INFO",
        "event": "request",
        "id": "req_1",
        "client": "192.0.2.7",
        "key_id": "ab12",
        "tenant": "team-a",
        "model": "alias",
        "pool": "org/m",
        "fallback": None,
        "backend": "b1",
        "revision": None,
        "adapter": "lora-a",
        "endpoint": "chat",
        "stream": True,
        "outcome": "ok",
        "status": 200,
        "code": None,
        "queue_s": 0.25,
        "ttft_s": 1.2,
        "duration_s": 3.0,
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "cached_tokens": 3,
        "usage_source": "upstream",
        "attempts": 1,
        "resumed": 0,
        "not_resumed": None,
        "engine_request_id": "0a1b",
        "bytes_out": 1234,
        "client_retry": 1,
    }


@pytest.mark.parametrize(
    ("level", "outcomes"),
    [
        ("INFO", "ok unauthenticated rejected upstream_rejected client_gone client_stalled"),
        ("WARNING", "shed backend_error backend_timeout stream_broken time_limit shutdown"),
        ("ERROR", "bug"),
    ],
)
def test_the_level_says_whether_anybody_but_the_caller_is_concerned(
    outlet, written, level, outcomes
):
    settled = [record(outcome=Outcome(each)) for each in outcomes.split()]
    AccessLog(outlet, HeldClock()).write(settled)
    lines = [json.loads(line) for line in written().splitlines()]
    assert [line["level"] for line in lines] == [level] * len(settled)


def test_access_and_event_lines_begin_alike(outlet, written, pipe, root):
    AccessLog(outlet, HeldClock()).write([record()])
    access = json.loads(written())
    event = json.loads(
        JsonFormatter().format(logging.LogRecord("gateway", logging.INFO, "", 0, "hi", None, None))
    )
    assert list(access)[:3] == list(event)[:3] == ["ts", "level", "event"]
    assert len(access["ts"]) == len(event["ts"])
    assert event["event"] == "library"  # a line of ours would have said its own


def test_what_is_not_known_is_null(outlet, written):
    AccessLog(outlet, HeldClock()).write(
        [
            RequestRecord(
                "req_1", Endpoint.CHAT, 10.0, ended_at=10.0, outcome=Outcome.UNAUTHENTICATED
            )
        ]
    )
    line = json.loads(written())
    assert set(line) == FIELDS
    unknown = {name for name, value in line.items() if value is None}
    assert unknown == {
        "client", "key_id", "tenant", "model", "pool", "fallback", "backend", "revision", "adapter", "code", "engine_request_id", "ttft_s",
        "prompt_tokens", "completion_tokens", "cached_tokens", "usage_source", "not_resumed",
    }  # fmt: skip


def test_only_a_stream_has_a_time_to_its_first_token(outlet, written):
    AccessLog(outlet, HeldClock()).write([record(stream=False)])
    assert json.loads(written())["ttft_s"] is None


@pytest.mark.parametrize("name", ['a"b', "a\nb", 'x","outcome":"ok', "\x1b[31m", "\u2028", "é☃"])
def test_hostile_names_stay_in_their_field(outlet, written, name):
    AccessLog(outlet, HeldClock()).write([record(model=name, outcome=Outcome.BUG)])
    text = written()
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line["model"] == name
    assert line["outcome"] == "bug"


def test_the_time_is_that_of_the_requests_end_however_late_it_is_written(outlet, written):
    clock = HeldClock()
    log = AccessLog(outlet, clock)
    log.write([record(ended_at=100.0)])
    log.write([record(ended_at=99.5)])
    clock.at += 60
    log.write([record(ended_at=100.0)])
    times = [json.loads(line)["ts"] for line in written().splitlines()]
    assert times == [
        "2023-11-14T22:13:20.062Z",
        "2023-11-14T22:13:19.562Z",
        "2023-11-14T22:14:20.062Z",
    ]


def test_a_log_that_is_off_writes_nothing(outlet):
    AccessLog(outlet, HeldClock(), enabled=False).write([record()])
    assert outlet.waiting == 0


# --- event lines ----------------------------------------------------------------------------------


@pytest.fixture
def events(pipe, root):
    """Set logging up on a pipe; return what was written, as text."""
    outlets = []

    def start(**settings):
        outlet = set_up_logging(LogConfig.model_validate(settings), fd=pipe[1])
        outlets.append(outlet)

        def read():
            assert outlet.flush()
            return os.read(pipe[0], 1_000_000).decode()

        return read

    yield start
    for outlet in outlets:
        assert outlet.close()


def test_an_event_is_one_json_line_with_its_name_and_fields(events):
    read = events()
    extra = {"event": "backend_down", "backend": "m/b1", "failures": 3, "why": ["a", 1, None]}
    logging.getLogger("gateway.pools").warning("%s is down", "m/b1", extra=extra)
    line = json.loads(read())
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "WARNING",
        "event": "backend_down",
        "message": "m/b1 is down",
        "logger": "gateway.pools",
        "backend": "m/b1",
        "failures": 3,
        "why": ["a", 1, None],
    }


def test_credentials_are_redacted_in_sentences_arguments_and_fields(events):
    read = events()
    logging.getLogger("x").error(
        "key %s",
        "gw_ab12_SEEKRITSEEKRIT",
        extra={"url": "http://u:SEEKRIT@h", "many": ["sk-SEEKRIT12"]},
    )
    text = read()
    assert "SEEKRIT" not in text
    assert json.loads(text)["url"] == "http://***@h"


def test_an_exception_is_told_without_locals_or_words(events):
    read = events()
    prompt = "CANARY"
    try:
        raise ValueError(f"cannot parse {prompt}")
    except ValueError:
        logging.getLogger("x").exception("request failed by a bug")
    text = read()
    assert "CANARY" not in text
    line = json.loads(text)
    assert "ValueError" in line["traceback"]
    assert "test_log.py" in line["traceback"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_hostile_name_cannot_forge_a_line_or_steer_a_terminal(events, form):
    read = events(format=form)
    logging.getLogger("x").info("model %s", "a\n\x1b[2Jb\x9b1m", extra={"name_asked": "c\r\nd"})
    text = read()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert "\r" not in text


def test_text_is_for_people(events):
    read = events(format="text")
    logging.getLogger("x").warning("m/b1 is down", extra={"event": "backend_down"})
    assert read()[8:] == " WARNING m/b1 is down  (event=backend_down)\n"


def test_a_traceback_follows_a_text_line_indented(events):
    read = events(format="text")
    try:
        raise OSError(5, "broken")
    except OSError:
        logging.getLogger("x").exception("no luck")
    first, *rest = read().splitlines()
    assert first.endswith("no luck")
    assert rest[-1] == "    OSError: [Errno 5] broken"


def test_the_default_is_json_where_nobody_watches_and_text_on_a_terminal(root):
    leader, follower = os.openpty()
    try:
        outlet = set_up_logging(LogConfig(), fd=follower)
        logging.getLogger("x").info("hello")
        assert outlet.close()
        assert os.read(leader, 1000)[8:].startswith(b" INFO    hello")
        outlet = set_up_logging(LogConfig.model_validate({"format": "json"}), fd=follower)
        assert isinstance(root.handlers[0].formatter, JsonFormatter)
        assert outlet.close()
    finally:
        os.close(leader)
        os.close(follower)


def test_lines_below_the_level_are_not_written(events):
    read = events(level="warning")
    logging.getLogger("x").info("not this")
    logging.getLogger("httpx2").info("HTTP Request: GET http://10.0.0.1")
    logging.getLogger("x").warning("this")
    assert [json.loads(line)["message"] for line in read().splitlines()] == ["this"]


def test_a_wrong_log_call_breaks_nobody(events):
    read = events()
    logging.getLogger("x").info("two: %s %s", "one")
    assert json.loads(read())["event"] == "log_bug"


def test_access_lines_and_events_keep_their_order(events, root):
    read = events()
    outlet = root.handlers[0]._outlet
    AccessLog(outlet, HeldClock()).write([record()])
    logging.getLogger("x").info("after it")
    first, second = read().splitlines()
    assert json.loads(first)["id"] == "req_1"
    assert json.loads(second)["message"] == "after it"
