"""Large bodies: read by their skim, changed by a splice.

See `wire.scan`. What the decoder reads of a large body is its skim; what it read is completed here
with the sizes of the body itself. The body is never decoded as a whole, and copied only where a
field must differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw, structs

from gateway.core.errors import RequestError
from gateway.core.types import Call, Endpoint, Places
from gateway.wire.objects import fields_of
from gateway.wire.prompts import TOOLS_GROWTH
from gateway.wire.scan import BodyScan
from gateway.wire.small import SMALL_BODY_BYTES
from gateway.wire.tally import Ids

_NO_INTEGER: Final = (b".", b'"', b"t", b"f", b"e", b"E")  # in no list of plain integers


def completed(call: Call, scan: BodyScan) -> Call:
    """Return a call that was read from a skim, with the body and its sizes.

    Token ids are counted exactly. A text's size stays an upper bound: what was left out of several
    prompts is added to the longest.

    Raises:
        RequestError: 400; token ids that are not written as integers, which the scan does not count.
    """
    left_out = len(scan.body) - len(call.body)
    ids, ratio, text_bytes = call.prompt_token_ids, call.longest_ratio, call.text_bytes
    likely_bytes = call.likely_bytes
    if ids is not None:
        field = "prompt" if call.endpoint is Endpoint.COMPLETIONS else "input"
        _check_ids(scan, field)
        ids, ratio = _counted(scan.tally.ids.get(field), ids, ratio)
    if text_bytes is not None:
        text_bytes += left_out + TOOLS_GROWTH * min(left_out, scan.size("tools"))
        if likely_bytes is not None:  # what is cut is mostly media, where there are any
            likely_bytes += left_out
    return structs.replace(
        call,
        body=scan.body,
        fields=None,  # their values are cut
        places=scan.fields,
        prompt_token_ids=ids,
        longest_ratio=ratio,
        text_bytes=text_bytes,
        likely_bytes=likely_bytes,
    )


def _check_ids(scan: BodyScan, field: str) -> None:
    """Refuse token ids in any other form than plain integers."""
    start, end = scan.fields.get(field, (0, 0))
    if any(scan.body.find(sign, start, end) >= 0 for sign in _NO_INTEGER):
        raise RequestError(
            f"`{field}` holds token ids that are not integers; in so large a body they must be.",
            param=field,
            code="invalid_type",
        )


def _counted(found: Ids | None, ids: int, ratio: float) -> tuple[int, float]:
    """Return the token ids of the longest prompt, and its share of all."""
    if found is None or not (found.inner or found.own):
        return ids, ratio
    if found.own:
        return found.own, 1.0
    longest = max(found.inner)
    return longest, longest / (sum(found.inner) or 1)


def fields_at_hand(call: Call) -> dict[str, Raw]:
    """Return the fields of a body; of a large one those whose values are small.

    Raises:
        RequestError, msgspec.DecodeError: see `fields_of`.
    """
    if call.fields is not None:
        return dict(call.fields)
    if call.places is None:
        return fields_of(call.body)
    return {
        name: Raw(bytes(call.body[start:end]))
        for name, (start, end) in call.places.items()
        if end - start <= SMALL_BODY_BYTES
    }


def spliced(body: bytes, places: Places, changes: Mapping[str, Raw]) -> bytes:
    """Return a large body with other values for some fields; it is copied once."""
    whole = memoryview(body)
    parts: list[bytes | memoryview | Raw] = []
    position = 0
    for start, end, name in sorted((*places[name], name) for name in changes if name in places):
        parts += (whole[position:start], changes[name])
        position = end
    last = body.rindex(b"}")
    parts.append(whole[position:last])
    comma = b"," if places else b""
    for name, value in changes.items():
        if name not in places:
            parts += (comma, msgspec.json.encode(name), b":", value)
            comma = b","
    parts.append(whole[last:])
    return b"".join(parts)
