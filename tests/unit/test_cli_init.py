"""`init`: the settings file that it writes from running servers is one that `check` and `serve` take."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.initial import Server, settings_of
from gateway.config.load import check_text
from gateway.core.traffic import Engine


def config(text, **env):
    checked = check_text(text, folder=pathlib.Path(), env=env)
    assert checked.loaded is not None, checked.findings
    return checked.loaded.config


def test_servers_of_one_model_are_one_pool():
    pools = config(
        settings_of(
            [
                Server("http://a:1", ("qwen3", "gpt-4o"), "0.32.0"),
                Server("http://b:1", ("llama",), None),
                Server("unix:/run/c.sock", ("qwen3", "gpt-4o", "only-here"), "0.32.0"),
            ]
        )
    ).pools
    assert [*pools] == ["qwen3", "llama"]
    assert [each.url for each in pools["qwen3"].backends] == ["http://a:1", "unix:/run/c.sock"]
    assert pools["qwen3"].aliases == ("gpt-4o",)
    assert (pools["qwen3"].engine, pools["llama"].engine) == (Engine.VLLM, Engine.OPENAI)


def test_a_name_that_servers_of_several_models_have_leads_to_none_of_them():
    text = settings_of(
        [
            Server("http://a:1", ("qwen3", "default", "gpt-4o"), "0.32.0"),
            Server("http://b:1", ("llama", "default"), "0.32.0"),
            Server("http://c:1", ("qwen3-vl", "qwen3"), "0.32.0"),
        ]
    )
    pools = config(text).pools
    assert [each.aliases for each in pools.values()] == [("gpt-4o",), (), ()]
    assert text.count("# No aliases, as another pool has them, too: default\n") == 2
    assert "them, too: qwen3\n" in text


def test_a_model_that_is_called_by_its_path_gets_a_name():
    (name, pool), *_ = config(
        settings_of([Server("http://a:1", ("/data/models/qwen",), "0.32.0")])
    ).pools.items()
    assert (name, pool.served_model) == ("qwen", None)  # the only one there is is found


def test_a_pool_of_two_kinds_of_servers_says_which_is_which():
    servers = [Server("http://a:1", ("m",), None), Server("http://b:1", ("m",), "0.32.0")]
    text = settings_of(servers, "KEY")
    backends = config(text, KEY="hunter2").pools["m"].backends
    assert [each.engine for each in backends] == [Engine.OPENAI, None]
    assert {each.api_key.get_secret_value() for each in backends} == {"hunter2"}
    assert "hunter2" not in text


NAMES = st.text(min_size=1, max_size=20) | st.sampled_from(
    ["true", "1", "a/b", "/m/x", "none", "a: b"]
)
SERVERS = st.builds(
    Server,
    st.integers(1, 99).map("http://h:{}".format),
    st.lists(NAMES, min_size=1, max_size=3, unique=True).map(tuple),
    st.sampled_from([None, "0.32.0"]),
)


@given(st.lists(SERVERS, min_size=1, max_size=4, unique_by=lambda each: each.url))
def test_whatever_a_server_calls_its_model_the_file_is_yaml_with_every_server(servers):
    codes = [each.code for each in check_text(settings_of(servers), folder=pathlib.Path()).findings]
    assert {*codes} <= {"bad-name"}


SCRIPT = pathlib.Path(sys.executable).with_name("vllm-gateway")


def run(*words, **env):
    ran = subprocess.run(
        [SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )
    return ran.returncode, ran.stdout, ran.stderr


@contextlib.contextmanager
def simulated(*options):
    """Run simulated servers; yields their URLs."""
    with contextlib.ExitStack() as stack:
        sims = [
            stack.enter_context(
                subprocess.Popen(
                    [SCRIPT, "sim", "--port", "0", *each], stderr=subprocess.PIPE, text=True
                )
            )
            for each in options
        ]
        try:
            yield [sim.stderr.readline().split()[-1] for sim in sims if sim.stderr is not None]
        finally:
            for sim in sims:
                sim.terminate()


def test_the_file_is_written_once_and_passes_the_check_with_the_servers(tmp_path):
    file = tmp_path / "gw.yaml"
    with simulated(
        ["--model", "/data/m", "--api-key", "hunter2", "--adapter", "sql"],
        ["--model", "/data/m", "--api-key", "hunter2"],
        ["--model", "other", "--api-key", "hunter2"],
    ) as urls:
        words = ["init", *(word for url in urls for word in ("--from", url)), "-c", file]
        code, _, err = run(*words)
        assert (code, file.exists()) == (1, False)
        assert "/v1/models: it wants an API key" in err
        assert "hint: name the variable that holds its key with --api-key-env; nothing" in err
        code, _, err = run(*words, "--api-key-env", "VLLM_KEY", VLLM_KEY="wrong")
        assert "/v1/models: it rejects the key of VLLM_KEY" in err
        assert "hint: name the variable that holds its key with --api-key-env; nothing" in err
        code, out, _ = run(*words, "--api-key-env", "VLLM_KEY", VLLM_KEY="hunter2")
        assert code == 0
        assert "3 servers, model m, other" in out
        written = file.read_text()
        assert "hunter2" not in written
        code, out, err = run("check", file, "--probe", VLLM_KEY="hunter2")
        assert code == 0, out + err
        assert out.count(" ok vLLM") == 3
        code, _, err = run(*words)
        assert (code, "is there already" in err, file.read_text()) == (1, True, written)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--from", "http://127.0.0.1:1"],
            "http://127.0.0.1:1 /v1/models: connection refused\n"
            "  hint: start it, or leave it out; nothing was written\n",
        ),
        (
            ["--from", "http://127.0.0.1:1/v1"],
            "without /v1 or any other path or query\n"
            "  hint: correct the URL, or leave it out; nothing was written\n",
        ),
        (["--from", "http://me:hunter2@h:1"], "a URL may not contain a user or password"),
        (["--from", "http://h:1", "--api-key-env", "NOPE"], "the variable NOPE is not set"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(tmp_path, words, told):
    code, _, err = run("init", *words, "-c", tmp_path / "gw.yaml")
    assert code in (1, 2)
    assert told in err
    assert "hunter2" not in err
    assert not [*tmp_path.iterdir()]
