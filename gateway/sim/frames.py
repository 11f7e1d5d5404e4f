"""Bytes of the chat and completions endpoints, key for key as captured from vLLM 0.32.

Each writer has the same five methods: `opening` (before the engine answers), `piece` (one token),
`closing` (the last frame is the one that ends the stream), `broken` (the engine died meanwhile) and
`whole` (not streamed).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.sim.ask import Ask
from gateway.sim.errors import envelope
from gateway.sim.plan import Piece, Plan
from gateway.sim.sequence import CacheUse

DONE: Final = b"data: [DONE]\n\n"


class Writer(Protocol):
    """How one dialect writes its reply."""

    def opening(self) -> list[bytes]:
        """Return the frames sent before the first token."""

    def piece(self, piece: Piece) -> list[bytes]:
        """Return the frames of one token."""

    def closing(self) -> list[bytes]:
        """Return the frames after the last token; the last one ends the stream."""

    def broken(self, message: str) -> list[bytes] | None:
        """Return the frames of an engine that died; None: the connection is cut instead."""

    def whole(self, plans: list[Plan]) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""


@dataclass(slots=True)
class Head:
    """What every frame of one reply repeats."""

    ask: Ask
    id: str
    created: int
    fingerprint: str
    cache: CacheUse | None = None  # what the prefix cache had, of the latest piece; None: not told


def compact(value: object) -> bytes:
    """Encode as vLLM encodes its models: no spaces, text as it is."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def data_frame(value: object) -> bytes:
    """One SSE frame without an event name."""
    return b"data: " + compact(value) + b"\n\n"


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """The three counts, in vLLM's order."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def full_usage(
    prompt: int, completion: int, cached: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The counts of a reply that is not streamed; `cached` is what it tells of the prefix cache."""
    unset = {"cached_tokens": None, "created_cache_tokens": None, "multimodal_tokens": None}
    details = {
        "prompt_tokens_details": unset | cached if cached else None,
        "completion_tokens_details": None,
    }
    return usage(prompt, completion) | details


class _OpenAiWriter:
    """What the chat and completions endpoints write alike."""

    object: str  # of a chunk, as it names itself

    def __init__(self, head: Head) -> None:
        self._head = head
        self._begun: set[int] = set()
        self._tokens = 0

    def opening(self) -> list[bytes]:
        """Nothing comes before the first engine output."""
        return []

    def closing(self) -> list[bytes]:
        """The usage chunk if asked for, then [DONE]."""
        if not self._head.ask.include_usage:
            return [DONE]
        cached = self._cached()
        details = {"prompt_tokens_details": cached} if cached else {}
        chunk = self._chunk([]) | {"usage": self._usage() | details}
        return [data_frame(chunk | {"system_fingerprint": self._head.fingerprint}), DONE]

    def broken(self, message: str) -> list[bytes]:
        """vLLM's error frame and [DONE]."""
        error = {"error": envelope(message, "InternalServerError", None, 500)}
        return [b"data: " + json.dumps(error).encode() + b"\n\n", DONE]

    def _usage(self) -> dict[str, Any]:
        return usage(self._head.ask.prompt_tokens, self._tokens)

    def _cached(self) -> dict[str, Any] | None:
        cache = self._head.cache
        return None if cache is None else {"cached_tokens": cache.found}

    def _whole_usage(self, plans: list[Plan]) -> dict[str, Any]:
        written = sum(len(plan.tokens) for plan in plans)
        return full_usage(self._head.ask.prompt_tokens, written, self._cached())

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": self.object,
            "created": head.created,
            "model": head.ask.model,
            "choices": choices,
        }


class ChatWriter(_OpenAiWriter):
    """`chat.completion` and `chat.completion.chunk`."""

    object = "chat.completion.chunk"
    _open = False  # the role chunks are out

    def piece(self, piece: Piece) -> list[bytes]:
        """The role chunks of all choices before the first token of any, then the token."""
        frames = []
        index = piece.plan.index
        if not self._open:
            self._open = True
            frames += [self._role(i, piece.plan) for i in range(self._head.ask.n)]
        if piece.token is None and index not in self._begun:
            return frames  # aborted before any token: vLLM sends no finish reason at all
        self._begun.add(index)
        self._tokens += len(piece.ids)
        choice: dict[str, Any] = {
            "index": index,
            "delta": self._delta(piece),
            "logprobs": None,
            "finish_reason": piece.finish,
        }
        if piece.finish:
            choice["stop_reason"] = piece.stop_reason
        choice["token_ids"] = (piece.ids or None) if self._head.ask.return_token_ids else None
        chunk = self._chunk([choice])
        if self._head.ask.usage_always:
            chunk["usage"] = self._usage() | {"completion_tokens_details": None}
        if piece.finish and not self._head.ask.include_usage:
            chunk["system_fingerprint"] = self._head.fingerprint
        return [*frames, data_frame(chunk)]

    def whole(self, plans: list[Plan]) -> dict[str, Any]:
        """One `chat.completion`."""
        ids = list(plans[0].prompt) if self._head.ask.return_token_ids else None
        return self._chunk([self._choice(plan) for plan in plans]) | {
            "object": "chat.completion",
            "service_tier": None,
            "system_fingerprint": self._head.fingerprint,
            "usage": self._whole_usage(plans),
            "prompt_logprobs": None,
            "prompt_token_ids": ids,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, plan: Plan) -> dict[str, Any]:
        tool, arguments = self._head.ask.tool, plan.arguments
        message: dict[str, Any] = {
            "role": "assistant",
            "content": plan.text or (None if tool else ""),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if arguments is not None:
            call = {"name": tool, "arguments": arguments}
            message["tool_calls"] = [
                {"id": self._tool_id(plan), "type": "function", "function": call}
            ]
        message["reasoning"] = None
        return {
            "index": plan.index,
            "message": message,
            "logprobs": None,
            "finish_reason": plan.finish,
            "stop_reason": plan.stop_reason,
            "token_ids": list(plan.tokens) if self._head.ask.return_token_ids else None,
            "routed_experts": None,
        }

    def _tool_id(self, plan: Plan) -> str:
        return f"chatcmpl-tool-{plan.index:04x}{self._head.id[-12:]}"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if not piece.calls:
            return {"content": piece.text}
        if piece.announces:
            call = {"id": self._tool_id(piece.plan), "type": "function", "index": 0}
            function = {"name": self._head.ask.tool}
            return {"content": None, "tool_calls": [call | {"function": function}]}
        part = {"index": 0, "function": {"arguments": piece.text}}
        return {"content": None, "tool_calls": [part]}

    def _role(self, index: int, plan: Plan) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk([choice])
        if self._head.ask.usage_always:
            chunk["usage"] = self._usage() | {"completion_tokens_details": None}
        ids = list(plan.prompt) if self._head.ask.return_token_ids else None
        return data_frame(chunk | {"prompt_token_ids": ids, "prompt_text": None})

    def _cached(self) -> dict[str, Any] | None:
        cache = self._head.cache
        if cache is None:
            return None
        return {"cached_tokens": cache.found, "created_cache_tokens": cache.stored}


class CompletionsWriter(_OpenAiWriter):
    """`text_completion`, streamed or not; the replies to all prompts share one stream."""

    object = "text_completion"

    def __init__(self, head: Head, prompt_texts: list[str]) -> None:
        super().__init__(head)
        self._texts = prompt_texts

    def piece(self, piece: Piece) -> list[bytes]:
        """One chunk; none for a reply that was aborted before its first token."""
        index = piece.plan.index
        first = index not in self._begun
        if first and piece.token is None:
            return []
        self._begun.add(index)
        self._tokens += len(piece.ids)
        ask = self._head.ask
        ids = (piece.ids or None) if ask.return_token_ids else None
        choice = {
            "index": index,
            "text": (self._echo(index) if first else "") + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": list(piece.plan.prompt) if first and (ids or ask.echo) else None,
            "token_ids": ids,
        }
        chunk = self._chunk([choice])
        if ask.usage_always:
            chunk["usage"] = self._usage()
        if piece.finish and not ask.include_usage:
            chunk["system_fingerprint"] = self._head.fingerprint
        return [data_frame(chunk)]

    def whole(self, plans: list[Plan]) -> dict[str, Any]:
        """One `text_completion`."""
        ask = self._head.ask
        choices = [
            {
                "index": plan.index,
                "text": self._echo(plan.index) + "".join(plan.pieces),
                "logprobs": None,
                "finish_reason": plan.finish,
                "stop_reason": plan.stop_reason,
                "token_ids": list(plan.tokens) if ask.return_token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": list(plan.prompt) if ask.return_token_ids else None,
                "routed_experts": None,
            }
            for plan in plans
        ]
        return self._chunk(choices) | {
            "service_tier": None,
            "system_fingerprint": self._head.fingerprint,
            "usage": self._whole_usage(plans),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _echo(self, index: int) -> str:
        ask = self._head.ask
        return self._texts[index // ask.n] if ask.echo and not ask.return_token_ids else ""
