"""Drive the gateway with whatever OpenAI SDK this interpreter has; prints one JSON object of findings."""

import json
import sys
import time
import urllib.request

import openai
import pydantic

url, key, model, sim = sys.argv[1:5]
client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
messages = [{"role": "user", "content": "hello"}]
found: dict[str, object] = {"version": openai.__version__}


class Weather(pydantic.BaseModel):
    place: str
    degrees: float


def chat(**more):
    return client.chat.completions.create(
        **{"model": model, "messages": messages, "max_tokens": 5, **more}
    )


def failure(call):
    try:
        call()
    except openai.APIError as error:
        return [
            type(error).__name__,
            getattr(error, "status_code", None),
            getattr(error, "code", None),
            getattr(error, "param", None),
        ]
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
found["model"] = client.models.retrieve(model).id

reply = chat()
found["chat"] = [reply.choices[0].finish_reason, reply.usage.completion_tokens]

chunks = list(chat(stream=True))
found["stream"] = [chunks[-1].choices[0].finish_reason, all(chunk.choices for chunk in chunks)]

chunks = list(chat(stream=True, stream_options={"include_usage": True}))
found["usage"] = [chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens]

tools = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
    }
]
wish = [{"role": "user", "content": "use the tool"}]
reply = chat(messages=wish, tools=tools, max_tokens=20)
found["tool"] = reply.choices[0].message.tool_calls[0].function.name
parts = [
    call.function.name
    for chunk in chat(messages=wish, tools=tools, max_tokens=20, stream=True)
    for call in chunk.choices[0].delta.tool_calls or []
]
found["tool_stream"] = parts[0]

reply = client.responses.create(model=model, input="hello", max_output_tokens=5)
found["response"] = [reply.status, reply.usage.output_tokens]
events = list(client.responses.create(model=model, input="hello", max_output_tokens=5, stream=True))
found["response_stream"] = [events[0].type, events[-1].type]

parsed = client.chat.completions.parse(model=model, messages=messages, response_format=Weather)
found["parsed"] = parsed.choices[0].message.parsed.degrees
parsed = client.responses.parse(model=model, input="hello", text_format=Weather)
found["response_parsed"] = parsed.output_parsed.degrees

found["embedding"] = len(client.embeddings.create(model=model, input="x").data)

raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=1)
found["request_id"] = raw.headers["x-request-id"].startswith("req_")

found["no_model"] = failure(lambda: chat(model="none"))
wrong = openai.OpenAI(base_url=url + "/v1", api_key="gw_wrong", max_retries=0)
found["bad_key"] = failure(lambda: wrong.embeddings.create(model=model, input="x"))
long = [{"role": "user", "content": "word " * 200_000}]
found["too_long"] = failure(lambda: chat(messages=long))

patient = client.with_options(max_retries=1)


def ask(name):
    return patient.chat.completions.create(model=name, messages=messages, max_tokens=5)


timed("down", lambda: failure(lambda: ask("down")))
timed("limited", lambda: failure(lambda: ask("busy")))
inject("http_500:429@1")
timed("served_later", lambda: ask(model).choices[0].finish_reason)

inject("reset_after:3@1")
found["broken_stream"] = failure(lambda: list(chat(max_tokens=20, stream=True)))
inject("reset_after:3@1")
asked = {"model": model, "input": "hello", "max_output_tokens": 20, "stream": True}
found["broken_response"] = failure(lambda: list(client.responses.create(**asked)))

with chat(max_tokens=3000, stream=True) as stream:
    found["left"] = bool(next(iter(stream)).choices)
print(json.dumps(found))
