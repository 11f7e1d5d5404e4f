"""Who counts a pool's prompts after a reload: the tokenizer there was, unless its folder changed."""

import asyncio
import json
import os

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gateway.config.models import Config
from gateway.core.errors import ConfigError
from gateway.core.types import Route
from gateway.counting.counters import PromptCounters
from gateway.wire.calls import ENDPOINTS, parse_call

CHAT = b"/v1/chat/completions"


@pytest.fixture
def folder(tmp_path):
    """One token a letter."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return tmp_path


def counters(folder, before=None, deadline_s=5.0):
    pool = {"backends": ["http://h:1"], "tokenizer": str(folder)}
    pools = Config.model_validate({"pools": {"m": pool}}, context={"folder": folder}).pools
    return PromptCounters(pools, lambda _: None, deadline_s=deadline_s, before=before)


def count(each, text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    call = parse_call(ENDPOINTS[CHAT], json.dumps(body).encode())
    return asyncio.run(each.count(call, Route("m", "m", "m", None), ()))


def test_a_folder_that_did_not_change_is_not_read_again(folder):
    file = folder / "tokenizer.json"
    before = counters(folder)
    at = file.stat()
    file.write_bytes(b"?" * at.st_size)
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))  # to who only looks, it is as it was
    assert count(counters(folder, before), "aaa") == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/tool_use.jinja"])
def test_a_folder_with_a_changed_file_is_read_again(folder, name):
    before = counters(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{% wrong")
    with pytest.raises(ConfigError, match=r"tokenizer.json|chat template"):
        counters(folder, before)


def test_a_new_template_counts_after_a_reload(folder):
    before = counters(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content * 2 }}")
    after = counters(folder, before)
    assert (count(before, "aaa"), count(after, "aaa")) == (3, 6)
