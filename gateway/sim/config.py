"""The settings of one simulated vLLM server, and of an engine in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")  # what follows, as in 0.33.0rc1, changes nothing

# What a text-generating vLLM with scoring and audio would serve; a real one serves fewer, by model.
PATHS: Final = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/generative_scoring",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and speeds of one engine. Times are seconds of the owner's clock."""

    max_num_seqs: int = 64
    num_blocks: int = 4096
    block_size: int = 16
    max_batched_tokens: int = 2048  # tokens one step computes at most; longer prompts go in chunks
    max_loras: int = 1
    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.010
    decode_step_per_seq_s: float = 0.00005
    context_token_s: float = 0.0  # of a step, for each token of context that it reads

    @property
    def capacity_tokens(self) -> int:
        """How many tokens the KV cache holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One server. Pacing is in seconds of simulated time, which runs `speed` times as fast as ours.

    `speed=0` means no waiting at all: every step ends at once, and requested paces are ignored.
    `paths` are the inference paths served (others are 404, as in vLLM when the model lacks a task).
    """

    model: str = "sim"
    adapters: tuple[str, ...] = ()
    max_model_len: int = 8192
    max_embed_len: int | None = None  # of a prompt to embed, made in chunks where it is longer
    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None  # path of a UNIX socket to listen on, in place of host and port
    ssl_certfile: str | None = None  # it speaks TLS; PEM, of vLLM's options of these names
    ssl_keyfile: str | None = None
    api_key: str | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048  # of one step; a longer prompt is read in chunks
    num_blocks: int = 0  # 0: enough for two requests of the longest length, at least 4096
    block_size: int = 16
    encoder_only: bool = False  # its metrics show no KV cache: the one block that is never used
    max_loras: int = 4
    max_lora_rank: int = 16
    adapter_load_s: float = 0.0  # of our time; the engines stand still meanwhile
    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.010
    context_token_s: float = 0.0
    prompt_tokens_details: bool = False  # replies tell what the prefix cache had of a prompt
    dev_mode: bool = False  # POST /reset_prefix_cache is served
    speed: float = 1.0
    reply_tokens: int = 24  # the length of a reply when the request states none
    ends_itself: bool = False  # it has that length, too, when the request allows more
    paths: tuple[str, ...] = field(default=PATHS)
    max_num_queued_reqs: int | None = None
    old_metrics: bool = False  # names of vLLM <= 0.9
    dp: int = 1
    version: str = "0.32.0"  # from 0.33 on, it writes as that does
    system_first: bool = False  # its chat template takes a system message as the first one only
    reads_effort: bool = False  # its chat template writes the effort into the prompt
    hides_tools: bool = False  # `--exclude-tools-when-tool-choice-none`; `/tokenize` shows them
    takes_prompt_ids: bool = True  # in place of a chat's rendered prompt; before 0.27: no
    keep_alive_s: float = 5.0  # idle connections are closed after it, as vLLM's uvicorn does
    death_linger_s: float = 0.2  # from the engine's death until the listener is gone

    def __post_init__(self) -> None:
        if self.blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into the KV cache of"
                f" {self.num_blocks} blocks of {self.block_size} tokens"
            )
        if self.dp < 1:
            raise ValueError("dp must be at least 1")
        if _RELEASE.match(self.version) is None:
            raise ValueError(f"version {self.version!r} is none of vLLM's: write it as 0.33.0")

    @property
    def newer(self) -> bool:
        """Whether it writes as vLLM 0.33 does."""
        found = _RELEASE.match(self.version)
        return found is not None and (int(found[1]), int(found[2])) >= (0, 33)

    @property
    def blocks(self) -> int:
        """KV blocks of one engine core."""
        return self.num_blocks or max(4096, 2 * -(-self.max_model_len // self.block_size))

    @property
    def engine(self) -> EngineConfig:
        """The same, for one engine core."""
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            num_blocks=self.blocks,
            block_size=self.block_size,
            max_loras=self.max_loras,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            context_token_s=self.context_token_s,
        )
