"""The token ids of a message's prompt, as they are asked for to go on with it, are those that a real vLLM gives it."""

import asyncio
import json
import pathlib

import httpx2
import pytest

from gateway.counting.ids import prompt_ids
from gateway.wire.calls import ENDPOINTS, parse_call

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MESSAGES = "/v1/messages"
PARSER = pathlib.Path(__file__).parent / "calls_by_letter.py"
FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "by_letter"),
    *("--tool-parser-plugin", str(PARSER), "--enable-scale-out"),
)
BEGIN = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{%- if reasoning_effort is defined %}effort {{ reasoning_effort }}
{% endif %}"""
END = """\
{%- for message in messages %}<|turn|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|over|>
{% endfor %}<|turn|>assistant
{% if enable_thinking is defined and not enable_thinking %}no thoughts
{% endif %}"""
FIRST = """\
{%- for message in messages[1:] %}{%- if message.role == "system" %}
{{- raise_exception("System message must be at the beginning.") }}{%- endif %}{%- endfor %}"""
TEMPLATES = {"anywhere": BEGIN + END, "first": FIRST + BEGIN + END, "none": END}
USER = {"role": "user", "content": "please tell me about the gateway " * 3}
REMINDED = [
    USER,
    {"role": "assistant", "content": [{"type": "text", "text": "well"}]},
    {"role": "system", "content": "x-anthropic-billing-header: 1"},
    {"role": "system", "content": [{"type": "text", "text": "keep to"}, {"type": "text", "text": " it"}]},
    {"role": "user", "content": "go on"},
]  # fmt: skip
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc"},
    {"type": "text", "text": "you write code", "cache_control": {"type": "ephemeral"}},
]
TOOL = {"name": "look", "description": "it looks", "input_schema": {"properties": {}}}
CASES = {
    "system": {"system": SYSTEM},
    "inline": {"messages": REMINDED, "system": SYSTEM, "tools": [TOOL]},
    "effort": {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
    "disabled": {"thinking": {"type": "disabled"}},
    "both": {
        "messages": REMINDED,
        "system": "be kind",
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "max"},
    },
    "kwargs": {
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"},
        "output_config": {"effort": "medium"},
    },
    "ignored": {"speed": "fast", "diagnostics": {}, "context_management": {"edits": []}},
}


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request, shared_engines, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATES[request.param])
    flags = (*FLAGS, "--chat-template", str(path))
    [engine] = shared_engines.serving(1, *flags)
    yield engine
    shared_engines.stop(*flags)


class Asker:
    """Asks one server."""

    def __init__(self, url):
        self.http = httpx2.Client(base_url=url, trust_env=False, timeout=60)

    async def post(self, path, body, *, timeout_s):
        reply = self.http.post(path, content=body, headers={"content-type": "application/json"})
        return reply.status_code, reply.content


def test_they_are_those_of_the_engine(server):
    asker = Asker(server.url)
    for name, more in CASES.items():
        body = {"model": "tiny", "max_tokens": 1, "messages": [USER], **more}
        rendered = asker.http.post(MESSAGES + "/render", json=body)
        assert rendered.status_code == 200, (name, rendered.text)
        engines = rendered.json()["token_ids"]
        told = asker.http.post(MESSAGES, json=body).json()["usage"]["input_tokens"]
        call = parse_call(ENDPOINTS[MESSAGES.encode()], json.dumps(body).encode())
        found = asyncio.run(prompt_ids(asker, "tiny", call=call, prompt_tokens=told))
        assert (found.ids, told) == (engines, len(engines)), name


def test_without_a_parser_of_reasoning_a_budget_is_refused(server):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "tiny", "max_tokens": 1025, "messages": [USER], "thinking": thinking}
    reply = Asker(server.url).http.post(MESSAGES, json=body)
    assert (reply.status_code, "thinking_token_budget" in reply.text) == (400, True)
