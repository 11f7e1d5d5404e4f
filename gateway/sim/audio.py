"""Speech to text, as vLLM 0.32 answers with a Whisper model: in one piece, with segments, or as a stream.

A `response_format` of `text` is answered in JSON too, and `srt` and `vtt` are refused: vLLM writes neither. Only
transcriptions that are not streamed tell their usage unasked.

Source: vLLM 0.32, `entrypoints/speech_to_text`.
"""

from __future__ import annotations

import math
import time
import uuid
import zlib
from collections.abc import Sequence
from typing import Any, Final

from gateway.sim.ask import resolve_model
from gateway.sim.errors import SimError, invalid, missing, shown
from gateway.sim.frames import DONE, compact, data_frame, usage
from gateway.sim.generate import EVENT_STREAM, JSON
from gateway.sim.http import Received, Reply
from gateway.sim.state import SimState
from gateway.sim.text import reply_words, tokenize

_TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
PATHS: Final = (_TRANSCRIPTIONS, "/v1/audio/translations")
_BYTES_PER_SECOND: Final = 32_000  # 16 kHz, 16 bit
_WORDS: Final = 4
_PROMPT_TOKENS: Final = 4  # what the decoder begins with
_TOKENS_PER_SECOND: Final = 100  # that a second of sound is counted as
_FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
_STREAM_OPTIONS: Final = ("stream_include_usage", "stream_continuous_usage_stats")
_BOOLS: Final = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("", "0", "false", "f", "no", "n", "off"), False
)


async def answer(request: Received, state: SimState, reply: Reply) -> None:
    """Answer with a few words that depend on the bytes of the file. Raises SimError before anything was sent."""
    form = parse_form(request.header("content-type") or "", request.body)
    if "file" not in form:
        raise missing("file", len(form))
    transcribes = request.path == _TRANSCRIPTIONS
    streams, *options = [_flag(form, name) for name in ("stream", *_STREAM_OPTIONS)]
    if any(options) and not streams:
        wrong = _STREAM_OPTIONS[options.index(True)]
        text = f"Stream options can only be defined when `stream=True`. (parameter={wrong})"
        raise SimError(400, text, param=wrong)
    wanted = _format(form, transcribes=transcribes)
    resolve_model({"model": _field(form, "model")}, state.config, list(state.adapters))
    model = _field(form, "model") or state.config.model
    _check_served(wanted, model, streams=streams)
    words = reply_words(zlib.crc32(form["file"]), _WORDS)
    seconds = len(form["file"]) / _BYTES_PER_SECOND
    if streams:
        given = request.header("x-request-id") or uuid.uuid4().hex
        head = {
            "id": f"{'transcribe' if transcribes else 'translate'}-{given}",
            "object": f"{'transcription' if transcribes else 'translation'}.chunk",
            "created": int(time.time()),
            "model": model,
        }
        await _stream(reply, head, words, seconds, options)
        return
    said: dict[str, Any] = {"text": "".join(words).strip()}
    if wanted == "verbose_json":
        said = _verbose(said["text"], seconds, form)
    elif transcribes:
        said["usage"] = {"type": "duration", "seconds": math.ceil(seconds)}
    reply.send(200, compact(said), JSON)


async def _stream(
    reply: Reply, head: dict[str, Any], words: Sequence[str], seconds: float, options: list[bool]
) -> None:
    """Write a frame for each word, one for the end, and one with the usage; `options` as `_STREAM_OPTIONS`."""
    tells_usage, tells_always = options
    prompt = _PROMPT_TOKENS + math.ceil(seconds * _TOKENS_PER_SECOND)
    reply.start_stream(EVENT_STREAM)
    said = [*words[:-1], words[-1].rstrip(), ""]
    for place, text in enumerate(said, 1):
        choice: dict[str, Any] = {"delta": {"content": text}}
        if place == len(said):
            choice |= {"finish_reason": "stop", "stop_reason": None}
        chunk = head | {"choices": [choice]}
        if tells_usage and tells_always:
            chunk["usage"] = usage(prompt, place)
        await reply.chunk(data_frame(chunk))
    if tells_usage:
        counts = usage(prompt, len(said))
        await reply.chunk(data_frame(head | {"choices": [], "usage": counts}))
    await reply.chunk(DONE)
    reply.end_stream()


def _verbose(text: str, seconds: float, form: dict[str, bytes]) -> dict[str, Any]:
    data = text.encode()
    segment = {
        "id": 0,
        "avg_logprob": -0.25,
        "compression_ratio": len(data) / len(zlib.compress(data)),
        "end": seconds,
        "no_speech_prob": None,
        "seek": 0,
        "start": 0.0,
        "temperature": float(_field(form, "temperature") or 0.0),
        "text": text,
        "tokens": tokenize(text),
    }
    return {
        "duration": seconds,
        "language": _field(form, "language") or "en",
        "text": text,
        "segments": [segment],
        "words": None,
    }


def _format(form: dict[str, bytes], *, transcribes: bool) -> str:
    """Return the `response_format`. Raises SimError for one that vLLM does not know."""
    wanted = _field(form, "response_format") or "json"
    known = (*_FORMATS, "diarized_json") if transcribes else _FORMATS
    if wanted not in known:
        *most, last = map(repr, known)
        says = f"Input should be {', '.join(most)} or {last}"
        raise invalid("literal_error", "body.response_format", says, shown(wanted))
    return wanted


def _check_served(wanted: str, model: str, *, streams: bool) -> None:
    """Refuse what vLLM knows and does not do."""
    if wanted in ("srt", "vtt"):
        served = "`text`, `json`, `verbose_json` or `diarized_json`"
        raise SimError(400, f"Currently only support response_format: {served}")
    if wanted == "diarized_json":
        raise SimError(400, f"Currently do not support diarized_json for {model}")
    if wanted == "verbose_json" and streams:
        raise SimError(400, "verbose_json format doesn't support streaming case")


def _field(form: dict[str, bytes], name: str) -> str:
    return form.get(name, b"").decode("utf-8", "replace")


def _flag(form: dict[str, bytes], name: str) -> bool:
    value = _field(form, name)
    if value.lower() not in _BOOLS:
        says = "Input should be a valid boolean, unable to interpret input"
        raise invalid("bool_parsing", f"body.{name}", says, shown(value))
    return _BOOLS[value.lower()]


def parse_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """Read a multipart form: the last part of each name. Raises SimError when it is not one."""
    kind, _, rest = content_type.partition("boundary=")
    if not kind.lower().startswith("multipart/form-data") or not rest:
        raise SimError(400, "1 validation error:\n  not a multipart form", kind="Bad Request")
    fields = {}
    for part in body.split(b"--" + rest.strip('"').encode())[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = head.partition(b'name="')[2].partition(b'"')[0]
        fields[name.decode("utf-8", "replace")] = value.removesuffix(b"\r\n")
    return fields
