"""The top-level fields that a body may have, by endpoint: those of vLLM 0.32 and 0.33, and of the public APIs.

A field that is in none of these is unknown: vLLM ignores it. Source: the request models of vLLM
0.32.0 and 0.33.0 (a test compares), openai-python 3.57, anthropic-python 2.14, Cohere's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.core.endpoints import READS
from gateway.core.types import Endpoint


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ENGINE: Final = _names(
    """model user request_id session_id priority cache_salt mm_processor_kwargs media_io_kwargs
    chat_template chat_template_kwargs kv_transfer_params ec_transfer_params vllm_xargs mm_payload
    return_mm_kwargs watermarking add_generation_prompt continue_final_message add_special_tokens
    truncate_prompt_tokens truncation_side"""
)
_SAMPLING: Final = _names(
    """stream stream_options seed n best_of temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty length_penalty early_stopping use_beam_search stop
    stop_token_ids min_tokens max_tokens ignore_eos logit_bias logprobs top_logprobs prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output response_format structured_outputs
    thinking_token_budget include_reasoning repetition_detection return_token_ids
    return_token_offsets return_tokens_as_token_ids return_weight_versions routed_experts_prompt_start
    stream_interval"""
)
# What OpenAI's API knows and vLLM ignores, or the other way round on one of its endpoints.
_OPENAI: Final = _names(
    """metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options
    prompt_cache_retention moderation verbosity tools tool_choice parallel_tool_calls"""
)
_CHAT: Final = _names(
    """messages max_completion_tokens reasoning_effort reasoning functions function_call documents
    audio modalities prediction web_search_options return_prompt_text"""
)
_RESPONSES: Final = _names(
    """input instructions include background background_options conversation context_management
    access_programs image max_output_tokens max_tool_calls multi_agent previous_response_id
    previous_input_messages prompt reasoning text truncation enable_response_messages"""
)
_ANTHROPIC: Final = _names(
    """messages system stop_sequences thinking output_config output_format betas container
    context_management mcp_servers cache_control inference_geo speed thread compaction diagnostics
    fallbacks fallback_credit_token billing_policy"""
)
_POOLING: Final = _names(
    """input inputs messages texts images input_type data task dimensions output_dimension
    encoding_format embedding_types embed_dtype endianness normalize use_activation padding truncate
    query queries documents items text_1 text_2 data_1 data_2 top_n return_documents rank_fields
    max_chunks_per_doc max_tokens max_tokens_per_doc max_tokens_per_query instruction
    label_token_ids apply_softmax item_first late_chunking_params"""
)
_DECISIONS: Final = _names("state questions instructions images audio videos")
_TOKENS: Final = _names("messages prompt tokens tools return_token_strs")

_KNOWN: Final[Mapping[Endpoint, frozenset[str]]] = {
    Endpoint.CHAT: _ENGINE | _SAMPLING | _OPENAI | _CHAT,
    Endpoint.CHAT_BATCH: _ENGINE | _SAMPLING | _OPENAI | _CHAT,
    Endpoint.COMPLETIONS: _ENGINE | _SAMPLING | _OPENAI | _names("prompt suffix prompt_embeds"),
    Endpoint.RESPONSES: _ENGINE | _SAMPLING | _OPENAI | _RESPONSES,
    Endpoint.MESSAGES: _ENGINE | _SAMPLING | _OPENAI | _ANTHROPIC,
    Endpoint.COUNT_TOKENS: _ENGINE | _SAMPLING | _OPENAI | _ANTHROPIC,
    **dict.fromkeys(READS, _ENGINE | _POOLING),
    Endpoint.DECISIONS: _ENGINE | _DECISIONS,
    Endpoint.TOKENIZE: _ENGINE | _TOKENS,
    Endpoint.DETOKENIZE: _ENGINE | _TOKENS,
}
_ANY: Final = frozenset().union(*_KNOWN.values())


def known_fields(endpoint: Endpoint) -> frozenset[str]:
    """Return the fields that an endpoint knows."""
    return _KNOWN.get(endpoint, _ANY)
