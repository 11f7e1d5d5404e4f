"""Read streams with the SDKs, all at once: requests come as JSON on stdin, what each saw goes to stdout."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai

url, key = sys.argv[1:3]
by_openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
by_anthropic = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def seen(path, body):
    """Return the text that was seen, why it ended, the tokens that were counted, and the error."""
    said, finish, usage, error = [], None, None, None
    try:
        if path == "/v1/messages":
            for event in by_anthropic.messages.create(**body):
                if event.type == "content_block_delta":
                    said.append(event.delta.text)
                if event.type == "message_delta":
                    finish, usage = event.delta.stop_reason, event.usage.output_tokens
        else:
            more = {"ignore_eos": body.pop("ignore_eos")}
            chats = by_openai.chat.completions
            create = (chats if path == "/v1/chat/completions" else by_openai.completions).create
            for chunk in create(**body, extra_body=more):
                usage = chunk.usage.model_dump(exclude_unset=True) if chunk.usage else usage
                for choice in chunk.choices:
                    text = choice.delta.content if hasattr(choice, "delta") else choice.text
                    said.append(text or "")
                    finish = choice.finish_reason or finish
    except (openai.APIError, anthropic.APIError) as failure:
        error = type(failure).__name__
    return "".join(said), finish, usage, error


asked = json.load(sys.stdin)
with ThreadPoolExecutor(len(asked)) as pool:
    print(json.dumps(list(pool.map(lambda each: seen(*each), asked))))
