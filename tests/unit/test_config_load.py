"""Settings files: what they mean, and what is said about the ones that are wrong."""

from __future__ import annotations

import json
import pathlib
import textwrap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.config.findings import Severity
from gateway.config.load import check_file, check_text, load_config
from gateway.config.models import BackendConfig, Config, OverflowPolicy, PoolConfig
from gateway.core.errors import ConfigError
from gateway.core.types import Endpoint

FOLDER = pathlib.Path("/srv/gw")
POOL = "pools: {m: {backends: [http://h:1]}}\n"


def check(text, env=None, folder=FOLDER):
    return check_text(textwrap.dedent(text), file="gw.yaml", folder=folder, env=env or {})


def config_of(text, env=None, folder=FOLDER):
    checked = check(text, env, folder)
    assert checked.loaded is not None, [str(each) for each in checked.findings]
    return checked.loaded.config


def codes(text, env=None):
    return [each.code for each in check(text, env).findings]


def the_finding(text, env=None):
    (finding,) = check(text, env).findings
    return finding


# --- what a file means ----------------------------------------------------------------------------


def test_the_least_file_has_safe_defaults():
    config = config_of(POOL)
    assert str(config.listen) == "127.0.0.1:8080"
    assert str(config.admin.listen) == "127.0.0.1:9090"
    assert config.admin.token is None
    assert config.redis is None
    assert config.keys is not None
    assert config.keys.file == FOLDER / "keys.yaml"
    pool = config.pools["m"]
    assert (pool.max_context, pool.adapters) == (None, "auto")
    assert pool.on_overflow is OverflowPolicy.REJECT
    assert (pool.kv.stop_admitting, pool.kv.resume) == (0.95, 0.85)
    assert (pool.queue.max_requests, pool.queue.max_wait) == (1024, 30.0)
    assert config.timeouts.heartbeat == 15.0
    assert config.limits.max_body == 32 << 20


def test_every_part_of_the_documented_file_is_read():
    config = config_of(
        """
        version: 1
        listen: 127.0.0.1:8080
        admin: {listen: 127.0.0.1:9090, token: "${GATEWAY_ADMIN_TOKEN:-}"}
        redis: "${GATEWAY_REDIS_URL:-}"
        keys: {file: keys.yaml}
        pools:
          qwen3-8b:
            aliases: [gpt-4o]
            backends:
              - http://10.0.0.11:8000
              - name: b2
                url: http://10.0.0.12:8000
                api_key: "${B2_KEY}"
                restart: {systemd: vllm@2.service}
              - name: b3
                launch:
                  command: [vllm, serve, Qwen/Qwen3-8B]
                  gpus: [0, 1]
                  port: 8003
                  args: {max-model-len: 8192}
                  env: {A: 1}
            max_context: auto
            adapters: auto
            queue: {max_requests: 256, max_wait: 30s}
            kv: {stop_admitting: 0.90, resume: 0.80}
        """,
        {"B2_KEY": "s3cret"},
    )
    one, two, three = config.pools["qwen3-8b"].backends
    assert (one.name, one.url, one.api_key) == ("b1", "http://10.0.0.11:8000", None)
    assert two.api_key is not None
    assert two.api_key.get_secret_value() == "s3cret"
    assert two.restart is not None
    assert two.restart.systemd == "vllm@2.service"
    assert three.url == "http://127.0.0.1:8003"
    assert three.launch is not None
    assert three.launch.env == {"A": "1"}
    assert "s3cret" not in repr(config)
    assert json.loads(config.model_dump_json())["listen"] == "127.0.0.1:8080"


def test_words_and_short_forms_mean_what_they_stand_for():
    config = config_of(
        """
        keys: none
        pools:
          m:
            backends: [{url: http://h:1, endpoints: [chat]}]
            max_context: 32k
            on_overflow: clamp
            adapters: [sql, {name: law, path: /l}]
            tokenizer: tok
            endpoints: [chat, embeddings]
        """
    )
    pool = config.pools["m"]
    assert config.keys is None
    assert pool.max_context == 32768
    assert pool.on_overflow is OverflowPolicy.CLAMP
    assert pool.adapters != "auto"
    assert [(each.name, each.path) for each in pool.adapters] == [("sql", None), ("law", "/l")]
    assert pool.tokenizer == FOLDER / "tok"
    assert pool.endpoints == (Endpoint.CHAT, Endpoint.EMBEDDINGS)
    assert pool.backends[0].endpoints == (Endpoint.CHAT,)


def test_anchors_and_merge_keys_work_and_x_keys_are_ignored():
    config = config_of(
        """
        x-base: &base {queue: {max_wait: 5s}, max_context: 1k}
        x-more: &more {max_context: 2k, on_overflow: clamp}
        pools:
          a: {<<: *base, backends: [http://h:1]}
          b: {<<: [*base, *more], backends: [http://h:2], queue: {max_wait: 7s}}
        """
    )
    a, b = config.pools["a"], config.pools["b"]
    assert (a.queue.max_wait, a.max_context) == (5, 1024)
    assert (b.queue.max_wait, b.max_context, b.on_overflow) == (7, 1024, OverflowPolicy.CLAMP)


def test_a_key_that_looks_like_a_number_is_a_name():
    assert list(config_of("pools: {7: {backends: [http://h:1]}}").pools) == ["7"]


# --- the environment ------------------------------------------------------------------------------


def test_variables_defaults_and_escapes_are_filled_in():
    config = config_of(
        POOL + 'admin: {token: "${A}-${B:-b}-$${C}"}\nlimits: {max_headers: "${N}"}\n',
        {"A": "a", "B": "", "N": "9"},
    )
    assert config.admin.token is not None
    assert config.admin.token.get_secret_value() == "a-b-${C}"
    assert config.limits.max_headers == 9


def test_a_secret_comes_from_a_file_without_its_last_line_end(tmp_path):
    (tmp_path / "token").write_text("line1\nline2\n")
    config = config_of(POOL + "keys: {pepper: '${file:token}'}", folder=tmp_path)
    assert config.keys is not None
    assert config.keys.pepper is not None
    assert config.keys.pepper.get_secret_value() == "line1\nline2"


@pytest.mark.parametrize(
    "text",
    [
        "pools: {m: {backends: [{url: http://h:1, api_key: '${K}'}]}}",
        POOL + "admin: {token: '${K}'}",
        POOL + "admin: {tokens: [{name: ci, role: viewer, token: '${K}'}]}",
    ],
)
@pytest.mark.parametrize(
    "value", ["0123456789abcdef\n", "0123456789\r\nabcdef", "0123456789abcde\udcff"]
)
def test_a_token_that_no_header_can_hold_is_an_error_and_not_told(text, value):
    finding = the_finding(text, {"K": value})
    assert "it has a line end or another control character" in finding.message
    assert "0123456789" not in finding.excerpt()


def test_an_unset_variable_is_an_error_at_its_place():
    finding = the_finding(POOL + 'admin: {token: "pre-${NOPE}"}')
    assert (finding.place.line, finding.place.column, finding.place.width) == (2, 21, 7)
    assert "${NOPE} is not set and has no default" in finding.message
    assert "${NOPE:-}" in finding.hint


def test_a_variable_as_a_shell_has_it_is_a_warning_that_shows_nothing_of_it():
    (finding,) = check(POOL + "admin: {token: $ADMIN_TOKEN}").findings
    assert (finding.severity, finding.code) == (Severity.WARNING, "no-variable")
    assert (finding.place.line, finding.place.column) == (2, 16)
    assert finding.hint == "write ${NAME} if a variable is meant"
    assert "ADMIN_TOKEN" not in finding.excerpt()
    for token in ("$5.dollars", "a$ADMIN_TOKEN", "$$", "$$A"):
        assert check(POOL + f"admin: {{token: '{token}'}}").findings == ()


@pytest.mark.parametrize(
    ("text", "code"),
    [("${}", "bad-reference"), ("${1x}", "bad-reference"), ("${A:=x}", "bad-reference")]
    + [("${A", "bad-reference"), ("${file:/no/such/file}", "unreadable-file")]
    + [("${file:/}", "unreadable-file"), ("${NOPE}", "unset-variable")],
)
def test_a_reference_that_leads_nowhere_is_one_error(text, code):
    assert codes(POOL + f"admin: {{token: '{text}'}}") == [code]


@pytest.mark.parametrize(("content", "words"), [(b"\xff", "UTF-8"), (b"x" * 70_000, "larger")])
def test_a_file_that_is_no_secret_is_refused(tmp_path, content, words):
    (tmp_path / "token").write_bytes(content)
    (finding,) = check(POOL + "admin: {token: '${file:token}'}", folder=tmp_path).findings
    assert words in finding.message


def test_an_unset_variable_does_not_add_errors_of_its_own_making():
    text = "pools: {m: {backends: ['${A}', {url: '${B}'}]}}\nlisten: '${C}'\n"
    assert codes(text) == ["unset-variable"] * 3


# --- what is wrong --------------------------------------------------------------------------------


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file():
    found = check(
        """\
        listen: 8080
        timeouts: {stall: 30, first_byt: 5s}
        max_body: 8MB
        pools:
          m:
            aliases: ["b d"]
            max_wait: 30s
            backends: [ftp://h, {url: http://h:1, speed: 2}]
            on_overflow: clam
            queue: {max_requests: lots}
            kv: {resume: 0.96}
          n: {}
        """
    ).findings
    assert [(each.place.line, each.code) for each in found] == [
        (1, "bad-address"),
        (2, "needs-unit"),
        (2, "unknown-key"),
        (3, "unknown-key"),
        (6, "bad-name"),
        (7, "unknown-key"),
        (8, "bad-url"),
        (8, "unknown-key"),
        (9, "bad-value"),
        (10, "wrong-type"),
        (12, "missing-key"),
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("limts: {}", "did you mean `limits`?"),
        ("first_byte: 1s", "it belongs under `timeouts`"),
        ("limits: {listen: a}", "it belongs under `admin`"),
        ("limits: {pools: {}}", "it belongs at the top level"),
        ("shutdown: {zzz: 1}", "known: announce, grace"),
        ("log: {format: jsn}", "did you mean `json`?"),
        ("log: {level: zzz}", "known: debug, info, warning, error"),
        (
            "keys: keys.yaml",
            "write `keys: {file: keys.yaml}`, or `keys: none` for no authentication",
        ),
        ("redis: 6379", "put it in quotes"),
        ("trusted_proxies: 10.0.0.1", "write it as a list, in brackets: [a, b]"),
        ("traces: {sample: 95}", "write 95 % as 0.95"),
        ("traces: {sample: 95%}", "write 95 % as 0.95"),
        ("traces: {sample: -1}", ""),
    ],
)
def test_the_nearest_right_thing_is_named(text, hint):
    assert the_finding(POOL + text).hint == hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("listen: null", "listen: an empty value is not an address such as", ""),
        ("timeouts: {total: }", "timeouts.total: an empty value is not a duration such as", ""),
        ("traces: {endpoint: 'http://[h'}", "traces.endpoint: must be a URL such as", ""),
        (
            "traces: {headers: {x y: z}}",
            "`x y` is not a valid name",
            "it must look like `x-api-key`",
        ),
        ('traces: {headers: {x: "z\\n"}}', "traces.headers.x: it has a line end or another", ""),
        ("traces: {headers: {x: zé}}", "traces.headers.x: it has a line end or another", ""),
        ('keys: {file: "k\\0"}', "keys.file: no path can hold a NUL character", ""),
        ('state: "a\\0b"', "state: no path can hold a NUL character", ""),
        ("tiers: {a b: {}}", "`a b` is not a valid name", "use up to 64 letters, digits and . _ -"),
    ],
)
def test_no_words_of_python_or_of_a_pattern_are_told(text, message, hint):
    finding = the_finding(POOL + text)
    assert finding.message.startswith(message)
    assert finding.hint.startswith(hint)


def test_a_key_of_the_pool_that_is_elsewhere_is_led_there():
    text = "pools: {m: {backends: [http://h:1], max_wait: 1s, max_in_flight: 3}}"
    assert [each.hint for each in check(text).findings] == [
        "it belongs under `queue`",
        "it belongs under `backends`",
    ]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("limits: {max_headers: 0}", "out-of-range", "limits.max_headers must be at least 1"),
        ("limits: {max_headers: many}", "wrong-type", "must be a whole number"),
        ("limits: {max_headers: 1.5}", "wrong-type", "must be a whole number"),
        ("log: {access: maybe}", "wrong-type", "must be true or false"),
        ("admin: text", "wrong-type", "admin must be a mapping"),
        ("admin:", "wrong-type", "admin is empty; it must be a mapping"),
        ("keys:", "empty", "write none or a value"),
        ("keys: [a]", "wrong-type", "keys must be a mapping"),
        ("timeouts: {stall: 0s}", "too-small", "must be more than 0"),
        ("traces: {sample: .nan}", "out-of-range", "traces.sample must be a number"),
        ("traces: {sample: nan}", "out-of-range", "traces.sample must be a number"),
        ("traces: {sample: -NaN}", "out-of-range", "traces.sample must be a number"),
        ("traces: {sample: ' +nan '}", "out-of-range", "traces.sample must be a number"),
        (
            f"prices: {{currency: {'x' * 17}}}",
            "bad-value",
            "prices.currency must have at most 16 characters",
        ),
        ("log: {level: true}", "bad-value", "log.level: `true` is not a known value"),
        ("limits: {max_body: 0B}", "out-of-range", "must be more than 0"),
        ("redis: localhost", "bad-url", "redis://"),
        ("version: 2", "bad-value", "version: `2` is not a known value"),
        ("version: '1'", "bad-value", "version is text; it must be a number"),
        ("session_header: bad header", "bad-name", "session_header: `bad header` is not a valid name"),
        ("tenants: {t: {limits: {requests_per_minute: two}}}", "bad-value", "two is not a count; write it like 60 or 100k"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_in_plain_words(text, code, words):
    finding = the_finding(POOL + text)
    assert finding.code == code
    assert words in finding.message


@pytest.mark.parametrize(
    ("pool", "code"),
    [
        ("{backends: []}", "out-of-range"),
        ("{backends: [{}]}", "empty"),
        ("{backends: [[]]}", "wrong-type"),
        ("{backends: http://h:1}", "wrong-type"),
        ("{backends: [http://h:1], max_context: }", "empty"),
        ("{backends: [http://h:1], adapters: none}", "wrong-type"),
        ("{backends: [http://h:1], endpoints: [chatt]}", "bad-value"),
        ("{backends: [{url: http://h:1, launch: {command: [v], port: 1}}]}", "one-of"),
        ("{backends: [{launch: {command: [v], port: x}}]}", "wrong-type"),
        ("{backends: [{launch: {command: [v]}}]}", "one-of"),
        ("{backends: [{launch: {command: [v], port: 1, socket: a}}]}", "one-of"),
        ("{backends: [{launch: {command: [v], socket: 1}}]}", "wrong-type"),
        ("{backends: ['unix:b1.sock']}", "bad-socket"),
        ("{backends: [{launch: x}]}", "wrong-type"),
        ("{backends: [{url: http://h:1, restart: {}}]}", "one-of"),
        ("{backends: [{url: http://h:1, restart: {systemd: a, docker: b}}]}", "one-of"),
        ("{backends: [{url: http://h:1, name: B_1}]}", "bad-name"),
    ],
)
def test_a_pool_that_cannot_work_is_refused(pool, code):
    found = check(f"pools: {{m: {pool}}}").findings
    assert code in [each.code for each in found]
    assert all(each.severity is Severity.ERROR for each in found)


def test_a_missing_backend_address_says_what_to_write():
    finding = check("pools: {m: {backends: [{name: b7}]}}").findings[0]
    assert "a backend needs either `url` or `launch`" in finding.message


def test_a_backend_whose_launch_is_wrong_lacks_no_url():
    for launch in ("{command: [v]}", "{command: v, port: 1}", "x"):
        found = check(f"pools: {{m: {{backends: [{{launch: {launch}}}]}}}}").findings
        assert len(found) == 1
        assert "launch" in found[0].message


@pytest.mark.parametrize(
    "text", ['"a\\e[31mb\\nc": 1', 'pools: {"a\\e[31mb\\nc": {backends: [http://h:1]}}']
)
def test_what_a_file_holds_steers_no_terminal_and_breaks_no_line(text):
    finding = check(text if "pools" in text else POOL + text).findings[0]
    for told in (str(finding), finding.excerpt().splitlines()[0]):
        assert "a\\x1b[31mb\\nc" in told
        assert told.isprintable()


@pytest.mark.parametrize("name", ["a b", "-a", "a" * 129, "ü"])
def test_a_model_name_that_clients_could_not_write_is_refused(name):
    finding = the_finding(f"pools: {{'{name}': {{backends: [http://h:1]}}}}")
    assert finding.code == "bad-name"
    assert finding.place.column == 9


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("{systemd: 'vllm 1'}", "vllm@1.service"),
        ("{docker: '-x'}", "vllm-1"),
        ("{kubernetes: qwen}", "ml/deployment/qwen"),
    ],
)
def test_a_name_that_a_service_manager_cannot_have_is_answered_with_an_example(target, shown):
    text = f"pools: {{m: {{backends: [{{url: 'http://h:1', restart: {target}}}]}}}}"
    (finding,) = check_text(text, folder=pathlib.Path()).findings
    assert finding.code == "bad-name"
    assert f"`{shown}`" in finding.hint
    assert "match" not in finding.hint


def test_a_key_written_twice_is_an_error_that_names_the_first():
    finding = the_finding(POOL + "log: {}\nlisten: 127.0.0.1:1\nlog: {}")
    assert (finding.code, finding.place.line) == ("duplicate-key", 4)
    assert "first is in line 2" in finding.message


def test_the_excerpt_shows_the_line_with_a_caret_and_hides_secrets():
    text = POOL + "admin: {token: hunter2, lissten: 127.0.0.1:1}  # x"
    assert the_finding(text).excerpt().splitlines() == [
        "gw.yaml:2:25 error unknown key `lissten` in admin [unknown-key]",
        "    2 | admin: {token: *******, lissten: ***********}",
        "      |                         ^^^^^^^ did you mean `listen`?",
    ]
    assert "hunter2" not in str(the_finding(text))


def test_of_a_long_line_the_excerpt_shows_what_is_around_the_place():
    backends = [f"http://h{number}:8000" for number in range(300)]
    text = json.dumps({"pools": {"m": {"backends": [*backends, "ftp://x:1", *backends[:9]]}}})
    finding = next(each for each in check(text).findings if each.code == "bad-url")
    _, line, mark = finding.excerpt().splitlines()
    assert len(line) < 180
    at = mark.index("^")
    assert line[at : at + mark.count("^")] == '"ftp://x:1"'
    assert text[finding.place.column - 1 :].startswith('"ftp://x:1"')


def test_a_finding_for_programs_has_all_its_parts():
    finding = the_finding(POOL + "limts: {}")
    assert finding.as_json() == {
        "file": "gw.yaml",
        "line": 2,
        "column": 1,
        "severity": "error",
        "code": "unknown-key",
        "message": "unknown key `limts`",
        "hint": "did you mean `limits`?",
    }
    assert str(finding).startswith("gw.yaml:2:1 error unknown key `limts`; did you mean")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "- a",
        "text",
        "a: [",
        "a: b: c",
        "a:\n\t- 1",
        "a: *x",
        "--- {a: 1}\n--- {b: 1}",
    ]
    + [
        "a: \x00",
        "a: !!python/name:os x",
        "? {a: 1}\n: 2",
        "a: &a [*a]",
        "a: &a {<<: *a}",
    ]
    + ["<<: 5", "<<: [5]"],
)
def test_what_is_no_usable_yaml_is_one_finding_with_a_place(text):
    found = check(text).findings
    assert found
    assert "bad-yaml" in [each.code for each in found]
    assert all(each.place.line >= 1 and each.place.column >= 1 for each in found)


def test_a_number_that_is_none_is_left_to_the_setting_it_is_for():
    assert codes(POOL + "limits: {max_headers: !!int x}") == ["wrong-type"]
    assert codes(POOL + "limits: {max_headers: !!int ''}") == ["wrong-type"]


def test_an_alias_bomb_ends_early():
    lines = ["x-0: &a0 [1,1,1,1,1,1,1,1,1]"]
    lines += [f"x-{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert codes("\n".join(lines) + "\n" + POOL) == ["bad-yaml"]


@pytest.mark.parametrize("least", ["{}", "{k: 1}"])
def test_a_bomb_of_merges_ends_early(least):
    lines = [f"x-0: &a0 {least}"]
    lines += [f"x-{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 7)]
    finding = the_finding("\n".join(lines) + "\n" + POOL)
    assert "more than 100000 values" in finding.message


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ("{a: ", "}")])
def test_a_file_that_is_nested_too_deeply_is_told_so(opens, closes):
    finding = the_finding(f"{POOL}x-a: {opens * 1000}1{closes * 1000}")
    assert "nested too deeply" in finding.message
    # Near the limit the parser can read what the walk over its nodes cannot.
    for depth in range(280, 340, 3):
        assert codes(f"{POOL}x-a: {opens * depth}1{closes * depth}") in ([], ["bad-yaml"])


def test_a_file_that_cannot_be_read_is_a_finding(tmp_path):
    assert [each.code for each in check_file(tmp_path / "no.yaml").findings] == ["unreadable-file"]
    (tmp_path / "latin.yaml").write_bytes(b"\xff\xfe")
    assert [each.code for each in check_file(tmp_path / "latin.yaml").findings] == ["bad-yaml"]


def test_where_no_file_is_the_next_step_is_told(tmp_path):
    (finding,) = check_file(tmp_path / "no.yaml").findings
    assert finding.message == "cannot read the file: No such file or directory"
    assert "give its path with -c" in finding.hint
    assert "`vllm-gateway init --from http://HOST:8000`" in finding.excerpt()
    (finding,) = check_file(tmp_path).findings
    assert (finding.message, finding.hint) == ("cannot read the file: Is a directory", "")


def test_no_more_of_a_file_is_read_than_settings_can_have():
    (finding,) = check_file(pathlib.Path("/dev/zero")).findings  # it has no end
    assert finding.message == "the file is larger than 16MiB, so it is no settings file"


def test_loading_raises_every_finding_and_returns_warnings(tmp_path):
    path = tmp_path / "gw.yaml"
    path.write_text(POOL + "limts: {}\nlgo: {}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert len(refused.value.findings) == 2
    assert refused.value.findings[0].startswith(f"{path}:2:1 error ")
    path.write_bytes(b"\xef\xbb\xbf" + POOL.encode() + b"timeouts: {upstream_keep_alive: 5s}\r\n")
    loaded = load_config(path, {})
    assert [each.code for each in loaded.warnings] == ["stale-connections"]


def test_each_setting_knows_where_it_was_written():
    checked = check("admin: {token: '${T:-x}'}\npools:\n  m: {backends: [http://h:1]}\n")
    assert checked.loaded is not None
    told = checked.loaded.told_in
    assert told(("admin", "token")) == "line 1, ${T:-x}"
    assert told(("pools", "m", "backends", 0, "url")) == "line 3"
    assert told(("listen",)) == "default"


def test_pools_that_are_all_wrong_do_not_hide_what_else_is():
    text = "pools: {m: {backends: [{url: x}, {api_kee: y}]}}\nadmin: {listen: 0.0.0.0:1}\n"
    assert codes(text) == ["bad-url", "empty", "unknown-key", "open-admin"]


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("pools: {m: {backends: [http://h:1]}}\n\ntimeouts:\n\n# more\nlog: {}\n", 3, 1),
        ("pools:\n  m:\n    backends:\n      - http://h:1\n      -  # later\n\nlog: {}\n", 5, 7),
    ],
)
def test_an_empty_value_is_where_it_should_have_been_written(text, line, column):
    (finding,) = check(text).findings
    assert (finding.code, finding.place.line, finding.place.column) == ("wrong-type", line, column)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a:\n\tb: x\n", 2, 1, "a tab indents this line"),
        ("a: [1, 2}\n", 1, 4, "the bracket [ that opens here is not closed"),
        ("a: {b: 1\nc: 2\n", 1, 4, "the brace { that opens here is not closed"),
        ("a: 'b\n", 1, 4, "the quote that opens here is not closed"),
        ("a: b: c\n", 1, 5, "a second `:`"),
        ("listen: [::1]:80\n", 1, 14, "text follows a value that has ended"),
        ("a: {listen: [::1]:80}\n", 1, 18, "there is a `:` within a value here"),
        ("a: [http://[::1]:80]\n", 1, 12, "there is a `[` within a value here"),
        ("a: {b: 1}}\n", 1, 10, "this } closes nothing"),
        ("]\n", 1, 1, "this ] closes nothing"),
        ("[a.b]\nc = 1\n", 2, 1, "text follows the first value"),
        ("a:\n  b: 1\n c: 2\n", 3, 2, "the indentation fits none of the lines above"),
        ("a: @x\n", 1, 4, "a value cannot begin with @"),
        ("a: *x\n", 1, 4, "a value that begins with * is an alias"),
        ("a: 1\nb: \x00\n", 2, 4, "the character U+0000 is not allowed"),
        ("a: 1\rb: 2\r\nc: \x00\r", 3, 4, "the character U+0000 is not allowed"),
        ("a: [1,\n", 2, 1, "the file ends within a list"),
        ('a: "\\q"\n', 1, 6, "a backslash in double quotes"),
        ("--- a\n--- b\n", 2, 1, "a second document"),
    ],
)
def test_what_is_no_yaml_is_told_in_plain_words(text, line, column, words):
    (finding,) = check(text).findings
    assert words in finding.message
    assert (finding.place.line, finding.place.column) == (line, column)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://::1:8000", "IPv6 address in brackets"),
        ("http://[::1:8000", "IPv6 address in brackets"),
        ("http://h:70000", "above 65535"),
        ("http://h:", "not a number"),
        ("http://h:x", "not a number"),
    ],
)
def test_a_url_is_told_what_is_wrong_with_its_port_or_address(url, words):
    finding = check(f"pools: {{m: {{backends: ['{url}']}}}}").findings[0]
    assert (finding.code, words in finding.message) == ("bad-url", True)


def test_a_wrong_file_still_gives_the_parts_that_are_right():
    checked = check(POOL + "keys: {file: k.yaml}\nlimts: {}\nadmin: {token: '${NOPE}'}")
    assert checked.loaded is None
    assert checked.partial is not None
    assert checked.partial.config.keys is not None
    assert checked.partial.config.keys.file == FOLDER / "k.yaml"


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "none", "30s", "http://h:1", "${A}", "b1", "m", "127.0.0.1:1"])
)
names = st.sampled_from(
    [*Config.model_fields, *PoolConfig.model_fields, *BackendConfig.model_fields]
    + ["token", "file", "max_wait", "resume", "port", "m", "b", ""]
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4)
)


def test_a_character_that_json_escapes_as_two_is_one():
    pools = '"pools": {"m": {"backends": ["http://h:1"]}}'
    (found,) = check(f'{{"\\ud83d\\ude00": 1, {pools}}}').findings
    assert found.path == ("\U0001f600",)
    (found,) = check(f'{{"x\\ud83d": 1, {pools}}}').findings  # half of one
    assert found.path == ("x\ufffd",)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, trees, max_size=5))
@example({"listen": "\U00010000"})
@example({"listen": "\ud800"})
def test_whatever_the_file_holds_the_answer_is_findings_or_a_config(tree):
    checked = check(json.dumps(tree))
    errors = [each for each in checked.findings if each.severity is Severity.ERROR]
    assert bool(errors) == (checked.loaded is None)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_text_makes_the_check_fail(text):
    checked = check_text(text, folder=FOLDER, env={})
    assert checked.loaded is None
    assert checked.findings


@pytest.mark.parametrize("wrong", ["10.0.0.0/33", "nginx", "127.0.0.1:80", "''", "*"])
def test_a_trusted_proxy_is_an_address_a_network_or_unix(wrong):
    text = f"trusted_proxies: ['{wrong}']\npools: {{m: {{backends: [http://h:1]}}}}\n"
    (found,) = check_text(text, file="gw.yaml", folder=pathlib.Path("/"), env={}).findings
    assert found.path == ("trusted_proxies", 0)
    assert found.message.endswith("must be an address, a network such as 10.0.0.0/8, or unix")


def test_a_network_that_is_written_by_one_of_its_addresses_is_told_as_it_must_be():
    found = the_finding("trusted_proxies: [10.0.0.1/8]\n" + POOL)
    assert found.message == (
        "trusted_proxies[0]: 10.0.0.1/8 is no network; write 10.0.0.0/8, or 10.0.0.1 for that address"
    )
