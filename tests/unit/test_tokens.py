"""Counting prompts here and at a backend; agreement with a real engine is tested in e2e."""

import asyncio
import json
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from gateway.core.errors import ConfigError
from gateway.counting.tokens import (
    BackendCounter,
    LocalCounter,
    prepared,
)
from gateway.wire.calls import ENDPOINTS, parse_call

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
TEMPLATE = "{% for m in messages %}<|m|>{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer without merges: one token a byte, `<|b|>` before a completion."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|b|>", "<|m|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|b|> $A", special_tokens=[("<|b|>", tokenizer.token_to_id("<|b|>"))]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def call(path, **body):
    return parse_call(ENDPOINTS[path], json.dumps({"model": "m", **body}).encode())


def count(folder, path, *, window=None, deadline_s=20.0, **body):
    async def main():
        counter = LocalCounter(folder, deadline_s=deadline_s)
        return await counter.count(call(path, **body), "m", window_tokens=window)

    return asyncio.run(main())


def chat(folder, *contents, **more):
    messages = [{"role": "user", "content": each} for each in contents]
    return count(folder, CHAT, messages=messages, **more)


def ids(folder, path, *, within_s=20.0, **body):
    async def main():
        counter = LocalCounter(folder, deadline_s=20.0)
        return await counter.read(call(path, **body), list, within_s=within_s)

    return asyncio.run(main())


# --- here -----------------------------------------------------------------------------------------


def test_a_chat_is_rendered_and_gets_no_begin_mark(folder):
    assert chat(folder, "hello", "you") == 1 + 5 + 1 + 3


def test_a_completion_gets_a_begin_mark_unless_told_otherwise(folder):
    assert count(folder, COMPLETIONS, prompt="hello") == 6
    assert count(folder, COMPLETIONS, prompt="hello", add_special_tokens=False) == 5
    assert chat(folder, "hello", add_special_tokens=True) == 7


def test_the_ids_of_the_only_prompt_can_be_had(folder):
    read, h = ids(folder, CHAT, messages=[{"role": "user", "content": "hh"}]), ids(folder, COMPLETIONS, prompt="h")  # fmt: skip
    assert len(h) == 2  # after the mark of the beginning
    assert read[1:] == [h[1], h[1]]
    assert ids(folder, COMPLETIONS, prompt=[7, 8]) == [7, 8]
    assert ids(folder, COMPLETIONS, prompt=[[7, 8]]) == [7, 8]


def test_ids_that_cannot_be_had_in_time_or_at_all_are_none(folder):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for path, body in (
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[7], [8]]}),
        (CHAT, {"messages": [{"role": "user", "content": [image]}]}),
    ):
        assert ids(folder, path, **body) is None
    assert ids(folder, COMPLETIONS, prompt="x" * 1_000_000, within_s=0.0) is None


def test_a_prompt_that_the_engine_cuts_is_counted_whole(folder):
    assert chat(folder, "hello", truncate_prompt_tokens=1) == chat(folder, "hello")


def test_neither_truncation_nor_padding_of_the_file_counts(folder):
    assert count(folder, COMPLETIONS, prompt="x" * 100) == 101
    assert count(folder, COMPLETIONS, prompt="x") == 2


def test_bytes_are_counted_not_characters(folder):
    assert count(folder, COMPLETIONS, prompt="ü🙂", add_special_tokens=False) == 6


def test_the_longest_prompt_is_the_one_that_counts(folder):
    assert count(folder, COMPLETIONS, prompt=["a", "abc", "ab"]) == 4
    assert count(folder, b"/v1/embeddings", input=["abcd", "ab"]) == 5


def test_token_ids_are_not_tokenised(folder):
    assert count(folder, COMPLETIONS, prompt=[1, 2, 3]) == 3
    assert count(folder, COMPLETIONS, prompt=[[1], [1, 2]]) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": [USER], "continue_final_message": True}),
        (CHAT, {"messages": [USER], "add_special_tokens": 1}),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {}),
        (b"/v1/embeddings", {"messages": [USER]}),
        (b"/v1/rerank", {"query": "a", "documents": ["b"]}),
        (b"/v1/messages", {"messages": [USER]}),
        (b"/v1/responses", {"input": "a"}),
    ],
)
def test_what_only_the_engine_knows_is_not_counted(folder, path, body):
    assert count(folder, path, **body) is None


def test_half_a_character_inside_a_tool_call_is_left_to_the_engine(folder):
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.a }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(source)
    function = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    assert count(folder, CHAT, messages=[{"role": "assistant", "tool_calls": calls}]) is None


def test_a_body_beyond_every_limit_is_not_counted(monkeypatch):
    monkeypatch.setattr("gateway.counting.tokens.MAX_BODY_BYTES", 1000)
    body = {"model": "m", "messages": [USER | {"content": "x" * 1000}]}
    call = parse_call(ENDPOINTS[CHAT], json.dumps(body).encode())
    assert asyncio.run(prepared(call)) is None


def test_what_no_decoder_takes_is_left_to_the_engine(folder):
    body = b'{"model": "m", "prompt": "hi", "seed": 1e999}'

    async def main():
        asked = parse_call(ENDPOINTS[COMPLETIONS], body)
        return await LocalCounter(folder, deadline_s=5).count(asked, "m")

    assert asyncio.run(main()) is None


@pytest.fixture
def slices(monkeypatch):
    monkeypatch.setattr("gateway.counting.tokens.SLICE_CHARS", 1000)
    return 1000


@pytest.mark.parametrize(("window", "slices_counted"), [(100, 1), (2500, 3)])
def test_a_prompt_far_beyond_the_window_is_not_counted_to_its_end(
    folder, slices, window, slices_counted
):
    told = chat(folder, "a b " * 2000, window=window)
    assert window < told <= slices_counted * slices


def test_a_long_prompt_that_may_fit_is_counted_exactly(folder, slices):
    long = "x" * (2 * slices + 10)
    assert chat(folder, long, window=10**9) == len(long) + 1
    assert chat(folder, long, window=len(long) - 5) == len(long) + 1
    assert chat(folder, long) == len(long) + 1


def test_a_template_that_never_ends_costs_no_more_than_the_deadline(folder):
    loop = "{% for i in range(90000) %}" * 2 + "x" + "{% endfor %}" * 2
    (folder / "chat_template.jinja").write_text(loop)
    began = time.monotonic()
    assert chat(folder, "hi", deadline_s=0.05) is None
    assert time.monotonic() - began < 5


def test_more_counts_than_are_worth_waiting_for_are_refused(folder, monkeypatch):
    monkeypatch.setattr("gateway.counting.tokens.MAX_WAITING", 3)
    loop = "{% for i in range(90000) %}" * 2 + "x" + "{% endfor %}" * 2
    (folder / "chat_template.jinja").write_text(loop)

    async def main():
        counter = LocalCounter(folder, deadline_s=1.0)
        busy, asked = call(CHAT, messages=[USER]), call(COMPLETIONS, prompt="hi")
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(counter.count(busy, "m"))
            await asyncio.sleep(0)
            with pytest.raises(StopIteration) as refused:
                counter.count(asked, "m").send(None)  # it is refused without a wait
        return refused.value.value, await counter.count(asked, "m")

    refused, afterwards = asyncio.run(main())
    assert refused is None
    assert afterwards == 3


def test_a_cancelled_count_lets_go_at_once(folder):
    async def main():
        counter = LocalCounter(folder, deadline_s=20)
        task = asyncio.ensure_future(  # noqa: TID251 - owned by this test
            counter.count(call(COMPLETIONS, prompt="x" * 200_000), "m")
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert task.cancelled()  # in the turn after: it waits for no thread
        return await counter.count(call(COMPLETIONS, prompt="x"), "m")

    assert asyncio.run(main()) == 2


# --- the folder -----------------------------------------------------------------------------------


def config(folder, **values):
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_special_tokens_come_from_either_file(folder):
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token }}")
    config(folder, bos_token={"content": "<|b|>"}, eos_token=None)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "x", "pad_token": "<p>"})
    )
    assert chat(folder, "hi") == 1 + 0 + 1  # <|b|>, nothing, <p> as a token of its own


def test_a_template_may_stand_in_the_configuration(folder):
    (folder / "chat_template.jinja").unlink()
    config(folder, chat_template="abc")
    assert chat(folder, "hi") == 3
    config(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "abcd"}))
    assert chat(folder, "hi") == 4


@pytest.mark.parametrize("in_files", [True, False])
def test_tools_have_a_template_of_their_own_where_there_is_one(folder, in_files):
    sources = {"default": "ab", "tool_use": "abcdef"}
    if in_files:
        (folder / "chat_template.jinja").write_text(sources["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(sources["tool_use"])
    else:
        (folder / "chat_template.jinja").unlink()
        listed = [{"name": name, "template": source} for name, source in sources.items()]
        config(folder, chat_template=listed)
    assert chat(folder, "hi") == 2
    assert chat(folder, "hi", tools=[{"function": {"name": "f"}}]) == 6


def test_without_a_template_only_completions_are_counted(folder):
    (folder / "chat_template.jinja").unlink()
    assert chat(folder, "hi") is None
    assert count(folder, COMPLETIONS, prompt="hi") == 3


def test_a_model_that_is_rendered_in_code_has_no_template_here(folder):
    (folder / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    assert chat(folder, "hi") is None
    assert count(folder, COMPLETIONS, prompt="hi") == 3


@pytest.mark.parametrize(
    ("files", "without_tools"),
    [
        ({"preprocessor_config.json": {}, "chat_template.json": {"chat_template": "abcd"}}, 4),
        ({"processor_config.json": {"chat_template": "abcd"}}, 4),
        ({"processor_config.json": {"a": 1}, "chat_template.json": {"chat_template": "abcd"}}, 4),
        ({"preprocessor_config.json": {}}, 2),
        ({"chat_template.json": {"chat_template": "abcd"}}, 2),  # there is no processor
    ],
)
def test_a_processors_template_renders_chats_without_tools(folder, files, without_tools):
    """As in vLLM: models that see or hear have a template of their processor, which may know no tools."""
    (folder / "chat_template.jinja").write_text("ab")
    for name, told in files.items():
        (folder / name).write_text(json.dumps(told))
    assert chat(folder, "hi") == without_tools
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(folder, "hi", tools=[tool]) == 2


def test_mistrals_own_tokenizer_is_left_to_the_engine(folder):
    (folder / "consolidated.safetensors").touch()
    assert count(folder, COMPLETIONS, prompt="hi") is None


def test_a_folder_that_cannot_be_used_is_named(folder):
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="chat template is wrong"):
        LocalCounter(folder, deadline_s=1)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config.json"):
        LocalCounter(folder, deadline_s=1)
    (folder / "tokenizer_config.json").write_text("[]")
    assert count(folder, COMPLETIONS, prompt="hi") == 3
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json"):
        LocalCounter(folder, deadline_s=1)


# --- a backend ------------------------------------------------------------------------------------


class Backend:
    """A backend's counting endpoints, or the failure to reach them."""

    def __init__(self, status=200, content=b'{"count": 7, "max_model_len": 9, "tokens": [1]}'):
        self.status, self.content = status, content
        self.seen = []

    async def post(self, path, body, *, timeout_s):
        self.seen.append((path, json.loads(body), timeout_s))
        if isinstance(self.content, Exception):
            raise self.content
        return self.status, self.content

    def close(self):
        pass


def ask(backend, path, **body):
    counter = BackendCounter(backend, deadline_s=5)
    return asyncio.run(counter.count(call(path, **body), "served"))


def test_a_backend_is_asked_by_its_own_name_and_for_no_longer_than_the_deadline():
    backend = Backend()
    assert ask(backend, CHAT, messages=[USER]) == 7
    ((path, body, timeout_s),) = backend.seen
    assert path == "/tokenize"
    assert (body["model"], body["messages"]) == ("served", [USER])
    assert timeout_s == 5


def test_anthropics_dialect_is_counted_by_its_own_endpoint():
    backend = Backend(content=b'{"input_tokens": 11}')
    assert ask(backend, b"/v1/messages", messages=[USER], max_tokens=5) == 11
    assert backend.seen[0][0] == "/v1/messages/count_tokens"
    assert backend.seen[0][1]["model"] == "served"


def test_a_backend_that_lacks_one_endpoint_is_asked_by_the_other():
    backend = Backend(404, b"")
    counter = BackendCounter(backend, deadline_s=5)
    message, chat = (
        call(b"/v1/messages", messages=[USER], max_tokens=5),
        call(CHAT, messages=[USER]),
    )
    assert asyncio.run(counter.count(message, "served")) is None
    backend.status, backend.content = Backend().status, Backend().content
    assert asyncio.run(counter.count(message, "served")) is None
    assert asyncio.run(counter.count(chat, "served")) == 7
    assert [path for path, *_ in backend.seen] == ["/v1/messages/count_tokens", "/tokenize"]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (501, "Only base64 data URLs are supported for now."),  # of an image
        (404, "The model `lora` does not exist."),  # an adapter that was unloaded just now
    ],
)
@pytest.mark.parametrize("path", [CHAT, b"/v1/messages"])
def test_what_is_wrong_with_one_prompt_keeps_no_other_from_being_counted(path, status, error):
    backend = Backend(status, json.dumps({"error": {"message": error, "code": status}}).encode())
    counter = BackendCounter(backend, deadline_s=5)
    asked = call(path, messages=[USER], max_tokens=5)
    assert asyncio.run(counter.count(asked, "served")) is None
    backend.status, backend.content = 200, b'{"count": 7, "input_tokens": 7, "max_model_len": 9}'
    assert asyncio.run(counter.count(asked, "served")) == 7


def test_token_ids_ask_nobody():
    backend = Backend()
    assert ask(backend, COMPLETIONS, prompt=[1, 2]) == 2
    assert backend.seen == []


def test_what_the_backend_cannot_count_is_not_asked():
    backend = Backend()
    assert ask(backend, b"/v1/rerank", query="a", documents=["b"]) is None
    assert backend.seen == []


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (404, b'{"detail":"Not Found"}'),
        (500, b""),
        (200, b"<html>"),
        (200, b"{}"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, b"/v1/messages"])
def test_a_backend_that_does_not_tell_leaves_it_to_the_engine(path, status, content):
    assert ask(Backend(status, content), path, messages=[USER]) is None


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (502, b""),
        (503, b""),
        (504, b""),
        (200, ConnectionRefusedError()),
        (200, TimeoutError()),
    ],
)
@pytest.mark.parametrize("path", [CHAT, b"/v1/messages"])
def test_a_backend_that_has_no_time_or_is_not_there_may_tell_later(path, status, content):
    with pytest.raises((TimeoutError, ConnectionRefusedError)):
        ask(Backend(status, content), path, messages=[USER])
