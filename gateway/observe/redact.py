"""Keep out of the log what looks like a credential, and the words of exceptions.

The access log needs none of this: its fields are an allow-list. This guards the free text of event
lines, where a key or a prompt could slip in through an exception.
"""

from __future__ import annotations

import re
import traceback
from typing import Final

from gateway.core.errors import ConfigError, GatewayError

_FRAMES: Final = 20  # of one traceback
_CHAIN: Final = 5  # exceptions that led to one another

# What stands between a name and its value: a sign, or the key `value` in an object with the key `name`.
_SIGN: Final = r"\\*['\"]?(?:\s*[=:]|,?\s+\\*['\"]?value\\*['\"]?\s*:)\s*(?:b(?=['\"]))?"
_IS: Final = rf"({_SIGN})"
# The shell's variable PWD is a folder; `UID=x;PWD=y` is not.
_FOLDER: Final = rf"(?-i:(?<![A-Za-z0-9_;])PWD{_SIGN}\\*['\"]?/)"
# An underscore separates words here: HF_TOKEN is a token, and a tokenizer is none. PGPASSWORD needs no underscore.
_NAME: Final = (
    r"((?<![a-z0-9])(?:access|api|auth|client|private|secret)[-_]?keys?"
    r"|(?<=[?&])key|(?-i:(?<=[A-Z]_)(?:KEY|PASS))"
    r"|(?<![a-z0-9])(?:access|auth|client|refresh)?(?:secret|credentials?|authorization|cookie|(token))"
    rf"|password|passwd|passphrase|(?<!old)(?!{_FOLDER})pwd)"
)
# A value stands in quotes (escaped ones, within JSON), in brackets, or alone.
_VALUE: Final = (
    r"(?:(?P<quote>\\*[\"'])(?:(?!(?P=quote))(?:\\.|.))+(?:(?P=quote)|$)|(?P<opens>\[|\w+\()[^\])\n]*"
    r"|(?!(?:null|none|true|false|bearer|basic)\b)[^\s\"',;}\\]+)"
)
_BLOTTED: Final = r"\g<quote>\g<opens>***\g<quote>"

_PATTERNS: Final = tuple(
    (re.compile(pattern, re.IGNORECASE | re.MULTILINE), replacement)
    for pattern, replacement in (
        # Our own keys: the id is public and says which key it was.
        (r"\bgw_([a-z0-9]{1,32})_[a-z0-9_-]+", r"gw_\1_***"),
        (r"\b(?:sk|hf|pk|rk|ghp|glpat|nvapi)[-_][a-z0-9_-]{8,}", "***"),
        (r"\beyJ[a-z0-9_-]{8,1024}\.[a-z0-9_-]+(?:\.[a-z0-9_-]*)?", "***"),  # a JWT
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.)*?(?:-----END|\Z)", "***"),
        (r"\b(bearer|basic)\s+[^\s\"',;]+", r"\1 ***"),
        # A header: a scheme of its own and several cookies are parts of its value.
        (r"\b((?:authorization|cookie)[ \t]*:[ \t]*)[^\r\n\"'\\]+", r"\1***"),
        (_NAME + _IS + r"(?(2)(?![\d.]+(?:[\s,;)}\]]|$)))" + _VALUE, r"\1\3" + _BLOTTED),
        (
            r"(--[\w-]{0,40}(?:key|token|password|passwd|passphrase|secret)['\"]?[\s,]+)(?!-)"
            + _VALUE,
            r"\1" + _BLOTTED,
        ),
        (r"\b([a-z][a-z0-9+.-]{0,20}://)[^/\s\"']*@", r"\1***@"),
        # asyncio shows a failed task with its exception, words and all.
        (r"\bexception=(\w+)\(.*", r"exception=\1(***)"),
    )
)

# Exceptions whose words come from the system, the interpreter or this project, never from a body.
_TELLING: Final = (
    OSError,
    ImportError,
    AttributeError,
    NameError,
    TypeError,
    GatewayError,
    ConfigError,
)


def redact(text: str) -> str:
    """Return the text with everything that looks like a credential blotted out."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def safe_traceback(error: BaseException, depth: int = 0) -> str:
    """Return where an exception came from: frames without locals, words only where they are safe.

    A ValueError may quote a prompt, so its words are left out; its type and place stay.
    """
    lines: list[str] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and depth < _CHAIN:
        lines += [safe_traceback(cause, depth + 1), "which led to:"]
    lines += [frame.rstrip() for frame in traceback.format_tb(error.__traceback__, limit=-_FRAMES)]
    name = type(error).__qualname__
    if isinstance(error, BaseExceptionGroup):
        lines.append(f"{name} of {len(error.exceptions)}:")
        if depth < _CHAIN:
            lines += [safe_traceback(each, depth + 1) for each in error.exceptions[:_CHAIN]]
    elif isinstance(error, _TELLING):
        lines.append(f"{name}: {redact(str(error))[:500]}")
    else:
        lines.append(f"{name} (its words are withheld, they may quote a request)")
    return "\n".join(lines)
