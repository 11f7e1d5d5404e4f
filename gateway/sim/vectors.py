"""Endpoints that answer in numbers: vectors, classes, scores, decisions, in vLLM's dialects for them."""

from __future__ import annotations

import base64
import json
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.sim.ask import count_chat, resolve_model
from gateway.sim.config import SimConfig
from gateway.sim.errors import SimError, bad_value, missing
from gateway.sim.frames import compact, full_usage
from gateway.sim.generate import JSON
from gateway.sim.http import Reply
from gateway.sim.state import SimState
from gateway.sim.tasks import fresh_id
from gateway.sim.text import BEGIN, tokenize

_DIMENSIONS: Final = 8
_BYTES: Final = ("bytes", "bytes_only")
_COHERE_TYPES: Final = ("float", "binary", "ubinary", "base64")
_LABELS: Final = 2
ENCODED: Final = ("/v1/embeddings", "/pooling")  # answered by `vectors`


@dataclass(frozen=True, slots=True)
class Vectors:
    """A JSON answer, or raw bytes for each prompt with the headers that say what they are."""

    answer: dict[str, Any] | None = None
    raw: tuple[bytes, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)


def vectors(path: str, body: dict[str, Any], state: SimState) -> Vectors:
    """POST /v1/embeddings and /pooling: vectors of 8 numbers made from the text."""
    model = _pooling_model(body, state)
    prompts = _prompts(body, state.config)
    found = [[_unit(ids, k) for k in range(_DIMENSIONS)] for ids in prompts]
    tokens = sum(map(len, prompts))
    kind, key = ("embedding", "embedding") if path == "/v1/embeddings" else ("pooling", "data")
    name = "embd" if kind == "embedding" else kind
    encoding = body.get("encoding_format", "float")
    if encoding in _BYTES:
        raw = tuple(map(_packed, found))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        told = _listed(name, model, _places(raw), usage)
        del told["object"]
        return Vectors(
            raw=raw, headers={"metadata": json.dumps(told)} if encoding == "bytes" else {}
        )
    data = [
        {"index": i, "object": kind, key: _base64(vector) if encoding == "base64" else vector}
        for i, vector in enumerate(found)
    ]
    return Vectors(_listed(name, model, data, full_usage(tokens, 0)))


async def send(made: Vectors, reply: Reply) -> None:
    """Answer with vectors; raw ones come one chunk each."""
    if made.answer is not None:
        reply.send(200, compact(made.answer), JSON)
        return
    reply.start_stream({"content-type": "application/octet-stream"} | made.headers)
    for each in made.raw:
        await reply.chunk(each)
    reply.end_stream()


def _listed(
    name: str, model: str, data: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return the list that these endpoints answer with."""
    about = {"id": fresh_id(name), "object": "list", "created": int(time.time()), "model": model}
    return about | {"data": data, "usage": usage}


def _places(raw: tuple[bytes, ...]) -> list[dict[str, Any]]:
    """Say where in the body each vector is."""
    return [
        {
            "index": i,
            "embed_dtype": "float32",
            "endianness": "native",
            "start": i * len(each),
            "end": (i + 1) * len(each),
            "shape": [_DIMENSIONS],
        }
        for i, each in enumerate(raw)
    ]


def cohere_embed(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /v2/embed: the same vectors in Cohere's form; a text that is too long is cut."""
    texts = body.get("texts")
    if not texts:
        raise missing("texts", len(body))
    _pooling_model(body, state)
    prompts = [[BEGIN, *tokenize(text)] for text in texts]
    if body.get("truncate") == "NONE":
        for ids in prompts:
            _checked_length(len(ids), state.config)
    prompts = [ids[: body.get("max_tokens") or state.config.max_model_len] for ids in prompts]
    found = [[_unit(ids, k) for k in range(_DIMENSIONS)] for ids in prompts]
    made: dict[str, Any] = {}
    asked = body.get("embedding_types") or ["float"]
    for kind in (each for each in _COHERE_TYPES if each in asked):
        made[kind] = found if kind == "float" else [_base64(vector) for vector in found]
        if kind in ("binary", "ubinary"):
            made[kind] = [[0] * (_DIMENSIONS // 8) for _ in found]
    billed = {"input_tokens": sum(map(len, prompts)), "image_tokens": 0}
    return {
        "id": fresh_id("embd"),
        "embeddings": made,
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
        "response_type": "embeddings_by_type",
    }


def classify(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /classify: two classes, by the text."""
    model = _pooling_model(body, state)
    prompts = _prompts(body, state.config)
    data = []
    for index, ids in enumerate(prompts):
        first = abs(_unit(ids, 0))
        probs = [first, 1 - first]
        label = f"LABEL_{probs.index(max(probs))}"
        data.append({"index": index, "label": label, "probs": probs, "num_classes": _LABELS})
    return _listed("classify", model, data, full_usage(sum(map(len, prompts)), 0))


def rerank(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /v1/rerank: documents by score, best first."""
    for name in ("query", "documents"):
        if name not in body:
            raise missing(name, len(body))
    model = _pooling_model(body, state)
    documents = body["documents"]
    scored = _scores([body["query"]] * len(documents), documents, state.config)
    best_first = sorted(enumerate(scored), key=lambda entry: entry[1][1], reverse=True)
    results = [
        {"index": i, "document": {"text": text, "multi_modal": None}, "relevance_score": value}
        for i, (text, value, _) in best_first
    ]
    tokens = sum(count for _, _, count in scored)
    return {
        "id": fresh_id("rerank"),
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": results[: body.get("top_n") or len(results)],
    }


def score(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /v1/score: one number per second text."""
    first = body.get("text_1", body.get("queries"))
    second = body.get("text_2", body.get("documents"))
    if first is None or second is None:
        raise missing("text_1" if first is None else "text_2", len(body))
    model = _pooling_model(body, state)
    texts = [second] if isinstance(second, str) else second
    scored = _scores(_each_first(first, len(texts)), texts, state.config)
    data = [
        {"index": i, "object": "score", "score": value} for i, (_, value, _) in enumerate(scored)
    ]
    usage = full_usage(sum(count for _, _, count in scored), 0)
    return _listed("score", model, data, usage)


def generative_scoring(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /generative_scoring: how probable the first label is after each item."""
    for name in ("query", "items", "label_token_ids"):
        if name not in body:
            raise missing(name, len(body))
    resolve_model(body, state.config, list(state.adapters))
    query = _ids(body["query"])
    prompts = [query + _ids(item)[1:] for item in body["items"]]
    prompts = [ids[: state.config.max_model_len - 1] for ids in prompts]
    data = [
        {"index": i, "object": "score", "score": abs(_unit(ids, 0))}
        for i, ids in enumerate(prompts)
    ]
    model = str(body.get("model") or state.config.model)
    usage = full_usage(sum(map(len, prompts)), len(prompts))
    return _listed("generative-scoring", model, data, usage)


def decide(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /v1/systemone: how probable each of the given answers to each question is."""
    for name in ("state", "questions"):
        if name not in body:
            raise missing(name, len(body))
    resolve_model(body, state.config, list(state.adapters))
    about = body["state"] if isinstance(body["state"], str) else json.dumps(body["state"])
    prompts = {
        name: _ids(f"{about} {json.dumps(asked)}") for name, asked in body["questions"].items()
    }
    answers = {name: _decision(asked, prompts[name]) for name, asked in body["questions"].items()}
    return {
        "id": fresh_id("decision"),
        "object": "structured_decision",
        "created": int(time.time()),
        "model": str(body.get("model") or state.config.model),
        "answers": answers,
        "usage": {"input_tokens": sum(map(len, prompts.values())), "output_tokens": len(prompts)},
        "diagnostics": {name: {"label_mass": 0.5, "argmax_is_label": True} for name in prompts},
    }


def _decision(asked: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """Answer one question: a choice of names, yes or no, or a level of a scale."""
    kind, criteria = asked["type"], asked.get("criteria") or ()
    labels = criteria if kind == "choice" else ("yes", "no")
    if kind == "score":
        labels = [str(place) for place in range(len(criteria))]
    weights = {label: abs(_unit(ids, k)) for k, label in enumerate(labels)}
    shares = {label: each / sum(weights.values()) for label, each in weights.items()}
    best = max(shares, key=lambda label: shares[label])
    told: dict[str, Any] = {"choice": best}
    if kind == "noul":
        told = {"noul": shares["yes"]}
    elif kind == "score":
        mean = sum(place * share for place, share in enumerate(shares.values()))
        told = {"score": mean, "legend": dict(zip(shares, criteria, strict=True))}
    return {"type": kind, **told, "probabilities": shares, "confidence": shares[best] / 2}


def _prompts(body: dict[str, Any], config: SimConfig) -> list[list[int]]:
    """Return the token ids of each prompt: of `input`, or of the conversations in `messages`."""
    given = body.get("messages", body.get("input"))
    if given is None:
        raise missing("input", len(body))
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, dict) or (isinstance(first, list) and isinstance(first[0], dict)):
        several = given if isinstance(first, list) else [given]
        prompts = [list(count_chat("", {"messages": chat}, config)[0]) for chat in several]
    else:
        alone = isinstance(given, str) or isinstance(first, int | float)
        prompts = [_ids(one) for one in ([given] if alone else given)]
    for ids in prompts:
        _checked_length(len(ids), config)
    return prompts


def _ids(given: str | list[Any]) -> list[int]:
    return [BEGIN, *tokenize(given)] if isinstance(given, str) else [int(each) for each in given]


def _packed(vector: list[float]) -> bytes:
    return struct.pack(f"<{_DIMENSIONS}f", *vector)


def _base64(vector: list[float]) -> str:
    return base64.b64encode(_packed(vector)).decode()


def _pooling_model(body: dict[str, Any], state: SimState) -> str:
    """Return the model to echo; an unknown one is refused in pooling's own words."""
    try:
        resolve_model(body, state.config, list(state.adapters))
    except SimError as error:
        text = f"The model `{body.get('model')}` does not exist."
        raise SimError(404, text, kind=error.kind) from None
    return str(body.get("model") or state.config.model)


def _checked_length(count: int, config: SimConfig) -> int:
    window = config.max_embed_len or config.max_model_len
    if count <= window:
        return count
    says = f"This model's maximum context length is {window} tokens. However, your prompt contains"
    says += f" at least {window + 1} input tokens, which exceeds this limit even without any"
    advice = "output tokens. Please reduce the length of the input prompt."
    raise bad_value(f"{says} {advice}", "input_tokens", window + 1)


def _each_first(first: str | list[str], count: int) -> list[str]:
    """Return the first text of each pair: one for all, or one for each."""
    several = [first] if isinstance(first, str) else first
    if len(several) not in (1, count):
        raise SimError(400, "Input lengths must be either 1:1, 1:N or N:N")
    return several if len(several) == count else several * count


def _scores(
    queries: list[str], texts: list[str], config: SimConfig
) -> list[tuple[str, float, int]]:
    scored = []
    for query, text in zip(queries, texts, strict=True):
        ids = [BEGIN, *tokenize(query), *tokenize(text)]
        scored.append((text, abs(_unit(ids, 0)), _checked_length(len(ids), config)))
    return scored


def _unit(ids: list[int], salt: int) -> float:
    """Make a number in -1..1 from token ids."""
    return zlib.crc32(repr((ids, salt)).encode()) / 0x7FFFFFFF - 1


TASKS: Final[dict[str, Callable[[dict[str, Any], SimState], dict[str, Any]]]] = {
    "/v2/embed": cohere_embed,
    "/classify": classify,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": rerank,
    "/score": score,
    "/v1/score": score,
    "/generative_scoring": generative_scoring,
    "/v1/systemone": decide,
}
