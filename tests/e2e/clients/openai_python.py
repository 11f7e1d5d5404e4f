"""Drive the gateway with whatever OpenAI SDK this interpreter has; prints one JSON object of findings."""

import json
import sys
import urllib.request

import openai

url, key, model, sim = sys.argv[1:5]
client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
found: dict[str, object] = {"version": openai.__version__}
messages = [{"role": "user", "content": "hello"}]

reply = client.chat.completions.create(model=model, messages=messages, max_tokens=5)
found["chat"] = [reply.choices[0].finish_reason, reply.usage.completion_tokens]

chunks = list(
    client.chat.completions.create(model=model, messages=messages, max_tokens=5, stream=True)
)
found["stream"] = [chunks[-1].choices[0].finish_reason, all(chunk.choices for chunk in chunks)]

chunks = list(
    client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
)
found["usage"] = chunks[-1].usage.completion_tokens

tools = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
    }
]
reply = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "use the tool"}], tools=tools, max_tokens=20
)
found["tools"] = reply.choices[0].message.tool_calls[0].function.name

found["embedding"] = len(client.embeddings.create(model=model, input="x").data)
found["models"] = sorted(each.id for each in client.models.list())
found["model"] = client.models.retrieve(model).id

raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=1)
found["request_id"] = raw.headers["x-request-id"].startswith("req_")


def failure(call):
    try:
        call()
    except openai.APIError as error:
        return [type(error).__name__, getattr(error, "code", None), getattr(error, "param", None)]
    return None


found["no_model"] = failure(lambda: client.chat.completions.create(model="none", messages=messages))
found["bad_key"] = failure(
    lambda: openai.OpenAI(base_url=url + "/v1", api_key="gw_wrong", max_retries=0).models.list()
)
long = [{"role": "user", "content": "word " * 200_000}]
found["too_long"] = failure(
    lambda: client.chat.completions.create(model=model, messages=long, max_tokens=5)
)
urllib.request.urlopen(
    urllib.request.Request(
        sim + "/sim/faults", b'{"fault": "reset_after:3@1"}', {"content-type": "application/json"}
    )
)
found["broken_stream"] = failure(
    lambda: list(
        client.chat.completions.create(model=model, messages=messages, max_tokens=20, stream=True)
    )
)
print(json.dumps(found))
