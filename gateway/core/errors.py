"""The error tree, by whose fault it is.

    GatewayError                          status  OpenAI type              code
    |-- RequestError        the caller's  400     invalid_request_error    (per raise)
    |   |-- ContextLengthExceeded         400     invalid_request_error    context_length_exceeded
    |   |-- MissingModel                  400     invalid_request_error    missing_required_parameter
    |   |-- ModelNotFound                 404     invalid_request_error    model_not_found
    |   |-- UnknownUrl                    404     invalid_request_error    unknown_url
    |   |-- RequestQuarantined            400     invalid_request_error    request_quarantined
    |   |-- EndpointNotServed             404     invalid_request_error    endpoint_not_supported
    |   |-- OriginNotAllowed              403     invalid_request_error    origin_not_allowed
    |   |-- MethodNotAllowed              405     invalid_request_error    method_not_allowed
    |   |-- BodyTimeout                   408     invalid_request_error    request_timeout
    |   |-- BodyTooLarge                  413     invalid_request_error    request_too_large
    |   |-- UnsupportedMediaType          415     invalid_request_error    unsupported_media_type
    |   |-- HeadTimeout                   408     invalid_request_error    request_timeout
    |   `-- HeadTooLarge                  431     invalid_request_error    request_headers_too_large
    |-- AccessError         the caller's  401     invalid_request_error    invalid_api_key
    |   |-- WrongKind                     403     invalid_request_error    wrong_kind_of_key
    |   |-- WrongAddress                  403     invalid_request_error    ip_not_authorized
    |   `-- MissingKey                    401     invalid_request_error    missing_api_key
    |-- TooManyFailedKeys   the caller's  429     rate_limit_error         too_many_failed_keys
    |-- KeysUnknown         nobody's      503     service_unavailable_error  keys_unknown
    |-- Rejected            nobody's      503     service_unavailable_error
    |   |-- TooManyWaiting    the caller's 429    rate_limit_error         too_many_waiting
    |   |-- Overloaded                    503     service_unavailable_error  server_is_overloaded
    |   |   `-- EngineFull                503     (the engine refused: elsewhere if there is room)
    |   |-- TooManyConnections            503     service_unavailable_error  too_many_connections
    |   |-- Unavailable                   503     service_unavailable_error  model_unavailable
    |   `-- ShuttingDown                  503     service_unavailable_error  shutting_down
    |-- EndedByShutdown     nobody's      503     service_unavailable_error  shutting_down
    |-- ReplyTooLarge       nobody's      502     server_error             reply_too_large
    |-- TookTooLong         nobody's      504     server_error             request_timeout
    |-- UpstreamError       the backend's 502     server_error             backend_error
    |   |-- ConnectFailed                 502     (nothing was sent: may be retried elsewhere)
    |   |   `-- NothingFree               502     (the gateway's own machine is to blame)
    |   |-- StaleConnection               502     (reused connection died unanswered: one retry)
    |   |-- BackendBroke                  502     (died or spoke nonsense before the first byte)
    |   |   |-- MisdirectedReply            502     (the reply names another request)
    |   |   |-- BackendStopping             502     (it drains, and takes nothing new: retried)
    |   |   |-- AdapterLost                 503     model_unavailable        (it has the adapter no more: retried)
    |   |   `-- RestRefused                 502     (it takes no rest of another's stream)
    |   |-- StreamBroke                   502     (after the first byte: an error frame, never a retry)
    |   |   `-- StreamMoved                 502     (cut by us: it has a place elsewhere)
    |   |-- BackendTimeout                504     server_error             backend_timeout
    |   |   `-- RequestForgotten            504     (its engine has it no more: retried)
    |   `-- BackendDown                   502     backend_down             (out of service with it: not retried)
    |-- ClientGone          nobody's      499     never answered, never held against a backend
    |   `-- ClientStalled                 499     did not read for too long: cut, to bound memory
    `-- ConfigError         the operator's        never becomes a reply

A reply always has `message`, `type`, `param` and a string `code` (openai-openapi ErrorResponse; SDKs read `error`).
Anything that is not a GatewayError is a bug: 500, with a traceback, Outcome.BUG. `core.ratelimited` has two more,
`ingress.unserved` has one.
"""

from __future__ import annotations

import random
from typing import ClassVar, Final

from gateway.core.endings import Ending
from gateway.core.types import Outcome, ShedReason

NO_MODEL: Final = "You must provide a `model`. GET /v1/models lists what this key can use."


class GatewayError(Exception):
    """A refusal or failure that a client may read. `message` says what, the numbers, what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    outcome: Outcome = Outcome.BUG

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else self.default_code
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(GatewayError):
    """The request itself is wrong: 400."""

    status = 400
    type = "invalid_request_error"
    outcome = Outcome.REJECTED


class ContextLengthExceeded(RequestError):
    """Prompt plus output do not fit the route's window: 400."""

    default_code = "context_length_exceeded"


class MissingModel(RequestError):
    """No model is named, and the key sees several: 400."""

    default_code = "missing_required_parameter"


class ModelNotFound(RequestError):
    """Unknown model, or one this key may not use; the same words for both: 404."""

    status = 404
    default_code = "model_not_found"


class UnknownUrl(RequestError):
    """Not in the endpoint allow-list: 404."""

    status = 404
    default_code = "unknown_url"


class RequestQuarantined(RequestError):
    """Two backends died with this request in them, so no third one gets it for a while: 400."""

    default_code = "request_quarantined"


class EndpointNotServed(RequestError):
    """The model exists, but its backends do not serve this endpoint: 404."""

    status = 404
    default_code = "endpoint_not_supported"


class OriginNotAllowed(RequestError):
    """A web page of this origin may not call the gateway: 403."""

    status = 403
    default_code = "origin_not_allowed"


class MethodNotAllowed(RequestError):
    """A known path with the wrong method: 405."""

    status = 405
    default_code = "method_not_allowed"


class BodyTimeout(RequestError):
    """The body did not arrive in time: 408, and the connection closes."""

    status = 408
    default_code = "request_timeout"


class BodyTooLarge(RequestError):
    """The body has more bytes than the endpoint takes: 413."""

    status = 413
    default_code = "request_too_large"


class UnsupportedMediaType(RequestError):
    """Wrong content-type, or an encoded body: 415."""

    status = 415
    default_code = "unsupported_media_type"


class HeadTimeout(RequestError):
    """The request head did not arrive in time: 408, and the connection closes."""

    status = 408
    default_code = "request_timeout"


class HeadTooLarge(RequestError):
    """The request head has too many bytes or headers: 431, and the connection closes."""

    status = 431
    default_code = "request_headers_too_large"


class AccessError(GatewayError):
    """A wrong key, or two different ones: 401."""

    status = 401
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "invalid_api_key"
    outcome = Outcome.UNAUTHENTICATED


class WrongKind(AccessError):
    """A right key that is for something else: 403."""

    status = 403
    default_code = "wrong_kind_of_key"


class WrongAddress(AccessError):
    """A right key, sent from an address that may not use it: 403."""

    status = 403
    default_code = "ip_not_authorized"


class MissingKey(AccessError):
    """No key at all: 401."""

    default_code = "missing_api_key"


class TooManyFailedKeys(GatewayError):
    """One address sent too many requests without a valid key: 429 in place of the 401."""

    status = 429
    type = "rate_limit_error"
    default_code = "too_many_failed_keys"
    outcome = Outcome.UNAUTHENTICATED


class KeysUnknown(GatewayError):
    """The store of the keys did not answer since this gateway started, and there is no copy: 503."""

    status = 503
    type = "service_unavailable_error"
    default_code = "keys_unknown"
    outcome = Outcome.UNAUTHENTICATED


class Rejected(GatewayError):
    """Refused for capacity, nobody's fault: 503 with Retry-After."""

    status = 503
    type = "service_unavailable_error"
    outcome = Outcome.SHED
    shed_reason: ShedReason = ShedReason.NO_ROOM


class Overloaded(Rejected):
    """Every backend that could serve it is saturated, and it cannot or may not wait longer."""

    default_code = "server_is_overloaded"
    retry_after_s: float

    def __init__(self, message: str, *, reason: ShedReason, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.shed_reason = reason


class EngineFull(Overloaded):
    """The engine itself refused: busy, not sick. `admission.refusals.engine_refused` is what a client gets.

    `pause_s` is how long the engine asks to wait; None: it does not say.
    """

    ending: ClassVar[Ending] = Ending.FULL

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        retry_after_s = pause_s or random.uniform(1.0, 3.0)  # spread: many are refused at once
        super().__init__(message, reason=ShedReason.ENGINE, retry_after_s=retry_after_s)
        self.pause_s = pause_s


class TooManyWaiting(Rejected):
    """The caller's own share of the queue is used up, or smaller than the request: 429."""

    status = 429
    type = "rate_limit_error"
    default_code = "too_many_waiting"
    shed_reason = ShedReason.TENANT_QUEUE_FULL


class TooManyConnections(Rejected):
    """There are as many client connections as there may be, all of them at work."""

    default_code = "too_many_connections"


class Unavailable(Rejected):
    """The model is known, but none of its backends serves now."""

    default_code = "model_unavailable"
    shed_reason = ShedReason.NO_BACKEND


class ShuttingDown(Rejected):
    """This gateway is draining."""

    default_code = "shutting_down"
    shed_reason = ShedReason.DRAINING


class EndedByShutdown(GatewayError):
    """This gateway stops, and ended the reply before it was complete: 503 where nothing of it had gone out."""

    status = 503
    type = "service_unavailable_error"
    default_code = "shutting_down"
    outcome = Outcome.SHUTDOWN


class ReplyTooLarge(GatewayError):
    """A backend did what the client asked for, but the reply is larger than `limits.max_reply`: 502."""

    status = 502
    outcome = Outcome.REJECTED
    default_code = "reply_too_large"


class TookTooLong(GatewayError):
    """The whole request took longer than `timeouts.total`: 504. Not held against a backend."""

    status = 504
    default_code = "request_timeout"
    outcome = Outcome.TIME_LIMIT


class UpstreamError(GatewayError):
    """The backend failed: 502. `ending` says how, for metrics and health."""

    status = 502
    type = "server_error"
    default_code = "backend_error"
    outcome = Outcome.BACKEND_ERROR
    ending: ClassVar[Ending] = Ending.BROKE
    # The backend itself ended an unfinished reply, as one does that is stopped: it did not crash.
    in_order = False


class ConnectFailed(UpstreamError):
    """No connection could be made, so nothing was sent; safe to try elsewhere."""

    ending = Ending.CONNECT


class NothingFree(ConnectFailed):
    """No connection could be made because this machine had no port, descriptor or memory for one."""

    ending = Ending.OURS


class StaleConnection(UpstreamError):
    """A reused idle connection died before any reply byte; one retry on a fresh connection."""

    ending = Ending.STALE


class BackendBroke(UpstreamError):
    """The backend died or answered nonsense before the client got a byte."""


class MisdirectedReply(BackendBroke):
    """The reply names another request: it was meant for another client, and nobody gets it."""

    ending = Ending.MISDIRECTED


class BackendStopping(BackendBroke):
    """The backend was told to stop, and answers requests that it does not take any more: nothing was done."""

    ending = Ending.HTTP_5XX


class AdapterLost(BackendBroke):
    """The backend listed the adapter and has it no more: nothing was done. 503, if no other one has it."""

    status = 503
    type = "service_unavailable_error"
    default_code = "model_unavailable"
    ending = Ending.REFUSED


class RestRefused(BackendBroke):
    """The backend refuses the rest of a stream that another one began: nobody's mistake, and no failure."""

    ending = Ending.REST_REFUSED


class BackendDown(UpstreamError):
    """The backend was declared down, or is restarted, with the request in it: 502. Its health knows that already."""

    default_code = "backend_down"
    ending = Ending.DOWN


class StreamBroke(UpstreamError):
    """The backend died, stalled or reported an error after the client's first byte."""

    ending = Ending.STREAM
    outcome = Outcome.STREAM_BROKEN


class StreamMoved(StreamBroke):
    """Its backend is drained, and another one has a place for its rest: no failure."""

    ending = Ending.MOVED


class BackendTimeout(UpstreamError):
    """The backend was silent past its deadline: 504. Not retried: the work may go on."""

    status = 504
    default_code = "backend_timeout"
    ending = Ending.TIMEOUT
    outcome = Outcome.BACKEND_TIMEOUT


class RequestForgotten(BackendTimeout):
    """The backend's engine works, and has no such request any more: 504, if no other one can take it."""

    ending = Ending.FORGOTTEN


class ClientGone(GatewayError):
    """The client left. Not an error: nothing is answered, nothing is retried."""

    status = 499
    outcome = Outcome.CLIENT_GONE


class ClientStalled(ClientGone):
    """The client stopped reading with its buffers full: the connection is cut."""

    outcome = Outcome.CLIENT_STALLED


class ConfigError(Exception):
    """The configuration cannot be used. `findings` are ready to print, one per line."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings
