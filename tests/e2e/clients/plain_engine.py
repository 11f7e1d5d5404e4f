"""The OpenAI SDK against an engine that is no vLLM: plain_engine.py BASE_URL KEY MODEL; prints JSON."""

from __future__ import annotations

import json
import sys

import openai


def main() -> None:
    url, key, model = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    asked = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    seen: dict[str, object] = {}
    chat = client.chat.completions.create(**asked)
    seen["chat"] = [chat.choices[0].finish_reason, chat.usage.completion_tokens]
    chunks = [*client.chat.completions.create(**asked, stream=True)]
    seen["stream"] = [chunks[-1].choices[0].finish_reason, chunks[0].object]
    text = client.completions.create(model=model, prompt="hello", max_tokens=5)
    seen["completion"] = [text.choices[0].finish_reason, text.usage.completion_tokens]
    parts = [*client.completions.create(model=model, prompt="hello", max_tokens=5, stream=True)]
    seen["completion_stream"] = parts[-1].choices[0].finish_reason
    try:
        long = [{"role": "user", "content": "hello " * 400}]
        client.chat.completions.create(model=model, messages=long, max_tokens=5)
    except openai.BadRequestError as error:
        seen["too_long"] = error.code
    try:
        client.embeddings.create(model=model, input="hello")
    except openai.APIStatusError as error:
        seen["embedding"] = error.status_code
    seen["models"] = [each.id for each in client.models.list().data]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
