"""Published advisories of vLLM, by the versions that have them. Pure.

Source: the advisories of the vLLM project on GitHub, those that hurt others than their sender. What the gateway
refuses in front of any version is in `vllm-gateway config policy`.
"""

from __future__ import annotations

import re
from typing import Final

# The first version that has it, as far as that is known; the first that does not; the advisory; what it is.
ADVISORIES: Final = (
    ((0, 6, 5), (0, 8, 5), "CVE-2025-32444", "code execution through the Mooncake transfer"),
    ((0, 6, 5), (0, 8, 5), "CVE-2025-47277", "code execution through the PyNccl pipe"),
    ((0, 6, 3), (0, 9, 0), "GHSA-j828-28rj-hfhp", "patterns that take for ever"),
    ((0, 5, 2), (0, 10, 0), "CVE-2025-30165", "code execution between the nodes of one engine"),
    ((0,), (0, 10, 1, 1), "CVE-2025-48956", "a huge header uses up the memory"),
    ((0, 10), (0, 10, 1, 1), "CVE-2025-9141", "a tool parser evaluates what the model writes"),
    ((0,), (0, 11, 0), "CVE-2025-59425", "the API key can be guessed by timing"),
    ((0, 10, 2), (0, 11, 1), "CVE-2025-62164", "prompt embeddings corrupt memory"),
    ((0,), (0, 11, 1), "CVE-2025-66448", "the configuration of a model executes code"),
    ((0, 6, 4), (0, 12, 0), "CVE-2026-22773", "a tiny image ends the engine"),
    ((0, 10, 2), (0, 13, 0), "CVE-2026-56340", "prompt embeddings corrupt memory, a second way"),
    ((0, 10, 1), (0, 14, 0), "CVE-2026-22807", "a model executes code while it is loaded"),
    ((0, 8, 3), (0, 14, 1), "CVE-2026-22778", "an image tells addresses of memory; a video executes code"),
    ((0, 10, 1), (0, 18, 0), "CVE-2026-27893", "a model executes code although that was forbidden"),
    ((0, 18), (0, 20, 0), "CVE-2026-44223", "penalties end an engine that extracts hidden states"),
    ((0,), (0, 22, 0), "CVE-2026-41523", "the activation function of a model executes code"),
    ((0, 3), (0, 22, 0), "CVE-2026-48746", "the API key is not asked for with a made-up Host header"),
    ((0, 17, 1), (0, 24, 0), "CVE-2026-54234", "an invalid token that was recovered ends the engine"),
    ((0,), (0, 24, 0), "CVE-2026-55574", "a pattern keeps the engine busy for ever"),
    ((0,), (0, 28, 0), "CVE-2026-105753", "images in a certain order end the engine"),
    ((0,), (0, 30, 0), "CVE-2026-105757", "structured output ends the engine"),
    ((0,), (0, 31, 0), "GHSA-6cxc-2vcg-w5qc", "tokens that one request allows hold for another"),
)  # fmt: skip

_UNRELEASED: Final = (0, 1)  # a build from source: its version says nothing


def open_in(version: str) -> list[str]:
    """Return the advisories that a version of vLLM has open, the newest last; nothing of an unknown version."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if found is None:
        return []
    numbers = tuple(int(part) for part in found[1].split("."))
    if numbers[:2] == _UNRELEASED:
        return []
    return [
        f"{name} ({what})" for since, mended, name, what in ADVISORIES if since <= numbers < mended
    ]


def mending(version: str) -> str:
    """Return the version that mends all that a version has open; empty if there is nothing."""
    return ".".join(map(str, ADVISORIES[-1][1])) if open_in(version) else ""
