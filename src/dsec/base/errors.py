"""The one error tree, branched by what the caller can do about it.

    DsecError
      RequestError            fix your request
        InvalidRequest          400  a value is wrong; the message names it
        Unauthenticated         401
        PermissionDenied        403
        NotFound                404  sandbox, image, command, path, user, ... (details.kind)
        Conflict                409  exists already, or not in a state that allows it
        PayloadTooLarge         413
        Unsupported             422  this host or backend cannot do what was asked
      LimitError              wait, or ask for more
        QuotaExceeded           403
        RateLimited             429
        CapacityUnavailable     503  no node can take it now; nothing was started
        StorageFull             507  the disk or a disk limit is full
      SandboxError            this sandbox is over
        SandboxGone             410  stopped, expired, failed or lost (details.reason)
        StartFailed             500  it never ran (details.step, .path, .errno)
      DeadlineExceeded        504  may or may not have happened; look before you retry
        Interrupted           504  the platform was killed at it
      Unavailable             503  retry with the same idempotency key
        DataUnavailable         503  the store does not give data of an environment
      InternalError           500  our bug; carries an incident id

Each class carries a stable code, an HTTP status, a CLI exit status and whether the same request
may simply be sent again. The REST body, the SDK exception, the CLI text and docs/errors.md all
derive from this table. A command that exits 1 is a value, not an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

Detail = str | int | float | bool | None


class DsecError(Exception):
    """Root of the tree; never raised itself."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 70
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Detail] = {k: v for k, v in details.items() if v is not None}


class RequestError(DsecError):
    """Fix your request."""

    code = "request_error"
    http_status = 400
    exit_status = 64


class InvalidRequest(RequestError):
    """A value in the request is wrong; the message names it."""

    code = "invalid_request"


class Unauthenticated(RequestError):
    """No key, or a key nobody issued."""

    code = "unauthenticated"
    http_status = 401
    exit_status = 77


class PermissionDenied(RequestError):
    """The principal may not do this, or a file's mode forbids it to the user named."""

    code = "permission_denied"
    http_status = 403
    exit_status = 77


class NotFound(RequestError):
    """Something named in the request does not exist; `details["kind"]` says what."""

    code = "not_found"
    http_status = 404
    exit_status = 66


class Conflict(RequestError):
    """It exists already, or is in a state that does not allow this."""

    code = "conflict"
    http_status = 409
    exit_status = 73


class PayloadTooLarge(RequestError):
    """A body or field is larger than the stated limit."""

    code = "payload_too_large"
    http_status = 413


class Unsupported(RequestError):
    """This host or backend cannot do what was asked; nothing was started."""

    code = "unsupported"
    http_status = 422
    exit_status = 69


class LimitError(DsecError):
    """Wait, or ask for more."""

    code = "limit_error"
    http_status = 429
    exit_status = 75


class QuotaExceeded(LimitError):
    """The project's quota does not allow it."""

    code = "quota_exceeded"
    http_status = 403


class RateLimited(LimitError):
    """Too many requests; `details["retry_after_s"]` says when to come back."""

    code = "rate_limited"
    retryable = True


class CapacityUnavailable(LimitError):
    """No node can take the sandbox now; nothing was started."""

    code = "capacity_unavailable"
    http_status = 503
    retryable = True


class StorageFull(LimitError):
    """The disk, or the sandbox's disk limit, is full; nothing partial was kept."""

    code = "storage_full"
    http_status = 507


class SandboxError(DsecError):
    """This sandbox is over."""

    code = "sandbox_error"
    http_status = 410
    exit_status = 74


class SandboxGone(SandboxError):
    """Stopped, expired, failed or lost; `details["reason"]` says which."""

    code = "sandbox_gone"


class StartFailed(SandboxError):
    """The sandbox never ran; `details` name the step, path and errno."""

    code = "start_failed"
    http_status = 500


class DeadlineExceeded(DsecError):
    """It may or may not have happened; look before you retry."""

    code = "deadline_exceeded"
    http_status = 504
    exit_status = 75


class Interrupted(DeadlineExceeded):
    """The platform was killed at it, and nobody knows how far it came; look before you ask again."""

    code = "interrupted"


class Unavailable(DsecError):
    """Retry with the same idempotency key."""

    code = "unavailable"
    http_status = 503
    exit_status = 69
    retryable = True


class DataUnavailable(Unavailable):
    """The store does not give data of an environment; it works again when the store does."""

    code = "data_unavailable"
    retryable = False  # the node itself has tried for as long as it is told to


class InternalError(DsecError):
    """Our bug; `details["incident"]` finds it in the log."""

    code = "internal_error"


def _walk(cls: type[DsecError]) -> Iterator[type[DsecError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _walk(sub)


ERRORS: dict[str, type[DsecError]] = {cls.code: cls for cls in _walk(DsecError)}
"""Every class of the tree by its code."""

_FAMILY_BY_STATUS: dict[int, type[DsecError]] = {
    400: RequestError,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    409: Conflict,
    410: SandboxError,
    413: PayloadTooLarge,
    422: Unsupported,
    429: LimitError,
    503: Unavailable,
    504: DeadlineExceeded,
    507: StorageFull,
}


def error_from(
    code: str, message: str, details: Mapping[str, Detail] | None = None, http_status: int = 500
) -> DsecError:
    """Rebuild an error that crossed a boundary.

    An unknown code (a newer server) falls back to the family its HTTP status belongs to, so that
    a caller's `except` clauses still do the right thing.
    """
    cls = ERRORS.get(code) or _FAMILY_BY_STATUS.get(http_status, InternalError)
    return cls(message, **dict(details or {}))
