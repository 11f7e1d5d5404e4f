"""The report tells what the tests did, not what they should."""

from tests.faults.catalogue import Fault, node
from tests.faults.report import FAILED, NONE, NOT_RUN, PASSED, outcomes, table, verdict

TWO = Fault(1, "a | b", "it breaks", "it holds", ("faults/test_a::test_x", "faults/test_a::test_y"))
LEFT_OUT = Fault(2, "c", "d", "e", missing="why")
X, Y = (node(test) for test in TWO.tests)


def test_a_fault_passes_where_all_of_its_tests_do():
    assert verdict(TWO, {X: PASSED, Y: PASSED}) == PASSED
    assert verdict(TWO, {X: PASSED, Y: FAILED}) == FAILED
    assert verdict(TWO, {X: PASSED}) == NOT_RUN
    assert verdict(LEFT_OUT, {}) == NONE


def test_one_parameter_that_fails_fails_its_test(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite>'
        '<testcase classname="tests.faults.test_a" name="test_x[1]"/>'
        '<testcase classname="tests.faults.test_a" name="test_x[2]"><failure/></testcase>'
        '<testcase classname="tests.faults.test_a" name="test_y[1]"/>'
        '<testcase classname="tests.faults.test_a" name="test_z"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )  # fmt: skip
    file = "tests/faults/test_a.py"
    assert outcomes(path) == {
        f"{file}::test_x": FAILED,
        f"{file}::test_y": PASSED,
        f"{file}::test_z": NOT_RUN,
    }


def test_the_table_has_a_row_for_each_with_what_was_measured():
    text = table([TWO, LEFT_OUT], {X: PASSED, Y: PASSED}, {Y: ["3 ms"]})
    assert "1 of 2 pass, 0 fail, 0 were not run, 1 have no test." in text
    assert "| 1 | a / b | it breaks | it holds | passed | 3 ms |" in text
    assert "| 2 | c | d | e | none: why | - |  |" in text
