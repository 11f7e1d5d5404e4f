"""vllm-gateway: an OpenAI-compatible gateway in front of vLLM servers.

Reading order: core/types.py, ingress/handler.py (the story of a request), pools/table.py (the live
state), then whatever the question is about. ARCHITECTURE.md has the map.
"""

__version__ = "0.1.0"
