"""Lines of a table of routes."""

from __future__ import annotations

from dsec.kit.http import Handler, Route

JSON = "application/json"
NDJSON = "application/x-ndjson"


def row(  # noqa: PLR0913 - a line of a table
    method: str,
    path: str,
    handler: Handler,
    body: type | None = None,
    query: type | None = None,
    answer: object = None,
    status: int = 200,
    *,
    media_type: str = JSON,
    public: bool = False,
) -> Route:
    """A route whose summary is what its handler says of itself in its first line."""
    return Route(
        method=method,
        path=path,
        handler=handler,
        summary=(handler.__doc__ or "").strip().partition("\n")[0].removesuffix("."),
        body=body,
        query=query,
        answer=answer,
        status=status,
        media_type=media_type,
        public=public,
    )
