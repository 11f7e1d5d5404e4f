"""Drive the gateway with litellm, by both of its dialects; prints one JSON object of findings."""

import json
import sys
import time

import litellm

url, key, model = sys.argv[1:4]
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
started = time.monotonic()
found["down"] = failure(lambda: chat(name="down", max_retries=1))
found["down_waited"] = time.monotonic() - started
print(json.dumps(found))
