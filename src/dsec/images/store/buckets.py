"""Object stores by their URL. Loaded for such a URL only: the library takes its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from dsec.images.store.objects import Connect, ObjectsStore
from dsec.images.store.options import StoreOptions
from dsec.images.store.urls import parameters_of, wrong

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

_S3_PARAMETERS = frozenset({"endpoint", "region", "path_style"})
_TRUTH = {"true": True, "false": False}


def open_bucket(parts: SplitResult, options: StoreOptions) -> ObjectsStore:
    """The store at a URL whose scheme is s3, gs or az.

    Raises:
        InvalidRequest: something else of it is wrong.
    """
    return _s3(parts, options) if parts.scheme == "s3" else _other_bucket(parts, options)


def _s3(parts: SplitResult, options: StoreOptions) -> ObjectsStore:
    parameters = parameters_of(parts, _S3_PARAMETERS)
    endpoint = parameters.get("endpoint", "")
    path_style = _TRUTH.get(parameters.get("path_style", "true"))
    if path_style is None:
        raise wrong("path_style is true or false")
    if endpoint:
        endpoint = _endpoint(endpoint, "" if path_style else parts.netloc)
    return _objects(parts, parameters, _S3Connect(parts, endpoint, parameters, path_style), options)


def _endpoint(endpoint: str, bucket: str) -> str:
    """An endpoint as the library wants it: with the bucket in the host's name if it is there."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong("the endpoint is not http://host:port or https://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise wrong("credentials do not belong in the endpoint")
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
    parameters_of(parts)

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
        raise wrong("the bucket's name is missing, or is none")
    query = f"?{urlencode(parameters, safe=':/')}" if parameters else ""
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}{query}"
    try:
        return ObjectsStore(url, connect, options)
    except (BaseError, ValueError) as error:
        # Its words may repeat what is in the environment.
        raise wrong(f"{type(error).__name__} for {parts.scheme}://{parts.netloc}") from None


def _prefix(parts: SplitResult) -> str | None:
    return unquote(parts.path).strip("/") or None
