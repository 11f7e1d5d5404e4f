import json
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.vllmlog.diagnosis import Kind, diagnose
from gateway.vllmlog.milestones import Stage, stage_of
from gateway.vllmlog.search import RULES

LOGS = Path(__file__).parents[1] / "data" / "logs"
REAL = [
    line for file in sorted(LOGS.glob("*.txt")) for line in file.read_text().split("\n") if line
]
NAMES = {each.value for each in Kind}

texts = st.text(max_size=400) | st.binary(max_size=400)
shuffled = st.lists(st.sampled_from(REAL) | st.text(max_size=80), max_size=40)
hints = st.sampled_from(
    sorted({word for rule in RULES for word in rule.pattern.split() if word.isalpha()})
)
nonsense = st.lists(hints | st.integers(-9, 10**9).map(str) | st.text(max_size=5), max_size=60)


@given(texts, st.none() | st.integers(-20, 300))
def test_any_text_has_an_answer(text, exit_code):
    assert diagnose(text, exit_code=exit_code).kind in Kind


@settings(max_examples=60)
@given(shuffled)
def test_lines_of_real_logs_in_any_order_have_an_answer_with_its_proof(lines):
    found = diagnose("\n".join(lines))
    fields = json.loads(json.dumps(found.fields()))
    assert fields["class"] in NAMES
    assert fields["cause"]
    assert found.line == 0 or found.evidence


@given(nonsense, st.sampled_from(["", "ValueError: ", "ERROR 11-21 10:09:36 [core.py:1] "]))
def test_the_words_of_messages_in_any_order_have_an_answer(words, prefix):
    assert diagnose(prefix + " ".join(words)).cause


@given(st.text(max_size=300) | st.sampled_from(REAL))
def test_any_line_is_a_milestone_or_none(line):
    assert stage_of(line) in {None, *Stage}


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(LOGS.glob("*.txt"))), st.lists(st.sampled_from(REAL[:200]), max_size=5)
)
def test_what_an_earlier_start_said_does_not_change_the_answer(file, before):
    alone = diagnose(file.read_bytes())
    # One that says little itself is told by the start before it, as `diagnose` says.
    assume(alone.kind not in (Kind.UNKNOWN, Kind.ENGINE_INIT))
    ended = "\n".join([*before, "INFO:     Application shutdown complete."]) + "\n"
    after = diagnose(ended.encode() + file.read_bytes())
    assert (after.kind, after.remedies) == (alone.kind, alone.remedies)


def test_a_line_that_nests_deeper_than_anybody_reads_is_a_line_like_any_other():
    deep = '{"log":' + "[" * 100_000
    found = diagnose(f"{deep}\nValueError: the cause")
    assert "the cause" in found.cause
    assert stage_of(deep) is None
