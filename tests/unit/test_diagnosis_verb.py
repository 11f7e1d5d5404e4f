import io
import json
from pathlib import Path

import pytest

from gateway.cli.console import Exit, VerbError
from gateway.cli.diagnose import diagnose
from gateway.vllmlog.lines import MAX_CHARS

LOGS = Path(__file__).parents[1] / "data" / "logs"


def test_people_get_the_cause_first_the_proof_and_flags_to_copy(capsys):
    diagnose(str(LOGS / "kv_small.txt"))
    lines = capsys.readouterr().out.splitlines()
    assert "about 896 tokens fit" in lines[0]
    assert any(line.startswith("  --max-model-len 896 ") for line in lines)
    assert any(line.startswith("  remove --num-gpu-blocks-override ") for line in lines)
    assert "A restart alone does not help." in lines
    assert any("To serve at least one request" in line for line in lines)


def test_programs_get_json(capsys):
    diagnose(str(LOGS / "kv_small.txt"), output="json")
    assert json.loads(capsys.readouterr().out)["remedies"][0]["value"] == "896"


def test_a_healthy_log_has_nothing_to_do(capsys):
    diagnose(str(LOGS / "healthy.txt"))
    assert "What to do" not in capsys.readouterr().out


def test_a_log_is_read_from_standard_input(monkeypatch, capsys):
    given = io.TextIOWrapper(io.BytesIO((LOGS / "bad_flag.txt").read_bytes()))
    monkeypatch.setattr("sys.stdin", given)
    diagnose("-", output="json")
    assert json.loads(capsys.readouterr().out)["class"] == "bad_cli_argument"


def test_the_exit_code_helps_when_the_log_says_nothing(tmp_path, capsys):
    (tmp_path / "x").write_text("")
    diagnose(str(tmp_path / "x"), output="json", exited=-11)
    assert json.loads(capsys.readouterr().out)["class"] == "engine_dead_runtime"


def test_of_a_long_log_the_end_is_read_and_its_lines_are_numbered_from_the_beginning(
    tmp_path, capsys
):
    filler, file = b"INFO 11-21 10:09:36 [x.py:1] " + b"." * 70 + b"\n", tmp_path / "long"
    before = 5 * MAX_CHARS // len(filler)
    failed = (LOGS / "kv_small.txt").read_bytes()
    file.write_bytes(filler * before + failed)
    diagnose(str(file), output="json")
    told = json.loads(capsys.readouterr().out)
    assert told["evidence"] in failed.decode().split("\n")[told["line"] - before - 1]


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(VerbError, match="does not exist") as caught:
        diagnose(str(tmp_path / "none"))
    assert caught.value.code is Exit.NOT_FOUND
    assert caught.value.hint


def test_a_folder_is_no_log(tmp_path):
    with pytest.raises(VerbError, match="cannot be read"):
        diagnose(str(tmp_path))
