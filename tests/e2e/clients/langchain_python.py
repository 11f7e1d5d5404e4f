"""LangChain's typed errors through the gateway; prints one JSON object of findings."""

import json
import sys

from langchain_openai import ChatOpenAI

url, key, model = sys.argv[1:4]
chat = ChatOpenAI(base_url=url + "/v1", api_key=key, model=model, max_retries=0, max_tokens=5)
found: dict[str, object] = {"text": bool(chat.invoke("hello").content)}
found["stream"] = sum(1 for _ in chat.stream("hello")) > 1
try:
    chat.invoke("word " * 200_000)
except Exception as error:
    found["too_long"] = [each.__name__ for each in type(error).__mro__]
print(json.dumps(found))
