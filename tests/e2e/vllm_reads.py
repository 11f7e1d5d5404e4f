"""Run with vLLM's Python: read bodies with vLLM's own request models and say what it finds in them.

Standard input: a list of [endpoint, body]. Standard output: for each the types of the content parts
that vLLM would work on (`uuid` too, where one is given), or null where it refuses the body; and the
fields of each endpoint's models.
"""

import json
import sys
from collections.abc import Mapping
from typing import get_args

from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest
from vllm.entrypoints.generate.structured_decisions.protocol import StructuredDecisionRequest
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest
from vllm.entrypoints.pooling.embed.protocol import CohereEmbedRequest, EmbeddingRequest
from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

try:
    from vllm.renderers.chat_utils.chat_message import (
        parse_chat_message_content_mm_part as parse_part,
    )
except ModuleNotFoundError:  # vLLM before 0.33
    from vllm.renderers.chat_utils import _parse_chat_message_content_mm_part as parse_part

MODELS = {
    "chat": ChatCompletionRequest,
    "chat_batch": BatchChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": AnthropicMessagesRequest,
    "count_tokens": AnthropicCountTokensRequest,
    "embeddings": EmbeddingRequest,
    "embed": CohereEmbedRequest,
    "pooling": PoolingRequest,
    "classify": ClassificationRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
    "generative_scoring": GenerativeScoringRequest,
    "structured_decisions": StructuredDecisionRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
ADAPTERS = {name: TypeAdapter(model) for name, model in MODELS.items()}
# Where messages, inputs and documents are, of any of these models.
CARRIERS = [
    "messages",
    "system",
    "input",
    "inputs",
    "query",
    "queries",
    "documents",
    "items",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
    "previous_input_messages",
]


def plain(value):
    """Return a validated value as plain data; lazy iterators are read."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, str | bytes | int | float | None):
        return value
    if hasattr(value, "__iter__"):
        return [plain(each) for each in value]
    return value


def parts_of(value):
    """Yield every part of a content, in a message, a list of messages or a document."""
    if isinstance(value, list):
        for each in value:
            yield from parts_of(each)
    elif isinstance(value, dict):
        for name in ("content", "output"):
            content = value.get(name)
            for part in content if isinstance(content, list) else [content]:
                if isinstance(part, dict):
                    yield part
                    yield from parts_of(part)


def reads(endpoint, body):
    try:
        request = ADAPTERS[endpoint].validate_python(body)
        known = [name for name in CARRIERS if name in type(request).model_fields]
        fields = {name: plain(getattr(request, name, None)) for name in known}
    except (ValidationError, ValueError, TypeError, KeyError):
        return None
    found = set()
    if "prompt_embeds" in type(request).model_fields and request.prompt_embeds:
        found.add("prompt_embeds")
    for name, value in fields.items():
        if endpoint == "chat" and name == "documents":
            continue  # texts for the template
        system = [{"content": value}] if name == "system" else value
        for part in parts_of(system):
            try:
                found.add(parse_part(part)[0])
            except Exception:  # no part for vLLM
                continue
            if part.get("uuid") is not None:
                found.add("uuid")
    return sorted(found)


def fields_of(model):
    if not hasattr(model, "model_fields"):
        return {name for each in get_args(model) for name in fields_of(each)}
    return {field.alias or name for name, field in model.model_fields.items()}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answer = {
        "reads": [reads(endpoint, body) for endpoint, body in asked],
        "fields": {name: sorted(fields_of(model)) for name, model in MODELS.items()},
    }
    sys.stdout.write("\n" + json.dumps(answer))
