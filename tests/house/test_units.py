"""The units that we ship are units: systemd says so."""

import pathlib
import re
import shutil
import subprocess

import pytest

UNITS = pathlib.Path(__file__).parents[2] / "deploy" / "systemd"
VERIFY = shutil.which("systemd-analyze")

pytestmark = pytest.mark.skipif(VERIFY is None, reason="systemd-analyze is not installed")


def verify(folder, text, name):
    """Return what systemd-analyze says of a unit whose program exists."""
    program = folder / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = folder / name
    unit.write_text(re.sub(r"(?m)^(ExecStart=)\S+", rf"\g<1>{program}", text))
    ran = subprocess.run(
        [VERIFY, "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", ["vllm-gateway.service", "vllm@.service"])
def test_units_are_without_fault(tmp_path, name):
    instance = name.replace("@", "@1")
    assert verify(tmp_path, (UNITS / name).read_text(), instance) == (0, "")


def test_a_fault_would_be_seen(tmp_path):
    text = (UNITS / "vllm-gateway.service").read_text()
    _, said = verify(tmp_path, text.replace("KillMode=process", "KillMode=never"), "x.service")
    assert "kill mode" in said


def test_what_the_design_rests_on_is_in_them():
    gateway = (UNITS / "vllm-gateway.service").read_text().splitlines()
    assert {"KillMode=process", "OOMPolicy=continue"} <= set(gateway)
    assert "--host 127.0.0.1" in (UNITS / "vllm@.service").read_text()
