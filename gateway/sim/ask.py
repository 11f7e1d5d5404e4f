"""What a request asks of the engine: bodies of the four generating endpoints, checked as vLLM does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gateway.sim.config import SimConfig
from gateway.sim.errors import SimError, bad_value, invalid, missing, shown, unknown_model
from gateway.sim.messages import chat_of_message, check_order, effort_of
from gateway.sim.steering import Control, parse_control, tool_of
from gateway.sim.structured import Form, demanded
from gateway.sim.text import BEGIN, begun_in, detokenize, render_chat, tokenize

CHAT: Final = "/v1/chat/completions"
CHAT_BATCH: Final = "/v1/chat/completions/batch"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"

_BYTES_PER_TOKEN_MAX: Final = 12  # the longest token of a vocabulary, in characters: 24576 / 2048
_SALT_CHARS_MAX: Final = 128
_N_MAX: Final = 16_384
_LIMIT_FIELDS: Final = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    CHAT_BATCH: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked request. `prompts` are token ids; every prompt gets `n` replies."""

    model: str  # as the client wrote it; echoed
    adapter: str | None
    cache_salt: str
    prompts: tuple[tuple[int, ...], ...]
    text: str  # all prompt text, for triggers
    max_tokens: int
    stated_max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    usage_always: bool
    stream_interval: int  # tokens of one chunk, but for the first of each choice
    stop: tuple[str, ...]
    ends_itself: bool  # before it has used up `max_tokens`
    control: Control
    # The function to call instead of answering, or behind `control.call_at` tokens.
    tool: str | None
    tool_forced: bool  # named by the client: the finish reason is then "stop"
    form: Form | None  # that the reply must have; None: plain text
    return_token_ids: bool
    echo: bool
    begun_tokens: int  # of the reply, that end the prompt already
    body: dict[str, Any]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


def resolve_model(body: dict[str, Any], config: SimConfig, adapters: list[str]) -> str | None:
    """Return the adapter asked for, None for the base model. No model at all is the base model."""
    name = body.get("model")
    if not name or name == config.model:
        return None
    if name in adapters:
        return str(name)
    raise unknown_model(str(name), config.model)


def parse_ask(path: str, body: dict[str, Any], config: SimConfig, adapters: list[str]) -> Ask:
    """Check a request of a generating endpoint. Raises SimError with vLLM's words."""
    fields = ("input",) if path == RESPONSES else ("messages",)
    for name in () if path == COMPLETIONS else fields:
        if name not in body:
            raise missing(name, len(body))
    if path == MESSAGES and "max_tokens" not in body:
        raise missing("max_tokens", len(body))
    limit_field, limit = _limit(path, body)
    n = _integer(body, "n") or 1 if body.get("n") != 0 else 0
    if path == CHAT_BATCH and n != 1:
        text = "Batch chat completions do not support `n > 1`. Please set `n` to 1."
        raise bad_value(text, "n", n)
    stream_options = body.get("stream_options")
    if stream_options and not body.get("stream"):
        text = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise SimError(400, text, param="stream_options")
    adapter = resolve_model(body, config, adapters)
    prompts, text = _prompts(path, body, config)
    begun_tokens = 0
    given = _given_ids(body, config) if path in (CHAT, MESSAGES, RESPONSES) else None
    if given is not None:
        begun_tokens = begun_in(given)
        prompts = (given,)
    max_tokens = _budget(path, max(map(len, prompts)), text, config, (limit_field, limit))
    if n < 1:
        raise SimError(400, f"n must be at least 1, got {n}.")
    if n > _N_MAX:
        raise SimError(400, f"n must be at most {_N_MAX}, got {n}.")
    if n > 1 and body.get("temperature") == 0:
        raise SimError(400, f"n must be 1 when using greedy sampling, got {n}.")
    options = stream_options or {}
    stop = body.get("stop", body.get("stop_sequences")) or ()
    control = parse_control(text if given is None else detokenize(given))
    tool, forced = tool_of(body, text, control)
    return Ask(
        model=str(body.get("model") or config.model),
        adapter=adapter,
        cache_salt=_cache_salt(body),
        prompts=prompts,
        text=text,
        max_tokens=max_tokens,
        stated_max_tokens=limit,
        n=n,
        stream=bool(body.get("stream")) and path != CHAT_BATCH,
        include_usage=bool(options.get("include_usage")),
        usage_always=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        stream_interval=_interval(path, body),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ends_itself=(limit is None or config.ends_itself) and not body.get("ignore_eos"),
        control=control,
        tool=tool,
        tool_forced=forced,
        form=demanded(body),
        return_token_ids=bool(body.get("return_token_ids")),
        echo=bool(body.get("echo")),
        begun_tokens=begun_tokens,
        body=body,
    )


def _interval(path: str, body: dict[str, Any]) -> int:
    if path not in (CHAT, COMPLETIONS):
        return 1
    interval = _integer(body, "stream_interval")
    if interval is not None and interval < 1:
        raise bad_value(
            f"stream_interval must be at least 1, got {interval}.", "stream_interval", interval
        )
    return interval or 1


def _given_ids(body: dict[str, Any], config: SimConfig) -> tuple[int, ...] | None:
    """Return the token ids that stand in for rendered messages; older servers ignore them."""
    given = body.get("kv_transfer_params") if config.takes_prompt_ids else None
    ids = given.get("prompt_token_ids") if isinstance(given, dict) else None
    return None if ids is None or body.get("echo") else _prompt_ids(ids, begin=False)


def count_chat(path: str, body: dict[str, Any], config: SimConfig) -> tuple[list[int], str]:
    """Render a chat-like body to token ids and to the text in it.

    Raises:
        SimError: an order that the template refuses.
    """
    messages = body.get("messages", body.get("input", []))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    system = body.get("instructions")
    messages = ([{"role": "system", "content": system}] if system else []) + messages
    if path.startswith(MESSAGES):
        messages = chat_of_message(body, system_first=config.system_first)
    elif config.system_first:
        check_order(messages)
    open_reply = body.get("add_generation_prompt", True)
    goes_on = bool(body.get("continue_final_message")) and bool(messages)
    hidden = config.hides_tools and body.get("tool_choice") in ("none", {"type": "none"})
    tools = [] if hidden else [_as_chat_has(each) for each in body.get("tools") or ()]
    effort = effort_of(body) if config.reads_effort else None
    ids = render_chat(messages, tools, open_reply=open_reply, goes_on=goes_on, effort=effort)
    return ids, "\n".join(_texts(messages))


def _as_chat_has(tool: Any) -> Any:
    """Return a tool of Messages as that of the chat which the engine makes of the request."""
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if schema is None:
        return tool
    parameters = schema if "type" in schema else schema | {"type": "object"}
    about = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": about | {"parameters": parameters}}


def _integer(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            text = "Input should be a valid integer, unable to parse string as an integer"
            raise invalid("int_parsing", f"body.{name}", text, shown(value)) from None
    if value is None:
        return None
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)
    if whole:  # true is 1, as in pydantic
        return int(value)
    raise invalid("int_type", f"body.{name}", "Input should be a valid integer", shown(value))


def _limit(path: str, body: dict[str, Any]) -> tuple[str, int | None]:
    for name in _LIMIT_FIELDS[path]:
        value = _integer(body, name)
        if value is not None:
            # The Messages endpoint is translated to chat before the check, which shows in errors.
            return ("max_completion_tokens" if path == MESSAGES else name), value
    return "max_tokens", None


def _cache_salt(body: dict[str, Any]) -> str:
    """Return what keeps the blocks of this request apart from those of others; empty for nothing."""
    salt = body.get("cache_salt")
    if salt is None:
        return ""
    says = ""
    if not isinstance(salt, str) or not salt:
        says = "must be a non-empty string if provided"
    elif len(salt) > _SALT_CHARS_MAX or any(char in salt for char in "@/\\\0"):
        says = f"must be at most {_SALT_CHARS_MAX} characters and must not contain '@', '/', '\\\\', or NUL"
    if says:
        text = f"Parameter 'cache_salt' {says}. (parameter=cache_salt)"
        raise SimError(400, text, param="cache_salt")
    return str(salt)


def _prompts(
    path: str, body: dict[str, Any], config: SimConfig
) -> tuple[tuple[tuple[int, ...], ...], str]:
    if path == CHAT_BATCH:
        chats = [count_chat(CHAT, body | {"messages": each}, config) for each in body["messages"]]
        return tuple(tuple(ids) for ids, _ in chats), "\n".join(text for _, text in chats)
    if path != COMPLETIONS:
        ids, text = count_chat(path, body, config)
        return (tuple(ids),), text
    prompt = body.get("prompt")
    if not prompt:
        text = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise SimError(400, text, param="prompt")
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    ids_of = [_prompt_ids(one, body.get("add_special_tokens", True)) for one in several]
    return tuple(ids_of), "\n".join(one for one in several if isinstance(one, str))


def _prompt_ids(prompt: str | list[int], begin: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return ((BEGIN,) if begin else ()) + tuple(tokenize(prompt))
    for token in prompt:
        if token < 0 or token >= 1 << 33:
            raise SimError(400, f"Token id {token} is out of vocabulary")
    return tuple(prompt)


def _budget(
    path: str, length: int, text: str, config: SimConfig, limit: tuple[str, int | None]
) -> int:
    """Return how many tokens the reply may have. 0.32 clamps silently to what the window leaves."""
    window = config.max_model_len
    name, stated = limit
    if stated is not None and stated > window:
        says = f"{name}={stated} cannot be greater than max_model_len={window}."
        raise bad_value(f"{says} Please request fewer output tokens.", name, stated)
    most = window * _BYTES_PER_TOKEN_MAX
    head = f"This model's maximum context length is {window} tokens. However, your prompt contains"
    advice = "Please reduce the length of the input prompt."
    if len(text) > most:
        says = f"{head} {len(text)} characters (more than {most} characters, which is the upper"
        says += f" bound for {window} input tokens). {advice}"
        raise bad_value(says, "input_text", len(text))
    if length > window:
        # Text is cut one token past the window before it is counted, so the number is a floor.
        shown, floor = (window + 1, "at least ") if text or length == window + 1 else (length, "")
        says = f"{head} {floor}{shown} input tokens, which exceeds this limit even without any"
        raise bad_value(f"{says} output tokens. {advice}", "input_tokens", shown)
    if length == window and path == RESPONSES:
        says = f"The engine prompt length {length} exceeds the max_model_len {window}."
        kind = "invalid_request_error"
        raise SimError(400, f"{says} Please reduce prompt.", kind=kind, param="input")
    default = 16 if path == COMPLETIONS else window
    budget = min(window - length, default if stated is None else stated)
    if budget < 1:
        raise bad_value(f"max_tokens must be at least 1, got {budget}.", "max_tokens", budget)
    return budget


def _texts(messages: list[Any]) -> list[str]:
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                found.append(text)
    return found
