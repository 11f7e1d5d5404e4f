"""Bytes of the responses and messages endpoints, event for event as captured from vLLM 0.32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from gateway.sim.frames import Head, compact
from gateway.sim.plan import Piece, Plan
from gateway.sim.text import detokenize

# The chat error chunk does not fit the model it is parsed into, and that is what clients read.
_MESSAGES_ERROR: Final = (
    "2 validation errors for ChatCompletionStreamResponse\nmodel\n"
    "  Field required [type=missing]\nchoices\n  Field required [type=missing]"
)
_STOP_REASONS: Final = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


class ResponsesWriter:
    """`response.*` events with sequence numbers; there is no [DONE]."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sequence = 0
        self._name = head.id.removeprefix("resp_")
        self._item = ""  # the id of the item that is open
        self._calls = False  # it is a tool call
        self._text = ""  # of it, or its arguments
        self._outputs: list[dict[str, Any]] = []  # the items that came to their end
        self._ids: list[int] = []
        self._finish: str | None = None

    def opening(self) -> list[bytes]:
        """Two events that come before the engine has done anything."""
        response = self._response("in_progress")
        return [
            self._event("response.created", {"response": response}),
            self._event("response.in_progress", {"response": response}),
        ]

    def piece(self, piece: Piece) -> list[bytes]:
        """An item is announced with its first token; then one delta each."""
        frames = []
        if piece.announces and self._item:
            frames += self._finish_item()
        if not self._item and not piece.is_hidden:
            frames += self._announce(calls=piece.calls)
        self._finish = piece.finish
        self._ids += () if piece.token is None else (piece.token,)
        self._text += piece.text
        if piece.text:
            frames.append(self._delta(piece.text))
        return frames

    def closing(self) -> list[bytes]:
        """Everything is said again; the type stays `response.completed` when the reply was cut."""
        frames = self._finish_item() if self._item else []
        response = self._response(_status(self._finish))
        return [*frames, self._event("response.completed", {"response": response})]

    def broken(self, message: str) -> None:
        """No event: the connection is cut (the error's own conversion fails)."""
        return

    def whole(self, plans: list[Plan]) -> dict[str, Any]:
        """One `response`."""
        plan = plans[0]
        self._ids, self._finish = [*plan.tokens], plan.finish
        for said, calls in ((plan.text, False), (plan.arguments, True)):
            if said is not None and (calls or said or plan.arguments is None):
                self._announce(calls=calls)
                self._text = said
                self._finish_item()
        return self._response(_status(plan.finish))

    def _announce(self, *, calls: bool) -> list[bytes]:
        place = len(self._outputs)
        kind, self._calls, self._text = "fc" if calls else "msg", calls, ""
        self._item = f"{kind}_{self._name}{f'_{place}' if place else ''}"
        item = {"item": self._output("in_progress"), "output_index": place}
        frames = [self._event("response.output_item.added", item)]
        if not calls:
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            frames.append(self._event("response.content_part.added", self._at(part=part)))
        return frames

    def _delta(self, text: str) -> bytes:
        if self._calls:
            fields = {"delta": text} | self._place()
            return self._event("response.function_call_arguments.delta", fields)
        return self._event("response.output_text.delta", self._at(delta=text, logprobs=[]))

    def _finish_item(self) -> list[bytes]:
        frames = []
        if self._calls:
            fields = {"arguments": self._text} | self._place()
            done = self._event("response.function_call_arguments.done", fields)
            name = b',"name":' + compact(self._head.ask.tool)  # the one key after the type
            frames.append(done.removesuffix(b"}\n\n") + name + b"}\n\n")
        else:
            text = self._at(logprobs=[], text=self._text)
            frames.append(self._event("response.output_text.done", text))
            frames.append(self._event("response.content_part.done", self._at(part=self._part())))
        item = self._output("completed")
        ended = {"item": item, "output_index": len(self._outputs)}
        frames.append(self._event("response.output_item.done", ended))
        self._outputs.append(item)
        self._item = ""
        return frames

    def _part(self) -> dict[str, Any]:
        return {"annotations": [], "text": self._text, "type": "output_text", "logprobs": None}

    def _at(self, **fields: Any) -> dict[str, Any]:
        return fields | {"content_index": 0} | self._place()

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": len(self._outputs)}

    def _output(self, status: str) -> dict[str, Any]:
        if self._calls:
            call_id = f"chatcmpl-tool-{self._head.id[-16:]}"
            about = {"arguments": self._text, "call_id": call_id, "name": self._head.ask.tool}
            call = about | {"type": "function_call"}
            unused = {"async": None, "caller": None, "namespace": None}
            return call | {"id": self._item} | unused | {"status": status}
        return {
            "id": self._item,
            "content": [self._part()] if status == "completed" else [],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        numbered = fields | {"sequence_number": self._sequence}
        body = dict(sorted(numbered.items())) | {"type": kind}  # the order in which vLLM writes
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + compact(body) + b"\n\n"

    def _response(self, status: str) -> dict[str, Any]:
        head, ask = self._head, self._head.ask
        ended = status != "in_progress"
        cut = {"reason": "max_output_tokens"} if self._finish == "length" else None
        tools = ask.body.get("tools") or []
        stated = ask.stated_max_tokens
        return {
            "id": head.id,
            "created_at": head.created,
            "incomplete_details": cut,
            "instructions": ask.body.get("instructions"),
            "metadata": ask.body.get("metadata"),
            "model": ask.model,
            "object": "response",
            "output": self._outputs if ended else [],
            "parallel_tool_calls": ask.body.get("parallel_tool_calls") is not False,
            "temperature": ask.body.get("temperature", 1.0),
            "tool_choice": ask.body.get("tool_choice", "auto" if tools else "none"),
            "tools": tools,
            "top_p": ask.body.get("top_p", 1.0),
            "background": False,
            "max_output_tokens": ask.max_tokens if stated is None else stated,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": ask.body.get("reasoning"),
            "service_tier": "auto",
            "status": status,
            "text": ask.body.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": ask.body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": self._raw(ask.prompts[0]) if ended else None,
            "output_messages": self._raw(self._ids) if ended else None,
        }

    def _raw(self, ids: Sequence[int]) -> list[dict[str, Any]] | None:
        """Text and token ids, where the client asked for them (`enable_response_messages`)."""
        if not self._head.ask.body.get("enable_response_messages"):
            return None
        return [{"message": detokenize(ids), "tokens": list(ids), "type": "raw_message_tokens"}]

    def _usage(self) -> dict[str, Any]:
        prompt = self._head.ask.prompt_tokens
        turns: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        out: dict[str, Any] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        return {
            "input_tokens": prompt,
            "input_tokens_details": self._cached() | turns,
            "output_tokens": len(self._ids),
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0} | out,
            "total_tokens": prompt + len(self._ids),
        }

    def _cached(self) -> dict[str, int]:
        cache = self._head.cache
        found, stored = (cache.found, cache.stored) if cache else (0, 0)
        return {"cached_tokens": found, "cache_write_tokens": stored}


class MessagesWriter:
    """Anthropic events; there is no [DONE]."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._begun = False
        self._block = False  # one is open
        self._index = 0  # its place, or that of the next one
        self._tokens = 0
        self._last: Piece | None = None

    def opening(self) -> list[bytes]:
        """Nothing: message_start comes with the first engine output."""
        return []

    def piece(self, piece: Piece) -> list[bytes]:
        """`message_start` and `content_block_start` with the first token; then one delta each."""
        frames = [] if self._begun else [self._start()]
        self._begun = True
        self._last = piece
        if piece.token is None:
            return frames
        self._tokens += 1
        if piece.announces:
            frames += self._end_block()
        if not self._block and not piece.is_hidden:
            self._block = True
            block = self._call("") if piece.calls else _text("")
            start = {"content_block": block, "index": self._index}
            frames.append(_event("content_block_start", start))
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            if piece.calls:
                delta = {"type": "input_json_delta", "partial_json": piece.text}
            frames.append(_event("content_block_delta", {"delta": delta, "index": self._index}))
        return frames

    def _end_block(self) -> list[bytes]:
        if not self._block:
            return []
        self._block = False
        self._index += 1
        return [_event("content_block_stop", {"index": self._index - 1})]

    def closing(self) -> list[bytes]:
        """The block ends, the reason and the usage follow, then `message_stop`."""
        frames = self._end_block()
        if self._last is not None:
            reason, sequence = self._reason(self._last.finish, self._last.stop_reason)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            frames.append(_event("message_delta", {"delta": delta, "usage": self._usage()}))
        return [*frames, _event("message_stop", {})]

    def broken(self, message: str) -> list[bytes]:
        """An error event that has lost the cause, and no `message_stop`."""
        error = {"type": "internal_error", "message": _MESSAGES_ERROR}
        return [_event("error", {"error": error})]

    def whole(self, plans: list[Plan]) -> dict[str, Any]:
        """One `message`."""
        plan = plans[0]
        self._tokens = len(plan.tokens)
        reason, sequence = self._reason(plan.finish, plan.stop_reason)
        stop = {"stop_sequence": sequence} if sequence else {}
        content = [_text(plan.text)] if plan.text or plan.arguments is None else []
        content += [] if plan.arguments is None else [self._call(plan.arguments)]
        return self._message(content, reason) | stop | {"usage": self._usage()}

    def _reason(self, finish: str | None, stop: str | None) -> tuple[str | None, str | None]:
        if finish == "stop" and stop:
            return "stop_sequence", stop
        if finish == "stop" and self._head.ask.tool:
            return "tool_use", None
        return _STOP_REASONS.get(finish or ""), None

    def _call(self, text: str) -> dict[str, Any]:
        call_id = f"chatcmpl-tool-{self._head.id[-16:]}"
        block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": self._head.ask.tool}
        block["input"] = {}
        try:
            block["input"] = json.loads(text or "{}")
        except ValueError:
            block["input"] = {}  # cut by max_tokens
        return block

    def _message(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._head.ask.model,
            "stop_reason": reason,
        }

    def _start(self) -> bytes:
        usage = {"input_tokens": self._head.ask.prompt_tokens, "output_tokens": self._tokens}
        message = self._message([], None) | {"stop_sequence": None, "usage": usage}
        return _event("message_start", {"message": message})

    def _usage(self) -> dict[str, Any]:
        prompt, cache = self._head.ask.prompt_tokens, self._head.cache
        if cache is None:
            return {"input_tokens": prompt, "output_tokens": self._tokens}
        return {
            "input_tokens": max(0, prompt - cache.found - cache.stored),
            "output_tokens": self._tokens,
            "cache_creation_input_tokens": cache.stored,
            "cache_read_input_tokens": cache.found,
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    body = {"type": kind} | fields
    return b"event: " + kind.encode() + b"\ndata: " + compact(body) + b"\n\n"


def _status(finish: str | None) -> str:
    return {"length": "incomplete", "abort": "cancelled"}.get(finish or "", "completed")
