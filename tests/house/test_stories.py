"""A story that is defined inside a test is also run."""

import ast
import pathlib

TESTS = pathlib.Path(__file__).parents[1]


def unrun(source):
    """Return the stories inside tests that nothing calls or names."""
    found = []
    for test in ast.parse(source).body:
        if isinstance(test, ast.FunctionDef):
            named = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
            found += [
                f"{test.name}, line {each.lineno}"
                for each in ast.walk(test)
                if isinstance(each, ast.AsyncFunctionDef)
                and each.name not in named
                and any(ast.unparse(mark).startswith("story") for mark in each.decorator_list)
            ]
    return found


def test_each_story_is_run():
    stories = [path for path in TESTS.rglob("test_*.py") if "story" in path.read_text()]
    assert len(stories) > 50
    assert {path.name: lost for path in stories if (lost := unrun(path.read_text()))} == {}


def test_one_that_is_not_run_is_found():
    story = "def test_it():\n    @story\n    async def check():\n        assert False\n"
    assert unrun(story) == ["test_it, line 3"]
    assert unrun(f"{story}    check()\n") == []
