"""Endpoints that do not generate: models, tokens, vectors, scores, audio, adapters, OpenAPI."""

from __future__ import annotations

import base64
import struct
import time
import uuid
import zlib
from typing import Any, Final

from gateway.sim.ask import count_chat, parse_ask, resolve_model
from gateway.sim.config import SimConfig
from gateway.sim.errors import SimError, bad_value, missing
from gateway.sim.frames import full_usage
from gateway.sim.state import SimState
from gateway.sim.text import BEGIN, detokenize, reply_word, tokenize

_DIMENSIONS: Final = 8
_BYTES_PER_AUDIO_SECOND: Final = 32_000  # 16 kHz, 16 bit
_FIXED_PATHS: Final = {
    "/health": "get",
    "/version": "get",
    "/metrics": "get",
    "/load": "get",
    "/ping": "get",
    "/v1/models": "get",
}


def list_models(state: SimState) -> dict[str, Any]:
    """GET /v1/models: the base model, then its adapters (which have no window of their own)."""
    config = state.config
    entries = [_model(config.model, f"/models/{config.model}", None, config.max_model_len)]
    entries += [_model(name, path, config.model, None) for name, path in state.adapters.items()]
    return {"object": "list", "data": entries}


def openapi(config: SimConfig) -> dict[str, Any]:
    """GET /openapi.json: only the paths, which is what tells the endpoints served."""
    served = _FIXED_PATHS | dict.fromkeys(config.paths, "post")
    paths: dict[str, Any] = {p: {method: {"responses": {}}} for p, method in served.items()}
    info = {"title": "FastAPI", "version": "0.1.0"}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def tokenize_body(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /tokenize: a prompt or messages."""
    resolve_model(body, state.config, list(state.adapters))
    if "messages" in body:
        ids, _ = count_chat("", body)
    elif isinstance(body.get("prompt"), str):
        ids = ([BEGIN] if body.get("add_special_tokens", True) else []) + tokenize(body["prompt"])
    else:
        raise missing("prompt", len(body))
    strings = [detokenize([i]) for i in ids] if body.get("return_token_strs") else None
    window = state.config.max_model_len
    return {"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": strings}


def detokenize_body(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /detokenize."""
    resolve_model(body, state.config, list(state.adapters))
    if "tokens" not in body:
        raise missing("tokens", len(body))
    return {"prompt": detokenize(body["tokens"])}


def count_tokens(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /v1/messages/count_tokens."""
    checked = parse_ask("/v1/messages", body | {"max_tokens": 1}, state.config, [*state.adapters])
    count = checked.prompt_tokens
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


def embed(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /v1/embeddings: vectors of 8 numbers made from the text."""
    if "input" not in body:
        raise missing("input", len(body))
    model = _pooling_model(body, state)
    given = body["input"]
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    data, tokens = [], 0
    for index, one in enumerate(several):
        ids = [BEGIN, *tokenize(one)] if isinstance(one, str) else list(one)
        tokens += _checked_length(len(ids), state.config)
        vector = [_unit(ids, k) for k in range(_DIMENSIONS)]
        packed = body.get("encoding_format") == "base64"
        value = base64.b64encode(struct.pack("<8f", *vector)).decode() if packed else vector
        data.append({"index": index, "object": "embedding", "embedding": value})
    return {
        "id": _id("embd"),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": full_usage(tokens, 0),
    }


def rerank(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /v1/rerank: documents by score, best first."""
    for name in ("query", "documents"):
        if name not in body:
            raise missing(name, len(body))
    model = _pooling_model(body, state)
    scored = _scores(body["query"], body["documents"], state.config)
    best_first = sorted(enumerate(scored), key=lambda entry: entry[1][1], reverse=True)
    results = [
        {"index": i, "document": {"text": text, "multi_modal": None}, "relevance_score": value}
        for i, (text, value, _) in best_first
    ]
    tokens = sum(count for _, _, count in scored)
    return {
        "id": _id("rerank"),
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
    scored = _scores(first, texts, state.config)
    data = [
        {"index": i, "object": "score", "score": value} for i, (_, value, _) in enumerate(scored)
    ]
    return {
        "id": _id("score"),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": full_usage(sum(count for _, _, count in scored), 0),
    }


def transcribe(form: dict[str, bytes], state: SimState) -> dict[str, Any] | str:
    """POST /v1/audio/*: a few words that depend on the bytes of the file."""
    if "file" not in form:
        raise missing("file", len(form))
    model = {"model": form.get("model", b"").decode()}
    resolve_model(model, state.config, list(state.adapters))
    text = "".join(reply_word(zlib.crc32(form["file"]), i) for i in range(4)).strip()
    if form.get("response_format", b"json") == b"text":
        return text
    seconds = -(-len(form["file"]) // _BYTES_PER_AUDIO_SECOND)
    return {"text": text, "usage": {"type": "duration", "seconds": seconds}}


def parse_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """Read a multipart form: the last part of each name. Raises SimError when it is not one."""
    kind, _, rest = content_type.partition("boundary=")
    if not kind.lower().startswith("multipart/form-data") or not rest:
        raise SimError(400, "1 validation error:\n  not a multipart form", kind="Bad Request")
    fields = {}
    for part in body.split(b"--" + rest.strip('"').encode())[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = head.partition(b'name="')[2].partition(b'"')[0]
        fields[name.decode()] = value.removesuffix(b"\r\n")
    return fields


def load_adapter(body: dict[str, Any], state: SimState) -> str:
    """POST /v1/load_lora_adapter: every path exists, unless it has "missing" in it."""
    name, path = body.get("lora_name"), body.get("lora_path")
    if not name or not path:
        raise _lora_error(400, "Both 'lora_name' and 'lora_path' must be provided.")
    if name == state.config.model:
        raise _lora_error(400, f"The lora adapter '{name}' conflicts with a served base model.")
    if name in state.loaded and not body.get("load_inplace"):
        says = f"The lora adapter '{name}' has already been loaded."
        advice = "If you want to load the adapter in place, set 'load_inplace' to True."
        raise _lora_error(400, f"{says} {advice}")
    if "missing" in path:
        raise _lora_error(404, f"Loading lora {name} failed: No adapter found for {path}")
    state.loaded[name] = path
    return f"Success: LoRA adapter '{name}' added successfully."


def unload_adapter(body: dict[str, Any], state: SimState) -> str:
    """POST /v1/unload_lora_adapter."""
    name = body.get("lora_name")
    if name not in state.loaded:
        raise _lora_error(404, f"The lora adapter '{name}' cannot be found.")
    del state.loaded[name]
    return f"Success: LoRA adapter '{name}' removed successfully."


def _model(name: str, root: str, parent: str | None, window: int | None) -> dict[str, Any]:
    now = int(time.time())
    permission = {
        "id": _id("modelperm"),
        "object": "model_permission",
        "created": now,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": window,
        "permission": [permission],
    }


def _id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:16]}"


def _pooling_model(body: dict[str, Any], state: SimState) -> str:
    """Return the model to echo; an unknown one is refused in pooling's own words."""
    try:
        resolve_model(body, state.config, list(state.adapters))
    except SimError as error:
        text = f"The model `{body.get('model')}` does not exist."
        raise SimError(404, text, kind=error.kind) from None
    return str(body.get("model") or state.config.model)


def _checked_length(count: int, config: SimConfig) -> int:
    window = config.max_model_len
    if count <= window:
        return count
    says = f"This model's maximum context length is {window} tokens. However, your prompt contains"
    says += f" at least {window + 1} input tokens, which exceeds this limit even without any"
    advice = "output tokens. Please reduce the length of the input prompt."
    raise bad_value(f"{says} {advice}", "input_tokens", window + 1)


def _scores(query: str, texts: list[str], config: SimConfig) -> list[tuple[str, float, int]]:
    asked = tokenize(query)
    scored = []
    for text in texts:
        ids = [BEGIN, *asked, *tokenize(text)]
        scored.append((text, abs(_unit(ids, 0)), _checked_length(len(ids), config)))
    return scored


def _unit(ids: list[int], salt: int) -> float:
    """Make a number in -1..1 from token ids."""
    return zlib.crc32(repr((ids, salt)).encode()) / 0x7FFFFFFF - 1


def _lora_error(status: int, message: str) -> SimError:
    return SimError(status, message, kind="NotFoundError" if status == 404 else "InvalidUserInput")
