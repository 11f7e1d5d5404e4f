"""The verb `plan`: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

from gateway.cli.console import Exit, VerbError, print_failure
from gateway.cli.plan import plan
from tests import modelconfigs as models
from tests.unit.test_modelfolder import safetensors

EIGHT_B = ["--parameters", "8B", "--layers", "36", "--heads", "32", "--kv-heads", "8", "--head-dim", "128"]  # fmt: skip


@pytest.fixture
def run(capsys):
    """Run the verb with a command line; return the exit code, stdout and stderr."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(plan)

    def run(*words):
        code = 0
        try:
            app(args=[str(word) for word in words], standalone_mode=False)
        except VerbError as error:
            code = int(print_failure(error))
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(models.QWEN3_06B))
    safetensors(tmp_path / "model.safetensors", {"model.embed_tokens.weight": ("BF16", 1000)})
    return tmp_path


def test_a_model_that_fits_is_told_with_its_command_line(run, folder):
    code, out, err = run(folder, "--gpu-memory", "24GiB")
    assert (code, err) == (0, "")
    assert out.startswith(f"● FITS  {folder} with 40,960 tokens\n")
    assert "112.0 KiB" in out
    assert out.endswith(
        f"vllm serve {folder} --max-model-len 40960 --gpu-memory-utilization 0.92\n"
    )


def test_what_is_estimated_is_marked_and_says_what_it_rests_on(run, folder):
    _, out, _ = run(folder, "--gpu-memory", "24GiB")
    marked = [line for line in out.splitlines() if " * " in line]
    assert [line.split(" *")[0] for line in marked] == [
        "activations",
        "CUDA graphs",
        "CUDA runtime",
    ]
    assert all("estimated: " in line for line in marked)
    assert "the estimates may be off by 1.00 GiB" in out


def test_a_model_that_does_not_fit_is_told_with_what_would(run):
    code, out, _ = run(*EIGHT_B, "--gpu-memory", "24GiB")
    assert code == 0  # an answer was given
    assert out.startswith("○ DOES NOT FIT  MODEL with 131,072 tokens\n")
    assert "What would fit" in out
    assert "--tensor-parallel-size 2" in out
    assert "The longest that fits is" in out


def test_a_model_that_nothing_makes_fit_is_told_so(run):
    _, out, _ = run(*EIGHT_B, "--gpu-memory", "1GiB")
    assert "nothing is left for the KV cache" in out
    assert "No single change makes it fit" in out
    assert "vllm serve" not in out


def test_flags_that_vllm_refuses_are_told(run, folder):
    code, out, _ = run(folder, "--gpu-memory", "24GiB", "--tp", "3")
    assert code == 0
    assert out.startswith("○ CANNOT START")
    assert "16 attention heads cannot be divided evenly among 3 GPUs" in out


def test_windows_and_states_have_lines_of_their_own(run, tmp_path):
    for config, line in (
        (models.GEMMA_2_9B, "beyond the sliding window  168.0 KiB"),
        (models.JAMBA_V01, "state of a request"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        safetensors(tmp_path / "model.safetensors", {"model.norm.weight": ("BF16", 1)})
        assert line in run(tmp_path, "--gpu-memory", "80GiB")[1]


def test_what_is_not_counted_is_said_of_a_model_with_images(run, folder):
    assert "Not counted" not in run(folder, "--gpu-memory", "80GiB")[1]
    (folder / "config.json").write_text(json.dumps(models.GEMMA_3_4B))
    assert (
        "Not counted: at start vLLM tries the largest images"
        in (run(folder, "--gpu-memory", "80GiB")[1])
    )


def test_json_has_every_number_of_the_answer(run, folder):
    code, out, _ = run(folder, "--gpu-memory", "24GiB", "--max-model-len", "auto", "-o", "json")
    answer = json.loads(out)
    assert code == 0
    assert answer["verdict"] == "fits"
    assert answer["kv_bytes_per_token"] == 112 * 1024
    assert answer["max_model_len"] == answer["longest_context_tokens"] == 40960
    assert answer["weights_total_bytes"] == answer["weights_bytes"] == 2000
    assert answer["concurrency"] == pytest.approx(answer["kv_cache_tokens"] / 40960, abs=0.01)
    assert answer["command"][:3] == ["vllm", "serve", str(folder)]
    assert answer["ways"] == []
    assert {each["what"] for each in answer["estimates"]} > {"activations"}


def test_json_tells_each_way_with_its_flags(run):
    _, out, _ = run(*EIGHT_B, "--gpu-memory", "24GiB", "-o", "json")
    answer = json.loads(out)
    assert not answer["fits"]
    ways = {way["flags"][0]: way for way in answer["ways"]}
    assert ways["--tensor-parallel-size"]["flags"][1] == "2"
    assert answer["command"][4] == str(answer["surely_longest_context_tokens"])


def test_a_command_line_is_quoted_for_a_shell(run, folder):
    moved = folder / "my model"
    moved.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).rename(moved / file)
    _, out, _ = run(moved, "--gpu-memory", "24GiB")
    assert f"vllm serve '{moved}' --max" in out


def test_the_kv_cache_alone_can_be_planned(run, folder):
    _, out, _ = run(folder, "--kv-cache-memory-bytes", "4GiB", "-o", "json")
    answer = json.loads(out)
    assert answer["kv_memory_bytes"] == 4 << 30
    assert answer["kv_cache_tokens"] == (4 << 30) // (112 * 1024) // 16 * 16


def test_lora_and_bits_of_weights_count(run):
    _, out, _ = run(*EIGHT_B, "--gpu-memory", "80GB", "--max-loras", "4", "--weight-bits", "8", "-o", "json")  # fmt: skip
    answer = json.loads(out)
    assert answer["lora_bytes"] > 0
    assert answer["weights_total_bytes"] == 8 * 10**9
    assert "--enable-lora" in answer["command"]


def test_a_number_of_parameters_may_be_written_in_small_letters(run):
    capital, small = (
        run(
            *["8b" if each == "8B" and letter else each for each in EIGHT_B],
            "--gpu-memory",
            "24GiB",
        )
        for letter in (False, True)
    )
    assert capital == small
    assert capital[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], Exit.USAGE, "these are needed: --parameters, --layers, --kv-heads, --head-dim"),
        (["--parameters", "8B", "--layers", "2"], Exit.USAGE, "needed: --kv-heads, --head-dim"),
        ([*EIGHT_B[2:], "--parameters", "8"], Exit.USAGE, "--parameters: 8 is not a number such"),
        (EIGHT_B, Exit.USAGE, "--gpu-memory 24GiB"),
        ([*EIGHT_B, "--gpu-memory", "24"], Exit.USAGE, "24 has no unit"),
        (
            [*EIGHT_B, "--gpu-memory", "9GiB", "--dtype", "x"],
            Exit.USAGE,
            "--dtype: x is not one of",
        ),
        ([*EIGHT_B, "--gpu-memory", "9GiB", "--max-model-len", "x"], Exit.USAGE, "--max-model-len"),
        ([*EIGHT_B, "--context", "far", "--gpu-memory", "9GiB"], Exit.USAGE, "--context: far"),
        ([*EIGHT_B, "--kv-cache-memory-bytes", "manyB"], Exit.USAGE, "manyB is not a size"),
        (["/absent", "--gpu-memory", "9GiB"], Exit.NOT_FOUND, "/absent is not a folder"),
    ],
)
def test_what_is_missing_or_wrong_is_said_with_what_to_do(run, words, code, said):
    found, out, err = run(*words)
    assert (found, out) == (code, "")
    assert said in err


def test_looking_does_not_import_the_server():
    ran = subprocess.run(
        [sys.executable, "-c", "import sys, gateway.cli.plan; print('pydantic' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == "False\n"
