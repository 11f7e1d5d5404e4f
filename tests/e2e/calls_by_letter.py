"""A parser of tool calls for vLLM, by which a random model calls tools, too: from a capital or a digit on it is one."""

import re

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser

BEGINS = re.compile(r"[A-Z0-9]")
NAME = "look_up"


@ToolParserManager.register_module("by_letter")
class ByLetter(ToolParser):
    """All of a text from its first capital or digit on are the arguments of one call."""

    def extract_tool_calls(self, model_output, request):
        """Take a whole reply apart."""
        found = BEGINS.search(model_output)
        if found is None:
            return ExtractedToolCallInformation(
                tools_called=False, tool_calls=[], content=model_output
            )
        function = FunctionCall(name=NAME, arguments=model_output[found.start() :])
        content = model_output[: found.start()] or None
        return ExtractedToolCallInformation(
            tools_called=True, tool_calls=[ToolCall(function=function)], content=content
        )

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
        found = BEGINS.search(current_text)
        if found is None:
            return DeltaMessage(content=delta_text) if delta_text else None
        begun = self.current_tool_id >= 0
        self.current_tool_id = 0
        arguments = delta_text if begun else current_text[found.start() :]
        if begun:
            call = DeltaToolCall(index=0, function=DeltaFunctionCall(arguments=arguments))
            return DeltaMessage(tool_calls=[call])
        function = DeltaFunctionCall(name=NAME, arguments=arguments)
        call = DeltaToolCall(index=0, type="function", id=make_tool_call_id(), function=function)
        content = current_text[len(previous_text) : found.start()] or None
        return DeltaMessage(content=content, tool_calls=[call])
