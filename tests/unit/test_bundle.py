"""The bundle for a bug report holds what it says, and never a secret."""

import contextlib
import http.server
import json
import tarfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gateway.cli.bundle import masked, secrets_of
from gateway.cli.main import app
from gateway.config.load import load_config

SECRET = 'pa"ss\\wörd-1234567'


def members(file):
    with tarfile.open(file) as tar:
        return {each.name.rpartition("/")[2]: tar.extractfile(each).read().decode() for each in tar}


SETTINGS = (
    "version: 1\nlisten: 127.0.0.1:8080\nkeys: none\n"
    "admin: {listen: 127.0.0.1:1, token: 'admin-token-of-many-letters'}\n"
    "redis: redis://user:redis-pass-word@127.0.0.1:1/0\n"
    "pools: {m: {backends: [{url: 'http://127.0.0.1:8001', api_key: '${MY_KEY}'}]}}\n"
)


def pack(folder, settings, *asked):
    """Pack a bundle with these settings and a log that has their secrets; return its parts, and what is printed.

    `asked` is whom to ask, a port without a gateway unless given.
    """
    if settings:
        (folder / "gateway.yaml").write_text(settings)
    log = folder / "log"
    log.write_text(f"sent {SECRET}\n{json.dumps(SECRET)}\nadmin-token-of-many-letters\nplain\n")
    out = folder / "out.tar.gz"
    words = ["bundle", "-c", str(folder / "gateway.yaml"), "--out", str(out), "--log", str(log)]
    ran = CliRunner().invoke(app, [*words, *(asked or ("--server", "http://127.0.0.1:1"))])
    assert ran.exit_code == 0, ran.output
    return members(out), ran.output


@pytest.fixture
def packed(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    return pack(tmp_path, SETTINGS)[0]


def test_it_holds_what_a_report_needs_of_a_gateway_that_is_down(packed):
    assert set(packed) == {
        "findings.txt", "settings.json", "versions.txt", "status.json", "events.json", "requests.json", "metrics.txt",
        "log.txt", "reloads.json", "doctor.txt",
    }  # fmt: skip
    assert packed["status.json"].startswith("not available")
    assert "pydantic" in packed["versions.txt"]
    assert json.loads(packed["settings.json"])["listen"] == "127.0.0.1:8080"
    assert "plain" in packed["log.txt"]
    assert "m/b1 does not answer" in packed["doctor.txt"]
    assert "wrong, " in packed["doctor.txt"].splitlines()[-1]


@contextlib.contextmanager
def admin(token):
    """Run an admin listener that takes this token and answers all the same; yields its address."""

    class Admin(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers["authorization"] == f"Bearer {token}"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(b"process_max_fds 65536.0\n" if known else b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_the_doctor_asks_the_same_gateway_with_the_same_token(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    with admin("another-token-of-letters") as address:
        asked = ["--server", f"http://{address}", "--token", "another-token-of-letters"]
        parts, _ = pack(tmp_path, SETTINGS, *asked)
    assert parts["metrics.txt"] == "process_max_fds 65536.0\n"
    assert "The running gateway may open 65,536 files" in parts["doctor.txt"]


def test_without_a_server_the_one_of_the_file_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    with admin("admin-token-of-many-letters") as address:
        parts, _ = pack(
            tmp_path,
            SETTINGS.replace("{listen: 127.0.0.1:1,", f"{{listen: {address},"),
            "--token",
            "",
        )
    assert parts["metrics.txt"] == "process_max_fds 65536.0\n"
    assert "The running gateway may open 65,536 files" in parts["doctor.txt"]


def test_the_mask_leaves_whole_what_to_do_about_a_token(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    with admin("another-token-of-letters") as address:
        parts, _ = pack(tmp_path, SETTINGS, "--server", f"http://{address}")
    assert "set GATEWAY_ADMIN_TOKEN, or give --token\n" in parts["doctor.txt"]


def test_no_secret_of_the_settings_is_in_it(packed):
    everything = "\n".join(packed.values())
    for secret in (SECRET, json.dumps(SECRET)[1:-1], "admin-token-of-many-letters", "redis-pass-word"):  # fmt: skip
        assert secret not in everything


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS + "listn: 1\n",
        SETTINGS.replace("api_key", "api_kye"),
        SETTINGS.replace("'${MY_KEY}'", "['${MY_KEY}']"),
        "{" + SETTINGS,
        "",
    ],
    ids=["another key is misspelt", "its key is misspelt", "it is wrong itself", "no YAML", "no file"],
)  # fmt: skip
def test_no_secret_is_in_it_while_the_settings_are_wrong(tmp_path, monkeypatch, settings):
    monkeypatch.setenv("MY_KEY", SECRET)
    parts, printed = pack(tmp_path, settings)
    everything = "\n".join(parts.values())
    for secret in (SECRET, json.dumps(SECRET)[1:-1], "admin-token-of-many-letters", "redis-pass-word"):  # fmt: skip
        assert secret not in everything
    assert "the settings are wrong" in parts["log.txt"]
    assert "and the log are left out: the settings are wrong" in printed


def test_nor_one_that_a_launched_server_gets_in_its_environment(tmp_path):
    launch = (
        "{port: 8001, command: [vllm, serve, m], env: {HF_TOKEN: hub-secret-1, VLLM_LOG: plainly}}"
    )
    (tmp_path / "gateway.yaml").write_text(
        f"keys: none\npools: {{m: {{backends: [{{launch: {launch}}}]}}}}\n"
    )
    secrets = secrets_of(load_config(tmp_path / "gateway.yaml").config)
    left = masked("got hub-secret-1, VLLM_LOG=plainly", secrets)
    assert left == "got ***, VLLM_LOG=plainly"


def test_the_log_begins_with_a_whole_line_as_half_a_secret_could_not_be_masked(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_KEY", SECRET)
    (tmp_path / "gateway.yaml").write_text(SETTINGS)
    log, out = tmp_path / "log", tmp_path / "out.tar.gz"
    rest = "letters\n" + "x" * 1023 + "\n"  # the last MiB begins in the middle of the token
    log.write_text("sent admin-token-of-many-" + rest.ljust(1024 * 1024 - 1, "y") + "\n")
    words = ["bundle", "-c", tmp_path / "gateway.yaml", "--out", out, "--log", log]
    ran = CliRunner().invoke(app, [*map(str, words), "--server", "http://127.0.0.1:1"])
    assert ran.exit_code == 0, ran.output
    assert members(out)["log.txt"].startswith("xxx")


@given(
    secrets=st.sets(st.text(min_size=8, max_size=30).filter(lambda text: "*" not in text), min_size=1, max_size=4),
    around=st.lists(st.text(max_size=20), min_size=2, max_size=5),
)  # fmt: skip
def test_whatever_a_secret_looks_like_it_is_not_left(secrets, around):
    text = "".join(part + secret + json.dumps(secret) for part in around for secret in secrets)
    left = masked(text, secrets)
    assert all(secret not in left for secret in secrets)


TOLD = '{"model": "qwen", "detail": "sent hunter2; models are down"}\ngateway_models{model="m"} 1\n'


@pytest.mark.parametrize(
    ("secret", "left"),
    [
        ("hunter2", TOLD.replace("hunter2", "***")),
        ("model", TOLD),  # names of fields and labels, and a part of a word
        ("down", TOLD.replace("down", "***")),
        ("odels", TOLD),
        ("1111", TOLD),
        ("are", TOLD),  # to mask words that are everywhere would only tell the secret
        ("m", TOLD),
        ("1", TOLD),
        ("    ", TOLD),
        (" ", TOLD),
        ('"', TOLD),
    ],
)
def test_a_secret_that_is_a_short_word_does_not_garble_the_rest(secret, left):
    assert masked(TOLD, {secret}) == left


def test_a_short_secret_is_masked_behind_a_line_end_that_json_writes():
    assert masked(json.dumps("sent\nhunter\tto"), {"hunter"}) == json.dumps("sent\n***\tto")


def test_a_short_secret_that_is_no_word_is_masked_wherever_it_is():
    assert masked("xhunter2x", {"hunter2"}) == "x***x"


@pytest.mark.parametrize("secret", ["a", "abc", "hunter2"])
def test_a_short_secret_is_masked_where_it_looks_like_one(secret):
    text = f"Authorization: Bearer {secret}\nredis://u:{secret}@h:1\n--api-key {secret}\napi_key={secret}\n"
    assert masked(text, {secret}) == (
        "Authorization: ***\nredis://***@h:1\n--api-key ***\napi_key=***\n"
    )
