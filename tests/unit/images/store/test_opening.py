from __future__ import annotations

import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.store.directory import DirectoryStore
from dsec.images.store.objects import ObjectsStore
from dsec.images.store.opening import open_store
from dsec.images.store.registry import RegistryStore


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")


@pytest.mark.parametrize(
    ("given", "kind", "shown"),
    [
        ("/srv/store", DirectoryStore, "file:///srv/store"),
        ("file:///srv/a%20b", DirectoryStore, "file:///srv/a%20b"),
        ("s3://bucket", ObjectsStore, "s3://bucket"),
        ("s3://bucket/a/b/", ObjectsStore, "s3://bucket/a/b"),
        (
            "s3://bucket/a?endpoint=http://10.0.0.1:9000&region=eu-1&path_style=false",
            ObjectsStore,
            "s3://bucket/a?endpoint=http://10.0.0.1:9000&region=eu-1&path_style=false",
        ),
        ("az://container/a", ObjectsStore, "az://container/a"),
        ("oci://registry.example/team/envs", RegistryStore, "oci://registry.example/team/envs"),
        ("oci+http://127.0.0.1:5000/a", RegistryStore, "oci+http://127.0.0.1:5000/a"),
    ],
)
def test_what_is_accepted(given: str, kind: type, shown: str) -> None:
    store = open_store(given)
    assert isinstance(store, kind)
    assert store.url == shown
    assert open_store(store.url).url == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "relative/path",
        "file://host/path",
        "file:relative",
        "ftp://host/x",
        "s3://",
        "s3:///prefix",
        "s3://bucket?endpoint=ftp://x",
        "s3://bucket?path_style=maybe",
        "s3://bucket?unknown=1",
        "s3://bucket#x",
        "gs://bucket?endpoint=http://x",
        "oci://host",
        "oci://host/UPPER",
        "oci://host/a/../b",
        "oci://host/a?x=1",
        "oci://host:port/a",
        "oci:///a",
        "s3://[::1/a",
    ],
)
def test_what_is_refused_says_what_is_accepted(url: str) -> None:
    with pytest.raises(InvalidRequest, match="Accepted: a directory"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "oci://user:hunter2@host/a",
        "s3://hunter2:hunter2@bucket/a",
        "s3://bucket?secret_access_key=hunter2",
        "s3://bucket?endpoint=http://user:hunter2@host",
        "https://user:hunter2@host/a",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_store(url)
    assert "hunter2" not in caught.value.message
