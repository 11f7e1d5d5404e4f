"""The table of the parameter policy: what a body may ask for, how much of it, and why.

One row for each thing that is limited. `wire.measures` finds it in a body, `wire.parameters` judges
it, `vllm-gateway config policy` prints it. Advisories are those of vLLM; numbers name their source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from gateway.core.endpoints import GENERATES, PAIRED, READS
from gateway.core.types import Endpoint

_OPENAI: Final = frozenset({Endpoint.CHAT, Endpoint.CHAT_BATCH, Endpoint.COMPLETIONS})
_LISTS: Final = frozenset({Endpoint.COMPLETIONS, Endpoint.CHAT_BATCH})
_RESPONSES: Final = frozenset({Endpoint.RESPONSES})
_MESSAGES: Final = frozenset({Endpoint.MESSAGES})


class Rule(Enum):
    """What a row does."""

    DENY = "deny"  # refused, unless `allow` names it
    MAX = "max"  # passes up to a number, which `max` changes
    FIXED = "fixed"  # refused always: no setting makes it work
    CHOICE = "choice"  # a setting of its own decides


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `name` is what settings call it, `fields` what a body calls it."""

    name: str
    rule: Rule
    why: str
    most: int | None = None  # of MAX, unless a setting says otherwise
    fields: tuple[str, ...] = ()  # the name itself, if none
    endpoints: frozenset[Endpoint] = frozenset()  # all, if none
    advisory: str = ""


_ROWS: Final = (
    # --- what reaches into the engine, its host, or other requests
    Row("priority", Rule.DENY, "a smaller number overtakes every other tenant in the engine"),
    Row("request_id", Rule.DENY, "the engine identifies requests by it: equal ids collide", advisory="GHSA-2phq-3phc-84px"),
    Row("vllm_xargs", Rule.DENY, "reaches the operator's own plug-ins unchecked"),
    Row("kv_transfer_params", Rule.DENY, "names hosts to fetch from and blocks of other requests"),
    Row("ec_transfer_params", Rule.DENY, "names hosts to fetch from"),
    Row("prompt_embeds", Rule.DENY, "loads a tensor that the client supplies", advisory="CVE-2025-62164 GHSA-33cg-gxv8-3p8g GHSA-x9pq-jx6q-p3qv"),
    Row("content.embeds", Rule.DENY, "loads a tensor that the client supplies", fields=("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil"), advisory="CVE-2025-62372 GHSA-pr7f-p5mw-fc87"),
    Row("content.uuid", Rule.DENY, "a cache key that other tenants share: it can read or replace their images", fields=("uuid",), advisory="GHSA-p92p-rxj5-7p2x"),
    Row("chat_template", Rule.DENY, "a template is a program that runs on the engine's host", advisory="CVE-2025-61620"),
    Row("chat_template_kwargs.chat_template", Rule.DENY, "a template is a program that runs on the engine's host", advisory="CVE-2025-61620"),
    Row("chat_template_kwargs.tokenize", Rule.DENY, "makes the server tokenize on its event loop, which blocks it", advisory="CVE-2025-62426"),
    Row("mm_processor_kwargs", Rule.DENY, "changes how much memory an image takes, and which code loads it", advisory="GHSA-h3rc-6mm3-gc2m GHSA-823j-m4cj-hmjf"),
    Row("media_io_kwargs", Rule.DENY, "changes how much memory a video takes", advisory="GHSA-x6mc-67gf-chw4 GHSA-58v5-2m8f-94pr"),
    Row("structured_outputs.whitespace_pattern", Rule.DENY, "the pattern is repeated throughout the grammar", advisory="GHSA-9hcf-v7m4-6m2j"),
    Row("media", Rule.CHOICE, "media addresses: `public` (default) accepts data: URLs and public hosts, `data` only data: URLs, `any` all", fields=("image_url", "audio_url", "video_url", "file_url", "source"), advisory="CVE-2025-6242 CVE-2026-24779"),
    # --- how much work, memory or output one request may cause
    Row("n", Rule.MAX, "each is a sequence of its own. Source: OpenAI reference", 128, endpoints=_OPENAI, advisory="CVE-2026-34756"),
    Row("prompts", Rule.MAX, "each is a sequence. Source: VLLM_MAX_COMPLETION_PROMPTS", 1024, fields=("prompt", "messages"), endpoints=_LISTS, advisory="CVE-2026-73559"),
    Row("inputs", Rule.MAX, "each is a sequence. Source: OpenAI reference", 2048, fields=("input", "inputs", "texts", "images"), endpoints=READS - PAIRED),
    Row("sequences", Rule.MAX, "n for each of the prompts", 1024, fields=("n", "prompt"), endpoints=_OPENAI),
    Row("beams", Rule.MAX, "n of a beam search, where each token is tried that many times", 16, fields=("use_beam_search",), endpoints=_OPENAI),
    Row("logprobs", Rule.MAX, "for each token. -1, the whole vocabulary, is more than any limit. Source: vLLM's --max-logprobs", 20, fields=("logprobs", "top_logprobs"), endpoints=GENERATES),
    Row("prompt_logprobs", Rule.MAX, "for each token of the prompt, as above", 20, endpoints=_OPENAI),
    Row("logprob_token_ids", Rule.MAX, "Source: vLLM 0.32", 128, endpoints=_OPENAI),
    Row("stop", Rule.MAX, "each is searched for after every token", 32, fields=("stop", "stop_sequences"), endpoints=GENERATES),
    Row("stop_chars", Rule.MAX, "of one stop string", 1024, fields=("stop", "stop_sequences"), endpoints=GENERATES),
    Row("stop_token_ids", Rule.MAX, "checked after every token; vLLM sets no limit", 128, endpoints=GENERATES),
    Row("logit_bias", Rule.MAX, "entries, applied at every step; vLLM sets no limit", 1024, endpoints=GENERATES),
    Row("allowed_token_ids", Rule.MAX, "a mask over the vocabulary; vLLM sets no limit", 1024, endpoints=_OPENAI, advisory="GHSA-6cxc-2vcg-w5qc"),
    Row("bad_words", Rule.MAX, "each becomes token sequences. Source: vLLM 0.32", 128, endpoints=_OPENAI),
    Row("bad_word_chars", Rule.MAX, "of one bad word", 256, fields=("bad_words",), endpoints=_OPENAI),
    Row("schema_bytes", Rule.MAX, "of one schema, which is compiled into a grammar. Source: OpenAI, structured outputs (120,000 characters)", 131_072, fields=("response_format", "structured_outputs", "text", "output_config"), advisory="GHSA-85xf-c7hm-whqw"),
    Row("schema_depth", Rule.MAX, "nested objects and arrays: twice to three times the 10 levels that OpenAI accepts", 32, fields=("response_format", "structured_outputs", "text", "output_config"), advisory="GHSA-vrq3-r879-7m65"),
    Row("schema_properties", Rule.MAX, "in all. Source: OpenAI, structured outputs", 5000, fields=("response_format", "structured_outputs", "text", "output_config")),
    Row("schema_enum", Rule.MAX, "values in all. Source: OpenAI, structured outputs", 1000, fields=("response_format", "structured_outputs", "text", "output_config")),
    Row("schema_multiple", Rule.MAX, "the least common multiple of all `multipleOf`, without their points: engines have a state for each remainder", 100_000, fields=("response_format", "structured_outputs", "text", "output_config")),
    Row("pattern_chars", Rule.MAX, "of one regular expression, which must be RE2's, without nested repetition", 2048, fields=("pattern", "regex"), advisory="CVE-2026-55574 GHSA-9hcf-v7m4-6m2j"),
    Row("choices", Rule.MAX, "of structured_outputs.choice", 1000, fields=("structured_outputs",)),
    Row("grammar_bytes", Rule.MAX, "of a grammar or structural tag", 16_384, fields=("structured_outputs", "response_format"), advisory="GHSA-6qc9-v4r8-22xg"),
    Row("tools", Rule.MAX, "more than any known agent sends", 512),
    Row("tools_bytes", Rule.MAX, "of all tools", 1_048_576, fields=("tools",)),
    Row("documents", Rule.MAX, "to rank or score, each a sequence", 2048, fields=("documents", "queries", "items", "text_1", "text_2", "data_1", "data_2"), endpoints=PAIRED),
    # --- what can never be right
    Row("guided_*", Rule.FIXED, "this vLLM ignores it and answers unconstrained; the new name is `structured_outputs`", fields=("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern")),
    Row("duplicate keys", Rule.FIXED, "two parsers may read two different values"),
    Row("number ranges", Rule.FIXED, "must be finite and within the parameter's range", fields=("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"), advisory="CVE-2026-54235 CVE-2026-44223"),
    Row("token ids", Rule.FIXED, "a negative id reads outside of the vocabulary", fields=("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), advisory="GHSA-25q3-v2hm-8vpf"),
    Row("min_tokens", Rule.FIXED, "must not exceed the output limit", endpoints=GENERATES, advisory="GHSA-4xqp-c3mv-qff7"),
    Row("ignore_eos", Rule.FIXED, "needs an output limit: nothing else would end it", endpoints=GENERATES),
    Row("best_of", Rule.FIXED, "vLLM ignores it, so it must equal n", endpoints=_OPENAI, advisory="CVE-2024-8939"),
    Row("cache_salt", Rule.FIXED, "1 to 128 characters without @ / \\ and NUL. Source: vLLM 0.32", advisory="GHSA-wpww-v874-ph2p GHSA-2823-qmq8-rwvj"),
    Row("content", Rule.FIXED, "content that is neither text nor a list of parts cannot be checked"),
    Row("stored responses", Rule.FIXED, "responses are not stored here", fields=("background", "store", "previous_response_id", "conversation", "prompt"), endpoints=_RESPONSES),
    Row("stored conversations", Rule.FIXED, "conversations are not stored here; vLLM would answer the last turn alone", fields=("thread",), endpoints=_MESSAGES),
)  # fmt: skip
TABLE: Final[Mapping[str, Row]] = MappingProxyType({row.name: row for row in _ROWS})
REFUSED_IN_FORMS: Final = frozenset(
    each
    for row in _ROWS
    if row.rule is Rule.DENY and "." not in row.name
    for each in row.fields or (row.name,)
)
