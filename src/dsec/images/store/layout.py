"""Names and wrapping of what lies in directories and buckets; the same in both.

A bucket copied into a directory is the same store. A document is two lines' worth: a header that
says its name (a file's name cannot always hold it) and its digest, then the body as it is.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from dsec.base.digests import digest_of as digest_of
from dsec.base.digests import hex_of as hex_of
from dsec.base.errors import DataUnavailable, InvalidRequest, PayloadTooLarge
from dsec.images.store.interface import MAX_DOCUMENT_BYTES, DocumentKind

MAX_NAME_BYTES = 512
HEADER_BYTES = 4096
"""A header is never longer: 512 bytes of name, each at most six characters of JSON."""
_QUOTED_LENGTH = 200
"""Of a file's name; file systems take 255."""
_BLOB_KEY = re.compile(r"blobs/sha256/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_HASHED = "="
"""Begins a hashed name; quoting never leaves it in a quoted one."""
_SUFFIX = ".json"


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a document."""

    name: str
    digest: str
    """Of the body."""


def blob_key(digest: str) -> str:
    """Where a blob lies, relative to the store.

    Raises:
        InvalidRequest: the digest is none.
    """
    digits = hex_of(digest)
    return f"blobs/sha256/{digits[:2]}/{digits}"


def digest_at(key: str) -> str | None:
    """The digest of the blob at a key; None if no blob of ours would lie there."""
    found = _BLOB_KEY.fullmatch(key)
    return f"sha256:{found[2]}" if found else None


def check_name(name: str) -> bytes:
    """A document's name as bytes.

    Raises:
        InvalidRequest: it is empty, longer than 512 bytes, or not Unicode.
    """
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("a document's name is not Unicode text") from None
    if not 0 < len(raw) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"a document's name has 1 to {MAX_NAME_BYTES} bytes, not {len(raw)}")
    return raw


def check_body(body: bytes) -> None:
    """Refuse a document that is too large.

    Raises:
        PayloadTooLarge: it is.
    """
    if len(body) > MAX_DOCUMENT_BYTES:
        raise PayloadTooLarge(
            f"a document of {len(body)} bytes; {MAX_DOCUMENT_BYTES} are allowed",
            limit=MAX_DOCUMENT_BYTES,
        )


def kind_key(kind: DocumentKind) -> str:
    """What the documents of a kind lie below."""
    return f"documents/{kind}"


def document_key(kind: DocumentKind, name: str) -> str:
    """Where a document lies: under its name quoted, or hashed if that is too long.

    Raises:
        InvalidRequest: as `check_name`.
    """
    raw = check_name(name)
    quoted = quote(raw, safe="").replace(".", "%2E")
    if len(quoted) > _QUOTED_LENGTH:
        quoted = _HASHED + hashlib.sha256(raw).hexdigest()
    return f"{kind_key(kind)}/{quoted}{_SUFFIX}"


def name_in_key(key: str) -> str | None:
    """The name as the last part of a document's key has it; None if it is hashed.

    Raises:
        ValueError: the key is no document's.
    """
    last = key.rpartition("/")[2]
    if not last.endswith(_SUFFIX):
        raise ValueError(key)
    stem = last.removesuffix(_SUFFIX)
    return None if stem.startswith(_HASHED) else unquote(stem, errors="strict")


def wrap(name: str, body: bytes) -> bytes:
    """A document as it is stored."""
    return msgspec.json.encode(Header(name, digest_of(body))) + b"\n" + body


def unwrap(stored: bytes, name: str) -> bytes:
    """The body of a stored document.

    Raises:
        DataUnavailable: it is damaged, or another's.
    """
    line, _, body = stored.partition(b"\n")
    header = header_of(line)
    if header.name != name or header.digest != digest_of(body):
        raise DataUnavailable(f"the document {name!r} is damaged in the store")
    return body


def header_of(start: bytes) -> Header:
    """The header at the start of a stored document.

    Raises:
        DataUnavailable: it is damaged.
    """
    try:
        return msgspec.json.decode(start.partition(b"\n")[0], type=Header)
    except msgspec.MsgspecError as error:
        raise DataUnavailable(f"a document in the store is damaged: {error}") from error
