"""For tests that talk to programs which are killed under them."""

import pathlib

import pytest

from tests.e2e.engines import engines_in

HERE = pathlib.Path(__file__).parent
# Files that start real vLLM servers. Two of them at once would be too much for two cores.
ENGINES = frozenset(
    {
        *("test_adapters_real", "test_control_real", "test_fit_real", "test_heals_real"),
        *("test_launch_real", "test_lax_types", "test_prefix_real", "test_resume_moved_real"),
        *("test_resume_real", "test_resume_reasoning_real", "test_service_managers"),
        *("test_token_agreement", "test_traces_real", "test_vllm", "test_vllm_reads"),
    }
)


@pytest.hookimpl(trylast=True)  # after the order was shuffled
def pytest_collection_modifyitems(items):
    """One process tests all engines, from the beginning on; another one does the rest meanwhile.

    Sockets to a server that a test killed are closed by the garbage collector, with a warning.
    """
    for item in items:
        if HERE in item.path.parents:
            name = item.path.stem
            item.add_marker(pytest.mark.xdist_group("engines" if name in ENGINES else name))
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )
    items.sort(key=lambda item: item.path.stem not in ENGINES)


@pytest.fixture(scope="session")
def shared_engines(tmp_path_factory):
    """Real vLLM servers, of which tests with the same flags get the same."""
    with engines_in(tmp_path_factory.mktemp("engines")) as found:
        yield found
