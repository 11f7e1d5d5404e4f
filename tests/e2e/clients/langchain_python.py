"""LangChain's typed errors through the gateway; prints one JSON object of findings."""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, key, model = sys.argv[1:4]
where = {"base_url": url + "/v1", "api_key": key, "max_retries": 0}
client = ChatOpenAI(**where, model=model, max_tokens=5)


class Plan(BaseModel):
    steps: list[str]


def failure(call):
    try:
        call()
    except Exception as error:
        return [each.__name__ for each in type(error).__mro__]
    return None


found: dict[str, object] = {}
reply = client.invoke("hello")
found["chat"] = [reply.response_metadata["finish_reason"], reply.usage_metadata["output_tokens"]]
chunks = list(client.stream("hello", stream_usage=True))
found["usage"] = sum(each.usage_metadata["output_tokens"] for each in chunks if each.usage_metadata)
tool = {"name": "look_up", "description": "", "parameters": {"type": "object", "properties": {}}}
wishing = ChatOpenAI(**where, model=model, max_tokens=20).bind_tools([tool])
found["tool"] = wishing.invoke("use the tool").tool_calls[0]["name"]
responses = ChatOpenAI(**where, model=model, use_responses_api=True)
parsing = responses.with_structured_output(Plan, method="json_schema")
*_, parsed = parsing.stream("hello")
found["response_parsed"] = len(parsed.steps)
embed = OpenAIEmbeddings(**where, model=model, check_embedding_ctx_length=False)
found["embedding"] = len(embed.embed_query("x")) > 0
found["no_model"] = failure(lambda: ChatOpenAI(**where, model="none").invoke("hello"))
found["too_long"] = failure(lambda: client.invoke("word " * 200_000))
print(json.dumps(found))
