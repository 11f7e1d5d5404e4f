"""What a prompt probably takes that nobody has counted."""

import json

import pytest

from gateway.admission.needs import Needs
from gateway.core.types import Caller, Demand
from gateway.counting.context import bound
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.large import completed
from tests.unit.test_context import within
from tests.unit.test_scan import scanned

CALLER, ROUTE = Caller("id", "ci", "ci"), within(1_000_000)
TEXT = "Reads a file from the local filesystem. " * 200  # 8,000 bytes, about 2,000 tokens
PIXELS = "data:image/png;base64," + "A" * 40_000
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXELS[22:]}
IMAGES = {
    CHAT: {"type": "image_url", "image_url": {"url": PIXELS}},
    RESPONSES: {"type": "input_image", "image_url": PIXELS},
    MESSAGES: {"type": "image", "source": SOURCE},
}
TOOL = {"name": "read", "description": TEXT}
TOOLS = {
    CHAT: {"type": "function", "function": TOOL},
    RESPONSES: {"type": "function", **TOOL},
    MESSAGES: {**TOOL, "input_schema": {"type": "object"}},
}


def body_of(path, content, **more):
    field = "input" if path == RESPONSES else "messages"
    return {"model": "m", field: [{"role": "user", "content": content}], **more}


def parts_of(path, images):
    text = {"type": "input_text" if path == RESPONSES else "text", "text": TEXT}
    return [text, *[IMAGES[path]] * images]


def small(path, raw):
    return parse_call(ENDPOINTS[path.encode()], raw)


def large(path, raw):
    found = scanned(raw)
    return completed(parse_call(ENDPOINTS[path.encode()], found.skim()), found)


def tokens(path, body, *, read=small, ascii_only=False):
    call = read(path, json.dumps(body, ensure_ascii=ascii_only).encode())
    demand = bound(call, route=ROUTE, caller=CALLER)
    assert not demand.exact
    return Needs().of(call, demand, CALLER, ROUTE.window_tokens).prompt_tokens


@pytest.mark.parametrize("read", [small, large])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_tools_take_as_much_as_other_text(path, read):
    """A template may write more than they have in the body; that it surely fits, and what is likely, differ."""
    with_tools = tokens(path, body_of(path, "hi", tools=[TOOLS[path]] * 4), read=read)
    assert with_tools == pytest.approx(tokens(path, body_of(path, TEXT * 4)), rel=0.05)


@pytest.mark.parametrize("read", [small, large])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_beside_an_image_text_takes_what_it_takes_without(path, images, read):
    plain = tokens(path, body_of(path, parts_of(path, 0)))
    beside = tokens(path, body_of(path, parts_of(path, images)), read=read)
    assert beside == pytest.approx(plain + images * 1024, rel=0.05)


def test_an_image_in_the_result_of_a_tool_is_one_and_the_text_beside_it_is_none():
    text, image = parts_of(MESSAGES, 1)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, image]}
    plain = tokens(MESSAGES, body_of(MESSAGES, [text]))
    assert tokens(MESSAGES, body_of(MESSAGES, [result])) == pytest.approx(plain + 1024, rel=0.05)


def test_several_prompts_with_images_take_what_all_of_them_do():
    several = [[{"role": "user", "content": parts_of(CHAT, 1)}]] * 3
    body = {"model": "m", "messages": several}
    assert tokens(CHAT + "/batch", body) == pytest.approx(3 * (2000 + 1024), rel=0.1)


@pytest.mark.parametrize(
    "text", ["Напишите краткое изложение. " * 300, "请总结这篇文章,并指出主要观点。" * 300]
)
def test_escaped_characters_take_what_they_take_unescaped(text):
    """As PHP and Python's json write them."""
    plain = tokens(CHAT, body_of(CHAT, text))
    assert tokens(CHAT, body_of(CHAT, text), ascii_only=True) == pytest.approx(plain, rel=0.15)


DOCUMENT = TEXT * 10  # about 20,000 tokens
CUT = {
    "one text": ("/v1/embeddings", {"input": DOCUMENT, "truncate_prompt_tokens": 512}, 512),
    "several": ("/v1/embeddings", {"input": [DOCUMENT] * 20, "truncate_prompt_tokens": 512}, 10240),
    "short": ("/v1/embeddings", {"input": [TEXT] * 20, "truncate_prompt_tokens": 9000}, 40_000),
    "texts": ("/v2/embed", {"texts": [DOCUMENT] * 20, "max_tokens": 512}, 10240),
    "a prompt": ("/v1/completions", {"prompt": DOCUMENT, "truncate_prompt_tokens": 512}, 512),
    "documents": (
        "/rerank",
        {"query": "a", "documents": [DOCUMENT] * 20, "truncate_prompt_tokens": 512},
        10240,
    ),
    "short documents": (
        "/rerank",
        {"query": "a", "documents": [TEXT] * 20, "truncate_prompt_tokens": 9000},
        40_000,
    ),
    "no number": (
        "/rerank",
        {"query": "a", "documents": [DOCUMENT] * 20, "truncate_prompt_tokens": -1},
        160_000,
    ),
}


@pytest.mark.parametrize("read", [small, large])
@pytest.mark.parametrize(("path", "body", "expected"), CUT.values(), ids=CUT)
def test_what_an_engine_cuts_takes_what_it_leaves(path, body, expected, read):
    call = read(path, json.dumps({"model": "m", **body}).encode())
    route = within(8000)
    demand = bound(call, route=route, caller=CALLER)
    need = Needs().of(call, demand, CALLER, route.window_tokens)
    assert need.prompt_tokens == pytest.approx(expected, rel=0.05)
    assert need.output_tokens == (16 if path == "/v1/completions" else 0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
@pytest.mark.parametrize(("texts", "size"), [(1000, 3000), (900, 12_000), (50, 60_000)])
def test_many_texts_take_no_more_than_all_of_them_do(path, texts, size):
    """Also where they are so many, or so long, that the scan cuts them."""
    field = "input" if path == "/v1/embeddings" else "prompt"
    body = {"model": "m", field: [(TEXT * 8)[:size]] * texts}
    call = large(path, json.dumps(body).encode())
    demand = bound(call, route=ROUTE, caller=CALLER) or Demand(size, exact=False)
    need = Needs().of(call, demand, CALLER, ROUTE.window_tokens)
    assert need.prompt_tokens == pytest.approx(texts * size / 4, rel=0.05)


def test_a_text_that_holds_escapes_itself_is_text():
    text = json.dumps("Напишите краткое изложение. " * 300)  # what a tool told, say
    body = body_of(CHAT, text)
    assert tokens(CHAT, body) == pytest.approx(len(json.dumps(body)) / 4, rel=0.05)
