"""From a URL to a store. Each kind is loaded when it is first asked for."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from dsec.images.store.directory import DirectoryStore
from dsec.images.store.interface import BlobStore
from dsec.images.store.options import StoreOptions
from dsec.images.store.urls import parameters_of, wrong

_REPOSITORY = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")


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
        raise wrong("the URL cannot be read") from None
    if userinfo:
        raise wrong("credentials do not belong in the URL")
    return _open(parts, options)


def _open(parts: SplitResult, options: StoreOptions) -> BlobStore:
    match parts.scheme:
        case "file":
            return _directory(parts, options)
        case "s3" | "gs" | "az":
            return _bucket(parts, options)
        case "oci" | "oci+http":
            return _registry(parts, options)
        case "":
            why = "it has no scheme and is no absolute path"
        case scheme:
            why = f"the scheme {scheme[:20]!r} is not known"
    raise wrong(why)


def _directory(parts: SplitResult, options: StoreOptions) -> DirectoryStore:
    parameters_of(parts)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise wrong("a file URL has three slashes and an absolute path")
    return DirectoryStore(Path(path), options)


def _bucket(parts: SplitResult, options: StoreOptions) -> BlobStore:
    from dsec.images.store.buckets import open_bucket

    return open_bucket(parts, options)


def _registry(parts: SplitResult, options: StoreOptions) -> BlobStore:
    from dsec.images.store.registry import RegistryStore

    parameters_of(parts)
    repository = parts.path.strip("/")
    if not parts.hostname or not _REPOSITORY.fullmatch(repository):
        raise wrong("a registry's URL has a host and a repository in small letters")
    scheme = "http" if parts.scheme == "oci+http" else "https"
    return RegistryStore(parts.scheme, f"{scheme}://{parts.netloc}", repository, options)
