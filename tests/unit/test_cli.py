"""The command line: verbs, exit codes, what goes to standard output and what to standard error."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import pathlib
import socket
import socketserver
import subprocess
import sys
import threading
import time
from urllib.parse import parse_qs, urlsplit

import pytest
from tokenizers import Tokenizer, models

from gateway import __version__
from gateway.access.keys import KeyRing
from gateway.cli import main as cli
from gateway.cli import verbs
from gateway.cli.console import VerbError, fetch
from gateway.config.load import load_config
from gateway.config.schema import json_schema
from gateway.core.errors import ConfigError
from gateway.core.limits import KeyLimits
from gateway.ingress.settings import settings_for
from gateway.watch.fetch import Pages
from tests import keyfiles as keys
from tests import modelconfigs

POOL = "pools: {m: {backends: [http://h:1]}}\n"


MAIN = "from gateway.cli.main import main; main()"
OF_SERVER = ("GATEWAY_ADMIN_URL", "GATEWAY_ADMIN_TOKEN", "GATEWAY_KEYS_SERVER")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line as the console script does; return exit code, stdout and stderr."""
    for name in ("GATEWAY_CONFIG", "GATEWAY_DEBUG", *OF_SERVER):
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["vllm-gateway", *map(str, words)])
        before = {name: os.environ.get(name) for name in OF_SERVER}
        with pytest.raises(SystemExit) as ended:
            cli.main()
        for name, value in before.items():  # what the command line sets for itself ends with it
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gw.yaml"
    path.write_text(POOL)
    return path


# --- front door -----------------------------------------------------------------------------------


def test_the_version_is_told(run):
    assert run("--version") == (0, f"vllm-gateway {__version__}\n", "")


VERBS = ["init", "serve", "demo", "sim", "check", "status", "explain", "route"]
VERBS += ["config schema", "config show"]
VERBS += ["keys create", "keys list", "keys show", "keys effective", "keys update", "keys revoke"]
VERBS += ["keys rotate", "keys import"]


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_each_verb_ends_with_an_example(run, verb):
    code, out, _ = run(*verb.split(), "--help")
    assert code == 0
    assert out.rstrip().splitlines()[-1].strip().startswith(f"Example: vllm-gateway {verb}")


@pytest.mark.parametrize("words", [["nope"], ["check", "--nope"], ["keys", "list", "-o", "xml"]])
def test_a_wrong_command_line_is_a_usage_error(run, words):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "Error" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["diagnose", "-", "--exited", "killed"], "'--exited': must be a whole number"),
        (["requests", "--limit", "0"], "'--limit': must be at least 1"),
        (["keys", "create", "x", "--priority", "high"], "'--priority': must be a whole number"),
        (["status", "-o", "yaml"], "'-o': 'yaml' is not one of 'table', 'json'."),
    ],
)
def test_a_wrong_option_is_told_in_plain_words(run, words, told):
    code, _, err = run(*words)
    assert code == 2
    assert err.endswith(f"{told}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["status", "--server", "http://127.0.0.1:1"],
        ["explain", "req_1", "--server", "http://127.0.0.1:1"],
        ["route", "--model", "m", "--server", "http://127.0.0.1:1"],
    ],
)
def test_looking_does_not_import_the_server(words):
    program = (
        "import sys; from gateway.cli import main as cli; sys.argv = sys.argv[:1] + sys.argv[1:]\n"
        "try: cli.main()\n"
        "finally: sys.stderr.write(' '.join(sys.modules))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    loaded = set(told.stderr.split())
    heavy = {"uvicorn", "starlette", "gateway.app", "gateway.config.models", "httpx2", "rich"}
    assert not loaded & heavy
    assert "gateway.cli.main" in loaded


def test_no_verb_is_paid_for_before_it_runs():
    program = "import sys; import gateway.cli.main; print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"pydantic", "asyncio", "msgspec", "ruamel"} & set(told.stdout.split())


def test_a_bug_is_one_line_and_a_hint_and_a_traceback_only_when_asked(run, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(verbs, "ask", broken)
    code, out, err = run("status")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "vllm-gateway: this is a bug: ZeroDivisionError: by zero",
        "  hint: run it again with -vv for the traceback, and please report it",
    ]
    monkeypatch.setattr(sys, "argv", ["vllm-gateway", "status", "-vv"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


# --- settings -------------------------------------------------------------------------------------


def test_check_is_quiet_about_a_good_file(run, file):
    created(run, file)
    assert run("check", file) == (0, f"{file}: 0 errors, 0 warnings\n", "")


@pytest.mark.parametrize("words", [["{file}"], ["-c", "{file}"], ["--config", "{file}"], []])
def test_check_finds_its_file_as_serve_does(run, file, words, monkeypatch):
    created(run, file)
    if not words:
        monkeypatch.setenv("GATEWAY_CONFIG", str(file))
    told = run("check", *[each.format(file=file) for each in words])
    assert told == (0, f"{file}: 0 errors, 0 warnings\n", "")


@pytest.mark.parametrize("verb", ["check", "serve"])
def test_two_settings_files_are_one_too_many(run, file, verb):
    created(run, file)
    code, _, err = run(verb, file, "-c", "other.yaml")
    assert (code, err) == (
        2,
        f"vllm-gateway: two settings files are named: {file} and other.yaml\n",
    )


def test_a_named_file_goes_before_that_of_the_environment(run, file, monkeypatch):
    created(run, file)
    monkeypatch.setenv("GATEWAY_CONFIG", "other.yaml")
    assert run("check", file)[0] == 0
    assert run("check", file, "-c", file)[0] == 0


def test_check_shows_every_finding_and_exits_with_3(run, file):
    file.write_text(POOL + "limts: {}\ntimeouts: {upstream_keep_alive: 5s}\nkeys: none\n")
    code, out, _ = run("check", file)
    assert code == 3
    assert f"{file}:2:1 error unknown key `limts` [unknown-key]" in out
    assert "      | ^^^^^ did you mean `limits`?" in out
    assert out.endswith(f"{file}: 1 error, 1 warning\n")


def test_check_exits_with_0_on_warnings(run, file):
    file.write_text(POOL + "keys: none\nlisten: 0.0.0.0:8080\n")
    code, out, _ = run("check", file)
    assert code == 0
    assert "AUTHENTICATION IS OFF" in out


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    return folder


def served(file, word, what):
    """Check what `serve` finds too: an error exactly where it refuses to start."""
    with pytest.raises(ConfigError, match=word):
        settings_for(load_config(file).config, Pages)
    return f"{file}:{what}"


def test_check_reads_the_tokenizers_that_serve_would_read(run, file, tokenizer):
    created(run, file)
    text = "pools:\n  m:\n    backends: [http://h:1]\n    tokenizer: tokenizer\n"
    file.write_text(text)
    assert run("check", file)[0] == 0
    settings_for(load_config(file).config, Pages)
    file.write_text(text.replace("tokenizer: tokenizer", "tokenizer: /nope"))
    code, out, _ = run("check", file)
    assert code == 3
    assert (
        served(file, "/nope", "4:16 error /nope/tokenizer.json: No such file or directory [bad-tok")
        in out
    )
    file.write_text(text)
    (tokenizer / "tokenizer.json").write_text("{")
    code, out, _ = run("check", file)
    assert code == 3
    assert served(file, "tokenizer.json", f"4:16 error {tokenizer}/tokenizer.json: ") in out


@pytest.mark.parametrize("words", [["serve"], ["serve", "-c"]])
def test_serve_takes_its_file_as_check_does(run, file, words):
    file.write_text(POOL + "limts: {}\n")
    code, _, err = run(*words, file)
    assert code == 3
    assert f"{file}:2:1 error unknown key `limts`" in err


def test_check_reads_the_keys_file_that_serve_would_read(run, file):
    file.write_text(POOL + "keys:\n  file: k.yaml\n")
    created(run, file)
    keys = file.parent / "k.yaml"
    keys.write_text(keys.read_text().replace("tenant:", "tennant:"))
    code, out, _ = run("check", file)
    assert code == 3
    assert served(file, "tennant", f"3:9 error {keys}:") in out
    assert "unknown setting 'tennant'; did you mean tenant? [bad-keys]" in out
    keys.write_text("keys: [oops")
    assert run("check", file)[0] == 3


def test_check_warns_of_keys_that_are_yet_to_be_made(run, file):
    keys = file.parent / "keys.yaml"
    code, out, _ = run("check", file)
    assert code == 0
    assert f"{file}:1:1 warning {keys}: No such file or directory; `serve` needs this file" in out
    assert f"`vllm-gateway keys create NAME -c {file}` creates it" in out
    created(run, file)
    (file.parent / "keys.yaml.pepper").unlink()
    code, out, _ = run("check", file)
    assert code == 0
    assert f"{file}:1:1 warning {keys}.pepper: No such file or directory" in out
    file.write_text(POOL + "keys: none\n")
    assert run("check", file)[1] == f"{file}: 0 errors, 0 warnings\n"


def test_check_judges_no_default_in_the_place_of_what_is_wrong(run, file):
    file.write_text(POOL + "keys: my-keys.yaml\n")
    code, out, _ = run("check", file, "--probe")
    assert code == 3
    assert "keys must be a mapping" in out
    assert "write `keys: {file: keys.yaml}`, or `keys: none`" in out
    assert "1 error, 0 warnings · nothing was asked, as the file has errors" in out


def test_check_tells_a_keys_file_that_is_there_and_cannot_be_read_as_an_error(run, file):
    keys = file.parent / "keys.yaml"
    keys.mkdir()
    code, out, _ = run("check", file)
    assert code == 3
    assert served(file, "Is a directory", f"1:1 error {keys}: Is a directory; `serve` needs") in out
    assert "name a file that the gateway's user can read" in out
    assert "keys create" not in out
    keys.rmdir()
    created(run, file)
    pepper = file.parent / "keys.yaml.pepper"
    pepper.unlink()
    pepper.mkdir()
    code, out, _ = run("check", file)
    assert code == 3
    assert f"{file}:1:1 error {pepper}: Is a directory; `serve` needs" in out


def test_check_warns_of_a_budget_of_a_key_where_nothing_costs_anything(run, file):
    key_id = created(run, file, "--limit", "budget_per_day=5")["id"]
    code, out, _ = run("check", file)
    assert code == 0
    assert f"budget_per_day of the key {key_id} refuses nothing: no model has a price" in out
    file.write_text(POOL + "prices: {models: {'*': {output: 2}}}\n")
    assert run("check", file)[1] == f"{file}: 0 errors, 0 warnings\n"


@pytest.mark.parametrize("text", ["", "keys: []\n"])
def test_check_warns_of_a_keys_file_without_a_key(run, file, text):
    keys = file.parent / "keys.yaml"
    keys.write_text(text)
    code, out, _ = run("check", file)
    assert code == 0
    assert f"{file}:1:1 warning {keys} has no key, so no client can get in [no-keys]" in out
    assert f"make one: `vllm-gateway keys create NAME -c {file}`" in out


def test_check_warns_of_a_keys_file_whose_keys_have_all_ended(run, file):
    for made in (created(run, file), created(run, file)):
        assert "no-keys" not in run("check", file)[1]
        assert run("keys", "revoke", made["id"], "-c", file)[0] == 0
    code, out, _ = run("check", file)
    assert code == 0
    told = "has no key that is valid: all were revoked or have expired, so no client can get in"
    assert f"warning {file.parent / 'keys.yaml'} {told} [no-keys]" in out


@pytest.mark.parametrize(
    ("setting", "missing", "code"),
    [
        ("redis: redis://127.0.0.1:1", "redis", "no-redis"),
        ("traces: {endpoint: 'http://h:1'}", "opentelemetry.exporter", "no-otel"),
        ("traces: {endpoint: 'http://h:1'}", "opentelemetry.sdk", "no-otel"),
        ("traces: {endpoint: 'http://h:1'}", "opentelemetry", "no-otel"),
    ],
)
def test_check_names_the_extra_that_a_setting_needs(file, setting, missing, code):
    file.write_text(POOL + f"keys: none\n{setting}\n")
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"  # as if it were not installed
        "from gateway.cli import main as cli; cli.main()"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, "check", file, "--probe", "-o", "json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stderr) == (3, "")
    assert [each["code"] for each in json.loads(told.stdout)] == [code]


def test_check_for_programs_is_json_and_nothing_else(run, file):
    file.write_text(POOL + "limts: {}\nkeys: none\n")
    code, out, err = run("check", file, "-o", "json")
    (finding,) = json.loads(out)
    assert (code, err) == (3, "")
    assert (finding["code"], finding["line"]) == ("unknown-key", 2)


def test_serve_and_show_refuse_a_wrong_file_with_its_findings(run, file):
    file.write_text(POOL + "limts: {}\n")
    for verb in (["serve"], ["config", "show"]):
        code, out, err = run(*verb, "-c", file)
        assert (code, out) == (3, "")
        assert "unknown key `limts`" in err


def test_a_file_of_keys_cannot_be_taken_over_through_a_server(run, file):
    code, out, err = run("--server", "http://10.0.0.5:9090", "keys", "import", "-c", file)
    assert (code, out) == (2, "")
    assert "where the file is" in err


def test_a_file_that_is_missing_is_named(run, tmp_path):
    code, _, err = run("serve", "-c", tmp_path / "no.yaml")
    assert code == 3
    assert "no.yaml:1:1 error cannot read the file: No such file or directory" in err


@contextlib.contextmanager
def another_user():
    """Be a user without rights; root comes back."""
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to be refused")
@pytest.mark.parametrize("words", [["check", "gw.yaml"], ["serve", "gw.yaml"], ["serve", "-c", "gw.yaml"]])  # fmt: skip
def test_a_file_that_this_user_may_not_read_cannot_be_used(run, file, monkeypatch, words):
    """3 keeps systemd from trying it again each second."""
    file.parent.chmod(0o755)
    file.chmod(0o600)
    monkeypatch.chdir(file.parent)
    run(words[0], "no.yaml")  # imports what another user may not be able to
    with another_user():
        code, out, err = run(*words)
    assert code == 3, out + err
    assert "cannot read the file: Permission denied [unreadable-file]" in out + err
    assert "chown" in out + err


def test_the_schema_is_printed(run):
    code, out, _ = run("config", "schema")
    assert (code, json.loads(out)) == (0, json_schema())


def test_show_tells_every_setting_and_where_it_comes_from(run, file, monkeypatch):
    monkeypatch.setenv("T", "hunter2")
    file.write_text(POOL + "admin: {token: '${T}'}\ntimeouts: {stall: 1m}\n")
    code, out, _ = run("config", "show", "-c", file, "--origin")
    assert code == 0
    assert 'admin.token: "***"  # line 2, ${T}' in out
    assert 'timeouts.stall: "1m"  # line 3' in out
    assert 'timeouts.body: "30s"  # default' in out
    assert "hunter2" not in out
    _, out, _ = run("config", "show", "-c", file, "-o", "json")
    assert json.loads(out)["timeouts"]["stall"] == "1m"
    _, out, _ = run("config", "show", "-c", file, "-o", "json", "--origin")
    assert {"setting": "version", "value": 1, "origin": "default"} in json.loads(out)


# --- keys -----------------------------------------------------------------------------------------


def created(run, file, *options):
    code, out, err = run("keys", "create", "ci", "-c", file, "-o", "json", *options)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_first_key_needs_no_further_setup(run, file):
    made = created(run, file)
    assert set(made) == {"id", "key"}
    keys = file.parent / "keys.yaml"
    assert keys.stat().st_mode & 0o777 == 0o600
    assert (file.parent / "keys.yaml.pepper").stat().st_mode & 0o777 == 0o600
    assert made["key"] not in keys.read_text()
    bearer = f"Bearer {made['key']}".encode()
    caller = KeyRing.load(keys).authenticate(bearer, None, None, time.time())
    assert (caller.key_id, caller.name, caller.models) == (made["id"], "ci", ("*",))


def test_a_key_takes_its_limits_from_the_options(run, file):
    options = ["--models", "qwen*", "--models", "sql", "--max-context", "32k"]
    options += ["--tenant", "acme", "--priority", "9"]
    options += ["--limit", "requests_per_minute=60", "--limit", "input_tokens_per_minute=100k"]
    made = created(run, file, *options, "--max-output", "4096", "--expires", "30d")
    caller = KeyRing.load(file.parent / "keys.yaml").authenticate(
        f"Bearer {made['key']}".encode(), None, None, time.time()
    )
    assert caller.models == ("qwen*", "sql")
    assert (caller.tenant, caller.priority) == ("acme", 9)
    assert (caller.max_context_tokens, caller.max_output_tokens) == (32768, 4096)
    assert caller.limits == KeyLimits(requests_per_minute=60, input_tokens_per_minute=102_400)
    _, out, _ = run("keys", "list", "-c", file, "-o", "json")
    assert json.loads(out)[0]["limits"]["requests_per_minute"] == 60
    (kept,) = keys.list_keys(file.parent / "keys.yaml")
    assert kept.ends_s == pytest.approx(time.time() + 30 * 86400, abs=60)


def test_for_people_only_the_key_is_on_standard_output(run, file):
    code, out, err = run("keys", "create", "ci", "-c", file)
    assert code == 0
    assert out.startswith("gw_")
    assert out.count("\n") == 1
    assert "only its hash is stored" in err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--expires", "30", "30 has no unit"),
        ("--max-context", "many", "many is not a token count"),
        ("--max-output", "-1", "-1 is not a token count"),
        ("--limit", "requests=5", "unknown limit 'requests'; there are requests_per_minute"),
        ("--limit", "concurrent_requests", "write it like requests_per_minute=60, not conc"),
        ("--limit", "concurrent_requests=", "write it like 60 or 100k"),
        (
            "--limit",
            "requests_per_minute=two",
            "_minute: two is not a count; write it like 60 or 100k",
        ),
        ("--limit", "requests_per_minute=0", "requests_per_minute: must be at least 1; write it"),
        ("--limit", "budget_per_day=two", "must be an amount of money above 0; write it like 2.50"),
    ],
)
def test_a_limit_that_cannot_be_read_is_a_usage_error(run, file, option, value, words):
    code, _, err = run("keys", "create", "ci", "-c", file, option, value)
    assert code == 2
    assert words in err
    assert option in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["ci", "--expires", "99999999d"],
            "--expires: 99999999d is too long; at most 36500d (100 years)",
        ),
        (["ci", "--expires", "0s"], "--expires: must be at least 1s"),
        (["ci", "--models", ""], "--models: an empty glob matches no model"),
        (["ci", "--models", "a", "--models", " "], "--models: an empty glob matches no model"),
        (["ci", "--max-context", "0"], "--max-context: must be at least 1"),
        (["ci", "--max-output", "0"], "--max-output: must be at least 1"),
        (
            ["ci", "--tenant", "t" * 129],
            "--tenant: expected a text of 1 to 128 characters on one line",
        ),
        ([""], "NAME: expected a text of 1 to 128 characters on one line"),
        (["\udcff"], "NAME: expected a text of 1 to 128 characters on one line"),
        (["two\nlines"], "NAME: expected a text of 1 to 128 characters on one line"),
    ],
)
def test_a_key_that_could_not_be_is_a_usage_error_and_changes_nothing(run, file, words, told):
    code, out, err = run("keys", "create", *words, "-c", file)
    assert (code, out) == (2, "")
    assert err.startswith(f"vllm-gateway: {told}")
    assert not (file.parent / "keys.yaml").exists()


def test_a_grace_without_end_is_a_usage_error(run, file):
    old = created(run, file)
    code, out, err = run("keys", "rotate", old["id"], "-c", file, "--grace", "99999999d")
    assert (code, out) == (2, "")
    assert err == "vllm-gateway: --grace: 99999999d is too long; at most 36500d (100 years)\n"
    assert run("keys", "rotate", old["id"], "-c", file, "--grace", "0s")[0] == 0


def test_keys_can_be_made_for_a_file_that_is_wrong_elsewhere(run, file):
    file.write_text(POOL + "keys: {file: k.yaml}\nadmin: {token: '${UNSET}'}\n")
    created(run, file)
    assert (file.parent / "k.yaml").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: none\n", "keys: none"),
        ("keys: {fil: k.yaml}\n", "did you mean `file`?"),
        ("keys: {file: '${UNSET}'}\n", "${UNSET} is not set"),
    ],
)
def test_keys_need_to_know_their_file(run, file, text, words):
    file.write_text(POOL + text)
    code, _, err = run("keys", "create", "ci", "-c", file)
    assert code == 3
    assert words in err


def test_a_list_tells_who_may_do_what_but_no_key(run, file):
    made = created(run, file, "--models", "a*", "--models", "b")
    code, out, _ = run("keys", "list", "-c", file)
    assert code == 0
    assert made["key"] not in out
    head, row = out.splitlines()
    assert head.split()[:5] == ["ID", "NAME", "TENANT", "PRIORITY", "STATE"]
    assert row.split()[:7] == [made["id"], "ci", "ci", "0", "active", "a*,", "b"]
    _, out, _ = run("keys", "list", "-c", file, "-o", "json")
    (key,) = json.loads(out)
    assert (key["id"], key["models"], key["ends"]) == (made["id"], ["a*", "b"], None)


def test_a_list_tells_the_role_and_owner_of_keys_that_have_one(run, file):
    created(run, file)
    head, _ = run("keys", "list", "-c", file)[1].splitlines()
    assert not {"ROLE", "OWNER", "TIER"} & {*head.split()}
    admin_of = ("--kind", "admin", "--role", "operator", "--owner", "ann")
    made = created(run, file, *admin_of)
    head, _, row = run("keys", "list", "-c", file)[1].splitlines()
    assert {"ROLE", "OWNER"} <= {*head.split()}
    assert row.startswith(made["id"])
    assert "  admin      operator  ann  " in row
    rows = json.loads(run("keys", "list", "-c", file, "-o", "json")[1])
    assert [(each["role"], each["owner"]) for each in rows] == [(None, None), ("operator", "ann")]


def test_an_empty_list_of_a_setting_is_a_dash(run, file):
    made = created(run, file)
    _, out, _ = run("keys", "effective", made["id"], "-c", file)
    assert ["deny", "-", "default"] in [line.split() for line in out.splitlines()]


def test_a_list_is_for_people(run, file):
    created(run, file, "--limit", "requests_per_minute=1,concurrent_requests=2", "--no-fallback")
    created(run, file)
    _, out, _ = run("keys", "list", "-c", file)
    _, limited, free = out.splitlines()
    assert "  no        concurrent_requests=2, requests_per_minute=1  " in limited
    assert "  yes       -  " in free


def test_a_change_to_what_a_key_has_already_is_told_as_none(run, file):
    made = created(run, file)
    change = ("keys", "update", made["id"], "-c", file, "--owner", "ann")
    assert f"key {made['id']} is changed" in run(*change)[2]
    _, out, err = run(*change, "-o", "json")
    assert f"key {made['id']} was like that already" in err
    version = json.loads(out)["version"]
    assert "was like that already" in run(*change, "--if-version", version)[2]


def test_limits_that_a_change_takes_away_are_named(run, file):
    made = created(run, file, "--limit", "requests_per_minute=60,concurrent_requests=4")
    change = ("keys", "update", made["id"], "-c", file, "--limit", "requests_per_minute=90")
    told = "taken away: concurrent_requests; --limit replaces all limits of the key\n"
    assert run(*change)[2].endswith(told)
    assert "taken away" not in run(*change)[2]
    assert "taken away" not in run("keys", "update", made["id"], "-c", file, "--owner", "ann")[2]


def test_a_setting_that_cannot_be_taken_away_is_told_of_the_option(run, file):
    made = created(run, file)
    code, _, err = run("keys", "update", made["id"], "-c", file, "--unset", "foo")
    assert code == 2
    assert "--unset: unknown setting 'foo'" in err


@pytest.mark.parametrize("note", ["foo", "=x", "a=1,foo"])
def test_a_note_has_a_name_and_a_text(run, file, note):
    code, _, err = run("keys", "create", "ci", "-c", file, "--metadata", note)
    wrong = note.rpartition(",")[2]
    assert code == 2
    assert err == f"vllm-gateway: --metadata: write it like team=search, not {wrong}\n"


def test_a_list_without_a_file_says_how_to_make_one(run, file):
    code, _, err = run("keys", "list", "-c", file)
    assert code == 3
    assert "keys create" in err


def test_revoke_ends_a_key_and_rotate_gives_it_a_second_secret(run, file):
    old = created(run, file)
    code, out, _ = run("keys", "rotate", old["id"], "-c", file, "--grace", "1h", "-o", "json")
    new = json.loads(out)
    assert code == 0
    assert new["id"] == old["id"]
    assert new["key"] != old["key"]
    _, out, _ = run("keys", "list", "-c", file, "-o", "json")
    assert [key["state"] for key in json.loads(out)] == ["rotating"]
    code, _, err = run("keys", "rotate", old["id"], "-c", file)
    assert code == 1
    assert "has two secrets" in err
    assert run("keys", "revoke", new["id"], "-c", file)[0] == 0
    _, out, _ = run("keys", "list", "-c", file, "-o", "json")
    assert [key["state"] for key in json.loads(out)] == ["revoked"]


@pytest.mark.parametrize("verb", ["revoke", "rotate"])
def test_an_unknown_key_is_not_found(run, file, verb):
    created(run, file)
    code, _, err = run("keys", verb, "nope", "-c", file)
    assert code == 4
    assert "there is no key with the id nope" in err
    assert "keys list" in err


# --- status ---------------------------------------------------------------------------------------

BACKEND = {
    **{"id": "m/b1", "name": "b1", "phase": "ready", "reason": "ok", "detail": "fine"},
    **{"phase_age_s": 3700.0, "in_flight": 2, "running": 3, "waiting": 0, "kv_usage_ratio": 0.41},
    **{"stale": False, "saturated": False, "version": "0.32.0"},
    **{"limit": 32, "kv_projected_ratio": 0.5},
}
DOWN = {
    **{"id": "m/b2", "name": "b2", "phase": "down", "detail": "connection refused 3 times"},
    **{"phase_age_s": 8.0, "in_flight": 0, "running": None, "waiting": None},
    **{"kv_usage_ratio": None, "stale": True, "saturated": False, "version": None},
}
OVERVIEW = {
    **{"schema_version": 1, "state": "degraded", "draining": False, "version": "0.1.0"},
    **{"verdict": {"state": "degraded", "sentence": "m has 1 of 2 backends ready."}},
    "uptime_s": 90061.0,
    "pools": [
        {
            **{"name": "m", "state": "degraded", "window_tokens": 8192, "adapters": ["sql"]},
            "queue": {"requests": 7, "tokens": 9000, "oldest_s": 3.2, "max_requests": 256},
            "backends": [BACKEND, DOWN],
        }
    ],
    "transitions": [
        {
            **{"at": "2026-01-31T14:02:11.120Z", "backend": "m/b2", "before": "ready"},
            **{"after": "down", "reason": "refused", "detail": "connection refused 3 times"},
        }
    ],
}


@contextlib.contextmanager
def admin(body=OVERVIEW, status=200, unix=None):
    """An admin listener that answers one thing, or by the path; yields its URL and the requests it got."""
    seen = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("authorization")))
            told = body(self.path) if callable(body) else body
            data = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *args):
            pass

    if unix is None:
        listener = http.server.HTTPServer(("127.0.0.1", 0), Answer)
        url = f"http://127.0.0.1:{listener.server_port}"
    else:
        listener = socketserver.UnixStreamServer(str(unix), Answer)
        url = f"unix:{unix}"
    with listener as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield url, seen
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("store", "looks"), [(None, 1), ({"trouble": "", "replicas": []}, 4)])
def test_a_drain_has_ended_once_others_told_what_they_carry(run, store, looks):
    """Another worker or gateway may have sent a request there a moment ago, and has not heard of the drain yet."""
    carried = iter([(0, 0, 0.5), (2, 0, 1.5), (0, 1, 5.5), (0, 0, 6.5)])

    def told(path):
        if path.endswith(":drain"):
            return {"sentence": "m/b1 takes no new work; 0 requests in flight."}
        in_flight, elsewhere, age_s = next(carried)
        backend = {"id": "m/b1", "phase": "draining", "detail": "takes no new requests"}
        backend |= {"in_flight": in_flight, "in_flight_elsewhere": elsewhere, "phase_age_s": age_s}
        return {"store": store, "pools": [{"backends": [backend]}]}

    with admin(told) as (url, seen):
        assert run("drain", "m/b1", "--wait", "--server", url)[0] == 0
    assert len(seen) == 1 + looks


def test_a_drain_has_not_ended_while_another_is_silent_since_before_it_heard(run):
    """It stands still, or Redis is away: it may carry requests there, and go on to send some."""
    silent = iter([(6.5, 5.0), (7.5, 0.5)])  # with the age of the drain

    def told(path):
        if path.endswith(":drain"):
            return {"sentence": "m/b1 takes no new work; 0 requests in flight."}
        age_s, heard_s = next(silent)
        backend = {"id": "m/b1", "phase": "draining", "detail": "takes no new requests"}
        backend |= {"in_flight": 0, "in_flight_elsewhere": 0, "phase_age_s": age_s}
        replicas = [{"here": True, "heard_s": 90.0}, {"here": False, "heard_s": heard_s}]
        store = {"trouble": "", "replicas": replicas}
        return {"store": store, "pools": [{"backends": [backend]}]}

    with admin(told) as (url, seen):
        assert run("drain", "m/b1", "--wait", "--server", url)[0] == 0
    assert len(seen) == 1 + 2


def test_a_log_without_a_line_is_said_to_be_empty(run):
    with admin(b"") as (url, _):
        assert run("logs", "m/b1", "--server", url) == (0, "", EMPTY_LOG)
        assert run("logs", "m/b1", "--bytes", "0", "--server", url) == (0, "", "")
    with admin(b"INFO ready\n") as (url, _):
        assert run("logs", "m/b1", "--server", url) == (0, "INFO ready\n", "")


EMPTY_LOG = "its log is empty: it has not been started, or has written nothing yet\n"


def test_status_says_the_verdict_first_and_the_worst_backend_before_the_others(run):
    with admin() as (url, seen):
        code, out, err = run("status", "--server", url, "--token", "t")
    assert seen == [("/admin/v1/overview", "Bearer t")]
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "◐ DEGRADED  vllm-gateway 0.1.0, up 1d"
    assert lines[1] == "  m has 1 of 2 backends ready."
    rows = [line.split() for line in lines]
    assert ["m", "degraded", "1/2", *"-------", "7", "3s", "2"] in rows
    assert ["m/b1", "ready", "1h", "3", "0", "41%", "50%", "2", "32", "-", "0.32.0"] in rows
    down = next(line for line in lines if line.startswith("m/b2"))
    assert down.split()[1:9] == ["down", "8s", "-", "-", "-", "-", "0", "-"]
    assert lines.index(down) < next(n for n, line in enumerate(lines) if line.startswith("m/b1"))
    assert lines[-1] == "  2026-01-31 14:02:11  m/b2  ready -> down  connection refused 3 times"


def test_what_is_stale_or_saturated_is_not_shown_as_fine(run):
    stale = {**BACKEND, "stale": True, "running": None}
    full = {**BACKEND, "saturated": True}
    pool = {**OVERVIEW["pools"][0], "backends": [stale, full]}
    with admin({**OVERVIEW, "pools": [pool]}) as (url, _):
        _, out, _ = run("status", "--server", url)
    assert "metrics are out of date" in out
    assert "takes no more: saturated" in out


def test_status_says_what_request_bodies_hold_when_they_hold_something(run):
    totals = {"body_bytes": 96 * 2**20, "body_bytes_limit": 512 * 2**20}
    with admin({**OVERVIEW, "totals": totals}) as (url, _):
        _, out, _ = run("status", "--server", url)
    assert out.splitlines()[2] == "  Request bodies hold 96.0 of 512 MiB (`limits.bodies`)."
    with admin({**OVERVIEW, "totals": {**totals, "body_bytes": 0}}) as (url, _):
        _, out, _ = run("status", "--server", url)
    assert "bodies" not in out


def test_status_for_programs_is_the_answer_itself(run):
    with admin() as (url, _):
        code, out, _ = run("status", "--server", url, "-o", "json")
    assert (code, json.loads(out)) == (0, OVERVIEW)


def test_status_reads_from_a_unix_socket_too(run, tmp_path):
    with admin(unix=tmp_path / "admin.sock") as (url, seen):
        code, _, _ = run("status", "--server", url)
    assert (code, seen) == (0, [("/admin/v1/overview", None)])


@pytest.mark.parametrize(("state", "expected"), [("ok", 0), ("degraded", 8), ("down", 8)])
def test_status_can_tell_a_cron_job_by_its_exit_code(run, state, expected):
    with admin({**OVERVIEW, "verdict": {"state": state, "sentence": "-"}}) as (url, _):
        assert run("status", "--server", url, "--exit-code")[0] == expected


def test_an_answer_of_another_version_is_shown_as_far_as_it_goes(run):
    with admin({"state": "ready", "pools": [{"name": "m", "backends": [{"id": "m/b1"}]}]}) as (
        u,
        _,
    ):
        code, out, _ = run("status", "--server", u)
    assert code == 0
    assert "m/b1" in out


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (401, b"{}", 5, "requires its admin token"),
        (404, b"{}", 4, "returned 404"),
        (200, b"<html>", 1, "did not return JSON"),
        (200, b"[]", 1, "did not return a JSON object"),
    ],
)
def test_an_answer_that_is_no_overview_is_a_failure_with_a_hint(run, status, body, code, words):
    with admin(body, status) as (url, _):
        ended, out, err = run("status", "--server", url)
    assert (ended, out) == (code, "")
    assert words in err
    assert "  hint: " in err


def test_a_token_that_is_wrong_is_told_as_such(run, monkeypatch):
    with admin(b"{}", 401) as (url, _):
        monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", "wrong")
        code, _, err = run("status", "--server", url)
    assert code == 5
    assert "does not accept this token\n" in err
    assert "hint: compare it with `admin.token`" in err


def test_an_admin_key_that_is_not_accepted_is_to_be_looked_for_among_the_keys(run):
    key = "gw_7k2m9qxd_" + 43 * "a" + "_b1c2d3"
    with admin(b"{}", 401) as (url, _):
        code, _, err = run("status", "--server", url, "--token", key)
    assert code == 5
    assert "hint: it is an API key: was it revoked, has it expired" in err
    assert "admin.token" not in err


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret\r\n", "s3crét"])
def test_a_token_is_sent_without_the_line_end_of_its_file(run, token):
    with admin() as (url, seen):
        assert run("status", "--server", url, "--token", token)[0] == 0
    sent = f"Bearer {token.strip()}".encode().decode("latin-1")  # as http.server reads it
    assert seen == [("/admin/v1/overview", sent)]


@pytest.mark.parametrize("token", ["s3\ncret", "s3\x00cret", "s3\udcffcret"])
def test_a_token_that_no_header_can_hold_is_told_and_not_repeated(run, token):
    code, out, err = run("status", "--server", "http://127.0.0.1:1", "--token", token)
    assert (code, out) == (2, "")
    assert "the admin token has a line end or another control character" in err
    assert "cret" not in err


def test_a_password_in_the_url_of_a_server_is_not_repeated(run):
    code, _, err = run("status", "--server", "http://admin:s3cret@127.0.0.1:1")
    assert code == 2
    assert "no user, password or path" in err
    assert "s3cret" not in err


@pytest.mark.parametrize(
    ("server", "code", "words"),
    [
        ("http://127.0.0.1:1", 1, ": Connection refused"),
        ("127.0.0.1:1", 1, ": Connection refused"),
        ("unix:/no/such.sock", 1, "cannot reach unix:/no/such.sock: No such file or directory"),
        (f"unix:/{'a' * 200}", 1, "AF_UNIX path too long"),
        ("http://a..b:9090", 2, "no host has such a name"),
        ("http://127.0.0.1:1/gateway", 2, "has no user, password or path"),
        ("ftp://h", 2, "is not a URL"),
        ("http://h:port", 2, "is not a URL"),
        ("http://", 2, "is not a URL"),
    ],
)
def test_a_server_that_cannot_be_reached_is_named(run, server, code, words):
    ended, out, err = run("status", "--server", server)
    assert (ended, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_a_character_that_the_locale_c_does_not_have_is_no_failure(tmp_path):
    (tmp_path / "gw.yaml").write_text(
        'pools: {"m\u00f6del": {backends: [http://h:1, h2]}}\n', "utf-8"
    )
    c_locale = {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "",
    }
    told = subprocess.run(
        [sys.executable, "-c", MAIN, "check", "gw.yaml"],
        cwd=tmp_path, env={**os.environ, **c_locale}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stderr) == (3, b"")
    assert b"pools.m?del.backends[1].url: write the backend's URL like" in told.stdout


@pytest.mark.parametrize(
    "words",
    ["hold --reason", "hold --pool", "drain", "explain", "requests --tenant", "usage --model"],
)
def test_a_word_that_is_no_text_is_told_in_words(words):
    """What a terminal of another encoding sends: the byte of an `ä` in Latin 1."""
    told = subprocess.run(
        [sys.executable, "-c", MAIN, *words.split(), b"f\xe4hrt"],
        env={**os.environ, "LC_ALL": "C"}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stdout) == (2, b"")
    assert told.stderr.decode().splitlines() == [
        "vllm-gateway: a word of the command line is not text in the encoding of this locale",
        "  hint: write it in UTF-8, with LC_ALL=C.UTF-8",
    ]


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_free_text_is_sent_as_it_was_written_whatever_the_locale(locale):
    with admin({"data": []}) as (url, seen):
        told = subprocess.run(
            [sys.executable, "-c", MAIN, "requests", "--tenant", "fährt", "--server", url],
            env={**os.environ, "LC_ALL": locale}, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert seen[0][0].endswith("&tenant=f%C3%A4hrt")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ("config", "policy"),
        ("keys", "create", "ci", "-c", "gw.yaml"),  # nor is it told to save a key that nobody saw
        ("check", "nope.yaml"),
    ],
)
def test_output_that_cannot_be_written_is_a_failure_in_words(file, words, unbuffered):
    def ran(stdout):
        told = subprocess.run(
            [sys.executable, "-c", MAIN, *words], stdout=stdout, stderr=subprocess.PIPE, text=True,
            cwd=file.parent, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, timeout=60, check=False,
        )  # fmt: skip
        return told.returncode, told.stderr

    with open("/dev/full", "w") as full:
        assert ran(full) == (1, "vllm-gateway: No space left on device\n")
    read, write = os.pipe()
    os.close(read)  # as `| head` does once it has its lines
    with open(write, "w") as unread:
        assert ran(unread) == (1, "")


def test_a_failure_is_told_though_output_cannot_be_written_either():
    script = "with written_out():\n    print('some output')\n    raise SystemError('not drained in time')"
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [sys.executable, "-c", f"from gateway.cli.streams import written_out\n{script}"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert told.stderr.endswith("SystemError: not drained in time\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("output", ["text", "json"])
def test_a_character_that_a_terminal_cannot_write_is_no_failure(tmp_path, encoding, output):
    name = "\u25cf\u00b7\udcff.yaml"
    told = subprocess.run(
        [sys.executable, "-c", MAIN, "check", name, "-o", output],
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (told.returncode, told.stderr) == (3, b"")
    out = told.stdout.decode(encoding)
    if output == "json":
        assert json.loads(out)[0]["file"] == name
    else:
        assert out.startswith(
            {"ascii": "???", "latin-1": "?\u00b7?"}.get(encoding, "\u25cf\u00b7?")
        )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["drain", "m/b1", "--wait", "--timeout", "10"], "--timeout: 10 has no unit"),
        (["restart", "m/b1", "--wait", "--timeout", "soon"], "--timeout: soon is not a duration"),
        (["hold", "--lift", "--for", "30m"], "use --for or --lift, not both"),
        (["hold", "--for", "0s"], "--for: 0s must be more than 0s and at most 30d"),
        (["hold", "--for", "31d"], "--for: 31d must be more than 0s and at most 30d"),
    ],
)
def test_an_option_that_is_wrong_is_told_before_anything_is_ordered(run, words, told):
    # Where nobody could take an order.
    code, out, err = run(*words, "--server", "http://127.0.0.1:1")
    assert (code, out) == (2, "")
    assert told in err


def test_the_memory_of_a_gpu_is_refused_where_nothing_would_be_compared_with_it(run, file):
    code, out, err = run("check", file, "--gpu-memory", "24GiB")
    assert (code, out) == (2, "")
    assert "--gpu-memory says what --fit compares with: use both" in err


@pytest.mark.parametrize(
    ("by", "head"), [("", "REQUESTS"), ("day,,tenant", "DAY         TENANT"), (",", "REQUESTS")]
)
def test_usage_is_grouped_by_what_is_named_if_anything(run, by, head):
    counts = {
        "requests": 3,
        "input_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 9,
        "money": 0.0,
    }
    row = {"day": "2026-11-27", "tenant": "acme", **counts}
    with admin({"data": [row]}) as (url, seen):
        code, out, err = run("usage", "--by", by, "--server", url)
    assert (code, err) == (0, "")
    assert out.startswith(head)
    assert seen[0][0].endswith("by=" + (by or ",").replace(",", "%2C"))


@pytest.mark.parametrize(
    ("money", "told"),
    [(0.0, "0"), (6e-9, "0.000000006"), (0.0000024, "0.0000024"), (0.0625, "0.0625"),
     (1234.56789, "1,234.5679")],
)  # fmt: skip
def test_money_of_a_few_requests_is_not_told_as_nothing(run, money, told):
    with admin({"data": [{"day": "2026-11-27", **USED, "money": money}]}) as (url, _):
        _, out, _ = run("usage", "--by", "day", "--server", url)
    assert out.splitlines()[1].split()[-1] == told


def test_numbers_of_usage_stand_below_one_another(run):
    rows = [
        {"day": day, **USED, "input_tokens": n}
        for day, n in (("2026-11-26", 7), ("2026-11-27", 1234))
    ]
    with admin({"data": rows}) as (url, _):
        _, out, _ = run("usage", "--by", "day", "--server", url)
    assert out.splitlines() == [
        "DAY         REQUESTS  INPUT  CACHED  OUTPUT  MONEY",
        "2026-11-26         1      7       0       9      0",
        "2026-11-27         1  1,234       0       9      0",
    ]


USED = {"requests": 1, "input_tokens": 5, "cached_tokens": 0, "output_tokens": 9, "money": 0.0}
LISTS = {
    ("usage", "--by", "day,key,model", "-o", "csv"): {
        **{"day": "2026-11-27", "tenant": None, "key": "k", "model": "m", "adapter": None},
        **{"complete": True, **USED},
    },
    ("adapters", "list"): {
        **{"adapter": "sql", "backend_id": "m/b1", "state": "loaded", "loaded_by": "gateway"},
        **{"wanted_by": "demand", "in_flight": 0, "path": "/l/sql", "detail": ""},
    },
    ("quarantine", "list"): {
        **{"id": "5f0c", "pool": "m", "body_bytes": 9, "until": "2026-11-27T00:00:00Z"},
        **{"deaths": [], "refused": {}},
    },
}


@pytest.mark.parametrize("words", LISTS)
def test_a_list_is_printed_whole_however_many_pages_it_has(run, words):
    def page(path):
        asked = parse_qs(urlsplit(path).query)
        first = int(asked.get("after", ["-1"])[0]) + 1
        ids = [str(each) for each in range(first, min(first + 1000, 2500))]
        rows = [{**LISTS[words], "key": each, "adapter": each} for each in ids]
        more = ids[-1] != "2499"
        return {"data": rows, "has_more": more, "first_id": ids[0], "last_id": ids[-1]}

    with admin(page) as (url, seen):
        code, out, err = run(*words, "--server", url)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 2501  # with the head
    assert len(seen) == 3


# --- explain and route ----------------------------------------------------------------------------

STOP = {"name": "pools.m.kv.stop_admitting", "value": 0.9, "origin": "gateway.yaml:12"}
WAITED = {
    **{"sentence": "req_1 waited 3.2 s for gpt and was sent to m/b2.", "state": "admitted"},
    **{"model": "gpt", "pool": "m", "tenant": "acme", "key_id": "k7m2q9xd", "priority": 0},
    **{"prompt_tokens": 900, "output_tokens": 256, "message": None, "setting": STOP},
    "backends": [
        {
            "id": "m/b1",
            "verdict": "kv_full",
            "expected_s": None,
            "cached_tokens": 700,
            "setting": STOP,
        },
        {"id": "m/b2", "verdict": "room", "expected_s": 0.417, "cached_tokens": 0, "setting": None},
    ],
}


def test_a_dry_run_says_what_would_happen_then_the_backends_then_the_setting(run):
    with admin(WAITED) as (url, seen):
        code, out, err = run("route", "--model", "gpt", "--server", url, "--token", "t")
    assert seen == [("/admin/v1/route?model=gpt&tokens=0&endpoint=chat", "Bearer t")]
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "req_1 waited 3.2 s for gpt and was sent to m/b2.",
        "  model gpt · pool m · key k7m2q9xd (acme) · priority 0 · 900 prompt + 256 output tokens",
        "",
        "BACKEND  VERDICT  COSTS   CACHED      SETTING",
        "m/b1     kv full          700 tokens  pools.m.kv.stop_admitting: 0.9 (gateway.yaml:12)",
        "m/b2     room     0.42 s  0 tokens",
        "",
        "Decided by pools.m.kv.stop_admitting: 0.9 (gateway.yaml:12)",
    ]


EXPLAINED = {
    **{"sentence": "req_1 for gpt was answered by m/b2 after 3.50 s: 200.", "endpoint": "chat"},
    **{"model": "gpt", "pool": "m", "tenant": "acme", "key_id": "k7m2q9xd", "stream": True},
    **{"client": "192.0.2.7", "setting": None, "message": None},
    "timeline": [
        {"after_s": 0.0, "step": "arrived", "sentence": "Its head was read."},
        {"after_s": 3.2, "step": "first_token", "sentence": "The first token went to the client."},
    ],
    "tried": [
        {
            "backend": "m/b1",
            "engine_request_id": "a",
            "sent_s": 0.1,
            "took_s": 1,
            "outcome": "connect",
        },
        {
            "backend": "m/b2",
            "engine_request_id": "b",
            "sent_s": 1.1,
            "took_s": 2.4,
            "outcome": "ok",
        },
    ],
    "weighed": [
        {"backend": "m/b2", "costs_s": 0.417, "chosen": True},
        {"backend": "m/b1", "costs_s": 2, "chosen": False},
    ],
    "changed": [{"field": "model", "sentence": "The backend knows gpt as m."}],
    "tokens": {"prompt": 900, "output": 20, "cached": 512, "counted_by": "upstream"},
}


def test_explain_tells_the_whole_life_of_a_request(run):
    with admin(EXPLAINED) as (url, seen):
        code, out, err = run("explain", "req_1", "--server", url, "--token", "t")
    assert seen == [("/admin/v1/requests/req_1", "Bearer t")]
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "req_1 for gpt was answered by m/b2 after 3.50 s: 200.",
        "  model gpt · pool m · chat as a stream · key k7m2q9xd (acme) · from 192.0.2.7",
        "  900 prompt + 20 output tokens, 512 of the prompt from the prefix cache (as the backend told)",
        "",
        "AFTER                 WHAT",
        "0.000 s  arrived      Its head was read.",
        "3.200 s  first token  The first token went to the client.",
        "",
        "BACKEND  ENDED    SENT AFTER  TOOK     ID AT THE ENGINE",
        "m/b1     connect  0.100 s     1.000 s  a",
        "m/b2     ok       1.100 s     2.400 s  b",
        "",
        "BACKEND  COSTS",
        "m/b2     0.417 s  chosen",
        "m/b1     2.000 s",
        "",
        "Changed `model`: The backend knows gpt as m.",
    ]


def test_explain_of_a_wait_tells_what_each_backend_said_and_the_setting(run):
    waits = {**EXPLAINED, "decision": WAITED, "setting": STOP, "message": "`m` is overloaded."}
    with admin(waits) as (url, _):
        _, out, _ = run("explain", "req_1", "--server", url)
    assert "  The client sees: `m` is overloaded." in out
    assert "m/b1     kv full          700 tokens  pools.m.kv.stop_admitting: 0.9" in out
    assert "COSTS\n" not in out
    assert out.endswith("Decided by pools.m.kv.stop_admitting: 0.9 (gateway.yaml:12)\n")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            {"prompt": 9, "output": 2, "counted_by": "counted"},
            "9 prompt + 2 output tokens (counted by",
        ),
        ({"expected_prompt": 9, "exact": False}, "about 9 prompt tokens expected"),
        ({"expected_prompt": 9, "exact": True, "expected_output": 5}, "9 prompt + about 5 output"),
    ],
)
def test_explain_says_who_counted_the_tokens(run, told, words):
    with admin({**EXPLAINED, "tokens": told}) as (url, _):
        assert f"\n  {words}" in run("explain", "req_1", "--server", url)[1]


@pytest.mark.parametrize(
    ("options", "query"),
    [
        (["--last-error"], "limit=1&key=&errors=true"),
        (["--key", f"gw_k7m2q9xd_{'s' * 43}_abc123"], "limit=1&key=k7m2q9xd&errors=false"),
        (["--last-error", "--key", "k7m2q9xd"], "limit=1&key=k7m2q9xd&errors=true"),
    ],
)
def test_explain_finds_the_newest_request(run, options, query):
    with admin({**EXPLAINED, "data": [{"id": "req_9"}]}) as (url, seen):
        assert run("explain", *options, "--server", url)[0] == 0
    assert [path for path, _ in seen] == [f"/admin/v1/requests?{query}", "/admin/v1/requests/req_9"]


def test_explain_says_so_where_no_such_request_is_kept(run):
    with admin({"data": []}) as (url, _):
        code, _, err = run("explain", "--last-error", "--key", "k", "--server", url)
    assert code == 4
    assert "No request of this key that did not end well is kept." in err


@pytest.mark.parametrize("words", [[], ["req_1", "--last-error"], ["req_1", "--key", "k"]])
def test_explain_is_told_one_request(run, words):
    code, _, err = run("explain", *words)
    assert code == 2
    assert "Name a request, or use --last-error, --key, or both." in err


def test_requests_are_listed_one_a_line(run):
    ended = {"outcome": "shed", "status": 503, "code": "server_is_overloaded", "state": "ended"}
    rows = [
        {
            "id": "a",
            "at": "2026-01-31T14:02:11.120Z",
            "state": "running",
            "model": "m",
            "backend": "m/b1",
        },
        {"id": "b", "at": "2026-01-31T14:02:10.000Z", "duration_s": 30, **ended},
    ]
    with admin({"data": rows}) as (url, seen):
        code, out, _ = run("requests", "--errors", "--backend", "m/b1", "--server", url)
    assert seen[0][0] == "/admin/v1/requests?limit=20&errors=true&backend=m%2Fb1"
    first, running, shed = out.splitlines()
    assert first.split()[:4] == ["CAME", "ID", "STATE", "MODEL"]
    assert running.split()[:5] == ["14:02:11.120", "a", "running", "m", "m/b1"]
    assert "shed 503 server_is_overloaded" in shed
    assert "30.00 s" in shed


@pytest.mark.parametrize("verb", [["explain", "req_1"], ["route", "--model", "m"], ["requests"]])
def test_reasons_for_programs_are_the_answer_itself(run, verb):
    with admin(WAITED) as (url, _):
        code, out, _ = run(*verb, "--server", url, "-o", "json")
    assert (code, json.loads(out)) == (0, WAITED)


def test_a_request_id_is_one_step_of_the_path(run):
    with admin(WAITED) as (url, seen):
        run("explain", "../../metrics?x", "--server", url)
    assert seen[0][0] == "/admin/v1/requests/..%2F..%2Fmetrics%3Fx"


@pytest.mark.parametrize(
    ("verb", "status", "expected"),
    [
        (["explain", "req_1"], 404, 4),
        (["route", "--model", "nope"], 404, 4),
        (["route", "--model", "m"], 400, 2),
        (["route", "--model", "m"], 500, 1),
    ],
)
def test_what_the_gateway_says_of_a_failure_is_passed_on(run, verb, status, expected):
    problem = {"code": "model_not_found", "detail": "The model `nope` does not exist."}
    with admin(problem, status) as (url, _):
        assert run(*verb, "--server", url) == (
            expected,
            "",
            "vllm-gateway: The model `nope` does not exist.\n",
        )


def test_a_gateway_that_knows_no_such_path_is_not_quoted(run):
    with admin({"code": "not_found", "detail": "There are: /metrics."}, 404) as (url, _):
        code, out, err = run("explain", "", "--server", url)
    assert (code, out) == (4, "")
    assert err == (
        "vllm-gateway: this gateway has nothing at /admin/v1/requests/\n"
        "  hint: is a name empty here, or the gateway of another version than this command?\n"
    )


def test_route_asks_with_all_that_is_told(run):
    options = ["--tokens", "32k", "--output-tokens", "500", "--endpoint", "responses"]
    with admin(WAITED) as (url, seen):
        run("route", "--model", "a/b c", *options, "--server", url)
        run("route", "--model", "m", "--server", url)
    assert [path for path, _ in seen] == [
        "/admin/v1/route?model=a%2Fb+c&tokens=32768&output=500&endpoint=responses",
        "/admin/v1/route?model=m&tokens=0&endpoint=chat",
    ]


@pytest.mark.parametrize("key", ["k7m2q9xd", f"gw_k7m2q9xd_{'s' * 43}_abc123"])
def test_of_a_key_only_its_id_is_sent(run, key):
    with admin(WAITED) as (url, seen):
        run("route", "--model", "m", "--key", key, "--server", url)
        run("usage", "--key", key, "--server", url)
        run("keys", "show", key, "--server", url)
    route, used, kept = (path for path, _ in seen)
    assert route.endswith("&key=k7m2q9xd&endpoint=chat")
    assert used.startswith("/admin/v1/usage?key=k7m2q9xd&")
    assert kept == "/admin/v1/keys/k7m2q9xd"


def test_a_key_that_is_found_somewhere_can_be_revoked_as_it_is(run, file):
    made = created(run, file)
    code, _, err = run("keys", "revoke", made["key"], "-c", file)
    assert (code, err) == (0, f"key {made['id']} is revoked\n")
    _, out, _ = run("keys", "list", "-c", file, "-o", "json")
    assert json.loads(out)[0]["state"] == "revoked"
    code, _, err = run("keys", "rotate", made["key"], "-c", file)
    assert code == 1
    assert made["key"] not in err


@pytest.mark.parametrize("option", ["--tokens", "--output-tokens"])
def test_a_token_count_that_cannot_be_read_is_a_usage_error(run, option):
    code, _, err = run("route", "--model", "m", option, "many")
    assert code == 2
    assert f"{option}: many is not a token count" in err


# --- sim and demo ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["sim", "--port", "0"], ["demo"]])
def test_an_unknown_fault_is_a_usage_error_that_names_the_known_ones(run, verb):
    code, _, err = run(*verb, "--fault", "nope")
    assert code == 2
    assert "unknown fault 'nope'; known: " in err


def test_a_port_that_is_taken_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = run("sim", "--port", where.rpartition(":")[2])
    assert code == 1
    first, hint = err.splitlines()
    assert first == f"vllm-gateway: {where}: Address already in use"
    assert hint == "  hint: end what listens there, or take a free port with --port 0"


def test_probing_compares_the_file_with_the_backends(run, tmp_path):
    script = pathlib.Path(sys.executable).with_name("vllm-gateway")
    options = ["--port", "0", "--model", "m", "--adapter", "sql", "--max-model-len", "4096"]
    with subprocess.Popen([script, "sim", *options], stderr=subprocess.PIPE, text=True) as sim:
        assert sim.stderr is not None
        url = sim.stderr.readline().split()[-1]
        file = tmp_path / "gw.yaml"
        file.write_text(
            f"pools:\n  m:\n    max_context: 32k\n    adapters: [sql, law]\n    backends: [{url}]\n"
            f"  n:\n    served_model: n\n    backends: ['{url}', http://127.0.0.1:1]\nkeys: none\n"
        )
        code, out, _ = run("check", file, "--probe", "-o", "json")
        told = [(each["line"], each["severity"], each["code"]) for each in json.loads(out)]
        file.write_text(f"pools: {{m: {{backends: ['{url}']}}}}\nkeys: none")
        good = run("check", file, "--probe")
        file.write_text(f"pools: {{n: {{served_model: n, backends: ['{url}']}}}}\nkeys: none")
        other = run("check", file, "--probe")[1]
        sim.terminate()
    assert "b1 does not serve `n`; it serves m, sql" in other
    assert other.endswith(f"{file}: 1 error, 0 warnings · n/b1 does not serve the model\n")
    assert code == 3
    assert told == [
        (3, "warning", "context-mismatch"),
        (4, "warning", "adapter-missing"),
        (8, "warning", "shared-backend"),
        (8, "error", "model-missing"),
        (8, "error", "backend-unreachable"),
    ]
    assert good == (0, f"{file}: 0 errors, 0 warnings · m/b1 ok vLLM 0.32.0\n", "")


def test_probing_reaches_a_socket_and_says_when_nobody_listens_there(run, tmp_path):
    script = pathlib.Path(sys.executable).with_name("vllm-gateway")
    where = tmp_path / "m.sock"
    options = ["--uds", str(where), "--model", "m"]
    file = tmp_path / "gw.yaml"
    file.write_text(f"pools: {{m: {{backends: ['unix:{where}']}}}}\nkeys: none")
    with subprocess.Popen([script, "sim", *options], stderr=subprocess.PIPE, text=True) as sim:
        assert sim.stderr is not None
        assert sim.stderr.readline().split()[-1] == f"unix:{where}"
        good = run("check", file, "--probe")
        sim.terminate()
    assert good == (0, f"{file}: 0 errors, 0 warnings · m/b1 ok vLLM 0.32.0\n", "")
    code, out, _ = run("check", file, "--probe")
    assert code == 3
    assert f"b1 (unix:{where}) /health: nothing listens on the socket" in out


@pytest.mark.parametrize("where", [[], ["--port", "0", "--uds", "/x"]])
def test_a_simulated_server_has_one_address(run, where):
    code, _, err = run("sim", *where)
    assert code == 2
    assert "use exactly one of --port and --uds" in err


def test_probing_names_a_refused_key_and_models_that_differ(run, tmp_path):
    script = pathlib.Path(sys.executable).with_name("vllm-gateway")
    options = [
        ["--model", "m", "--max-model-len", "4096"],
        ["--model", "other", "--max-model-len", "8192"],
        ["--model", "m", "--api-key", "k"],
    ]
    with contextlib.ExitStack() as stack:
        sims = [
            stack.enter_context(
                subprocess.Popen(
                    [script, "sim", "--port", "0", *each], stderr=subprocess.PIPE, text=True
                )
            )
            for each in options
        ]
        urls = [sim.stderr.readline().split()[-1] for sim in sims]
        file = tmp_path / "gw.yaml"
        head = "pools:\n  m:\n    max_context: 6k\n    backends:\n"
        file.write_text(head + "".join(f"    - {url}\n" for url in urls))
        code, out, _ = run("check", file, "--probe", "-o", "json")
        for sim in sims:
            sim.terminate()
    assert code == 3
    told = {each["code"]: each["message"] for each in json.loads(out)}
    hints = {each["code"]: each["hint"] for each in json.loads(out)}
    assert len(told) == len(json.loads(out)), "one of them takes what `max_context` allows"
    assert "needs more than 4096 tokens" in hints["context-mismatch"]
    assert "b1 serves `m`, b2 serves `other`" in told["model-mismatch"]
    assert "b1 4096, b2 8192" in told["context-mismatch"]
    assert "/v1/models: it rejects the gateway's key; set api_key" in told["backend-unreachable"]


def test_probing_expects_no_answer_of_a_server_that_the_gateway_is_to_start(run, tmp_path):
    file = tmp_path / "gw.yaml"
    file.write_text(
        f"pools: {{m: {{backends: [{{name: b1, launch: {{command: [{sys.executable}], port: 1}}}}]}}}}\n"
        "keys: none"
    )
    told = run("check", file, "--probe")
    words = f"{file}: 0 errors, 0 warnings · m/b1 not running, `serve` starts it\n"
    assert told == (0, words, "")


def test_a_state_folder_that_cannot_be_written_is_a_warning(run, tmp_path):
    file = tmp_path / "gw.yaml"
    file.write_text("keys: none\nstate: /proc/nope\npools: {m: {backends: [http://127.0.0.1:1]}}\n")
    code, out, _ = run("check", file, "-o", "json")
    told = [(each["line"], each["severity"], each["code"]) for each in json.loads(out)]
    assert code == 0
    assert told == [(2, "warning", "state-unwritable")]


def test_a_launched_server_whose_program_or_model_folder_is_missing_is_a_warning(run, tmp_path):
    file = tmp_path / "gw.yaml"
    file.write_text(
        "pools:\n  m:\n    backends:\n      - name: b1\n        launch:\n"
        f"          command: [{tmp_path}/vllm, serve, {tmp_path}/model]\n          port: 8001\n"
        "keys: none\n"
    )
    code, out, _ = run("check", file, "-o", "json")
    told = [(each["line"], each["severity"], each["code"]) for each in json.loads(out)]
    assert code == 0
    assert told == [(6, "warning", "program-missing"), (6, "warning", "model-folder-missing")]
    assert f"there is no program `{tmp_path}/vllm`" in out
    assert "see that it is there and may be run" in out
    assert f"there is no folder {tmp_path}/model" in out


def test_a_command_line_in_one_word_is_a_warning_that_shows_none_of_its_arguments(run, tmp_path):
    file = tmp_path / "gw.yaml"
    command = '["vllm serve m --api-key ours"]'
    launch = f"{{command: {command}, port: 8001}}"
    file.write_text(f"keys: none\npools: {{m: {{backends: [{{name: b1, launch: {launch}}}]}}}}\n")
    code, out, _ = run("check", file)
    assert code == 0
    assert "there is no program `vllm ...`" in out
    assert "write each word apart: [vllm, ...]" in out
    assert "ours" not in out


@pytest.mark.parametrize(
    ("env", "args", "code", "said"),
    [
        ("{}", "{}", 0, "the GPU memory is unknown"),
        ("{VLLM_CPU_OMP_THREADS_BIND: 0-1}", "{}", 0, "set VLLM_CPU_KVCACHE_SPACE"),
        ("{VLLM_CPU_KVCACHE_SPACE: 1}", "{}", 0, "m/b1 fits"),
        ("{VLLM_CPU_KVCACHE_SPACE: 1}", "{num-gpu-blocks-override: 2}", 3, "override 2 makes"),
    ],
)
def test_fit_judges_a_server_on_a_cpu(run, tmp_path, env, args, code, said):
    config = modelconfigs.LLAMA_3_8B | {"max_position_embeddings": 512}
    file = launched(tmp_path, config, f"env: {env}, args: {args}")
    ended, out, _ = run("check", file, "--fit")
    assert said in out
    assert ended == code


@pytest.mark.parametrize(
    ("config", "args", "why"),
    [
        ({"is_encoder_decoder": True}, "{}", "encoder-decoder models are not supported"),
        ({}, "{kv-cache-dtype: nvfp4}", "nvfp4 is not supported"),  # vLLM 0.25 has it
        ({}, "{quantization: bitsandbytes}", "how small bitsandbytes makes its weights"),
        ({}, "{cpu-offload-gb: 4}", "cpu-offload-gb: how much of the weights stays on"),
        ({}, "{speculative-config: {model: d}}", "how much its draft model takes"),
    ],
)
def test_what_the_fit_check_does_not_know_is_no_error_of_the_file(run, tmp_path, config, args, why):
    more = f"env: {{VLLM_CPU_KVCACHE_SPACE: 1}}, args: {args}"
    file = launched(tmp_path, modelconfigs.LLAMA_3_8B | config, more)
    code, out, _ = run("check", file, "--fit")
    assert "cannot tell whether it fits" in out
    assert why in out
    assert code == 0


def test_a_server_that_takes_the_advice_of_the_fit_check_fits(run, tmp_path):
    """Its weights are quantized as vLLM loads them."""
    for args, code, said in (
        (
            "max-model-len: 512",
            3,
            "weights of 8 bits (another checkpoint, or fp8): --quantization fp8",
        ),
        ("max-model-len: 512, quantization: fp8", 0, "m/b1 fits"),
    ):
        folder = tmp_path / str(code)
        folder.mkdir()
        file = launched(folder, modelconfigs.LLAMA_3_8B, f"args: {{{args}}}", weights=8 * 10**9)
        ended, out, _ = run("check", file, "--fit", "--gpu-memory", "14GiB")
        assert said in out
        assert ended == code


def launched(tmp_path, config, more, weights=4):
    """Write a file with one launched server, whose model has `weights` numbers in its folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensor = {"dtype": "BF16", "shape": [weights], "data_offsets": [0, 2 * weights]}
    head = json.dumps({"w": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 2 * weights)
    file = tmp_path / "gw.yaml"
    file.write_text(
        f"pools: {{m: {{backends: [{{name: b1, launch: {{command: [{sys.executable}, serve, {folder}],"
        f" port: 8001, {more}}}}}]}}}}\nkeys: none"
    )
    return file


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        (modelconfigs.LLAMA_3_8B, 3, "does-not-fit"),  # 16 GB, and not 4
        (modelconfigs.DEEPSEEK_V2_LITE, 0, "how its engines share the experts"),
    ],
)
def test_each_engine_of_a_data_parallel_server_needs_all_of_a_dense_model(
    run, tmp_path, config, code, said
):
    more = "gpus: [0, 1, 2, 3], args: {data-parallel-size: 4, max-model-len: 512}"
    file = launched(tmp_path, config, more, weights=8 * 10**9)
    ended, out, _ = run("check", file, "--fit", "--gpu-memory", "12GiB")
    assert said in out
    assert ended == code


@pytest.mark.parametrize("verb", ["validate", "diff"])
def test_a_file_that_cannot_be_read_is_no_valid_one(run, tmp_path, verb):
    (tmp_path / "odd.yaml").write_bytes(b"\xff")
    for name, why in (("odd.yaml", "is not UTF-8"), ("none.yaml", "No such file or directory")):
        code, out, err = run("config", verb, tmp_path / name)
        assert (code, out) == (3, "")
        assert why in err


def test_probing_needs_a_usable_file(run, file):
    file.write_text(POOL + "limts: {}\n")
    code, out, _ = run("check", file, "--probe")
    assert code == 3
    assert "backend-unreachable" not in out


def test_a_key_file_that_may_not_be_written_is_one_line(run, file):
    file.write_text(POOL + "keys: {file: /proc/nope/keys.yaml}\n")
    code, out, err = run("keys", "create", "ci", "-c", file)
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert "No such file or directory" in err


def test_what_is_to_be_known_beside_the_problems_stands_apart_from_them(run):
    one = {"severity": "note", "sentence": "Something is odd.", "cause": "", "next": "Look."}
    pool = {"name": "m", "state": "ready", "canary": {"sentence": "b2 takes a tenth."}}
    told = {"verdict": {"state": "ok"}, "pools": [pool]}
    fact = "  m: b2 takes a tenth.\n"
    for problems, before in (([one], f"  next  Look.\n\n{fact}"), ([], fact)):
        with admin({**told, "problems": problems}) as (url, _):
            assert before in run("status", "--server", url)[1]


def test_an_overview_without_pools_says_so(run):
    with admin({"verdict": {"state": "ok", "sentence": "Nothing to do."}}) as (url, _):
        code, out, _ = run("status", "--server", url)
    assert code == 0
    assert "no pools" in out


@pytest.mark.parametrize("verb", [["events"], ["status"]])
def test_what_somebody_else_wrote_steers_no_terminal_and_breaks_no_row(run, verb):
    reason = "a\x1b[2J\nb"
    event = {"id": "1", "at": "2026-11-28T01:57:18Z", "kind": "operator", "backend": reason}
    pool = {"name": reason, "state": "ready", "backends": []}
    wrong = {"severity": "note", "sentence": reason, "cause": reason, "next": reason}
    told = {"data": [event | {"label": "drain", "detail": reason}], "has_more": False}
    told |= {"problems": [wrong], "transitions": [event | {"detail": reason}]}
    with admin(told | {"state": "ready", "verdict": {}, "pools": [pool]}) as (url, _):
        code, out, _ = run(*verb, "--server", url)
    assert code == 0
    assert "a\\x1b[2J\\nb" in out
    assert "\x1b" not in out


def test_a_listener_that_is_not_http_is_named(run):
    class Garbage(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1000)
            self.request.sendall(b"220 mail ready\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Garbage) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        code, _, err = run("status", "--server", f"http://127.0.0.1:{server.server_address[1]}")
        thread.join()
    assert code == 1
    assert "does not speak HTTP" in err


def test_what_cannot_be_reached_is_told_with_the_way_there(run, tmp_path):
    with admin({}) as (url, _):
        code, _, err = run("status", "--server", url.replace("http:", "https:"))
    assert code == 1
    assert "what answers there speaks no TLS: write http://" in err
    code, _, err = run("status", "--server", f"unix:{tmp_path}/none.sock")
    assert code == 1
    assert "is the gateway running?" in err


def why_not_whole(trickles):
    """Return what is said of an answer that breaks off, or (`trickles`) goes on for ever byte by byte."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1000)
            self.request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n{")
            with contextlib.suppress(OSError):
                while trickles:
                    self.request.sendall(b" ")
                    time.sleep(0.01)

    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(VerbError) as told:
            fetch(f"http://127.0.0.1:{server.server_address[1]}", "/", "", timeout_s=10.0)
        thread.join()
    return str(told.value)


def test_an_answer_that_breaks_off_is_told():
    assert "does not speak HTTP: IncompleteRead" in why_not_whole(trickles=False)


def test_an_answer_that_trickles_is_not_waited_for(monkeypatch):
    looks = itertools.count(0.0, 30.0)  # by the clock, half a minute passes between two of them
    monkeypatch.setattr(time, "monotonic", looks.__next__)
    assert "does not end within 100 s" in why_not_whole(trickles=True)


# --- the parameter policy ---------------------------------------------------------------------------


def test_the_policy_is_printed_with_the_setting_that_decides_each_row(run, tmp_path):
    file = tmp_path / "gw.yaml"
    file.write_text(
        "parameters: {max: {n: 4}, deny: [mine]}\nkeys: {file: keys.yaml}\n"
        "pools: {m: {backends: [http://h:1], parameters: {allow: [priority], media: data}}}\n"
    )
    key = keys.create(tmp_path / "keys.yaml", name="a", wall_now=1.0).id

    def rows(*words):
        code, out, _ = run("config", "policy", "-c", file, *words, "-o", "json")
        assert code == 0
        return {row["parameter"]: row for row in json.loads(out)}

    everywhere, pool = rows(), rows("--pool", "m", "--key", key)
    assert everywhere["n"]["here"] == pool["n"]["here"] == "at most 4"
    assert everywhere["n"]["decided_by"] == "parameters.max.n"
    assert (everywhere["priority"]["here"], pool["priority"]["here"]) == ("refused", "passes")
    assert pool["priority"]["decided_by"] == "pools.m.parameters.allow"
    assert pool["media"]["here"] == "data"
    assert everywhere["mine"]["decided_by"] == "parameters.deny"
    assert "CVE-2025-61620" in everywhere["chat_template"]["advisories"]
    assert run("config", "policy", "-c", file, "--pool", "x")[0] == 4
    assert run("config", "policy", "-c", file, "--key", "x")[0] == 4


def test_without_a_settings_file_the_policy_is_the_default(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("config", "policy")
    assert code == 0
    assert "at most 128" in out


def test_a_settings_file_that_is_named_for_the_policy_and_missing_is_an_error(run, tmp_path):
    code, out, err = run("config", "policy", "-c", tmp_path / "none.yaml")
    assert (code, out) == (3, "")
    assert "none.yaml:1:1 error cannot read the file" in err


def test_a_parameter_that_no_row_is_called_by_is_an_error(run, tmp_path):
    file = tmp_path / "gw.yaml"
    file.write_text(
        "pools: {m: {backends: [http://h:1], parameters: {allow: [priorty], max: {top_p: 1}}}}\n"
    )
    code, out, _ = run("check", file)
    assert code == 3
    assert "did you mean priority?" in out
    assert "top_p is no parameter" in out
