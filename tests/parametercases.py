"""Bodies for tests of the parameter policy: of each row what passes and what not; what clients send."""

from gateway.wire.table import TABLE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
DECISIONS = "/v1/systemone"

HI = [{"role": "user", "content": "hi"}]
BASE = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    EMBEDDINGS: {"input": "hi"},
    RERANK: {"query": "q", "documents": ["d"]},
    SCORE: {"text_1": "a", "text_2": "b"},
    "/v2/embed": {},
    DECISIONS: {"state": "a", "questions": {}},
}
TEXT = {"type": "text", "text": "see"}


def parts(*each):
    return {"messages": [{"role": "user", "content": [TEXT, *each]}]}


def image(url):
    return parts({"type": "image_url", "image_url": {"url": url}})


def schema(value):
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
    }


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def strict(value):
    """A tool whose calls keep to its schema, if the value says so."""
    function = {"name": "f", "parameters": {"pattern": "(a+)+"}, "strict": value}
    return {"type": "function", "function": function}


def namespace(*tools):
    return {"type": "namespace", "name": "n", "tools": [*tools]}


def adding(*tools):
    """A message that adds tools to the others."""
    blocks = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": each}}
        for each in tools
    ]
    return {"messages": [{"role": "system", "content": blocks}]}


FLAT = {"type": "function", "name": "f", "parameters": {"pattern": "(a+)+"}}
CLAUDES = {"name": "f", "input_schema": {"pattern": "(a+)+"}}
STRICT_TOOLS = [
    (CHAT, {"tools": [strict(False), strict(None)]}, {"tools": [tool(), strict(True)]}, "tools[1].function.parameters.pattern"),
    (CHAT, {"tools": [strict("off")]}, {"tools": [strict("yes")], "tool_choice": "auto"}, "tools[0].function.parameters.pattern"),
    (CHAT, {"tools": [strict(True)], "tool_choice": "none"}, {"tools": [strict(1)], "tool_choice": None}, "tools[0].function.parameters.pattern"),
    (RESPONSES, {"tools": [FLAT]}, {"tools": [FLAT | {"strict": True}]}, "tools[0].parameters.pattern"),
    (RESPONSES, {"tools": [namespace(FLAT)]}, {"tools": [namespace(FLAT | {"strict": True})]}, "tools[0].tools[0].parameters.pattern"),
    (RESPONSES, {"tools": [namespace()]}, {"tools": [namespace(FLAT)], "tool_choice": "required"}, "tools[0].tools[0].parameters.pattern"),
    (MESSAGES, adding(plain := {"name": "g", "input_schema": {}}), adding(plain, CLAUDES), "messages[0].content[1].tool.definition.input_schema.pattern"),
    (MESSAGES, {"tools": [CLAUDES]}, {"tools": [CLAUDES | {"strict": True}]}, "tools[0].input_schema.pattern"),
]  # fmt: skip


ADDED_TOOLS = [
    (MESSAGES, adding(*[plain] * 512), adding(*[plain] * 513), "messages[0].content[512].tool")
]
LARGE_TOOL = {"name": "g", "input_schema": {}, "description": "x" * (1 << 20)}


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"items": value}
    return value


# Of each row: where, what passes, what is refused, and the field that the refusal names.
ROWS = {
    "priority": [(CHAT, {"priority": 0}, {"priority": -1}, "priority")],
    "request_id": [(CHAT, {"request_id": None}, {"request_id": "abc"}, "request_id")],
    "vllm_xargs": [(CHAT, {"vllm_xargs": None}, {"vllm_xargs": {"a": 1}}, "vllm_xargs")],
    "kv_transfer_params": [
        (COMPLETIONS, {"kv_transfer_params": None}, {"kv_transfer_params": {}}, "kv_transfer_params")
    ],
    "ec_transfer_params": [
        (MESSAGES, {"ec_transfer_params": None}, {"ec_transfer_params": {}}, "ec_transfer_params")
    ],
    "prompt_embeds": [(COMPLETIONS, {}, {"prompt_embeds": "AAAA"}, "prompt_embeds")],
    "content.embeds": [
        (CHAT, parts(TEXT), parts({"type": "image_embeds", "image_embeds": "A"}), "messages[0].content[1].image_embeds"),
        (CHAT, parts(), parts({"prompt_embeds": "A"}), "messages[0].content[1].prompt_embeds"),
        (EMBEDDINGS, {"messages": HI}, {"input": "a", "messages": parts({"type": "audio_embeds"})["messages"]}, "messages[0].content[1].audio_embeds"),
        (RERANK, {"query": {"content": [TEXT]}}, {"documents": ["a", {"content": [{"type": "video_embeds"}]}]}, "documents[1].content[0].video_embeds"),
        (SCORE, {"text_1": {"content": [TEXT]}}, {"data_1": {"content": [{"type": "image_embeds"}]}}, "data_1.content[0].image_embeds"),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}]}, {"input": [{"type": "function_call_output", "output": [{"type": "image_embeds"}]}]}, "input[0].output[0].image_embeds"),
        (MESSAGES, {"system": [TEXT]}, {"system": [{"type": "image_embeds"}]}, "system[0].image_embeds"),
    ],
    "content.uuid": [(CHAT, image("data:image/png;base64,AA"), parts({"image_url": None, "uuid": "u"}), "messages[0].content[1].uuid")],
    "chat_template": [(CHAT, {"chat_template": None}, {"chat_template": "{{ 1 }}"}, "chat_template")],
    "chat_template_kwargs.chat_template": [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template")
    ],
    "chat_template_kwargs.tokenize": [(CHAT, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize")],
    "mm_processor_kwargs": [(CHAT, {}, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs")],
    "media_io_kwargs": [(CHAT, {}, {"media_io_kwargs": {"video": {}}}, "media_io_kwargs")],
    "structured_outputs.whitespace_pattern": [
        (CHAT, {"structured_outputs": {"json": {}}}, {"structured_outputs": {"json": {}, "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        (CHAT, schema({"x-guidance": {"key_separator": ": ?", "lenient": True}}), schema({"x-guidance": {"whitespace_pattern": " *"}}), "response_format.json_schema.schema.x-guidance.whitespace_pattern"),
    ],
    "media": [
        (CHAT, image("https://example.com/a.png"), image("http://169.254.169.254/latest"), "messages[0].content[1].image_url.url"),
        (CHAT, image("DATA:image/png;base64,AA"), image("file:///etc/passwd"), "messages[0].content[1].image_url.url"),
        (CHAT, parts({"type": "video_url", "video_url": {"url": "https://8.8.8.8/a"}}), parts({"audio_url": "http://localhost/a"}), "messages[0].content[1].audio_url"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}, {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://[::1]/"}]}]}, "input[0].content[0].file_url"),
        (MESSAGES, parts({"type": "image", "source": {"type": "base64", "data": "AA"}}), parts({"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/"}}]}), "messages[0].content[1].content[0].source.url"),
    ],
    "n": [(CHAT, {"n": 128}, {"n": 129}, "n")],
    "prompts": [(COMPLETIONS, {"prompt": ["a"] * 1024}, {"prompt": ["a"] * 1025}, "prompt")],
    "inputs": [(EMBEDDINGS, {"input": ["a"] * 2048}, {"input": ["a"] * 2049}, "input")],
    "sequences": [(COMPLETIONS, {"prompt": ["a"] * 16, "n": 64}, {"prompt": ["a"] * 17, "n": 64}, "n")],
    "beams": [(CHAT, {"n": 16, "use_beam_search": True}, {"n": 17, "use_beam_search": True}, "n")],
    "logprobs": [
        (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 5}, {"logprobs": "21"}, "logprobs"),
    ],
    "prompt_logprobs": [(COMPLETIONS, {"prompt_logprobs": 0}, {"prompt_logprobs": -1}, "prompt_logprobs")],
    "logprob_token_ids": [(CHAT, {"logprob_token_ids": [1]}, {"logprob_token_ids": [1] * 129}, "logprob_token_ids")],
    "stop": [(CHAT, {"stop": ["a"] * 4}, {"stop": ["a"] * 33}, "stop"), (MESSAGES, {"stop_sequences": ["a"]}, {"stop_sequences": ["a"] * 33}, "stop_sequences")],
    "stop_chars": [(CHAT, {"stop": "a" * 1024}, {"stop": ["b", "a" * 1025]}, "stop")],
    "stop_token_ids": [(CHAT, {"stop_token_ids": [2]}, {"stop_token_ids": [2] * 129}, "stop_token_ids")],
    "logit_bias": [(CHAT, {"logit_bias": {"5": -100}}, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias")],
    "allowed_token_ids": [(CHAT, {"allowed_token_ids": [5]}, {"allowed_token_ids": [5] * 1025}, "allowed_token_ids")],
    "bad_words": [(CHAT, {"bad_words": ["a"]}, {"bad_words": ["a"] * 129}, "bad_words")],
    "bad_word_chars": [(CHAT, {"bad_words": ["a"]}, {"bad_words": ["a" * 257]}, "bad_words")],
    "schema_bytes": [
        (CHAT, schema({"type": "object"}), schema({"description": "x" * 131072}), "response_format.json_schema.schema"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, {"output_config": {"format": {"type": "json_schema", "schema": {"description": "x" * 131072}}}}, "output_config.format.schema"),
    ],
    "schema_depth": [(RESPONSES, {"text": {"format": {"type": "json_schema", "schema": deep(31)}}}, {"text": {"format": {"type": "json_schema", "schema": deep(32)}}}, "text.format.schema")],
    "schema_properties": [(CHAT, schema({"properties": {"a": {}}}), schema({"properties": {f"p{i}": {} for i in range(5001)}}), "response_format.json_schema.schema")],
    "schema_enum": [(CHAT, schema({"enum": ["a"]}), schema({"anyOf": [{"enum": list(range(501))}] * 2}), "response_format.json_schema.schema")],
    "schema_multiple": [
        (CHAT, schema({"items": [{"multipleOf": each} for each in (5, 15, 120, 0.05, 1e-9, 10**6, 250.0, 0, True, "7")]}), schema({"multipleOf": 100_003}), "response_format.json_schema.schema"),
        (CHAT, schema({"multipleOf": 1e17}), schema({"multipleOf": 10**18 + 3}), "response_format.json_schema.schema"),
        (CHAT, schema({"multipleOf": 86_400}), schema({"allOf": [{"multipleOf": 0.997}, {"multipleOf": 991}]}), "response_format.json_schema.schema"),
    ],
    "pattern_chars": [
        (CHAT, schema({"pattern": "^[a-z0-9]+(?:-[a-z0-9]+)*$"}), schema({"pattern": "a" * 2049}), "response_format.json_schema.schema"),
        (CHAT, schema({"x-guidance": 7}), schema({"x-guidance": {"key_separator": "(a{100}){100}"}}), "response_format.json_schema.schema.pattern"),
        (CHAT, {"structured_outputs": {"regex": r"\d{4}"}}, {"structured_outputs": {"regex": "(a+)+$"}}, "structured_outputs.regex"),
        (CHAT, {"structured_outputs": {"json": '{"pattern": "a"}'}}, {"structured_outputs": {"json": '{"patternProperties": {"(?=a)": {}}}'}}, "structured_outputs.json.pattern"),
        (CHAT, {"tools": [tool(pattern="(a+)+")], "tool_choice": "auto"}, {"tools": [tool(pattern="(a+)+")], "tool_choice": "required"}, "tools[0].function.parameters.pattern"),
        *STRICT_TOOLS,
    ],
    "choices": [(CHAT, {"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice")],
    "grammar_bytes": [(CHAT, {"structured_outputs": {"grammar": 'root ::= "a"'}}, {"structured_outputs": {"grammar": "x" * 16384}}, "structured_outputs.grammar")],
    "tools": [(CHAT, {"tools": [tool()] * 512}, {"tools": [tool()] * 513}, "tools"), (RESPONSES, {"tools": [namespace(*[FLAT] * 511)]}, {"tools": [namespace(*[FLAT] * 512)]}, "tools"), *ADDED_TOOLS],
    "tools_bytes": [(CHAT, {"tools": [tool()]}, {"tools": [tool(description="x" * 1048576)]}, "tools")],
    "documents": [(RERANK, {"documents": ["d"] * 2048}, {"documents": ["d"] * 2049}, "documents"), (SCORE, {"text_2": ["d"]}, {"text_2": ["d"] * 2049}, "text_2")],
    "guided_*": [(CHAT, {"structured_outputs": {"json": {}}}, {name: "x"}, name) for name in TABLE["guided_*"].fields],
    "number ranges": [
        (CHAT, {"temperature": 0}, {"temperature": "NaN"}, "temperature"),
        (CHAT, {"temperature": 2.0}, {"temperature": float("1e300")}, "temperature"),
        (CHAT, {"top_p": 1}, {"top_p": 1.01}, "top_p"),
        (CHAT, {"top_k": -1}, {"top_k": -2}, "top_k"),
        (CHAT, {"min_p": 0.05}, {"min_p": -0.1}, "min_p"),
        (CHAT, {"presence_penalty": -2}, {"presence_penalty": 2.1}, "presence_penalty"),
        (CHAT, {"frequency_penalty": 2}, {"frequency_penalty": "inf"}, "frequency_penalty"),
        (CHAT, {"repetition_penalty": 1.1}, {"repetition_penalty": -1}, "repetition_penalty"),
        (CHAT, {"length_penalty": 1}, {"length_penalty": "1e99"}, "length_penalty"),
    ],
    "token ids": [(CHAT, {name: [0]}, {name: [3, -1]}, name) for name in TABLE["token ids"].fields],
    "min_tokens": [(CHAT, {"min_tokens": 5, "max_tokens": 5}, {"min_tokens": 6, "max_tokens": 5}, "min_tokens"), (COMPLETIONS, {"min_tokens": 16}, {"min_tokens": 17}, "min_tokens"), (COMPLETIONS, {"min_tokens": 16, "max_completion_tokens": 9}, {"min_tokens": 17, "max_completion_tokens": 99}, "min_tokens")],
    "ignore_eos": [
        (CHAT, {"ignore_eos": True, "max_tokens": 5}, {"ignore_eos": 1}, "ignore_eos"),
        (CHAT, {"ignore_eos": True, "max_completion_tokens": 5}, {"ignore_eos": True, "max_output_tokens": 5}, "ignore_eos"),
        (RESPONSES, {"ignore_eos": True, "max_output_tokens": 5}, {"ignore_eos": True, "max_tokens": 5}, "ignore_eos"),
    ],
    "best_of": [(COMPLETIONS, {"best_of": 2, "n": 2}, {"best_of": 2}, "best_of")],
    "cache_salt": [(CHAT, {"cache_salt": "a" * 128}, {"cache_salt": "a/b"}, "cache_salt"), (EMBEDDINGS, {}, {"cache_salt": ""}, "cache_salt")],
    "content": [
        (CHAT, {"messages": [{"role": "user", "content": ["hi", TEXT]}]}, {"messages": [{"role": "user", "content": ["hi", 5]}]}, "messages[0].content[1]"),
        (CHAT, parts(), parts({"type": 5}), "messages[0].content[1].type"),
        (CHAT, parts(), {"messages": [*parts()["messages"], {"role": "user", "content": True}]}, "messages[1].content"),
    ],
    "stored responses": [
        (RESPONSES, {"store": False}, {"store": True}, "store"),
        (RESPONSES, {"store": "off"}, {"store": "true"}, "store"),
        (RESPONSES, {"background": 0}, {"background": 1}, "background"),
        (RESPONSES, {"previous_response_id": None}, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"conversation": None}, {"conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"prompt": None}, {"prompt": {"id": "pmpt_1"}}, "prompt"),
        (RESPONSES, {"input": [{"role": "user", "content": '"item_reference"'}]}, {"input": [*HI, {"type": "item_reference", "id": "msg_1"}]}, "input[1]"),
        (CHAT, {"store": True}, {"guided_json": {}}, "guided_json"),
    ],
    "stored conversations": [
        (MESSAGES, {"thread": None}, {"thread": {"type": "create"}}, "thread"),
        (MESSAGES, {"thread": None}, {"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ],
}  # fmt: skip
CASES = [(name, *case) for name, cases in ROWS.items() for case in cases]

# What clients really send.
FUNCTION = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}  # fmt: skip
CLIENTS = {
    "openai-python chat": (CHAT, {"temperature": 0.2, "max_completion_tokens": 512, "stream": True, "stream_options": {"include_usage": True}, "tools": [tool(**FUNCTION)], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": FUNCTION}}, "seed": 1, "user": "u", "metadata": {"a": "b"}, "store": False, "logprobs": True, "top_logprobs": 5, "logit_bias": {"50256": -100}, "stop": ["\n"], "n": 2}),
    "openai-python vision": (CHAT, parts({"type": "image_url", "image_url": {"url": "https://upload.wikimedia.org/a.jpg", "detail": "high"}}, {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}})),
    "openai-python tool result": (CHAT, {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"uuid\": 1, \"uuid\": 2}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "{\"role\": \"x\"}"}]}),
    "openai-python responses": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "5"}], "instructions": "be brief", "store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"}, "prompt_cache_key": "k", "tools": [{"type": "function", "name": "f", "parameters": FUNCTION, "strict": True}], "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled", "stream": True}),
    "anthropic claude code": (MESSAGES, {"max_tokens": 32000, "system": [{"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}}], "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 1, "stream": True, "tools": [{"name": "Bash", "description": "d", "input_schema": FUNCTION}], "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "tool_use", "id": "t", "name": "Bash", "input": {"uuid": "x", "url": "http://localhost:3000", "content": [1]}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "out"}], "is_error": False}]}]}),
    "anthropic-python beta": (MESSAGES, {"compaction": {"type": "summarize"}, "diagnostics": {"previous_message_id": None}, "fallbacks": "default", "fallback_credit_token": "t", "billing_policy": {"type": "billing_policy", "bill_to": "self"}}),
    "openai-python background": (RESPONSES, {"background": False, "background_options": {"completion_window": "soonest"}, "multi_agent": {"enabled": False}}),
    "anthropic image": (MESSAGES, parts({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}, {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}, {"type": "search_result", "source": "http://intranet/a", "title": "t", "content": [TEXT]})),
    "langchain": (CHAT, {"temperature": 0.7, "n": 1, "stream": False, "max_tokens": None, "presence_penalty": 0, "frequency_penalty": 0.0, "top_p": 1.0, "tools": [tool(**FUNCTION)], "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False}),
    "langchain completion": (COMPLETIONS, {"prompt": ["a", "b"], "best_of": 1, "n": 1, "max_tokens": 256, "temperature": 0.7, "logit_bias": {}}),
    "vercel ai sdk": (CHAT, {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "tool_choice": "auto", "tools": [tool(**FUNCTION)], "messages": [{"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]}),
    "qwen-code": (CHAT, {"max_tokens": 32000, "temperature": 0, "top_p": 1, "stream": True, "stream_options": {"include_usage": True}, "metadata": {"sessionId": "s", "promptId": "p"}, "tools": [tool(**FUNCTION)] * 40, "vl_high_resolution_images": True}),
    "vllm bench serve": (COMPLETIONS, {"prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 128, "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}),
    "lm-eval": (COMPLETIONS, {"prompt": [[1, 2, 3]] * 64, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}),
    "cohere rerank": (RERANK, {"documents": ["a", "b"], "top_n": 2, "return_documents": False, "max_tokens_per_doc": 512}),
    "vllm extras": (CHAT, {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "structured_outputs": {"choice": ["a", "b"]}, "chat_template_kwargs": {"enable_thinking": False}, "skip_special_tokens": False, "add_generation_prompt": True, "guided": None}),
}  # fmt: skip
