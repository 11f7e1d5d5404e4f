"""What a token stream is judged to be, and what of it reaches the client."""

from __future__ import annotations

import json

import pytest

from gateway.core.types import Dialect, Usage, UsageSource
from gateway.wire.frames import json_aborted, json_usage, whole_answer
from gateway.wire.replies import Fault
from gateway.wire.sse import ABORTED, CUT_SHORT, HEARTBEAT, HOLD_BYTES, StreamWatch

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3}


def frame(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def chunk(text: str = "a", finish: str | None = None, index: int = 0, **fields: object) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return frame(id="x", object="chat.completion.chunk", model="m", choices=[choice], **fields)


def event(kind: str, **fields: object) -> bytes:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def watch(dialect: Dialect = Dialect.CHAT, choices: int = 1, *, hide: bool = False) -> StreamWatch:
    return StreamWatch(dialect, choices=choices, hide_usage=hide, request_id="req-1")


def gone(message: str) -> Fault:
    return Fault(502, "server_error", "backend_error", message)


def payload(data: bytes) -> dict[str, object]:
    """The only data line of one frame, decoded."""
    (line,) = [line for line in data.splitlines() if line.startswith(b"data:")]
    return json.loads(line[5:])


def frames(data: bytes) -> list[bytes]:
    return [each + b"\n\n" for each in data.split(b"\n\n")[:-1]]


# --- success ------------------------------------------------------------------------------------


def test_ordinary_frames_pass_as_the_same_object():
    w = watch()
    data = chunk("a") + chunk("b") + chunk("c")
    assert w.feed(data) is data
    one = chunk("d")
    assert w.feed(one) is one
    assert w.events == 4
    assert not w.complete


@pytest.mark.parametrize(
    "data",
    [
        chunk("", "stop"),
        frame(id="x", choices=[], usage=USAGE),
        frame(error={"message": "boom", "code": 500}),
        DONE,
        chunk("a") + DONE,
        chunk("a")[:-1],
    ],
)
def test_no_token_passes_unseen_after_a_frame_that_was_judged_or_held_back(data):
    w = watch(hide=True)
    w.feed(chunk(""))  # a first one may tell the role
    w.feed(chunk("a"))
    token = chunk("b")
    framed = b"%x\r\n%b\r\n" % (len(token), token)
    assert w.shape.fits(framed)
    w.feed(data)
    assert not w.shape.fits(framed)


def test_a_role_is_an_ordinary_frame():
    w = watch()
    data = chunk("", prompt_token_ids=None)
    assert w.feed(data) is data
    assert w.events == 1


@pytest.mark.parametrize(
    "reason", ["stop", "length", "tool_calls", "function_call", "content_filter", "repetition"]
)
def test_a_good_finish_reason_completes_the_stream(reason):
    w = watch()
    whole = chunk() + chunk("", reason) + DONE
    assert w.feed(whole) == whole
    assert (w.complete, w.failed) == (True, False)
    assert w.close() == b""


def test_every_choice_must_finish():
    w = watch(choices=2)
    w.feed(chunk("", "stop", 0))
    assert not w.complete
    w.feed(chunk("", "stop", 1))
    assert w.complete


def test_choices_that_were_not_asked_for_prove_nothing():
    w = watch(choices=1)
    w.feed(chunk("", "stop", 7))
    assert not w.complete


def test_a_finished_choice_beside_an_open_one_is_seen():
    w = watch(choices=2)
    both = frame(
        choices=[{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": None}]
    )
    assert w.feed(both) == both
    w.feed(chunk("", "stop", 1))
    assert w.complete


def test_other_spacing_is_understood():
    w = watch()
    spaced = b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\ndata:[DONE]\n\n'
    assert w.feed(spaced) == spaced.replace(b"data:[", b"data: [")
    assert w.complete


def test_crlf_frames_are_frames():
    w = watch()
    whole = (chunk() + chunk("", "stop") + DONE).replace(b"\n", b"\r\n")
    assert b"".join(w.feed(whole[i : i + 1]) for i in range(len(whole))).count(b"data:") == 3
    assert w.complete


def test_done_inside_a_text_is_text():
    w = watch()
    data = chunk("data: [DONE]\n\n") + chunk("[DONE]")
    assert w.feed(data) == data
    assert w.feed(chunk('","finish_reason":"stop"')) != b""
    assert not w.complete


def test_a_missing_done_is_added_to_a_stream_that_said_everything():
    w = watch()
    w.feed(chunk("", "stop"))
    assert w.close() == DONE
    assert not w.failed
    w = watch()
    w.feed(chunk("", "stop"))
    assert w.broken(gone("cut")) == DONE
    assert w.complete


def test_a_last_frame_without_its_blank_line_counts():
    w = watch()
    assert w.feed(chunk("", "stop")[:-1]) == b""
    assert w.close() == chunk("", "stop") + DONE
    assert w.complete
    w = watch()
    w.feed(chunk("", "stop") + b"data: [DONE]")
    assert w.close() == DONE


def test_nothing_follows_the_end():
    w = watch()
    w.feed(chunk("", "stop") + DONE)
    assert w.feed(chunk("late")) == b""
    assert w.feed(b"x" * (HOLD_BYTES + 1)) == b""
    assert w.feed(b"x\n\n" + chunk("late")) == b""
    assert w.close() + w.broken(gone("x")) == b""
    assert w.complete


# --- failure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["abort", "error", "brand_new"])
def test_an_aborted_request_gets_an_error_frame_before_done(reason):
    w = watch()
    out = frames(w.feed(chunk() + chunk("", reason) + DONE))
    assert out[:2] == [chunk(), chunk("", reason)]
    assert out[3:] == [DONE]
    error = payload(out[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "backend_error")
    assert "req-1" in error["message"]
    assert (w.complete, w.fault) == (False, ABORTED)


def test_done_without_a_finish_reason_is_a_truncation():
    w = watch()
    out = frames(w.feed(chunk() + DONE))
    assert [out[0], out[2]] == [chunk(), DONE]
    assert "error" in payload(out[1])
    assert (w.complete, w.fault) == (False, CUT_SHORT)


def test_a_clean_end_without_done_is_a_truncation():
    w = watch()
    w.feed(chunk())
    error, done = frames(w.close())
    assert "error" in payload(error)
    assert done == DONE
    assert w.fault == CUT_SHORT


def test_a_cut_frame_is_dropped_and_told():
    w = watch()
    assert w.feed(chunk() + chunk("half")[:-20]) == chunk()
    error, done = frames(w.broken(gone("the backend went away")))
    assert "the backend went away" in payload(error)["error"]["message"]
    assert done == DONE
    w = watch()
    w.feed(chunk("half")[:-20])
    assert b"half" not in w.close()


def test_the_backends_error_frame_is_put_into_the_clients_form():
    w = watch()
    raw = (
        b'data: {"error": {"message": "EngineCore encountered an issue.", '
        b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
    )
    error, done = frames(w.feed(raw + DONE))
    assert payload(error)["error"] == {
        "message": "EngineCore encountered an issue. (request id: req-1)",
        "type": "server_error",
        "param": None,
        "code": "backend_error",
    }
    assert done == DONE
    assert (w.failed, w.fault.status, w.events) == (True, 500, 0)
    assert w.close() == b""


def test_a_busy_engine_is_told_apart_from_a_broken_one():
    w = watch()
    out = w.feed(
        b'data: {"error": {"message": "busy", "type": "x", "param": null, "code": 503}}\n\n'
    )
    assert payload(out)["error"]["code"] == "server_is_overloaded"
    assert w.fault.status == 503


def test_a_request_refused_in_mid_stream_is_the_callers_fault():
    w = watch()
    text = "This model's maximum context length is 10 tokens. However, ..."
    out = w.feed(
        frame(error={"message": text, "type": "BadRequestError", "param": None, "code": 400})
    )
    assert payload(out)["error"]["code"] == "context_length_exceeded"
    assert w.fault.status == 400


def test_old_and_odd_error_frames_are_errors():
    for raw in (frame(object="error", message="m", code=400), frame(error="m"), frame(error={})):
        w = watch()
        assert payload(w.feed(raw))["error"]["type"]
        assert w.failed
    assert watch().feed(frame(error=None, choices=[])) == frame(error=None, choices=[])


def test_only_one_error_frame_reaches_the_client():
    w = watch()
    error = frame(error={"message": "m", "code": 500})
    out = w.feed(error + error + chunk("", "stop") + DONE) + w.close() + w.broken(gone("x"))
    assert out.count(b'"error"') == 1
    assert out.count(DONE) == 1
    assert not w.complete
    w = watch()
    w.feed(error)
    assert w.broken(gone("x")) == DONE


def test_an_error_after_the_finish_is_still_an_error():
    w = watch()
    w.feed(chunk("", "stop") + frame(error={"message": "m", "code": 500}))
    assert (w.complete, w.failed) == (False, True)


def test_a_frame_that_is_no_json_passes():
    w = watch()
    assert w.feed(b"data: {nonsense\n\n") == b"data: {nonsense\n\n"
    assert w.feed(b"data: hello\n\n") == b"data: hello\n\n"
    deep = b"data: " + b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}\n\n"
    assert w.feed(deep) == deep


# --- usage --------------------------------------------------------------------------------------


def test_the_final_usage_chunk_is_recorded_and_hidden_only_when_asked():
    end = frame(id="x", choices=[], usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 4}})
    for hide in (True, False):
        w = watch(hide=hide)
        out = w.feed(chunk("", "stop") + end + DONE)
        assert out == chunk("", "stop") + (b"" if hide else end) + DONE
        assert w.usage == Usage(5, 3, UsageSource.UPSTREAM, 4)
        assert w.complete


def test_the_last_chunk_gets_the_fingerprint_of_the_hidden_one_as_vllm_writes_it():
    usage = frame(id="x", choices=[], usage=USAGE, system_fingerprint="vllm-0.32.0-ab")
    stamped = chunk("", "stop", system_fingerprint="vllm-0.32.0-ab")
    w = watch(hide=True)
    assert w.feed(chunk("a")) == chunk("a")
    assert w.feed(chunk("", "stop")) == b""  # vLLM writes the usage chunk at once
    assert w.feed(usage) == stamped
    assert w.feed(DONE) == DONE
    assert (w.complete, w.usage) == (True, Usage(5, 3, UsageSource.UPSTREAM))


def test_with_several_choices_the_last_one_to_end_waits_and_no_other():
    usage = frame(id="x", choices=[], usage=USAGE, system_fingerprint="f")
    w = watch(choices=2, hide=True)
    first, second = chunk("", "stop", 1), chunk("b", "length", 0)
    assert w.feed(first) == first
    assert w.feed(chunk("b")) == chunk("b")
    assert w.feed(second) == b""
    assert w.feed(usage + DONE) == chunk("b", "length", 0, system_fingerprint="f") + DONE


def test_a_last_chunk_that_waits_is_passed_on_whatever_comes():
    end, late = chunk("", "stop"), chunk("late")
    null = frame(id="x", choices=[], usage=USAGE, system_fingerprint=None)
    for then, told in (
        (DONE, DONE),
        (null, b""),
        (late, late),
        (b"data: {nonsense\n\n", b"data: {nonsense\n\n"),
        (frame(id="x", choices=[]), frame(id="x", choices=[])),
    ):
        w = watch(hide=True)
        assert w.feed(end) == b""
        assert w.feed(then) == end + told
    for stop in (lambda w: w.close(), lambda w: w.broken(gone("cut"))):
        w = watch(hide=True)
        assert w.feed(end) == b""
        assert stop(w) == end + DONE
    failed = watch(hide=True)
    failed.feed(end)
    told = failed.feed(b'data: {"error": {"message": "died", "code": 500}}\n\n')
    assert told.startswith(end + b'data: {"error":')


def test_nothing_waits_where_nothing_is_hidden():
    end = chunk("", "stop")
    assert watch().feed(end) == end


@pytest.mark.parametrize("wrong", [-1, 1 << 64, 2.5, "3", True, [], {}])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_counts_that_can_be_none_count_nothing_and_break_nothing(name, wrong):
    w = watch()
    last = chunk("", "stop", usage={**USAGE, name: wrong})
    assert w.feed(chunk("a") + last + DONE) == chunk("a") + last + DONE
    assert (w.complete, w.usage) == (True, None)


@pytest.mark.parametrize("wrong", [[], "none", 7, {"input_tokens": -1}, {"input_tokens": 0.5}])
def test_events_with_counts_that_can_be_none_end_well(wrong):
    w = watch(Dialect.RESPONSES)
    end = event("response.completed", response={"status": "completed", "usage": wrong})
    assert (w.feed(end), w.complete, w.usage) == (end, True, None)
    w = watch(Dialect.MESSAGES)
    end = event("message_delta", delta={"stop_reason": None}, usage=wrong)
    assert b"message_stop" not in w.feed(end + STOP)
    assert (w.fault, w.usage) == (ABORTED, None)


def test_usage_on_every_chunk_is_kept_and_the_last_counts():
    w = watch(hide=True)
    data = chunk("a", usage={**USAGE, "completion_tokens": 1}) + chunk("b", usage=USAGE)
    assert w.feed(data) == data
    assert w.usage == Usage(5, 3, UsageSource.UPSTREAM)
    assert w.feed(chunk("c", usage=None)) == chunk("c", usage=None)
    assert w.events == 3


def test_a_strange_usage_harms_nothing():
    w = watch(hide=True)
    w.feed(frame(choices=[], usage={"prompt_tokens": "many"}) + chunk("", "stop"))
    assert w.usage is None
    assert w.complete
    w.feed(frame(choices=[], usage={}))
    assert w.usage is None


# --- other lines --------------------------------------------------------------------------------


def test_comments_pass():
    w = watch()
    assert w.feed(HEARTBEAT) == HEARTBEAT
    assert w.feed(b": a\n: b\n\n" + chunk()) == b": a\n: b\n\n" + chunk()
    assert w.events == 1


def test_ids_and_retry_times_are_taken_out():
    w = watch()
    assert w.feed(b"id: 1\n" + chunk()) == chunk()
    assert w.feed(b"retry: 1000\n\n") == b""
    assert w.feed(b"id: 1\n: ok\n\n") == b": ok\n\n"


def test_an_event_without_data_is_dropped():
    assert watch().feed(b"event: ping\n\n") == b""


def test_empty_input_is_nothing():
    assert watch().feed(b"") == b""


# --- long frames --------------------------------------------------------------------------------


def test_a_long_frame_is_held_no_further_than_the_bound():
    long = chunk("x" * (2 * HOLD_BYTES), "stop")
    w = watch()
    pieces = [w.feed(long[i : i + 10_000]) for i in range(0, len(long), 10_000)]
    assert pieces[0] == b""
    assert len(pieces[7]) > 0
    assert b"".join(pieces) == long
    assert (w.complete, w.events) == (True, 1)
    assert w.feed(DONE) == DONE


def test_what_follows_a_long_frame_in_the_same_read_is_judged():
    long = chunk("x" * HOLD_BYTES, usage=USAGE)
    w = watch(hide=True)
    out = w.feed(long[:-3]) + w.feed(long[-3:-1]) + w.feed(long[-1:] + chunk("", "stop") + DONE)
    assert out == long + chunk("", "stop") + DONE
    assert w.complete
    assert w.usage == Usage(5, 3, UsageSource.UPSTREAM)


def test_a_long_frame_cut_in_the_middle_is_ended_before_the_error():
    w = watch()
    w.feed(b"data: " + b"x" * HOLD_BYTES)
    out = w.broken(gone("cut"))
    assert out.startswith(b'\n\ndata: {"error"')
    assert out.endswith(DONE)


def test_a_long_completed_event_completes():
    usage = {"input_tokens": 2, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 1}}
    answer = {"id": "r", "output": "x" * HOLD_BYTES, "status": "completed", "usage": usage}
    long = event("response.completed", response=answer, sequence_number=9)
    w = watch(Dialect.RESPONSES)
    assert w.feed(long[:-10]) + w.feed(long[-10:]) == long
    assert w.complete
    assert w.usage == Usage(2, 3, UsageSource.UPSTREAM, 1)


def test_other_long_events_prove_nothing():
    w = watch(Dialect.RESPONSES)
    long = event("response.output_item.done", item="x" * HOLD_BYTES)
    assert w.feed(long[:-10]) + w.feed(long[-10:]) == long
    assert not w.complete
    w = watch()
    long = chunk("x" * HOLD_BYTES)
    w.feed(long[:-10])
    w.feed(long[-10:])
    assert not w.complete


# --- Responses ----------------------------------------------------------------------------------

DELTA = event("response.output_text.delta", delta="a", sequence_number=4)


def ended(status: str) -> dict[str, object]:
    return {"status": status, "usage": {"input_tokens": 2, "output_tokens": 3}}


@pytest.mark.parametrize("status", ["completed", "incomplete"])
@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_a_terminal_event_completes_a_response(kind, status):
    w = watch(Dialect.RESPONSES)
    assert w.feed(DELTA) is DELTA
    end = event(kind, response=ended(status), sequence_number=5)
    assert w.feed(end) == end
    assert (w.complete, w.events, w.close()) == (True, 1, b"")
    assert w.usage == Usage(2, 3, UsageSource.UPSTREAM)


def test_a_cancelled_response_is_an_abort():
    w = watch(Dialect.RESPONSES)
    out = w.feed(event("response.completed", response=ended("cancelled"), sequence_number=5))
    assert out.startswith(b"event: error\n")
    assert w.fault == ABORTED


def test_a_failed_response_passes_and_fails():
    w = watch(Dialect.RESPONSES)
    failed = event("response.failed", response={"status": "failed"}, sequence_number=5)
    assert w.feed(failed) == failed
    assert (w.complete, w.failed, w.close()) == (False, True, b"")


@pytest.mark.parametrize("split", [True, False])
def test_a_broken_response_ends_with_an_error_event_that_counts_on(split):
    w = watch(Dialect.RESPONSES)
    if split:
        w.feed(DELTA[:20])
        w.feed(DELTA[20:])
    else:
        w.feed(DELTA)
    out = w.broken(gone("gone"))
    assert out.startswith(b"event: error\ndata: ")
    told = {"code": "backend_error", "message": "gone (request id: req-1)", "param": None}
    assert payload(out) == {
        "type": "error",
        **told,
        "sequence_number": 5,
        # OpenAI's SDKs raise what has it, and pass on what has not.
        "error": {"type": "server_error", **told},
    }


def test_events_of_a_response_that_say_nothing_new_pass():
    w = watch(Dialect.RESPONSES)
    for other in (event("response.created", sequence_number=0), event("response.output_item.done")):
        assert w.feed(other) == other
    assert (w.events, w.complete) == (0, False)


def test_an_error_event_of_a_response_is_put_into_form():
    for raw in (event("error", code="x", message="m", param=None, sequence_number=1),
                frame(error={"message": "m", "code": 500})):  # fmt: skip
        w = watch(Dialect.RESPONSES)
        out = payload(w.feed(raw))
        assert (out["type"], out["code"]) == ("error", "backend_error")
        assert w.failed
        assert w.close() == b""


# --- Messages -----------------------------------------------------------------------------------

START = event("message_start", message={"usage": {"input_tokens": 7, "output_tokens": 0}})
TEXT = event("content_block_delta", delta={"type": "text_delta", "text": "a"}, index=0)
STOP = event("message_stop")


def stopping(reason: str | None, **usage: int) -> bytes:
    return event(
        "message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 2, **usage}
    )


def test_a_message_completes_with_its_stop():
    w = watch(Dialect.MESSAGES)
    assert w.feed(TEXT) is TEXT
    counts = {"input_tokens": 3, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 1}
    whole = START + TEXT + stopping("end_turn", **counts) + STOP
    assert w.feed(whole) == whole
    assert (w.complete, w.failed, w.events, w.close()) == (True, False, 2, b"")
    assert w.usage == Usage(7, 2, UsageSource.UPSTREAM, 3)


def test_what_a_message_found_in_the_cache_is_a_part_of_its_prompt():
    w = watch(Dialect.MESSAGES)
    w.feed(START + TEXT + stopping("end_turn", cache_read_input_tokens=3) + STOP)
    assert w.usage == Usage(7, 2, UsageSource.UPSTREAM, 3)


def test_a_message_that_stopped_for_no_reason_was_aborted():
    w = watch(Dialect.MESSAGES)
    out = w.feed(START + stopping(None) + STOP)
    assert b"message_stop" not in out
    assert payload(frames(out)[-1])["error"]["type"] == "api_error"
    assert (w.complete, w.fault) == (False, ABORTED)


def test_what_a_message_told_of_its_prompt_at_the_start_is_no_usage_of_it():
    w = watch(Dialect.MESSAGES)
    w.feed(START + TEXT)
    assert (w.usage, w.began.prompt_tokens, w.events) == (None, 7, 1)


def test_a_broken_message_ends_with_an_error_event():
    w = watch(Dialect.MESSAGES)
    w.feed(START + TEXT)
    out = w.close()
    assert out.startswith(b"event: error\n")
    assert payload(out)["type"] == "error"
    assert payload(out)["error"]["type"] == "api_error"
    assert payload(out)["error"]["details"] == {"error_code": "backend_error"}
    assert w.fault == CUT_SHORT


def test_an_error_event_of_a_message_is_told_once():
    w = watch(Dialect.MESSAGES)
    raw = event("error", error={"type": "internal_error", "message": "see http://10.0.0.1:8000/x"})
    out = w.feed(raw + raw)
    assert payload(out)["error"] == {
        "type": "api_error",
        "message": "see <url> (request id: req-1)",
        "details": {"error_code": "backend_error"},
    }
    assert w.close() == b""


def test_of_an_error_that_vllm_misread_it_is_said_that_the_reason_is_lost():
    """Before 0.33 it reads its own error as a chunk of a chat, and tells how that failed."""
    misread = "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing]"
    w = watch(Dialect.MESSAGES)
    out = w.feed(event("error", error={"type": "internal_error", "message": misread}))
    said = "The backend failed, and the reason is lost: vLLM before 0.33 does not tell it here."
    assert payload(out)["error"]["message"] == f"{said} (request id: req-1)"
    assert w.fault.message == said


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("overloaded_error", 503, "server_is_overloaded"),
        ("invalid_request_error", 400, "invalid_request"),
        ("api_error", 500, "backend_error"),
        ("internal_error", 500, "backend_error"),
        (["odd"], 500, "backend_error"),
    ],
)
def test_an_error_event_of_a_message_has_its_status_in_its_type(kind, status, code):
    w = watch(Dialect.MESSAGES)
    w.feed(event("error", error={"type": kind, "message": "Generation is paused."}))
    assert (w.fault.status, w.fault.code, w.fault.message) == (
        status,
        code,
        "Generation is paused.",
    )


def test_counts_may_be_missing_from_a_message():
    w = watch(Dialect.MESSAGES)
    w.feed(event("message_start", message={}) + event("message_delta", delta=None) + STOP)
    assert (w.complete, w.usage) == (True, None)


def test_odd_events_pass():
    w = watch(Dialect.MESSAGES)
    for odd in (event("ping"), b"event: x\ndata: nonsense\n\n", event("message_start", message=5)):
        assert w.feed(odd) == odd


# --- audio --------------------------------------------------------------------------------------


def test_an_audio_stream_is_complete_at_its_end_only():
    w = watch(Dialect.PLAIN)
    piece = frame(choices=[{"delta": {"content": "a"}, "finish_reason": "stop"}])
    assert w.feed(piece) == piece
    assert not w.complete  # one finish reason for each piece of sound
    assert w.feed(DONE) == DONE
    assert w.complete
    w = watch(Dialect.PLAIN)
    w.feed(piece)
    assert b'"error"' in w.broken(gone("cut"))
    assert w.failed


# --- replies that are no stream -----------------------------------------------------------------


CHAT_USAGE = b'"usage":{"prompt_tokens":1,"total_tokens":3,"completion_tokens":2}'
CACHED = b'"usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}'
RESPONSES_USAGE = b'"usage":{"input_tokens":4,"x_details":{"cached_tokens":2},"output_tokens":1}'


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b'{"choices":[],' + CHAT_USAGE + b"}", (1, 2, None)),
        (b"{" + CACHED + b', "x": {}}', (1, 0, 1)),
        (b'cut off","a":"",' + RESPONSES_USAGE.replace(b"x_", b"input_tokens_") + b"}", (4, 1, 2)),
        (b'{"content":"\\"usage\\":{\\"prompt_tokens\\":9}"}', None),
        (b'{"usage":null}', None),
        (b'{"usage":{"prompt_tokens":1},"metadata":{"usage":{"a":"b"}}}', (1, 0, None)),
        (b'{"usage":{"prompt_tokens":-1}}', None),
        (
            b'{"usage":{"input_tokens":4,"cache_creation_input_tokens":3,"output_tokens":1}}',
            (7, 1, None),
        ),
        (b'{"usage":{"prompt_tokens":1', None),
        (b"", None),
    ],
)
def test_usage_is_found_in_a_reply_or_its_end(body, usage):
    expected = None if usage is None else Usage(*usage[:2], UsageSource.UPSTREAM, usage[2])
    assert json_usage(body) == expected


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("reasons", "aborted"),
    [
        (["stop", "length"], False),
        (["tool_calls", None], False),
        (["a new one", "stop"], False),
        (["stop", "abort"], True),
        (["error"], True),
        ([], False),
    ],
)
@pytest.mark.parametrize(
    ("usage", "told"),
    [
        (USAGE, Usage(5, 3, UsageSource.UPSTREAM)),
        ({**USAGE, "completion_tokens": None}, Usage(5, 0, UsageSource.UPSTREAM)),
        (
            {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}},
            Usage(5, 3, UsageSource.UPSTREAM, 4),
        ),
        ({"input_tokens": 7, "output_tokens": 1}, Usage(7, 1, UsageSource.UPSTREAM)),
        ({"prompt_tokens": None}, None),
        (None, None),
        ({**USAGE, "completion_tokens": -3_000_000}, None),
        ({**USAGE, "prompt_tokens": 1 << 64}, None),
        ({**USAGE, "prompt_tokens": 10**400}, None),
        ({**USAGE, "prompt_tokens_details": {"cached_tokens": -5}}, None),
        (
            {**USAGE, "prompt_tokens_details": {"cached_tokens": 6}},
            Usage(5, 3, UsageSource.UPSTREAM, 5),
        ),
    ],
)
def test_a_whole_answer_tells_how_it_ended_and_what_it_took(reasons, aborted, usage, told, indent):
    said = {"role": "assistant", "content": '"finish_reason":"abort"'}
    choices = [{"message": said, "finish_reason": reason} for reason in reasons]
    body = json.dumps({"id": "x", "choices": choices, "usage": usage}, indent=indent).encode()
    assert whole_answer(body) == (aborted, told)


def test_an_aborted_reply_is_recognised_whatever_its_text_says():
    assert json_aborted(b'{"choices":[{"finish_reason":"abort"}]}')
    assert json_aborted(b'{"choices":[{"finish_reason": "error"}]}')
    assert not json_aborted(b'{"choices":[{"finish_reason":"stop"}]}')
    assert not json_aborted(b'{"content":"\\"finish_reason\\":\\"abort\\""}')


def test_a_frame_with_more_choices_than_asked_for_is_judged_not_waved_through():
    frame = b'data: {"choices":[{"index":0,"finish_reason":"stop"},{"index":0,"finish_reason":null}]}\n\n'
    whole = StreamWatch(Dialect.CHAT, choices=1, hide_usage=False, request_id="r")
    halves = StreamWatch(Dialect.CHAT, choices=1, hide_usage=False, request_id="r")
    assert whole.feed(frame) == halves.feed(frame[:30]) + halves.feed(frame[30:])
    assert whole.complete
    assert halves.complete
