"""Where the gateway answers otherwise than vLLM does, by decision, and the tests that show it.

`make vllm-tests` fails on any other difference, and on a decision that no longer makes one.
"""

from typing import NamedTuple


class Decision(NamedTuple):
    """Tests that pass against vLLM and not through the gateway, and why."""

    file: str  # below tests/entrypoints; a pattern too
    tests: str  # a pattern of their names
    why: str


OPERATOR = "Adapters are loaded by the operator of a server, never by a client."
VERSION = "Which version a server runs is for its operator to know; two of one pool may differ."
LOAD = "The load of one server says little of its pool, and something of other tenants. Operators have metrics."
PATHS = "Clients do not learn where an adapter lies on a server's disk."
TYPES = "`type` of an error is OpenAI's, which its SDKs and other clients compare; vLLM's is a class name."
PATH_FORM = "A path that a model does not serve is refused in OpenAI's form, where vLLM says `{'detail': 'Not Found'}`."
INVOCATIONS = (
    "An endpoint of one cloud's platform, where only the body's shape says which API is meant."
)
KV_TRANSFER = (
    "The operator decides where KV blocks are fetched from, unless the pool allows the field."
)
REQUEST_ID = "The engine tells requests apart by it, so equal ones collide, unless the pool allows the field."
STATELESS = "Responses are not stored: which replica or server would have one is not known."
LOGPROBS = (
    "-1 returns the whole vocabulary for each token, unless the pool allows so many logprobs."
)
EMBEDS = "A tensor that a client made is refused by name, unless the pool allows it."

_LORA = "serve/lora/test_lora_adapters.py"
_CLASSIFY = "pooling/classify/test_online.py"
DECISIONS = [
    Decision(_LORA, "test_dynamic_lora_*", OPERATOR),
    Decision(_LORA, "test_load_lora_adapter_*", OPERATOR),
    Decision(_LORA, "test_static_lora_lineage*", PATHS),
    Decision("serve/instrumentator/test_basic.py", "test_show_version", VERSION),
    Decision("serve/instrumentator/test_basic.py", "test_server_load*", LOAD),
    Decision("serve/instrumentator/test_orca_metrics.py", "test_*_with_orca_header*", LOAD),
    Decision("openai/models/test_models.py", "test_check_models", PATHS),
    Decision("pooling/basic/test_truncation.py", "test_bigger_truncation_size", TYPES),
    Decision("pooling/*", "test_pooling_not_supported*", TYPES),
    Decision(_CLASSIFY, "test_score*", PATH_FORM),
    Decision(_CLASSIFY, "test_rerank*", PATH_FORM),
    Decision("pooling/token_embed/test_online.py", "test_pooling_token_embed*", REQUEST_ID),
    Decision("*", "test_invocations*", INVOCATIONS),
    Decision("openai/completion/test_prompt_validation.py", "test_empty_prompt", EMBEDS),
    Decision("openai/chat_completion/test_chat_completion.py", "test_kv_transfer_*", KV_TRANSFER),
    Decision("openai/responses/test_stateful.py", "test_*", STATELESS),
    # On a slow machine these two run past their time against vLLM itself.
    Decision("openai/chat_completion/test_chat_echo.py", "test_*_logprobs", LOGPROBS),
]

_NOISE = "It asks for words where a random model may say none."
# May differ, or not: the outcome depends on what a random model happens to say.
CHANCE = [Decision("openai/responses/test_simple.py", "test_enable_response_messages*", _NOISE)]
