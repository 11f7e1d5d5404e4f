"""The units that we ship are units, and as strict as they say: systemd says so."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

UNITS = pathlib.Path(__file__).parents[2] / "deploy" / "systemd"


def analyze(*words):
    """Run systemd-analyze; where it is not installed the test is skipped, but not in CI, which installs it."""
    program = shutil.which("systemd-analyze")
    if program is None:
        if "CI" in os.environ:
            pytest.fail("systemd-analyze is not installed, and .ci/run should have done that")
        pytest.skip("systemd-analyze is not installed (Debian's package systemd)")
    return subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=60, check=False
    )


def verify(folder, text, name):
    """Return what systemd-analyze says of a unit whose program exists; a socket needs its service beside it."""
    program = folder / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    beside = (UNITS / "vllm-gateway.service").read_text()
    for each, unit in {"vllm-gateway.service": beside, name: text}.items():
        (folder / each).write_text(re.sub(r"(?m)^(ExecStart=)\S+", rf"\g<1>{program}", unit))
    ran = analyze("verify", "--man=no", "--recursive-errors=no", str(folder / name))
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", ["vllm-gateway.service", "vllm-gateway.socket", "vllm@.service"])
def test_units_are_without_fault(tmp_path, name):
    instance = name.replace("@", "@1")
    assert verify(tmp_path, (UNITS / name).read_text(), instance) == (0, "")


def test_a_fault_would_be_seen(tmp_path):
    text = (UNITS / "vllm-gateway.service").read_text()
    _, said = verify(tmp_path, text.replace("KillMode=process", "KillMode=never"), "x.service")
    assert "kill mode" in said


@pytest.mark.parametrize("name", ["vllm-gateway.service", "vllm@.service"])
def test_the_exposure_of_a_unit_is_at_most_2_5(name):
    ran = analyze("security", "--offline=yes", "--threshold=25", "--no-pager", str(UNITS / name))
    if "unrecognized option" in ran.stderr:
        pytest.skip("this systemd-analyze is older than 250")
    assert ran.returncode == 0, ran.stdout[-300:] + ran.stderr
    assert "Overall exposure level" in ran.stdout
