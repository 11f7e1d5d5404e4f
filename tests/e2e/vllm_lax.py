"""Run by vLLM's own Python: what its request models make of bodies, one JSON answer for all of them.

Input: a list of [endpoint, body as text]. Output: for each the values read, or {"refused": [...]}.
"""

import json
import sys

from pydantic import ValidationError
from vllm_reads import ADAPTERS

READ = (
    *("model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    "truncate_prompt_tokens",
)


def lengths(prompt):
    """Return the lengths of token id lists; None of what is text."""
    if not isinstance(prompt, list) or not prompt:
        return None
    if isinstance(prompt[0], int):
        return [len(prompt)]
    return [len(each) for each in prompt] if isinstance(prompt[0], list) else None


def read(adapter, body):
    try:
        made = adapter.validate_python(json.loads(body))
    except ValidationError as error:
        return {"refused": [[each["type"], *map(str, each["loc"])] for each in error.errors()]}
    except Exception as error:  # vLLM's own validators raise their own
        return {"refused": [[type(error).__name__]]}
    values = {name: getattr(made, name, None) for name in READ}
    options = getattr(made, "stream_options", None)
    values["include_usage"] = getattr(options, "include_usage", None)
    values["ids"] = lengths(getattr(made, "prompt", None) or getattr(made, "input", None))
    return values


print(json.dumps([read(ADAPTERS[name], body) for name, body in json.load(sys.stdin)]))
