"""The package as people get it: a wheel and a source archive, installed into fresh environments of the system's Python."""

import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.request
import zipfile

import pytest

from tests.e2e.support import running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHARED = ("configs", "deploy/grafana", "deploy/nginx", "deploy/prometheus", "deploy/systemd")
VENV = "python3 -m venv venv"


def ran(*words, cwd=None, env=None):
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def system_python():
    """The system's own Python where it can make environments; Debian 12 has 3.11.2."""
    system = "/usr/bin/python3"
    asks = "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"
    works = pathlib.Path(system).exists() and not subprocess.run([system, "-c", asks]).returncode
    return system if works else sys.executable


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, made from the source archive, and that archive."""
    folder = tmp_path_factory.mktemp("built")
    ran(system_python(), "-m", "venv", folder / "builder")
    python = folder / "builder/bin/python"
    ran(python, "-m", "pip", "install", "--quiet", "build>=1.3")
    ran(python, "-m", "build", "--outdir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    (archive,) = (folder / "dist").glob("*.tar.gz")
    return wheel, archive


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder of an environment that has the wheel and what it needs, and nothing else."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    ran(system_python(), "-m", "venv", venv)
    ran(venv / "bin/python", "-m", "pip", "install", "--quiet", built[0])
    return venv


def files_of(folder):
    """Each file of a folder of the source, by its path from the root."""
    within = [each for each in (ROOT / folder).rglob("*") if each.is_file()]
    return {
        each.relative_to(ROOT).as_posix(): each.read_bytes()
        for each in within
        if "__pycache__" not in each.parts
    }


def test_the_wheel_has_the_program_its_page_and_the_files_to_copy_and_nothing_else(built):
    expected = files_of("gateway")
    assert "gateway/dashboard/vendor/uplot.js" in expected
    with zipfile.ZipFile(built[0]) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist()}
    shared = {}
    for name in list(found):
        if ".dist-info/" in name:
            del found[name]
        elif (place := "/data/share/vllm-gateway/") in name:
            shared[name.partition(place)[2]] = found.pop(name)
    assert found == expected
    assert shared == {name: text for folder in SHARED for name, text in files_of(folder).items()}


def test_files_that_messages_name_are_in_the_wheel():
    named = {
        found
        for each in (ROOT / "gateway").rglob("*.py")
        for found in re.findall(r"deploy/(?:nginx|systemd|prometheus|grafana)/[\w@.-]+\w", each.read_text())
    }  # fmt: skip
    assert {"deploy/nginx/gateway.conf", "deploy/systemd/49-vllm-gateway.rules"} <= named
    assert named <= {name for folder in SHARED for name in files_of(folder)}


@pytest.fixture
def source(built, tmp_path):
    """The folder of the unpacked source archive."""
    subprocess.run(["tar", "-xf", built[1], "-C", tmp_path], check=True)
    (folder,) = tmp_path.iterdir()
    return folder


def test_the_source_archive_installs_with_the_commands_of_the_readme(source):
    block = re.search(rf"^    {re.escape(VENV)}.*?pip install \..*?$", README, re.M | re.S)[0]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUAL")}
    path = f"{pathlib.Path(system_python()).parent}:/usr/bin:/bin"
    ran("bash", "-ec", block, cwd=source, env=kept | {"PATH": path})
    assert ran(source / "venv/bin/vllm-gateway", "--version").startswith("vllm-gateway ")
    assert (source / "venv/share/vllm-gateway/deploy/nginx/gateway.conf").exists()


def test_the_installed_program_checks_the_settings_of_the_readme(installed, tmp_path):
    settings = re.search(r"```yaml\n(# gateway.yaml\n.*?)```", README, re.S)[1]
    (tmp_path / "gateway.yaml").write_text(settings)
    program, env = installed / "bin/vllm-gateway", {"VLLM_KEY": "k", "PATH": "/usr/bin:/bin"}
    ran(program, "keys", "create", "me", "-c", "gateway.yaml", cwd=tmp_path, env=env)
    assert "0 errors" in ran(program, "check", "gateway.yaml", cwd=tmp_path, env=env)


def fetched(url, key="", body=None):
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as reply:
        return reply.read().decode()


def answers(command, log, cwd=None):
    """Start a demo, ask for an answer, its dashboard, and each file that this begins with; end it."""
    with running([*map(str, command)], log=log, env={"PYTHONUNBUFFERED": "1"}, cwd=cwd):
        wait_until(lambda: "chat.completions.create({" in log.read_text(), 240, "the demo is ready")
        printed = log.read_text()
        url, key = (re.search(rf"{what} +(\S+)", printed)[1] for what in ("base URL", "API key"))
        hello = {"model": "llama3-1b", "messages": [{"role": "user", "content": "hi"}]}
        assert '"choices"' in fetched(f"{url}/chat/completions", key, hello)
        page = re.search(r"dashboard +(\S+)", printed)[1].rstrip("/")
        links = re.findall(r'(?:src|href)="/?([^"#:]+)"', fetched(page + "/"))
        assert "main.js" in " ".join(links)
        for link in links:
            assert fetched(f"{page}/{link}")


def test_the_installed_demo_answers_and_has_its_dashboard(installed, tmp_path):
    flags = ("demo", "--port", "0", "--admin-port", "0")
    answers([installed / "bin/vllm-gateway", *flags], tmp_path / "demo.log")


def test_make_demo_needs_no_development_tools(source, tmp_path):
    python = f"PYTHON={system_python()}"
    answers(["make", "demo", python, "DEMO=--port 0 --admin-port 0"], tmp_path / "log", cwd=source)
    listed = json.loads(ran(source / ".venv/bin/python", "-m", "pip", "list", "--format", "json"))
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & {each["name"] for each in listed}
