"""The simulator's tokenizer, chat template and vocabulary; small rules, so that tests can count.

* Text: one token per 4 bytes of UTF-8, the last one may be shorter: `ceil(bytes / 4)` tokens.
* A completions prompt given as text costs 1 more (the begin-of-text token).
* A chat costs, per message, 3 tokens (start, role, end) plus its text, and 2 for the reply's header
  (none with `add_generation_prompt: false`). Every image, audio or other part costs 64 tokens,
  whose ids follow from its content: two pictures share no block of the prefix cache.
  Tools cost 3 tokens plus their JSON, compact.
* Replies are made of 4-byte words, so N tokens of reply are 4 N bytes, and counting the reply again
  gives N.

Ids: 0..255 are special or unknown (they have no text), others hold their own bytes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any, Final

BEGIN: Final = 0
START: Final = 1
END: Final = 2
ROLES: Final = {"system": 10, "developer": 10, "user": 11, "assistant": 12, "tool": 13}
OTHER_ROLE: Final = 14
TOOLS: Final = 15
MEDIA: Final = 16  # the first of many
TOKEN_BYTES: Final = 4
_FIRST_TEXT_ID: Final = 256  # 0x01 before the bytes keeps leading zeros apart

_WORDS: Final = (
    "the sea sun sky fog dew ice rye oak elm ash bee owl fox cat dog hen cow pig ant bay inn pub "
    "map key box cup pot pan jar lid mat bed rug ink pen log axe saw nut bun pie tea jam egg ham "
    "one two six ten and but for nor yet all few any who how why now "
)


def tokenize(text: str) -> list[int]:
    """Turn text into token ids; `detokenize` gives the text back."""
    data = text.encode("utf-8", "surrogatepass")
    return [
        int.from_bytes(b"\x01" + data[i : i + TOKEN_BYTES], "big")
        for i in range(0, len(data), TOKEN_BYTES)
    ]


def detokenize(ids: Sequence[int]) -> str:
    """Turn token ids into text; special and unknown ids have none."""
    parts = (i.to_bytes((i.bit_length() + 7) // 8, "big")[1:] for i in ids if i >= _FIRST_TEXT_ID)
    return b"".join(parts).decode("utf-8", "replace")


def render_chat(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Any] = (),
    *,
    open_reply: bool = True,
    goes_on: bool = False,
    effort: str | None = None,
) -> list[int]:
    """Apply the chat template: messages (and tools) to token ids; with `goes_on` the last one is not ended."""
    ids: list[int] = []
    if effort is not None:
        told = "do not think at all" if effort == "none" else f"effort {effort}"
        ids += [START, ROLES["system"], *tokenize(told), END]
    if tools:
        ids += [START, TOOLS, *tokenize(json.dumps(tools, separators=(",", ":"))), END]
    for message in messages:
        role = ROLES.get(str(message.get("role")), OTHER_ROLE)
        ids += [START, role, *_content_ids(message), END]
    if goes_on:
        return ids[:-1]
    return [*ids, START, ROLES["assistant"]] if open_reply else ids


def begun_in(ids: Sequence[int]) -> int:
    """Return how many tokens of a reply end a prompt that is given as ids, behind the header of the reply."""
    header = (START, ROLES["assistant"])
    ends = range(len(ids), 1, -1)
    return next((len(ids) - end for end in ends if tuple(ids[end - 2 : end]) == header), 0)


def _content_ids(message: dict[str, Any]) -> list[int]:
    content = message.get("content")
    ids: list[int] = []
    if isinstance(content, str):
        ids += tokenize(content)
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else None
        ids += tokenize(text) if isinstance(text, str) else _media_ids(part)
    if calls := message.get("tool_calls"):
        ids += tokenize(json.dumps(calls, separators=(",", ":")))
    return ids


def _media_ids(part: Any) -> list[int]:
    digest = hashlib.sha512(json.dumps(part).encode()).digest()
    return [MEDIA + byte % (_FIRST_TEXT_ID - MEDIA) for byte in digest]


def reply_seed(prompt: Sequence[int], adapter: str | None, choice: int) -> int:
    """Make the seed of a reply: equal prompts get equal replies, on every machine.

    A prompt that ends with the beginning of a reply gets the rest of it.
    """
    return _after(zlib.crc32(f"{adapter or ''}/{choice}".encode()), prompt)


def reply_words(seed: int, count: int) -> tuple[str, ...]:
    """Return the first words of the reply with that seed, each of 4 bytes; a word follows from all before."""
    words = []
    for _ in range(count):
        start = zlib.crc32(b"next", seed) % (len(_WORDS) // TOKEN_BYTES) * TOKEN_BYTES
        word = _WORDS[start : start + TOKEN_BYTES]
        words.append(word)
        seed = _after(seed, tokenize(word))
    return tuple(words)


def _after(seed: int, ids: Sequence[int]) -> int:
    return zlib.crc32(b"".join(i.to_bytes(8, "big") for i in ids), seed)
