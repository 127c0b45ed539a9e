"""From a URL to a store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from dsec.base.errors import InvalidRequest
from dsec.images.store.directory import DirectoryStore
from dsec.images.store.interface import BlobStore
from dsec.images.store.objects import Connect, ObjectsStore
from dsec.images.store.options import StoreOptions
from dsec.images.store.registry import RegistryStore

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

ACCEPTED = (
    "a directory (/path or file:///path), "
    "s3://bucket/prefix?endpoint=http://host:port&region=...&path_style=true, "
    "gs://bucket/prefix, az://container/prefix, "
    "oci://host[:port]/repository (https) or oci+http://host[:port]/repository"
)
_S3_PARAMETERS = frozenset({"endpoint", "region", "path_style"})
_REPOSITORY = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_TRUTH = {"true": True, "false": False}


def open_store(url: str, options: StoreOptions | None = None) -> BlobStore:
    """The store at a URL. Nothing is sent before the first call; close it with `aclose`.

    Credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*) and from Docker's file of
    credentials for registries, never from the URL.

    Raises:
        InvalidRequest: the URL is none that is accepted; the message says which are, and repeats
            nothing that may be a secret.
    """
    options = options or StoreOptions()
    if url.startswith("/"):
        return DirectoryStore(Path(url), options)
    try:
        parts = urlsplit(url)
        userinfo = parts.username is not None or parts.password is not None
        _ = parts.port
    except ValueError:
        raise _wrong("the URL cannot be read") from None
    if userinfo:
        raise _wrong("credentials do not belong in the URL")
    return _open(parts, options)


def _open(parts: SplitResult, options: StoreOptions) -> BlobStore:
    match parts.scheme:
        case "file":
            return _directory(parts, options)
        case "s3":
            return _s3(parts, options)
        case "gs" | "az":
            return _other_bucket(parts, options)
        case "oci" | "oci+http":
            return _registry(parts, options)
        case "":
            why = "it has no scheme and is no absolute path"
        case scheme:
            why = f"the scheme {scheme[:20]!r} is not known"
    raise _wrong(why)


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"not the URL of a store: {why}. Accepted: {ACCEPTED}")


def _parameters(parts: SplitResult, allowed: frozenset[str] = frozenset()) -> dict[str, str]:
    if parts.fragment:
        raise _wrong("it has a fragment (#...)")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    for key, _ in pairs:
        if key not in allowed:
            raise _wrong(f"the parameter {key[:40]!r} is not known to {parts.scheme}")
    return dict(pairs)


def _directory(parts: SplitResult, options: StoreOptions) -> DirectoryStore:
    _parameters(parts)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise _wrong("a file URL has three slashes and an absolute path")
    return DirectoryStore(Path(path), options)


def _s3(parts: SplitResult, options: StoreOptions) -> ObjectsStore:
    parameters = _parameters(parts, _S3_PARAMETERS)
    endpoint = parameters.get("endpoint", "")
    path_style = _TRUTH.get(parameters.get("path_style", "true"))
    if path_style is None:
        raise _wrong("path_style is true or false")
    if endpoint:
        endpoint = _endpoint(endpoint, "" if path_style else parts.netloc)
    return _objects(parts, parameters, _S3Connect(parts, endpoint, parameters, path_style), options)


def _endpoint(endpoint: str, bucket: str) -> str:
    """An endpoint as the library wants it: with the bucket in the host's name if it is there."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _wrong("the endpoint is not http://host:port or https://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise _wrong("credentials do not belong in the endpoint")
    host = f"{bucket}.{parts.netloc}" if bucket else parts.netloc
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


@dataclass(frozen=True, slots=True)
class _S3Connect:
    parts: SplitResult
    endpoint: str
    parameters: Mapping[str, str]
    path_style: bool

    def __call__(self, client: ClientConfig, retry: RetryConfig) -> ObjectStore:
        config: S3Config = {
            "virtual_hosted_style_request": not self.path_style,
            "disable_bulk_delete": True,  # not all that speak S3 have it
        }
        if self.endpoint:
            config["endpoint"] = self.endpoint
        if region := self.parameters.get("region"):
            config["region"] = region
        return S3Store(
            self.parts.netloc,
            prefix=_prefix(self.parts),
            config=config,
            client_options=client,
            retry_config=retry,
        )


def _other_bucket(parts: SplitResult, options: StoreOptions) -> ObjectsStore:
    _parameters(parts)

    def connect(client: ClientConfig, retry: RetryConfig) -> ObjectStore:
        prefix = _prefix(parts)
        if parts.scheme == "gs":
            return GCSStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
        return AzureStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)

    return _objects(parts, {}, connect, options)


def _objects(
    parts: SplitResult, parameters: Mapping[str, str], connect: Connect, options: StoreOptions
) -> ObjectsStore:
    if not parts.netloc or ":" in parts.netloc:
        raise _wrong("the bucket's name is missing, or is none")
    query = f"?{urlencode(parameters, safe=':/')}" if parameters else ""
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}{query}"
    try:
        return ObjectsStore(url, connect, options)
    except (BaseError, ValueError) as error:
        # Its words may repeat what is in the environment.
        raise _wrong(f"{type(error).__name__} for {parts.scheme}://{parts.netloc}") from None


def _prefix(parts: SplitResult) -> str | None:
    return unquote(parts.path).strip("/") or None


def _registry(parts: SplitResult, options: StoreOptions) -> RegistryStore:
    _parameters(parts)
    repository = parts.path.strip("/")
    if not parts.hostname or not _REPOSITORY.fullmatch(repository):
        raise _wrong("a registry's URL has a host and a repository in small letters")
    scheme = "http" if parts.scheme == "oci+http" else "https"
    return RegistryStore(parts.scheme, f"{scheme}://{parts.netloc}", repository, options)
