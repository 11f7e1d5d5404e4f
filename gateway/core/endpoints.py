"""What each endpoint has a backend do."""

from __future__ import annotations

from typing import Final

from gateway.core.types import Endpoint

# A chat template writes the prompt.
TEMPLATED: Final = frozenset(
    {
        Endpoint.CHAT,
        Endpoint.CHAT_BATCH,
        Endpoint.RESPONSES,
        Endpoint.MESSAGES,
        Endpoint.DECISIONS,
    }
)
GENERATES: Final = TEMPLATED - {Endpoint.DECISIONS} | {Endpoint.COMPLETIONS}
# The engine reads prompts and generates no text.
READS: Final = frozenset(
    {
        Endpoint.EMBEDDINGS,
        Endpoint.EMBED,
        Endpoint.POOLING,
        Endpoint.CLASSIFY,
        Endpoint.RERANK,
        Endpoint.SCORE,
        # One token a prompt, of which only the probability counts.
        Endpoint.GENERATIVE_SCORING,
        Endpoint.DECISIONS,
    }
)
# Each of several documents is read beside one query.
PAIRED: Final = frozenset({Endpoint.RERANK, Endpoint.SCORE, Endpoint.GENERATIVE_SCORING})
# The server answers without its engine.
NO_ENGINE: Final = frozenset({Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
NO_OUTPUT: Final = NO_ENGINE | READS
