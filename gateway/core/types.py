"""The values that flow through the gateway; the first file to read.

Only the standard library is imported here, and msgspec: values made for every request are its structs,
built in C at a fifth of a dataclass's cost. What is not frozen (`Slot`, `RequestRecord`) says so, and who owns it.
Times called `at` or `now` are monotonic seconds; wall time exists only in `observe` and in key expiry. Ratios are 0..1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from gateway.core.asked import NOTHING_ASKED, Asked
from gateway.core.asked import Caller as Caller
from gateway.core.endings import Attempt, Barrier, Ending
from gateway.core.exclusion import Exclusion as Exclusion
from gateway.core.limits import Price, Taken
from gateway.core.prefix import Prefix, SentPrompt
from gateway.core.tracing import Trace
from gateway.core.traffic import Fallback, Shadow, Trial, Waited
from gateway.core.usage import Usage as Usage
from gateway.core.usage import UsageSource as UsageSource


class Endpoint(Enum):
    """An API path kind; the value is its name in settings, metrics and logs."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a call into Python

    CHAT = "chat"
    CHAT_BATCH = "chat_batch"  # several conversations in one request
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    EMBED = "embed"  # the same in Cohere's form
    POOLING = "pooling"
    CLASSIFY = "classify"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    RERANK = "rerank"
    SCORE = "score"
    GENERATIVE_SCORING = "generative_scoring"
    DECISIONS = "structured_decisions"  # questions about one text, each with given answers
    TRANSCRIPTIONS = "transcriptions"
    TRANSLATIONS = "translations"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class Dialect(Enum):
    """How a reply's errors, stream frames and endings are written."""

    __hash__ = object.__hash__  # as for Endpoint

    CHAT = "chat"  # OpenAI chunks with choices[].delta, ended by [DONE]
    COMPLETIONS = "completions"  # OpenAI chunks with choices[].text, ended by [DONE]
    RESPONSES = "responses"  # typed events, ended by response.completed or response.incomplete
    MESSAGES = "messages"  # Anthropic events, ended by message_stop
    PLAIN = "plain"  # no token stream of its own (embeddings, audio, ...)


class Phase(Enum):
    """Where one backend is in its life; `pools.health` holds the transitions."""

    STARTING = "starting"  # not yet seen healthy since it was added or restarted
    READY = "ready"
    DEGRADED = "degraded"  # serves only when no READY backend of the pool can
    DRAINING = "draining"  # takes no new work, its streams finish
    CORDONED = "cordoned"  # taken out by an operator, until that is undone
    DOWN = "down"  # refuses, fails its probes, or makes no progress
    STOPPED = "stopped"  # removed from the configuration; final


SERVING = frozenset({Phase.READY, Phase.DEGRADED})


class Outcome(Enum):
    """How one request ended; closed, because it is a metric label."""

    OK = "ok"
    UNAUTHENTICATED = "unauthenticated"  # 401
    REJECTED = "rejected"  # the caller's own fault, refused here: 400, 404, 408, 413, 415
    SHED = "shed"  # refused for capacity: 429, 503
    UPSTREAM_REJECTED = "upstream_rejected"  # the backend answered 4xx
    BACKEND_ERROR = "backend_error"  # the backend failed before the first byte to the client
    BACKEND_TIMEOUT = "backend_timeout"  # the backend was silent past its deadline
    STREAM_BROKEN = "stream_broken"  # the backend failed after the first byte to the client
    CLIENT_GONE = "client_gone"  # the client left; never the backend's fault
    CLIENT_STALLED = "client_stalled"  # the client did not read; cut to bound memory
    TIME_LIMIT = "time_limit"  # took longer than `timeouts.total`
    SHUTDOWN = "shutdown"  # cut by our own shutdown after the grace period
    BUG = "bug"  # ours; logged with a traceback

    __hash__ = object.__hash__  # as for Endpoint


_OK = Outcome.OK  # looked up once: 0.15 us before Python 3.12


class ShedReason(Enum):
    """Why a request was refused for capacity; closed, because it is a metric label and a header."""

    NO_ROOM = "no_room"  # no backend has room, and nothing may wait
    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    TOO_LATE = "too_late"  # its turn would come after its deadline
    QUEUE_TIMEOUT = "queue_timeout"  # its deadline passed while it waited
    NO_BACKEND = "no_backend"  # none serves the model now
    DRAINING = "draining"  # this gateway shuts down
    BODIES = "bodies"  # request bodies hold as much memory as they may
    ENGINE = "engine"  # the engine's own admission control refused it


Places = Mapping[str, tuple[int, int]]  # where values of an object stand in its bytes: [start, end)


class Call(msgspec.Struct, frozen=True):
    """What is asked: the few fields of a request body that the gateway looks at, and the body itself."""

    endpoint: Endpoint
    dialect: Dialect
    model: str
    stream: bool
    body: bytes
    max_new_tokens: int | None = None
    max_new_field: str | None = None
    choices: int = 1  # in a complete answer: n x number of prompts
    sequences: int = 1  # in an engine: one for each choice, prompt and document
    longest_ratio: float = 1.0  # of several prompts: the longest's share of all their text
    wants_usage: bool = False
    text_bytes: int | None = None  # UTF-8 of the longest prompt at most; None: unbounded (images)
    likely_bytes: int | None = None  # of text with as many tokens; None: all of `text_bytes`
    prompt_token_ids: int | None = None  # exact prompt length when the prompt is token ids
    truncates_prompt: bool = False  # truncate_prompt_tokens is set: the engine cuts, not we
    content_type: bytes = b"application/json"
    unnamed: bool = False  # the body names no model
    model_at: tuple[int, int] | None = None  # of a form, whose beginning `body` is: its value
    asked: Asked = NOTHING_ASKED
    fields: Mapping[str, msgspec.Raw] | None = None  # of a small JSON body, if it was taken apart
    places: Places | None = None  # of a large JSON body, which is never decoded as a whole
    tells_ids: bool = False  # the backend is asked for the ids of all tokens: see `resume.stream`
    messages_only: bool = False  # no other field adds to its prompt, or names a session
    event_tokens: int = 1  # in each event of a stream, but for the first of a choice

    @property
    def hides_usage(self) -> bool:
        """Whether the backend is asked for a usage chunk that the client did not ask for."""
        return self.stream and not self.wants_usage


@dataclass(frozen=True, slots=True)
class Route:
    """Where a model name leads. Windows are None while none is known."""

    requested: str
    pool: str
    served_model: str  # the name the backends know it by
    adapter: str | None = None  # set when the name is a LoRA adapter
    window_tokens: int | None = None  # the smallest of the backends' and the pool's `max_context`
    engine_tokens: int | None = None  # the smallest of the backends'
    widest_tokens: int | None = None  # the largest of the backends', within `max_context`
    widest_engine_tokens: int | None = None  # the largest of the backends'
    tenants_apart: bool = False  # each tenant has a prefix cache of its own
    trial: Trial | None = None  # a revision is on trial
    shadow: Shadow | None = None  # another pool gets copies


class Demand(msgspec.Struct, frozen=True):
    """What a request needs from a window. `prompt_tokens` is an upper bound unless `exact`."""

    prompt_tokens: int
    exact: bool
    max_new_tokens: int | None = None
    judged: bool = True  # False: no backend that could count it served as it came

    @property
    def total_tokens(self) -> int:
        """Prompt plus the stated output (0 when none is stated)."""
        return self.prompt_tokens + (self.max_new_tokens or 0)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One scrape of /metrics, data-parallel engines summed (KV usage: of the fullest; capacity: of one)."""

    at: float
    running: int
    waiting: int
    kv_usage_ratio: float | None
    kv_capacity_tokens: int | None = None  # 0: the model uses no KV cache; None: not known
    progress: float = 0.0  # generation + prompt tokens + iterations, growing within an incarnation
    preemptions: float = 0.0
    asleep: bool = False
    running_adapters: tuple[str, ...] = ()
    steps: float = 0.0  # sum of what every step may move, of those that make no token too
    generation_tokens: float = 0.0
    engines: tuple[int, ...] = ()  # requests of each, where a server has several from rank 0 on
    prefix_hits: float | None = None  # prompt tokens found in the prefix cache, ever


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of a backend's /v1/models. Adapters have a parent and usually no window of their own."""

    name: str
    parent: str | None
    window_tokens: int | None
    root: str | None = None  # of an adapter: its path on the backend


# --- what probes, scrapes and traffic tell the pool table: a closed union -----------------------


@dataclass(frozen=True, slots=True)
class ProbePassed:
    """`GET /health` answered 200; it was asked `asked_at`."""

    at: float
    asked_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """`GET /health` did not answer 200 in time; `reason` is a short closed word such as `refused`."""

    at: float
    reason: str
    asked_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Scraped:
    """`GET /metrics` was read and understood."""

    sample: LoadSample


@dataclass(frozen=True, slots=True)
class ScrapeFailed:
    """`GET /metrics` failed, held nothing we know, or is not asked for: the load is unknown, not free."""

    at: float


@dataclass(frozen=True, slots=True)
class ModelsSeen:
    """`GET /v1/models` answered; `endpoints` is None when the backend does not tell them."""

    at: float
    models: tuple[ServedModel, ...]
    endpoints: frozenset[Endpoint] | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class TrafficOk:
    """A real request ended well on the backend. `trial`: it tried a backend that is on probation."""

    at: float
    trial: bool = False


@dataclass(frozen=True, slots=True)
class TrafficFailed:
    """An attempt failed at the backend; `pools.attribution` says whose fault that is. `trial` as above."""

    at: float
    ending: Ending
    trial: bool = False


Observation = ProbePassed | ProbeFailed | Scraped | ScrapeFailed | ModelsSeen | TrafficOk | TrafficFailed  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of a backend's phase, with its evidence in one sentence."""

    backend_id: str
    before: Phase
    after: Phase
    reason: str  # short closed word, a metric label
    detail: str
    at: float


class Need(msgspec.Struct, frozen=True, gc=False):
    """What all of a request is expected to take of a KV cache, in tokens: an estimate, not a bound."""

    prompt_tokens: int
    output_tokens: int
    streams: bool = False  # its first token will be seen, which shows that its prompt was read
    sequences: int = 1  # of several, those that find no room in the engine wait there

    @property
    def tokens(self) -> int:
        """All of it."""
        return self.prompt_tokens + self.output_tokens


class Ask(msgspec.Struct):
    """One request that looks for a backend. Its handler owns it: `tried` grows with failed attempts."""

    route: Route
    call: Call
    demand: Demand
    caller: Caller
    need: Need = Need(0, 0)
    top_priority: int | None = None  # of several in use: a reserve is kept for it
    tried: dict[str, float] = {}  # when the phase began in which an attempt failed there
    returned: bool = False  # its client says that it was refused before (`x-stainless-retry-count`)
    prefix: Prefix | None = None  # None: nothing is known of its beginning
    session: bytes = b""  # as its client names it in a header
    asked_at: float = -math.inf  # when it came
    free_at: float = math.inf  # since when a backend other than `awaits` could take it
    awaits: str | None = None  # the backend that it waits for, because its prompt is cached there
    fallback: Fallback | None = None  # set when its own pool could not take it
    attempts_before: int = 0  # made in other pools
    on_trial: bool | None = None  # whether it goes to the revision on trial; None: there is none
    place: Slot | None = None  # taken ahead, for the rest of its stream
    leaves: tuple[str, str | None] | None = None  # what its stream leaves: revision, adapter's path
    weighed: tuple[str, ...] = ()  # the backends that were compared last
    costs_s: Sequence[float] = ()  # of the request, at each of `weighed`
    let_in: bool = False  # it had a place before, so it need not wait its turn again
    moves_rest: bool | None = None  # until a rest is sent: it moves, or (False) follows a failure


class Credit(msgspec.Struct, gc=False):
    """What one request in flight counts for; `pools.room.Room` alone makes and changes it."""

    prompt_tokens: int
    output_tokens: int
    need_tokens: int = 0  # both, and what a batch that is larger than the cache needs on top
    unread_tokens: int = 0  # of the prompt, that the engine has to read
    unread_before: int = 0  # of other prompts, at the backend when it was sent
    read_at: int | None = None  # scrapes seen when its prompt had been read; None: not read yet
    held: bool = True
    tenant: str = ""
    sequences: int = 1
    began_at: float | None = None  # when its first token came, where its pace is known


class Slot(msgspec.Struct, gc=False):
    """A place on a backend, taken from the pool table. Give it back through `release` alone, in a `finally`."""

    backend_id: str
    taken_at: float
    scrape_count: int  # scrapes seen when taken: newer ones already include this request
    credit: Credit
    _give_back: Callable[[Slot], None] | None = None
    sent: SentPrompt | None = None  # its prompt's beginning, if what the backend holds is known
    adapter: str | None = None

    def held_from(self, give_back: Callable[[Slot], None] | None) -> bool:
        """Whether `give_back` is where it goes back to, and it was not given back yet."""
        return give_back is not None and self._give_back is give_back

    def release(self) -> None:
        """Give the place back; further calls do nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self)


class RequestRecord(msgspec.Struct, gc=False):
    """What one request learned about itself. The handler owns it; `observe.ledger` settles it once."""

    id: str
    endpoint: Endpoint | None  # None: refused before there was one
    received_at: float
    caller: Caller | None = None
    model: str | None = None  # as asked, only once it is known to exist
    pool: str | None = None  # that answered, or was asked last
    fallback: Fallback | None = None  # from which pool it came, and why
    adapter: str | None = None
    stream: bool = False
    backend_id: str | None = None
    revision: str = ""  # of that backend
    conversation: float | None = None  # the hash of its conversation, where a canary is on trial
    attempts: int = 0
    failed: tuple[Attempt, ...] = ()  # the attempts that failed
    trace: Trace | None = None  # None: there are no traces
    weighed: tuple[str, ...] = ()  # as in `Ask`, for the last attempt
    costs_s: Sequence[float] = ()
    sent_model: str | None = None  # the name that the backend got; None: that in the client's body
    adds_usage: bool = False  # a usage chunk was asked for that the client did not want
    adds_ids: bool = False  # the backend was asked for the ids of all tokens
    adds_salt: bool = False  # its prefix cache got a salt of the tenant's own
    stated_tokens: int | None = None  # limit of the output, as the client wrote it
    sent: SentPrompt | None = None  # of the last attempt; let go once the request is settled
    expected_cached_tokens: int | None = None  # as `sent` has it; kept when that is let go
    engine_id: str = ""  # what the engine calls the last attempt
    body_at: float | None = None  # when its whole body was there; of an upload, its model's name
    queue_s: float = 0.0  # waited for a place on a backend, in all
    waits: tuple[Waited, ...] = ()  # the parts of `queue_s`
    need: Need | None = None
    choices: int = 1
    shed_reason: ShedReason | None = None
    sent_at: float | None = None
    first_byte_at: float | None = None
    ended_at: float | None = None
    status: int = 0
    outcome: Outcome | None = None
    error_code: str | None = None
    message: str | None = None  # of the error, as its client reads it
    resumed: int = 0  # how often another backend went on with its stream
    moved: int = 0  # how often of these because its own backend was drained
    not_resumed: Barrier | None = None  # why no backend went on with a stream that broke off
    demand: Demand | None = None
    usage: Usage | None = None
    taken: Taken | None = None  # of its limits, if it has any
    price: Price | None = None  # of its tokens, as it came; None: they are free
    client: str | None = None  # address, behind trusted proxies; None on a UNIX socket
    client_retry: int = 0  # x-stainless-retry-count
    unknown_fields: int = 0  # in its body, of which neither vLLM nor a public API knows
    bytes_out: int = 0
    settled: bool = False  # set by the ledger; a second settling is a bug

    @property
    def token_gap_s(self) -> float | None:
        """The mean time between two tokens of a stream that came to a good end; None for others."""
        usage, first_at, ended_at = self.usage, self.first_byte_at, self.ended_at
        if not self.stream or usage is None or first_at is None or ended_at is None:
            return None
        gaps = usage.completion_tokens // self.choices - 1
        return (ended_at - first_at) / gaps if gaps > 0 and self.outcome is _OK else None
