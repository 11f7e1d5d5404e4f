"""A parser of tool calls for vLLM, by which a random model calls tools, too: from the first token with an "s" on.

A call begins with a token of its own, as it does where models have been taught tools.
"""

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
)
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser


@ToolParserManager.register_module("by_letter")
class ByLetter(ToolParser):
    """All of a reply from its first such token on are the arguments of one call."""

    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
        self._marks = {number for token, number in tokenizer.get_vocab().items() if "s" in token}

    def extract_tool_calls(self, model_output, request):
        """Take a whole reply apart: it is asked for nowhere."""
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(
        self,
        previous_text,
        current_text,
        delta_text,
        previous_token_ids,
        current_token_ids,
        delta_token_ids,
        request,
    ):
        """Take a part of a reply apart."""
        if self.current_tool_id >= 0:
            call = DeltaToolCall(index=0, function=DeltaFunctionCall(arguments=delta_text))
            return DeltaMessage(tool_calls=[call])
        ids = list(current_token_ids)
        at = next((place for place, each in enumerate(ids) if each in self._marks), None)
        if at is None:
            return DeltaMessage(content=delta_text) if delta_text else None
        self.current_tool_id = 0
        said = len(self.model_tokenizer.decode(ids[:at]))
        function = DeltaFunctionCall(name="look_up", arguments=current_text[said:])
        call = DeltaToolCall(index=0, type="function", id=make_tool_call_id(), function=function)
        content = current_text[len(previous_text) : said] or None
        return DeltaMessage(content=content, tool_calls=[call])
