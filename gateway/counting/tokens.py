"""How many tokens a prompt has: counted here with the model's own tokenizer, or by a backend.

Both count what the engine will: the prompt of a completion, the rendered messages of a chat, the
longest where there are several. Both answer None when they cannot tell in time or meet something
that only the engine knows; then the engine decides.

The tokenizer's folder must be the one the backends use, and they must not change the prompt by
flags (`--chat-template`, `--default-chat-template-kwargs`, `--chat-template-content-format`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import structs
from tokenizers import Tokenizer

from gateway.core.aio import beside
from gateway.core.errors import ConfigError
from gateway.core.types import Call, Endpoint
from gateway.counting.anthropic import chat_of_message
from gateway.counting.folder import settings, special_tokens, templates
from gateway.counting.messages import Json, Unmodelled, chat_of_response
from gateway.wire.calls import upstream_body
from gateway.wire.objects import decode_or_none
from gateway.wire.replies import lacks_endpoint
from gateway.wire.vllm import TEXT_FIELD, longest_chat, parse_tokenize, tokenize_request

# Two million tokens of text. What is larger is not decoded here: it would take too long in one piece.
MAX_BODY_BYTES: Final = 8 << 20
WORKERS: Final = 2
MAX_WAITING: Final = 64  # counts in and before the threads; more are not worth waiting for
ABSENT_S: Final = 30.0  # a backend without the endpoint is left alone for that long
SLICE_CHARS: Final = 1 << 18
# A cut may split a word's one token into a few.
_CUT_TOKENS: Final = 16

Prepared = TypeVar("Prepared")
Made = TypeVar("Made")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


def countable(call: Call) -> Call | None:
    """Return a call whose prompt can be counted; None when that is not known.

    Neither a tokenizer's templates nor `POST /tokenize` know more than chats: a call of `/v1/responses`
    or `/v1/messages` becomes one, and of a batch of chats the longest in bytes is counted.
    """
    if call.endpoint is Endpoint.CHAT_BATCH:
        return longest_chat(call)
    as_chat = _AS_CHAT.get(call.endpoint)
    if as_chat is None:
        return call
    try:
        chat = as_chat(msgspec.json.decode(call.body, type=dict[str, Any]))
    except (Unmodelled, msgspec.DecodeError, RecursionError, AttributeError):
        # The backend counts a Messages request itself, but none that is longer than its window.
        return call if call.endpoint is Endpoint.MESSAGES else None
    body = msgspec.json.encode(chat)
    return structs.replace(call, endpoint=Endpoint.CHAT, body=body, fields=None, places=None)


_AS_CHAT: Final = {
    Endpoint.RESPONSES: chat_of_response,
    Endpoint.MESSAGES: chat_of_message,
}


class LocalCounter:
    """Counts with `tokenizer.json` and the chat template of a model folder, in threads."""

    def __init__(self, folder: Path, *, deadline_s: float) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: the folder has none, or not one that can be used.
        """
        config = settings(folder / "tokenizer_config.json")
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            why = str(error).partition(" (os error ")[0]
            raise ConfigError([f"{folder / 'tokenizer.json'}: error: {why}"]) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = special_tokens(folder, config)
        self._tokenizer.add_special_tokens(
            [each for each in special.values() if self._tokenizer.token_to_id(each) is None]
        )
        self._templates = templates(folder, config, special)
        # vLLM takes Mistral's own tokenizer for a model in Mistral's form.
        self._known = not any(folder.glob("consolidated*.safetensors"))
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenizer")
        self._pending: set[Future[Any]] = set()

    async def count(
        self, call: Call, served_model: str, *, window_tokens: int | None = None
    ) -> int | None:
        """Return the tokens of the call's longest prompt, None when they cannot be told in time.

        With a window, a prompt that is far longer is not counted to its end: the answer is then
        only known to be longer than the window.

        Cancel: a count that has begun runs to its end in its thread, at most to the deadline.
        """
        if call.prompt_token_ids is not None:
            return call.prompt_token_ids
        work = partial(self._count, call, window_tokens)
        return await self._in_thread(call, work, self._deadline_s)

    async def read(
        self, call: Call, make: Callable[[Sequence[int]], Made], *, within_s: float
    ) -> Made | None:
        """Return what `make` makes of the token ids of the call's only prompt; None when they cannot be told.

        `make` is called in the thread that has the ids.

        Cancel: as for `count`.
        """
        return await self._in_thread(call, partial(self._read, call, make), within_s)

    async def _in_thread(
        self, call: Call, work: Callable[[float], Made | None], within_s: float
    ) -> Made | None:
        self._pending = {each for each in self._pending if not each.done()}
        if not self._known or len(self._pending) >= MAX_WAITING:
            return None
        if call.text_bytes is None and call.prompt_token_ids is None:
            return None
        future = self._pool.submit(work, time.monotonic() + within_s)
        self._pending.add(future)
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            return None

    def _count(self, call: Call, window_tokens: int | None, until: float) -> int | None:
        """Count in a thread."""
        try:
            request = msgspec.json.decode(call.body, type=dict[str, Any])
            texts, adds_special = self._texts(call.endpoint, request, until)
            return max(self._tokens(text, adds_special, window_tokens) for text in texts)
        except (Unmodelled, msgspec.DecodeError, RecursionError, UnicodeError):
            return None

    def _read(self, call: Call, make: Callable[[Sequence[int]], Made], until: float) -> Made | None:
        """Read in a thread."""
        try:
            request = msgspec.json.decode(call.body, type=dict[str, Any])
            if call.prompt_token_ids is not None:
                return make(_given_ids(request.get("prompt")))
            texts, adds_special = self._texts(call.endpoint, request, until)
            return make(self._ids(texts[0], adds_special)) if len(texts) == 1 else None
        except (Unmodelled, msgspec.MsgspecError, RecursionError, UnicodeError):
            return None

    def _texts(self, endpoint: Endpoint, request: Json, until: float) -> tuple[list[str], bool]:
        """Return the prompts as text, and whether the tokenizer adds its begin and end marks."""
        if endpoint is Endpoint.CHAT:
            name = "tool_use" if request.get("tools") else "default"
            template = self._templates.get(name) or self._templates.get("default")
            if template is None:
                raise Unmodelled("no chat template")
            return [template.render(request, until=until)], _flag(request, default=False)
        field = TEXT_FIELD.get(endpoint)
        other = "suffix" if endpoint is Endpoint.COMPLETIONS else "messages"
        if field is None or request.get(other) is not None:
            raise Unmodelled(endpoint.value)
        return _prompts(request.get(field)), _flag(request, default=True)

    def _tokens(self, text: str, adds_special: bool, window_tokens: int | None) -> int:
        if window_tokens is not None and len(text) > SLICE_CHARS:
            floor = self._floor(text, window_tokens)
            if floor > window_tokens:
                return floor
        return len(self._ids(text, adds_special))

    def _ids(self, text: str, adds_special: bool) -> list[int]:
        try:
            # `encode` would stop all other threads for as long as it takes; this one does not.
            encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
            ids: list[int] = encoded[0].ids
            return ids
        except TypeError as error:  # half a surrogate pair, from within a tool call's arguments
            raise Unmodelled("text that is not Unicode") from error

    def _floor(self, text: str, window_tokens: int) -> int:
        """Return how many tokens a text has at least; more than the window if it is clearly longer.

        Slices are counted only as long as they promise to exceed the window, so that refusing the
        longest prompts costs no more than counting one that fits.
        """
        tokens = end = 0
        while True:
            part = text[end : end + SLICE_CHARS]
            tokens += len(self._ids(part, adds_special=False)) - _CUT_TOKENS
            end += SLICE_CHARS
            if tokens > window_tokens or tokens / end * len(text) < 1.5 * window_tokens:
                return tokens


class Asker(Protocol):
    """Puts questions to one backend."""

    async def get(self, path: str, *, timeout_s: float) -> bytes:
        """Return the body of a 200 reply.

        Raises:
            OSError: there was none within `timeout_s`.
        """

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and body of the reply to a JSON body.

        Raises:
            OSError: there was no reply within `timeout_s`.
        """

    def close(self) -> None:
        """Let go of its connections."""


class BackendCounter:
    """Asks a backend: `POST /tokenize`, or for Anthropic's dialect its own counting endpoint."""

    def __init__(self, asker: Asker, *, deadline_s: float) -> None:
        self.asker = asker
        self._deadline_s = deadline_s
        self._absent_until: dict[str, float] = {}  # by path; asked again after a while

    async def count(self, call: Call, served_model: str) -> int | None:
        """Return the tokens of the call's prompt, None when the backend does not tell.

        An endpoint that it does not have is not asked again for `ABSENT_S`.

        Raises:
            OSError: it was silent for too long, is not there, or has no time (503).
        Cancel: the request is dropped.
        """
        if call.prompt_token_ids is not None:
            return call.prompt_token_ids
        of_messages = call.endpoint is Endpoint.MESSAGES
        path = "/v1/messages/count_tokens" if of_messages else "/tokenize"
        if time.monotonic() < self._absent_until.get(path, 0.0):
            return None
        body: bytes | None
        if of_messages:
            body = upstream_body(call, served_model=served_model, inject_usage=False)
        else:
            body = await off_loop(call, partial(tokenize_request, call, served_model))
        if body is None:
            return None
        status, reply = await self.asker.post(path, body, timeout_s=self._deadline_s)
        if lacks_endpoint(status, reply):
            self._absent_until[path] = time.monotonic() + ABSENT_S
        elif status in (502, 503, 504):
            raise TimeoutError(f"{path} was answered with {status}: another may tell")
        if status != 200:
            return None
        if of_messages:
            counted = decode_or_none(_COUNTED, reply)
            return None if counted is None else counted.input_tokens
        told = parse_tokenize(reply)
        return told[0] if told is not None else None

    async def text_of(self, tokens: Sequence[int], served_model: str) -> str | None:
        """Return the text of tokens by `POST /detokenize`, None when the backend does not tell in time.

        Cancel: the request is dropped.
        """
        body = msgspec.json.encode({"model": served_model, "tokens": tokens})
        try:
            status, reply = await self.asker.post("/detokenize", body, timeout_s=self._deadline_s)
        except OSError:
            return None
        told = decode_or_none(_TEXT, reply) if status == 200 else None
        return None if told is None else told.prompt


async def prepared(call: Call) -> Call | None:
    """Return a call whose prompt can be counted; None for one that is too large, or not known.

    Cancel: nothing is held.
    """
    if len(call.body) > MAX_BODY_BYTES:
        return None
    return await off_loop(call, partial(countable, call))


async def off_loop(call: Call, work: Callable[[], Prepared]) -> Prepared:
    """Do work that takes a body apart: of a large one beside the loop.

    Cancel: the work is done to its end.
    """
    return work() if call.places is None else await beside(work)


class _Text(msgspec.Struct):
    prompt: str


_TEXT: Final = msgspec.json.Decoder(_Text)


class _Counted(msgspec.Struct):
    input_tokens: int


_COUNTED: Final = msgspec.json.Decoder(_Counted)


def _flag(request: Json, *, default: bool) -> bool:
    value = request.get("add_special_tokens", default)
    if not isinstance(value, bool):
        raise Unmodelled("add_special_tokens")
    return value


def _given_ids(prompt: Any) -> list[int]:
    """Return the ids of a prompt that is given as such, alone or as the only one of a list."""
    only = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    return msgspec.convert(only if isinstance(only, list) else prompt, list[TokenId])


def _prompts(value: Any) -> list[str]:
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list) or not all(isinstance(each, str) for each in prompts):
        raise Unmodelled("a prompt that is no text")
    if not prompts:
        raise Unmodelled("no prompt")
    return prompts
