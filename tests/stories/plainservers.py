"""Servers with OpenAI's API that are no vLLM, as small fakes: what they tell, refuse and leave out.

Source of the shapes: Ollama 0.12 (`openai/openai.go`), llama.cpp's server (`tools/server`), TGI 3 and SGLang 0.5.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

WORDS = ("one ", "two ", "three")


@dataclass
class Plain:
    """One fake. `bodies` are what it was sent; `refuse` is answered in place of a completion."""

    models: tuple[str, ...] = ("m",)
    windows: Mapping[str, int] = field(default_factory=dict)  # that it tells, by model
    health: bool = False  # it has a page /health
    usage_in_streams: bool = True
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)
    refuse: tuple[int, object] | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    holds: bool = False

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.list_models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/", self.root),
        ]
        if self.health:
            routes.append(Route("/health", self.well))
        return Starlette(routes=routes, exception_handlers={404: self.missing})

    async def missing(self, request: Request, error: Exception) -> Response:
        self.asked.append(request.url.path)
        return PlainTextResponse("404 page not found", 404)

    async def root(self, request: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    async def well(self, request: Request) -> Response:
        self.asked.append("/health")
        return JSONResponse({"status": "ok"})

    async def list_models(self, request: Request) -> Response:
        self.asked.append("/v1/models")
        listed = [
            {"id": name, "object": "model", "created": 1763800000, "owned_by": "library"}
            | ({"max_model_len": self.windows[name]} if name in self.windows else {})
            for name in self.models
        ]
        return JSONResponse({"object": "list", "data": listed})

    async def chat(self, request: Request) -> Response:
        return await self.answer(request, "chat.completion")

    async def complete(self, request: Request) -> Response:
        return await self.answer(request, "text_completion")

    async def answer(self, request: Request, kind: str) -> Response:
        # As llama-cpp-python does.
        uuid.UUID(request.headers.get("x-request-id", str(uuid.uuid4())))
        body = await request.json()
        self.bodies.append(body)
        if self.refuse is not None:
            status, told = self.refuse
            return JSONResponse(told, status)
        if self.holds:
            await self.held.wait()
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        head = {"id": "chatcmpl-123", "created": 1763800001, "model": body.get("model", "")}
        if not body.get("stream"):
            text = "".join(WORDS)
            said = (
                {"message": {"role": "assistant", "content": text}}
                if kind == "chat.completion"
                else {"text": text}
            )
            choice = {"index": 0, "finish_reason": "stop", **said}
            return JSONResponse({**head, "object": kind, "choices": [choice], "usage": usage})
        chunk = {**head, "object": kind + ".chunk" if kind == "chat.completion" else kind}

        async def frames():
            for word in WORDS:
                said = (
                    {"delta": {"role": "assistant", "content": word}}
                    if kind == "chat.completion"
                    else {"text": word}
                )
                yield frame({**chunk, "choices": [{"index": 0, "finish_reason": None, **said}]})
            last = {"delta": {}} if kind == "chat.completion" else {"text": ""}
            yield frame({**chunk, "choices": [{"index": 0, "finish_reason": "stop", **last}]})
            wants = (body.get("stream_options") or {}).get("include_usage")
            if wants and self.usage_in_streams:
                yield frame({**chunk, "choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        return StreamingResponse(frames(), media_type="text/event-stream")


def frame(chunk: object) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
