"""How vLLM divides KV memory into blocks, and how many of them a request takes.

Layers of one kind share a block table. A model of several kinds is cut into groups of as many
layers as its rarest kind has; every group draws its blocks from one pool, so all their pages have
the size of the largest, and a block costs as much as the widest group.

Source: vLLM 0.32, v1/core/kv_cache_utils.py: `get_kv_cache_groups`,
`unify_kv_cache_spec_page_size`, `_get_kv_cache_groups_uniform_page_size`,
`_max_memory_usage_bytes_from_groups`, `get_max_concurrency_for_kv_cache_config`,
`get_kv_cache_configs`; platforms/interface.py: `_align_hybrid_block_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.sizing.kvcaches import Cache, Dtype, Heads, Latent, State

_KERNEL_BLOCK_TOKENS: Final = 16  # FlashAttention and Triton take multiples of it
_MLA_HYBRID_BLOCK_TOKENS: Final = 128  # beside recurrent layers; platforms/interface.py
_NEAR: Final = 1.5  # kinds whose numbers of layers differ by less are padded, not split


@dataclass(frozen=True, slots=True)
class Sizing:
    """What of a plan decides the layout."""

    tp: int = 1
    block_tokens: int = 16
    kv_bytes: int = 2  # of one number in the KV cache
    dtype: Dtype = Dtype.BFLOAT16
    in_flight_tokens: int = 4096  # scheduled and not yet settled; windows are kept that much longer
    prefix_caching: bool = True
    recurrent_dtype: Dtype | None = None  # None: that of the model

    def state_bytes(self, state: State) -> int:
        """Return the bytes of a recurrent layer's state of one request on one GPU."""
        return state.request_bytes(self.tp, self.dtype, self.recurrent_dtype)


@dataclass(frozen=True, slots=True)
class _Page:
    """One cache of one layer: what a block of it holds."""

    layer: int
    cache: Cache
    block_tokens: int
    page_bytes: int

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers of one group have in common."""
        return (self.cache, self.block_tokens, self.page_bytes)

    @property
    def everywhere(self) -> tuple[object, ...]:
        """What layers of different sizes must have in common to take one block table."""
        if isinstance(self.cache, State):
            return (State, self.page_bytes, self.cache.checkpoints)
        window = self.cache.window if isinstance(self.cache, Heads) else None
        return (window, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table; `layers` are their numbers, `pages` their bytes a block."""

    cache: Cache
    block_tokens: int
    layers: tuple[int, ...]
    pages: tuple[int, ...]

    def blocks(self, tokens: int, sizing: Sizing) -> int:
        """Return the blocks that a request of so many tokens may hold at a time."""
        if isinstance(self.cache, State):
            return 2 + self.cache.checkpoints if sizing.prefix_caching else 1
        if isinstance(self.cache, Heads) and self.cache.window is not None:
            kept = min(self.cache.window - 1 + sizing.in_flight_tokens, tokens)
            return _ceil(kept, self.block_tokens) + 1  # a window may begin inside a block
        return _ceil(tokens, self.block_tokens)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups of a whole model, and the layers each pipeline stage has of them."""

    groups: tuple[Group, ...]
    sizing: Sizing
    stages: tuple[range, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of attention: what `--block-size` comes to."""
        attention = [g.block_tokens for g in self.groups if not isinstance(g.cache, State)]
        return max(attention, default=self.sizing.block_tokens)

    def block_bytes(self, stage: int) -> int:
        """Return what one block costs on a GPU of a stage: the pages of its widest group."""
        layers = self.stages[stage]
        return max(
            (
                sum(page for layer, page in zip(g.layers, g.pages, strict=True) if layer in layers)
                for g in self.groups
            ),
            default=0,
        )

    def blocks(self, tokens: int) -> int:
        """Return the blocks of one request of so many tokens."""
        return sum(group.blocks(tokens, self.sizing) for group in self.groups)

    def pool_blocks(self, kv_memory: Sequence[int]) -> int:
        """Return the blocks that every stage can hold. `kv_memory`: bytes per GPU, by stage."""
        costs = [self.block_bytes(stage) for stage in range(len(self.stages))]
        held = [max(0, m) // cost for m, cost in zip(kv_memory, costs, strict=True) if cost]
        return min(held, default=0)

    def needed_bytes(self, tokens: int, stage: int) -> int:
        """Return what one request of so many tokens needs on a GPU of a stage.

        This includes the null block, which vLLM holds back.
        """
        return (self.blocks(tokens) + 1) * self.block_bytes(stage)

    def fits(self, tokens: int, kv_memory: Sequence[int]) -> bool:
        """Whether one request of so many tokens fits on every stage; otherwise vLLM refuses to start."""
        return all(self.needed_bytes(tokens, s) <= m for s, m in enumerate(kv_memory))

    def longest(self, most_tokens: int, kv_memory: Sequence[int]) -> int:
        """Return the longest request that fits, at most `most_tokens`; 0: none."""
        low, high = 0, most_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle, kv_memory) else (low, middle - 1)
        return low


def lay_out(layers: Sequence[Sequence[Cache]], sizing: Sizing, stages: Sequence[range]) -> KvLayout:
    """Return the layout of a model. `layers`: the caches of each layer, in order."""
    sizing = replace(sizing, block_tokens=_aligned_block(layers, sizing))
    pages = [_page(number, c, sizing) for number, caches in enumerate(layers) for c in caches]
    pages = _padded_states(pages)
    if len({page.everywhere for page in pages}) <= 1:
        groups = [_group(pages)] if pages else []
    else:
        groups = _split(_unified(pages))
    return KvLayout(tuple(groups), sizing, tuple(stages))


def split_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage.

    Layers that are left over go to the stages before the last one, the hindmost first, so that the first and
    the last stage, which also have the embeddings, stay small (vLLM distributed/utils.py,
    `get_pp_indices`).
    """
    counts = [layers // stages] * stages
    for place in range(2, layers % stages + 2):
        counts[-place] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _aligned_block(layers: Sequence[Sequence[Cache]], sizing: Sizing) -> int:
    """Return the block size; beside recurrent layers a page must hold a whole state of theirs."""
    caches = [cache for layer in layers for cache in layer]
    states = [sizing.state_bytes(c) for c in caches if isinstance(c, State)]
    attention = [c for c in caches if not isinstance(c, State)]
    if not states or not attention:
        return sizing.block_tokens
    token = attention[0].token_bytes(sizing.tp, sizing.kv_bytes)
    step = max(_KERNEL_BLOCK_TOKENS, sizing.block_tokens)
    if isinstance(attention[0], Latent):
        step = max(step, _MLA_HYBRID_BLOCK_TOKENS)
    return max(sizing.block_tokens, step * _ceil(max(states), step * token))


def _page(layer: int, cache: Cache, sizing: Sizing) -> _Page:
    if isinstance(cache, State):
        return _Page(layer, cache, 0, sizing.state_bytes(cache))
    token = cache.token_bytes(sizing.tp, sizing.kv_bytes)
    return _Page(layer, cache, sizing.block_tokens, sizing.block_tokens * token)


def _padded_states(pages: list[_Page]) -> list[_Page]:
    """Give the states of a hybrid model the page of its attention, which is at least as large."""
    attention = [page.page_bytes for page in pages if not isinstance(page.cache, State)]
    if not attention:
        return pages
    return [
        replace(page, page_bytes=max(page.page_bytes, attention[0]))
        if isinstance(page.cache, State)
        else page
        for page in pages
    ]


def _unified(pages: Sequence[_Page]) -> list[_Page]:
    """Give all pages the size of the largest: with longer blocks where that divides, or padded."""
    largest = max(page.page_bytes for page in pages)
    unified = []
    for page in pages:
        ratio, rest = divmod(largest, page.page_bytes)
        if rest or isinstance(page.cache, State):
            unified.append(replace(page, page_bytes=largest))
        else:
            block = page.block_tokens * ratio
            unified.append(replace(page, block_tokens=block, page_bytes=largest))
    return unified


def _split(pages: Iterable[_Page]) -> list[Group]:
    """Cut each kind of layers into groups of the same number of layers."""
    kinds: dict[tuple[object, ...], list[_Page]] = {}
    for page in pages:
        kinds.setdefault(page.kind, []).append(page)
    counts = [len(kind) for kind in kinds.values()]
    width = max(counts) if max(counts) < min(counts) * _NEAR else min(counts)
    groups = []
    for kind in kinds.values():
        number = _ceil(len(kind), width)
        groups += [_group(kind[place::number]) for place in range(number)]
    return groups


def _group(pages: Sequence[_Page]) -> Group:
    return Group(
        pages[0].cache,
        pages[0].block_tokens,
        tuple(page.layer for page in pages),
        tuple(page.page_bytes for page in pages),
    )


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
