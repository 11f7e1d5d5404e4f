"""What is shown of settings: no secret, wherever it is written."""

import json
import pathlib

import pytest

from gateway.config.load import check_text
from gateway.config.reload import diff
from gateway.config.spell import flat, spell
from gateway.config.supervision import LaunchConfig

LAUNCHED = """
pools:
  m:
    backends:
      - name: a
        launch:
          command: [vllm, serve, x, --api-key, S3CRET, S3CRET2, --port, "8000", "--hf-token=S3CRET"]
          port: 8000
          args: {max-model-len: 8192, hf-token: S3CRET, api_key: [S3CRET], kv-transfer-config: {extra: {redis_password: S3CRET}}, y: '{"token":"S3CRET"}'}
          env: {HF_TOKEN: S3CRET, CUDA_LAUNCH_BLOCKING: "1"}
"""


def loaded(text, **env):
    found = check_text(text, folder=pathlib.Path("/"), env=env)
    assert found.loaded is not None, found.findings
    return found.loaded


def test_no_secret_of_a_launched_server_is_shown():
    config = loaded(LAUNCHED).config
    rows = {name.partition("launch.")[2]: value for _, name, value in flat(config)}
    assert rows["command"] == [
        *("vllm", "serve", "x", "--api-key", "***", "***", "--port", "8000", "--hf-token=***")
    ]
    assert rows["args.max-model-len"] == 8192
    assert rows["args.kv-transfer-config.extra.redis_password"] == "***"
    assert rows["env.CUDA_LAUNCH_BLOCKING"] == "***"
    for shown in (
        rows,
        spell(config),
        diff(config, loaded(LAUNCHED.replace("S3CRET", "T3CRET")).config),
    ):
        assert "3CRET" not in json.dumps(shown)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ('{"a": [{"password": "S3CRET"}], "b": 1}', '{"a": [{"password": "***"}], "b": 1}'),
        ('{"b":1}', '{"b":1}'),
        ("{model} --api-key S3CRET", "{model} --api-key ***"),
    ],
)
def test_no_secret_inside_of_what_a_flag_is_set_to_is_shown(word, shown):
    launch = {"command": ["vllm", "serve", "m", "--kv-transfer-config", word], "port": 8000}
    assert spell(LaunchConfig.model_validate(launch))["command"][-1] == shown


def test_that_a_secret_of_a_launched_server_changes_is_told():
    new = loaded(LAUNCHED.replace("HF_TOKEN: S3CRET", "HF_TOKEN: T3CRET")).config
    assert diff(loaded(LAUNCHED).config, new) == ("m: a.launch.env changed",)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("HF_TOKEN=abc exec vllm serve m --api-key abc --port 1", "HF_TOKEN=*** exec vllm serve m --api-key *** --port 1"),
        ("--tokenizer", "--tokenizer"),
        ("--max-num-batched-tokens=8", "--max-num-batched-tokens=8"),
        ("--ssl-keyfile=/k.pem", "--ssl-keyfile=/k.pem"),
    ],
)  # fmt: skip
def test_a_command_for_a_shell_is_read_word_by_word(word, shown):
    text = LAUNCHED.replace('"--hf-token=S3CRET"', json.dumps(word))
    rows = {name.partition("launch.")[2]: value for _, name, value in flat(loaded(text).config)}
    assert rows["command"][-1] == shown


def test_what_a_reference_stands_for_is_known():
    text = LAUNCHED.replace("max-model-len: 8192", 'max-model-len: "${LEN}"')
    found = loaded(text.replace("x, --api", "'${NAME}', --api"), LEN="8192", NAME="n")
    referring = found.referring()
    names = {name for path, name, _ in flat(found.config) if path in referring}
    assert {name.partition("launch.")[2] for name in names} == {"command", "args.max-model-len"}
