"""Drive the gateway with litellm, by both of its dialects; prints one JSON object of findings."""

import asyncio
import json
import os
import sys
import time
import urllib.request

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for prices, three times
import litellm

url, key, model, sim = sys.argv[1:5]
where = {"api_base": url + "/v1", "api_key": key, "max_retries": 0}
messages = [{"role": "user", "content": "hello"}]


def chat(dialect="openai", name=model, **more):
    asked = {"messages": messages, "max_tokens": 5, **where, **more}
    return litellm.completion(model=f"{dialect}/{name}", **asked)


def failure(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", None)]
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


found: dict[str, object] = {}
for dialect in ("openai", "hosted_vllm"):
    more = "" if dialect == "openai" else "_vllm"
    reply = chat(dialect)
    found["chat" + more] = [reply.choices[0].finish_reason, reply.usage.completion_tokens]
    chunks = list(chat(dialect, stream=True, stream_options={"include_usage": True}))
    usage = [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)]
    found["usage" + more] = usage[-1]
tool = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
wish = [{"role": "user", "content": "use the tool"}]
reply = chat(messages=wish, max_tokens=20, tools=[{"type": "function", "function": tool}])
found["tool"] = reply.choices[0].message.tool_calls[0].function.name
found["embedding"] = len(litellm.embedding(model=f"openai/{model}", input=["x"], **where).data)
reply = litellm.rerank(
    model=f"hosted_vllm/{model}", query="x", documents=["a", "b"], api_base=url, api_key=key
)
found["rerank"] = len(reply.results)
found["no_model"] = failure(lambda: chat(name="none"))
found["bad_key"] = failure(
    lambda: litellm.embedding(
        model=f"openai/{model}", input=["x"], **{**where, "api_key": "gw_wrong"}
    )
)
found["too_long"] = failure(lambda: chat(messages=[{"role": "user", "content": "word " * 200_000}]))
timed("down", lambda: failure(lambda: chat(name="down", max_retries=1)))
timed("limited", lambda: failure(lambda: chat(name="busy", max_retries=1)))
inject("http_500:429@1")
timed("served_later", lambda: chat(max_retries=1).choices[0].finish_reason)
for dialect in ("openai", "hosted_vllm"):
    more = "" if dialect == "openai" else "_vllm"
    inject("reset_after:3@1")
    found["broken_stream" + more] = failure(
        lambda dialect=dialect: list(chat(dialect, max_tokens=20, stream=True))
    )


async def leave(dialect):
    asked = {"messages": messages, "max_tokens": 3000, **where}
    stream = await litellm.acompletion(model=f"{dialect}/{model}", stream=True, **asked)
    first = await anext(stream)
    await stream.aclose()
    return bool(first.choices)


found["left"] = asyncio.run(leave("openai"))
found["left_vllm"] = asyncio.run(leave("hosted_vllm"))
print(json.dumps(found))
