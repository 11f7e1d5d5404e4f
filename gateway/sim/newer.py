"""A reply as vLLM 0.33 writes it: that of 0.32, and what was added or renamed since, as captured from both."""

from __future__ import annotations

import json
from typing import Any, Final

from gateway.sim.errors import envelope, newer_words
from gateway.sim.events import MessagesWriter
from gateway.sim.frames import DONE, ChatWriter, Writer, compact, data_frame
from gateway.sim.plan import Piece, Plan

_CHUNKS: Final = ("chat.completion.chunk", "text_completion")
_ENDS_BLOCK: Final = b"event: content_block_stop\n"


class NewerWriter:
    """Writes what another writer does, in the newer form."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._cut = False  # the reply ended at its limit

    def opening(self) -> list[bytes]:
        """See `Writer`."""
        return [self._newer(frame) for frame in self._writer.opening()]

    def piece(self, piece: Piece) -> list[bytes]:
        """See `Writer`."""
        self._cut = piece.finish == "length"
        return [self._newer(frame) for frame in self._writer.piece(piece)]

    def closing(self) -> list[bytes]:
        """See `Writer`."""
        return [self._newer(frame) for frame in self._writer.closing()]

    def broken(self, message: str) -> list[bytes] | None:
        """The error in words for clients. A chat writes no spaces; a message ends its block first, and tells it."""
        told = newer_words(message)
        frames = self._writer.broken(told)
        if isinstance(self._writer, ChatWriter):
            return [data_frame({"error": envelope(told, "InternalServerError", None, 500)}), DONE]
        if isinstance(self._writer, MessagesWriter):
            ends = [each for each in self._writer.closing() if each.startswith(_ENDS_BLOCK)]
            error = {"type": "error", "error": {"type": "api_error", "message": told}}
            return [*ends, b"event: error\ndata: " + compact(error) + b"\n\n"]
        return frames

    def whole(self, plans: list[Plan]) -> dict[str, Any]:
        """See `Writer`."""
        body, self._cut = self._writer.whole(plans), plans[0].finish == "length"
        if body.get("object") == "response":
            return self._response(body)
        for choice in body.get("choices", ()):
            choice["weight_versions"] = None
        return body

    def _newer(self, frame: bytes) -> bytes:
        name, _, data = frame.partition(b"data: ")
        if not data.startswith(b"{"):
            return frame
        body = json.loads(data)
        if body.get("object") in _CHUNKS:
            self._note(body)
        elif "response" in body:
            body["response"] = self._response(body["response"])
            if body["response"]["status"] == "incomplete":
                body["type"], name = "response.incomplete", b"event: response.incomplete\n"
        elif body["type"] == "response.output_item.done" and self._cut:
            body["item"]["status"] = "incomplete"
        return name + b"data: " + compact(body) + b"\n\n"

    def _note(self, chunk: dict[str, Any]) -> None:
        """Add what a chunk says: nothing new of a role, or of the usage at the end."""
        if not chunk["choices"] or "prompt_text" in chunk:
            return
        for choice in chunk["choices"]:
            if "text" in choice or choice["finish_reason"]:
                choice["weight_versions"] = None
        chunk["kv_transfer_params"] = None

    def _response(self, response: dict[str, Any]) -> dict[str, Any]:
        """Add what a request may ask for and gets back, where it stands; only the last item can be cut."""
        if self._cut and response["output"]:
            response["output"][-1]["status"] = "incomplete"
        added: dict[str, Any] = {}
        for name, value in response.items():
            added[name] = value
            if name == "prompt":
                added |= dict.fromkeys(
                    ("prompt_cache_options", "prompt_cache_key", "prompt_cache_retention")
                )
            elif name == "reasoning":
                added["safety_identifier"] = None
        return added
