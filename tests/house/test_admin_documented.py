from pathlib import Path

from gateway.admin.reference import reference

PAGE = Path(__file__).parents[2] / "deploy" / "ADMIN_API.md"


def test_the_page_of_the_admin_api_is_what_the_table_generates():
    assert PAGE.read_text() == reference(), (
        "run: python -m gateway.admin.reference > deploy/ADMIN_API.md"
    )
