"""Drive /v1/messages with the Anthropic SDK; prints one JSON object of findings."""

import json
import sys
import time
import urllib.request

import anthropic

url, key, model, sim = sys.argv[1:5]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
found: dict[str, object] = {"version": anthropic.__version__}
messages = [{"role": "user", "content": "hello"}]
asked = {"model": model, "max_tokens": 5, "messages": messages}


def failure(call):
    try:
        call()
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.type, error.error_code]
    return None


def timed(case, call):
    started = time.monotonic()
    found[case] = call()
    found[case + "_waited"] = time.monotonic() - started


def inject(fault):
    body = json.dumps({"fault": fault}).encode()
    urllib.request.urlopen(
        urllib.request.Request(sim + "/sim/faults", body, {"content-type": "application/json"})
    )


found["models"] = sorted(each.id for each in client.models.list())
reply = client.messages.create(**asked)
found["message"] = [reply.stop_reason, reply.usage.output_tokens]
found["knows_its_id"] = reply._request_id.startswith("req_")
with client.messages.stream(**asked) as stream:
    final = stream.get_final_message()
found["message_stream"] = [final.stop_reason, final.usage.output_tokens]
tools = [{"name": "look_up", "input_schema": {"type": "object", "properties": {}}}]
wish = [{"role": "user", "content": "use the tool"}]
reply = client.messages.create(model=model, max_tokens=20, messages=wish, tools=tools)
found["message_tool"] = [reply.stop_reason, reply.content[-1].name]


@anthropic.beta_tool(input_schema={"type": "object", "properties": {"value": {"type": "string"}}})
def look_up(value: str) -> str:
    return value


asked_for_tool = {"model": model, "max_tokens": 20, "messages": wish, "tools": [look_up]}
turns = list(client.beta.messages.tool_runner(**asked_for_tool, max_iterations=2))
first, second = (turn.usage.input_tokens for turn in turns)
found["message_tool_runner"] = [turns[0].stop_reason, second > first]
found["count"] = client.messages.count_tokens(model=model, messages=messages).input_tokens > 0

found["message_no_model"] = failure(lambda: client.messages.create(**{**asked, "model": "none"}))
wrong = anthropic.Anthropic(base_url=url, api_key="gw_wrong", max_retries=0)
found["message_bad_key"] = failure(lambda: wrong.messages.create(**asked))
long = [{"role": "user", "content": "word " * 200_000}]
found["message_too_long"] = failure(lambda: client.messages.create(**{**asked, "messages": long}))

patient = client.with_options(max_retries=1)


def ask(name):
    return patient.messages.create(**{**asked, "model": name})


timed("message_down", lambda: failure(lambda: ask("down")))
timed("message_limited", lambda: failure(lambda: ask("busy")))
inject("http_500:429@1")
timed("message_served_later", lambda: ask(model).stop_reason)

inject("reset_after:3@1")
found["message_broken_stream"] = failure(
    lambda: list(client.messages.create(**{**asked, "max_tokens": 20}, stream=True))
)
with client.messages.create(**{**asked, "max_tokens": 3000}, stream=True) as stream:
    found["message_left"] = next(iter(stream)).type
print(json.dumps(found))
