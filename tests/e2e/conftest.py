"""For tests that talk to programs which are killed under them."""

import pathlib

import pytest

from tests.e2e.engines import engines_in

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Sockets to a server that a test killed are closed by the garbage collector, with a warning.

    Where tests run in two processes, those of real vLLM all run in one: two pairs of engines on two cores are
    so slow that tests of what they do meanwhile say nothing.
    """
    for item in items:
        if HERE in item.path.parents:
            stem = item.path.stem
            runs_vllm = stem.endswith("_real") or stem == "test_vllm"
            item.add_marker(pytest.mark.xdist_group("vllm" if runs_vllm else stem))
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(scope="session")
def shared_engines(tmp_path_factory):
    """Real vLLM servers, of which tests with the same flags get the same."""
    with engines_in(tmp_path_factory.mktemp("engines")) as found:
        yield found
