"""The README and its two pages of detail, done as they are written: their commands, on the README's settings, in front
of simulated servers."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from gateway.sim.server import SimConfig, SimServer
from tests import loopback
from tests.ports import free_port
from tests.stories.served import PROGRAM
from tests.stories.support import story as story_within

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = README + "".join(
    (ROOT / "deploy" / f"{name}.md").read_text() for name in ("GUIDE", "OPERATIONS")
)
VLLM_LOG = ROOT / "tests" / "data" / "logs" / "kv_small.txt"

# What each command does in this story: its exit code, and what it prints among other things.
BEFORE = {
    "vllm-gateway init --from http://10.0.0.11:8000": (0, "gateway.yaml"),
    "vllm-gateway check gateway.yaml --probe": (0, "0 errors"),
    "vllm-gateway check --probe": (0, "0 errors"),
    "vllm-gateway check gateway.yaml --fit": (0, "0 errors"),
    "vllm-gateway config schema": (0, '"pools"'),
    "vllm-gateway config policy": (0, "priority"),
    "vllm-gateway keys create me -c gateway.yaml": (0, "gw_"),
    "keys create ci --limit requests_per_minute=60 --limit tokens_per_day=2M": (0, "gw_"),
    "keys create ci --tier gold": (0, "gw_"),
    "keys effective ID": (0, "tier"),
    "keys rotate": (0, "gw_"),
    "vllm-gateway diagnose vllm.log": (0, "What to do"),
}
WHILE_IT_SERVES = {
    ".venv/bin/vllm-gateway status": (0, "READY"),
    "vllm-gateway status": (0, "qwen3-8b/b2"),
    "vllm-gateway explain REQUEST_ID": (0, "context_length_exceeded"),
    "vllm-gateway requests": (0, "context_length_exceeded"),
    "vllm-gateway route --model gpt-4o --tokens 64k": (0, "context_length_exceeded"),
    "vllm-gateway events": (0, ""),
    "vllm-gateway replicas": (0, ""),
    "vllm-gateway usage --from 2026-11-01 --by tenant -o csv": (0, "tenant"),
    "vllm-gateway adapters list": (0, ""),
    "vllm-gateway remedies list": (0, ""),
    "vllm-gateway restart qwen3-8b/b1 --dry-run": (0, "b1"),
    "vllm-gateway restart POOL/NAME --force": (0, "b1"),
    "vllm-gateway hold --for 30m": (0, "30m"),
    "vllm-gateway quarantine lift": (2, "Usage"),  # it wants to know which
}
HERE = "stories/test_readme.py"
# Those that need more than this story has: the file that runs each, and words of it that do.
ELSEWHERE = {
    "make demo": ("e2e/test_package.py", '["make", "demo"'),
    ".venv/bin/vllm-gateway demo --traffic --fault stall_after:5": (
        "stories/test_demo.py",
        '"--traffic", "--fault", "stall_after:5"',
    ),
    "make test": ("../.ci/run", "make test"),
    "make e2e": ("../.ci/run", "make e2e"),
    "python3 -m venv venv": ("e2e/test_package.py", "python3 -m venv venv"),
    ". venv/bin/activate": ("e2e/test_package.py", "python3 -m venv venv"),  # and what follows it
    "pip install .": ("e2e/test_package.py", r"pip install \."),
    "pip install 'vllm-gateway[redis]'": (HERE, "test_the_extras"),
    "pip install 'vllm-gateway[kvevents]'": (HERE, "test_the_extras"),
    "pip install 'vllm-gateway[oidc]'": (HERE, "test_the_extras"),
    "vllm-gateway serve -c gateway.yaml": (
        HERE,
        '("serve", "-c", "gateway.yaml")',
    ),
    "vllm-gateway serve --workers 4": ("stories/test_workers.py", "workers: 2"),
    "vllm-gateway upgrade": ("stories/served.py", '"upgrade"'),
    "vllm-gateway check FILE --probe": (
        HERE,
        "vllm-gateway check gateway.yaml --probe",
    ),
    "vllm-gateway top": ("stories/test_shown.py", '"top"'),
    "vllm-gateway doctor --through https://api.example.com --key KEY": (
        "e2e/test_nginx.py",
        '"doctor"',
    ),
    "vllm-gateway plan ./Qwen3-8B --gpu-memory 24GiB --tp 2": ("unit/test_plan.py", "--gpu-memory"),
    "keys import": ("unit/test_cli.py", '"import"'),
    "python -m loadtest.simulated": ("unit/test_simulated_study.py", "loadtest.simulated"),
}
# Commands whose output is shown, and is the same each time; test_shown.py compares the others.
SAMPLES = {"vllm-gateway diagnose vllm.log", "vllm-gateway route --model gpt-4o --tokens 64k"}
story = functools.partial(story_within, seconds=150.0)  # many processes start


def commands_of(text: str) -> list[str]:
    """Return the commands of a page, without what is said of them, each once."""
    lines = re.findall(
        r"^    (?=make|pip|python3|\. |vllm-gateway|\.venv)(\S.*?)(?: +#.*)?$", text, re.M
    )
    verbs = r"(?:\.venv/bin/)?vllm-gateway|make|pip|python -m|keys"
    inline = re.findall(rf"`((?:{verbs}) [^`.][^`]*)`", text)
    return [*dict.fromkeys(" ".join(each.split()) for each in (*lines, *inline))]


def settings_of(text: str) -> str:
    """Return the settings that a newcomer copies."""
    return re.search(r"```yaml\n(# gateway.yaml\n.*?)```", text, re.S)[1]


def sample(before: str) -> re.Pattern[str]:
    """Return what the page shows after some words; `[...]` stands for anything."""
    shown = re.search(rf"{re.escape(before)}.*?```\n(.*?)```", README, re.S)[1]
    return re.compile(".*".join(map(re.escape, shown.split("[...]"))))


def test_each_command_of_the_pages_has_who_runs_it():
    assert sorted(commands_of(PAGES)) == sorted([*BEFORE, *WHILE_IT_SERVES, *ELSEWHERE])


@pytest.mark.parametrize("command", [each for each in ELSEWHERE if ELSEWHERE[each][0] != HERE])
def test_what_this_story_does_not_run_is_run_where_it_says(command):
    file, words = ELSEWHERE[command]
    assert words in (ROOT / "tests" / file).read_text()


def test_the_extras_of_the_readme_exist():
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for name in re.findall(r"vllm-gateway\[(\w+)\]", PAGES):
        assert re.search(rf"^{name} = \[", extras, re.M)


@dataclass
class Newcomer:
    """Who follows the README in a folder of their own."""

    folder: Path
    sims: list[SimServer]
    port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    names: dict[str, str] = field(default_factory=dict)

    def own(self, text: str) -> str:
        """Put this machine's addresses, and names that became known, where the README has examples."""
        for example, here in {
            "http://10.0.0.11:8000": self.sims[0].url,
            "http://10.0.0.12:8000": self.sims[1].url,
            "127.0.0.1:8080": f"127.0.0.1:{self.port}",
            "127.0.0.1:9090": f"127.0.0.1:{self.admin_port}",
            "POOL/NAME": "qwen3-8b/b1",
            **self.names,
        }.items():
            text = text.replace(example, here)
        return text

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "VLLM_KEY": "a-key-of-the-backend",
            "GATEWAY_ADMIN_URL": f"http://127.0.0.1:{self.admin_port}",
        }

    async def run(self, command: str, folder: Path | None = None) -> tuple[int, str]:
        """Run a command of the README in a shell; return its exit code and what it printed."""
        line = command.removeprefix(".venv/bin/")
        line = f"vllm-gateway {line}" if line.startswith("keys ") else line
        ran = await asyncio.create_subprocess_shell(
            self.own(line), cwd=folder or self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(30):
            printed, _ = await ran.communicate()
        return ran.returncode, printed.decode()

    async def does(
        self, command: str, expected: tuple[int, str], folder: Path | None = None
    ) -> str:
        code, printed = await self.run(command, folder)
        assert (code, expected[1] in printed) == (expected[0], True), f"{command}\n{printed}"
        return printed


def write_settings(newcomer: Newcomer) -> None:
    """Write the README's settings; the first server can be restarted, and a tier is there."""
    text = newcomer.own(settings_of(README))
    first = newcomer.sims[0].url
    restarted = f'- {{url: "{first}", restart: {{command: ["true"]}}}}'
    assert f"- {first}\n" in text
    text = text.replace(f"- {first}\n", f"{restarted}\n")
    tier = re.search(r"`(tiers: \{gold: .*?)`", PAGES)[1]
    (newcomer.folder / "gateway.yaml").write_text(f"{text}\n{tier}\n")


@pytest.mark.timeout(180)
@story
async def test_the_commands_of_the_readme_do_what_it_says(tmp_path):
    model = SimConfig(model="qwen3-8b", max_model_len=32768)
    secured = SimConfig(model="qwen3-8b", max_model_len=32768, api_key="a-key-of-the-backend")
    async with SimServer(model) as one, SimServer(secured) as other:
        newcomer = Newcomer(tmp_path, [one, other])
        write_settings(newcomer)
        await before_it_runs(newcomer)
        serving = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("serve", "-c", "gateway.yaml"),
            cwd=tmp_path,
            env=newcomer.environment,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            await while_it_serves(newcomer)
        finally:
            serving.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                await serving.wait()
        assert serving.returncode == 0


async def before_it_runs(newcomer: Newcomer) -> None:
    elsewhere = newcomer.folder / "written"
    elsewhere.mkdir()
    newcomer.names["vllm.log"] = str(VLLM_LOG)
    for command, expected in BEFORE.items():
        folder = elsewhere if " init " in command else None
        printed = await newcomer.does(command, expected, folder)
        if command in SAMPLES:
            assert sample(command).fullmatch(printed), printed
        if found := re.search(r"gw_([a-z0-9]{8})_\S+", printed):
            newcomer.names.setdefault("KEY", found[0])
            newcomer.names.update({"keys rotate": f"keys rotate {found[1]}", " ID": f" {found[1]}"})


async def while_it_serves(newcomer: Newcomer) -> None:
    url = f"http://127.0.0.1:{newcomer.port}"
    headers = {"authorization": f"Bearer {newcomer.names['KEY']}"}
    async with loopback.client(base_url=url, headers=headers) as client:
        async with asyncio.timeout(30):
            while not await is_ready(client):
                await asyncio.sleep(0.05)
        hello = {"model": "qwen3-8b", "messages": [{"role": "user", "content": "hello"}]}
        reply = await client.post("/v1/chat/completions", json=hello)
        assert reply.status_code == 200
        refused = await client.post("/v1/chat/completions", json={**hello, "max_tokens": 99_999})
        assert refused.status_code == 400
    newcomer.names["REQUEST_ID"] = refused.headers["x-request-id"]
    for command, expected in WHILE_IT_SERVES.items():
        printed = await newcomer.does(command, expected)
        if command in SAMPLES:
            assert sample(command).fullmatch(printed), printed


async def is_ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx2.TransportError:
        return False
