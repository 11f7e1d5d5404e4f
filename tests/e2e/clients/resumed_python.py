"""Read streams with the SDKs, all at once: requests come as JSON on stdin, what each saw goes to stdout."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai

url, key = sys.argv[1:3]
by_openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
by_anthropic = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def counted(prompt, completion):
    """Return counts as a chat tells them."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def message(body, said):
    """Read a message of Anthropic's; what the SDK puts together is what was said."""
    more = {"temperature": body["temperature"]} if "temperature" in body else {}
    known = {name: body[name] for name in ("model", "messages", "max_tokens")}
    with by_anthropic.messages.stream(**known, extra_body=more) as stream:
        said.extend(stream.text_stream)
        whole = stream.get_final_message()
    assert [block.text for block in whole.content] == ["".join(said)]
    reasons = {"max_tokens": "length", "end_turn": "stop"}
    return reasons[whole.stop_reason], counted(whole.usage.input_tokens, whole.usage.output_tokens)


def response(body, said):
    """Read a response of OpenAI's; its events are numbered, and its end says all of it again."""
    names = set()
    for number, event in enumerate(by_openai.responses.create(**body)):
        assert event.sequence_number == number
        item = getattr(event, "item", None)
        names.add(getattr(event, "item_id", None) if item is None else item.id)
        if event.type == "response.created":
            first = event.response.id
        if event.type == "response.output_text.delta":
            said.append(event.delta)
    if event.type == "error":  # the SDK hands it out as an event, the last one
        return None, None, event.code
    whole, usage = event.response, event.response.usage
    assert (whole.id, whole.output_text, len(names - {None})) == (first, "".join(said), 1)
    finish = "length" if whole.incomplete_details else "stop"
    return finish, counted(usage.input_tokens, usage.output_tokens), None


def seen(path, body):
    """Return the text that was seen, why it ended, the tokens that were counted, and the error."""
    said, finish, usage, error = [], None, None, None
    try:
        if path == "/v1/messages":
            finish, usage = message(body, said)
        elif path == "/v1/responses":
            finish, usage, error = response(body, said)
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
