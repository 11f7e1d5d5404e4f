"""Endpoints that run no model here: models, tokens, OpenAPI."""

from __future__ import annotations

import time
import uuid
from typing import Any, Final

from gateway.sim.ask import count_chat, parse_ask, resolve_model
from gateway.sim.config import SimConfig
from gateway.sim.errors import missing
from gateway.sim.state import SimState
from gateway.sim.text import BEGIN, detokenize, tokenize

_FIXED_PATHS: Final = {
    "/health": "get",
    "/version": "get",
    "/metrics": "get",
    "/load": "get",
    "/ping": "get",
    "/v1/models": "get",
}
_METHODS: Final = {"/tokenizer_info": "get"}
RESET_CACHE: Final = "/reset_prefix_cache"


def list_models(state: SimState) -> dict[str, Any]:
    """GET /v1/models: the base model, then its adapters (which have no window of their own)."""
    config = state.config
    entries = [_model(config.model, f"/models/{config.model}", None, config.max_model_len)]
    entries += [_model(name, path, config.model, None) for name, path in state.adapters.items()]
    return {"object": "list", "data": entries}


def openapi(config: SimConfig) -> dict[str, Any]:
    """GET /openapi.json: only the paths, which is what tells the endpoints served."""
    served = _FIXED_PATHS | {path: _METHODS.get(path, "post") for path in config.paths}
    paths: dict[str, Any] = {p: {method: {"responses": {}}} for p, method in served.items()}
    info = {"title": "FastAPI", "version": "0.1.0"}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def tokenizer_info(state: SimState) -> dict[str, Any]:
    """GET /tokenizer_info, which vLLM serves with `--enable-tokenizer-info-endpoint` only."""
    return {
        "tokenizer_class": "TokenizerPoolCachedTokenizersBackend",
        "backend": "tokenizers",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 10**30,
        "pad_token": "</s>",
        "chat_template": "{{ messages }}",
        "truncation_side": "left",
        "name_or_path": f"/models/{state.config.model}",
        "is_local": True,
        "local_files_only": True,
        "added_tokens_decoder": {"0": "<s>", "1": "</s>", "2": "<|turn|>", "3": "<|over|>"},
    }


def tokenize_body(body: dict[str, Any], state: SimState) -> dict[str, Any]:
    """POST /tokenize: a prompt or messages."""
    resolve_model(body, state.config, list(state.adapters))
    if "messages" in body:
        ids, _ = count_chat("", body, state.config)
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


def reset_cache(state: SimState, *, preempt: bool) -> dict[str, Any]:
    """POST /reset_prefix_cache: fails while a block is in use, unless the running are preempted for it."""
    forgot = [driver.forget_prefixes(preempt=preempt) for driver in state.drivers]
    return {"success": all(forgot)}


def _model(name: str, root: str, parent: str | None, window: int | None) -> dict[str, Any]:
    now = int(time.time())
    permission = {
        "id": fresh_id("modelperm"),
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


def fresh_id(prefix: str) -> str:
    """Return an id as vLLM makes them."""
    return f"{prefix}-{uuid.uuid4().hex[:16]}"
