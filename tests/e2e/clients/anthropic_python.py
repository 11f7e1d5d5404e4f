"""Drive /v1/messages with the Anthropic SDK; prints one JSON object of findings."""

import json
import sys

import anthropic

url, key, model = sys.argv[1:4]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
found: dict[str, object] = {"version": anthropic.__version__}
messages = [{"role": "user", "content": "hello"}]

reply = client.messages.create(model=model, max_tokens=5, messages=messages)
found["message"] = [reply.stop_reason, reply.usage.output_tokens]
with client.messages.stream(model=model, max_tokens=5, messages=messages) as stream:
    found["stream"] = len(stream.get_final_text()) > 0
found["count"] = client.messages.count_tokens(model=model, messages=messages).input_tokens > 0


def failure(call):
    try:
        call()
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.body["error"]["type"]]
    return None


found["no_model"] = failure(
    lambda: client.messages.create(model="none", max_tokens=5, messages=messages)
)
found["bad_key"] = failure(
    lambda: anthropic.Anthropic(base_url=url, api_key="gw_wrong", max_retries=0).messages.create(
        model=model, max_tokens=5, messages=messages
    )
)
print(json.dumps(found))
