"""What a request is expected to take of an engine, by its prompt and by how long outputs get."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from gateway.core.endpoints import NO_ENGINE, NO_OUTPUT, PAIRED
from gateway.core.types import Call, Caller, Demand, Need, Outcome, RequestRecord
from gateway.wire.vllm import cut_tokens

DEFAULT_OUTPUT_TOKENS: Final = 256  # a chat answer of a few paragraphs; public traces have 150-350

_OK: Final = Outcome.OK  # looked up once: 0.15 us before Python 3.12
_WEIGHT: Final = 0.1  # of the newest output: the mean follows the last twenty or so
_BYTES_PER_TOKEN: Final = 4  # of English text and code
_UNKNOWN_TOKENS: Final = 1024  # of sound in a form
# A character that JSON escapes, as PHP and Python's json write it, has 6 bytes and as many tokens as it has
# in UTF-8: with 2 bytes there up to U+07FF, else 3. How many there are is asked of a few places.
_SHORT_BYTES: Final = 2048  # a prompt of no more is not worth it
_PLACES, _PLACE_BYTES = 4, 256


@dataclass(slots=True)
class _Mean:
    tokens: float
    count: int
    whole: int  # the tokens, rounded up


class Outputs:
    """The mean output length per (model, key), of at most `most` entries, least recently fed first out.

    A key without a mean has the one of its model, and a model without one the default. A new mean begins
    with the value that stood in for it, so that one odd reply says little.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._means: OrderedDict[tuple[str, str | None], _Mean] = OrderedDict()

    def expect(self, model: str, key: str, max_new_tokens: int | None = None) -> int:
        """Return the expected output in tokens, never more than `max_new_tokens`."""
        means = self._means
        mean = means.get((model, key)) or means.get((model, None))
        tokens = DEFAULT_OUTPUT_TOKENS if mean is None else mean.whole
        if max_new_tokens is not None and max_new_tokens < tokens:
            return max_new_tokens
        return tokens

    def ended(self, model: str, key: str, tokens: int) -> None:
        """Learn from an output that came to its own end."""
        for entry in ((model, key), (model, None)):  # the model last: its mean outlives its keys'
            self._learn(entry, tokens)

    def cut(self, model: str, key: str, tokens: int) -> None:
        """Learn from an output that was cut (by its limit, its client, a failure): a lower bound."""
        for entry in ((model, key), (model, None)):
            if tokens > self._mean(*entry):
                self._learn(entry, tokens)

    def _mean(self, model: str, key: str | None) -> float:
        known = self._means.get((model, key)) or self._means.get((model, None))
        return known.tokens if known is not None else DEFAULT_OUTPUT_TOKENS

    def _learn(self, entry: tuple[str, str | None], tokens: int) -> None:
        mean = self._means.get(entry)
        if mean is None:
            mean = self._means[entry] = _Mean(self._mean(*entry), 1, 0)
            if len(self._means) > self._most:
                self._means.popitem(last=False)
        self._means.move_to_end(entry)
        mean.count += 1
        mean.tokens += (tokens - mean.tokens) * max(_WEIGHT, 1 / mean.count)
        mean.whole = math.ceil(mean.tokens)


class Needs:
    """Estimates what requests need, and learns from those that ended."""

    def __init__(self) -> None:
        self.outputs = Outputs()

    def of(
        self, call: Call, demand: Demand, caller: Caller, window_tokens: int | None = None
    ) -> Need:
        """Estimate what a request will take of a KV cache; the output as learnt of model and key.

        No sequence is expected to be longer than the window, which every engine can hold: so an estimate alone
        refuses nothing. The choices of one prompt share its KV cache; each of several prompts has its own.
        """
        if call.endpoint in NO_ENGINE:
            return Need(0, 0)
        several = call.endpoint in PAIRED or call.longest_ratio < 1.0
        prompt = demand.prompt_tokens if demand.exact else _likely(call, demand)
        if call.truncates_prompt and not several:
            prompt = min(prompt, _kept(call, window_tokens, prompt))
        output = 0
        if call.endpoint not in NO_OUTPUT:
            output = self.outputs.expect(call.model, caller.key_id, demand.max_new_tokens)
            if window_tokens is not None and output > window_tokens - prompt:
                if not demand.exact:
                    prompt = min(prompt, window_tokens - 1)  # cut, it leaves a token
                output = min(output, max(window_tokens - prompt, 1))
        if several:
            exact = demand.exact or call.endpoint in PAIRED
            prompt = round(prompt / call.longest_ratio) if exact else _of_all(call, prompt)
            if call.truncates_prompt:
                prompt = min(prompt, call.sequences * _kept(call, window_tokens, prompt))
        # The first of several tells little of the others, and a form takes its place before it has come.
        streams = call.stream and not several and call.model_at is None
        return Need(prompt, output * call.choices, streams=streams, sequences=call.sequences)

    def learn(self, record: RequestRecord) -> None:
        """Learn from a request that ended how long outputs of its model and key get."""
        usage, demand = record.usage, record.demand
        if usage is None or demand is None or record.model is None or record.caller is None:
            return
        tokens = usage.completion_tokens // record.choices
        most = demand.max_new_tokens
        cut = record.outcome is not _OK or (most is not None and tokens >= most)
        if tokens and record.endpoint not in NO_OUTPUT:
            learn = self.outputs.cut if cut else self.outputs.ended
            learn(record.model, record.caller.key_id, tokens)


def _likely(call: Call, demand: Demand) -> int:
    """Return how many tokens a prompt that nobody counted probably has, by its bytes; of pairs all of them together.

    It is for estimates, and never to refuse by.
    """
    size = call.text_bytes if call.likely_bytes is None else call.likely_bytes
    if size is None:
        likely = _UNKNOWN_TOKENS
    else:
        if size > _SHORT_BYTES < len(call.body):
            size = int(size * _unescaped(call.body))
        likely = size // _BYTES_PER_TOKEN + 1
    most = demand.prompt_tokens
    return likely if likely < most or call.endpoint in PAIRED else most  # half the time of `min`


def _kept(call: Call, window_tokens: int | None, prompt_tokens: int) -> int:
    """Return how many tokens the engine leaves at most of a prompt that it cuts."""
    return cut_tokens(call) or window_tokens or prompt_tokens


def _of_all(call: Call, longest_tokens: int) -> int:
    """Return how many tokens all prompts of a call probably have, by those of the longest.

    Of a large body only a bound of the longest is known: what the scan cut of any prompt counts for it.
    """
    tokens = round(longest_tokens / call.longest_ratio)
    if call.text_bytes is None:
        return tokens
    return min(tokens, len(call.body) // _BYTES_PER_TOKEN + 1)


def _unescaped(body: bytes) -> float:
    """Return how many bytes a body would have without escapes, for each that it has."""
    step, saved = len(body) // _PLACES, 0
    for start in range(step // 2, len(body), step):
        end = start + _PLACE_BYTES
        if escapes := body.count(b"\\u", start, end):
            escapes -= body.count(b"\\\\u", start, end)  # JSON that is told as text is text
            saved += 3 * escapes + (body.count(b"\\u0", start, end) if escapes else 0)
    return 1 - saved / (_PLACES * _PLACE_BYTES)
