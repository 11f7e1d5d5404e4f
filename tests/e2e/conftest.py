"""For tests that talk to programs which are killed under them."""

import pathlib

import pytest

from tests.e2e.engines import engines_in

HERE = pathlib.Path(__file__).parent
ASK_VLLM = ("test_vllm", "test_vllm_reads", "test_lax_types", "test_token_agreement")


def pytest_collection_modifyitems(items):
    """Mark the tests that start real vLLM servers, or ask vLLM's own functions.

    Sockets to a server that a test killed are closed by the garbage collector, with a warning.
    """
    for item in items:
        if HERE in item.path.parents:
            if item.path.stem.endswith("_real") or item.path.stem in ASK_VLLM:
                item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(scope="session")
def shared_engines(tmp_path_factory):
    """Real vLLM servers, of which tests with the same flags get the same."""
    with engines_in(tmp_path_factory.mktemp("engines")) as found:
        yield found
