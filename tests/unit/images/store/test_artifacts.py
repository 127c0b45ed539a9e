from __future__ import annotations

import json
import re

import pytest

from dsec.base.errors import Unavailable
from dsec.images.store import artifacts
from dsec.images.store.interface import BlobRef

BODY = BlobRef("sha256:" + "1" * 64, 10)
BLOBS = [BlobRef("sha256:" + digit * 64, 20) for digit in "32"]


def test_a_manifest_names_all_that_must_be_kept() -> None:
    made = json.loads(artifacts.manifest("layer", "a name", BODY, [*BLOBS, *BLOBS]))
    assert made["schemaVersion"] == 2
    assert made["artifactType"] == "application/vnd.dsec.layer.v1+json"
    assert made["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
    assert [layer["digest"][7] for layer in made["layers"]] == ["1", "2", "3"]
    assert made["layers"][0]["mediaType"] == made["artifactType"]


def test_the_same_document_has_the_same_manifest() -> None:
    assert artifacts.manifest("layer", "x", BODY, BLOBS) == artifacts.manifest(
        "layer", "x", BODY, BLOBS[::-1]
    )


def test_it_is_read_back() -> None:
    found = artifacts.read_manifest(artifacts.manifest("trace", "ü:1", BODY, []), "tag")
    assert found.name == "ü:1"
    assert found.layers[0].digest == BODY.digest


@pytest.mark.parametrize("data", [b"", b"{}", b'{"layers":[]}'])
def test_what_others_put_there_is_no_document(data: bytes) -> None:
    with pytest.raises(Unavailable):
        artifacts.read_manifest(data, "tag")


def test_tags() -> None:
    tag = artifacts.tag_of("toolkit", "any name / at all:1.0")
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", tag)
    assert artifacts.is_tag_of("toolkit", tag)
    assert not artifacts.is_tag_of("image", tag)
    assert not artifacts.is_tag_of("toolkit", "latest")
    assert tag != artifacts.tag_of("toolkit", "another")
