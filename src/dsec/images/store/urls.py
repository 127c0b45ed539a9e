"""What a store's URL may be, and what is said about others."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl

from dsec.base.errors import InvalidRequest

ACCEPTED = (
    "a directory (/path or file:///path), "
    "s3://bucket/prefix?endpoint=http://host:port&region=...&path_style=true, "
    "gs://bucket/prefix, az://container/prefix, "
    "oci://host[:port]/repository (https) or oci+http://host[:port]/repository"
)


def wrong(why: str) -> InvalidRequest:
    """The error for a URL that is none."""
    return InvalidRequest(f"not the URL of a store: {why}. Accepted: {ACCEPTED}")


def parameters_of(parts: SplitResult, allowed: frozenset[str] = frozenset()) -> dict[str, str]:
    """The query of a URL. Raises InvalidRequest for a parameter that is not allowed."""
    if parts.fragment:
        raise wrong("it has a fragment (#...)")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    for key, _ in pairs:
        if key not in allowed:
            raise wrong(f"the parameter {key[:40]!r} is not known to {parts.scheme}")
    return dict(pairs)
