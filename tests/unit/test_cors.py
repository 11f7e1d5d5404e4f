"""Which origins may be configured."""

import pytest
from pydantic import ValidationError

from gateway.config.limits import CorsConfig
from gateway.ingress.cors import Cors


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example",
        "http://localhost:5173",
        "http://[::1]:3000",
        "vscode-webview://a1b2",
        "*",
    ],
)
def test_origins_as_browsers_send_them_are_taken(origin):
    assert CorsConfig(origins=(origin,)).origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example/", "https://App.example", "app.example", "null", "", "https://*.example",
        "https://app.example:443", "http://app.example:80", "https://a.example, https://b.example",
        "https://app.example\r\nx: y",
    ],
)  # fmt: skip
def test_what_no_browser_sends_is_an_error_of_the_file(origin):
    with pytest.raises(ValidationError):
        CorsConfig(origins=(origin,))


def test_without_an_origin_there_is_none_of_it():
    assert Cors.of(CorsConfig()) is None
