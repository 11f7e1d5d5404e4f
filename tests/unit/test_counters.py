"""Who counts a pool's prompts: the tokenizer that is configured, that of a launched model, a backend."""

import asyncio
import json
import pathlib

import pytest

from gateway.config.load import check_text
from gateway.config.supervision import LaunchConfig
from gateway.core.types import Route, ServedModel
from gateway.counting.counters import PromptCounters, _model_folder
from gateway.counting.tokens import SLICE_CHARS
from gateway.pools.table import Backend
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.unit.test_tokens import folder  # noqa: F401 - the fixture

ASKED = 1000  # what a backend answers
ROUTE = Route("m", "m", "m")


class Told:
    """A backend that counts."""

    async def post(self, path, body, *, timeout_s):
        return 200, json.dumps({"count": ASKED, "max_model_len": 4096}).encode()

    def close(self):
        pass


def launched(*command, port=8001, **args):
    return {"launch": {"command": list(map(str, command)), "port": port, "args": args}}


def count(*backends, prompt="abc", route=ROUTE, **pool):
    text = json.dumps({"pools": {"m": {"backends": list(backends), **pool}}})
    loaded = check_text(text, folder=pathlib.Path("/"), env={}).loaded
    counters = PromptCounters(loaded.config.pools, lambda backend: Told(), deadline_s=20)
    call = parse_call(
        ENDPOINTS[b"/v1/completions"], json.dumps({"model": "m", "prompt": prompt}).encode()
    )
    backend = Backend("m", "b1", "http://127.0.0.1:8001")
    return asyncio.run(counters.count(call, route, [backend]))


def test_a_launched_model_in_a_folder_is_counted_here(folder):  # noqa: F811
    for backend in (
        launched("vllm", "serve", folder),
        launched("vllm", "serve", model=str(folder)),
        launched("python", "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
    ):
        assert count(backend) == 4
    other = {"url": "http://10.0.0.13:8000"}
    assert count(launched("vllm", "serve", folder), launched("vllm", "serve", folder, port=8002), other) == 4  # fmt: skip


def test_a_prompt_that_fits_the_largest_window_is_counted_to_its_end(folder):  # noqa: F811
    text, route = "a" * (SLICE_CHARS + 9), Route("m", "m", "m", None, 1000, 1000, 1 << 20, 1 << 20)
    assert count(launched("vllm", "serve", folder), prompt=text, route=route) == len(text) + 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tokenizer", "other/one"),
        ("chat-template", "x.jinja"),
        ("chat_template_content_format", "string"),
        ("default-chat-template-kwargs", {"enable_thinking": False}),
        ("tokenizer-mode", "mistral"),
        ("hf-overrides", {}),
        ("config", "flags.yaml"),
    ],
)
def test_flags_that_change_prompts_leave_it_to_the_backend(folder, flag, value):  # noqa: F811
    assert count(launched("vllm", "serve", folder, **{flag: value})) == ASKED


def test_only_a_backend_that_has_the_adapter_is_asked_about_its_prompts():
    """Another answers 404, and would be thought to have no such endpoint."""
    asked = []

    def open_asker(backend):
        asked.append(backend.name)
        return Told()

    counters = PromptCounters({}, open_asker, deadline_s=20)
    call = parse_call(ENDPOINTS[b"/v1/completions"], b'{"model": "lora", "prompt": "abc"}')
    backends = [Backend("m", name, f"http://{name}:8001") for name in ("b1", "b2")]
    backends[1].models["lora"] = ServedModel("lora", "m", None)
    backends[1].in_flight = 5
    route = Route("lora", "m", "lora", adapter="lora")
    assert asyncio.run(counters.count(call, route, backends)) == ASKED
    assert asked == ["b2"]
    assert asyncio.run(counters.count(call, route, backends[:1])) is None
    assert asked == ["b2"]


def test_what_is_no_folder_with_a_tokenizer_is_left_to_the_backend(folder, tmp_path):  # noqa: F811
    for named in ("Qwen/Qwen3-8B", tmp_path / "nothing", "--port"):
        assert count(launched("vllm", "serve", named)) == ASKED
    (folder / "tokenizer.json").unlink()
    assert count(launched("vllm", "serve", folder)) == ASKED
    assert count({"url": "http://h:1"}) == ASKED


def test_launched_servers_of_different_models_are_asked(folder, tmp_path):  # noqa: F811
    twin = launched("vllm", "serve", "other/one", port=8002)
    assert count(launched("vllm", "serve", folder), twin) == ASKED


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": [{"name": 5}]}'),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_tokenizer_of_a_launched_model_is_told_once_and_stops_nothing(
    folder,  # noqa: F811
    caplog,
    file,
    text,
):
    if file == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert count(launched("vllm", "serve", folder)) == ASKED
    (told,) = caplog.records
    assert told.event == "tokenizer_unusable"
    assert str(folder) in told.getMessage()


def test_a_configured_tokenizer_comes_first(folder):  # noqa: F811
    assert count(launched("vllm", "serve", "other/one"), tokenizer=str(folder)) == 4


def test_a_model_that_may_not_be_looked_at_has_no_folder_here():
    unreadable = "/" + 300 * "x"  # `Path.is_file` raises, as it does in a folder of another user
    launch = LaunchConfig.model_validate({"command": ["vllm", "serve", unreadable], "port": 8001})
    assert _model_folder(launch) is None
