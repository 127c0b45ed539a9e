from __future__ import annotations

import pytest

from dsec.base.errors import InternalError, InvalidRequest, Unsupported
from dsec.images.compose import MergeLimits, key_of_merged, key_over, plan_layers, plan_merges
from dsec.images.oci.archive import ArchiveKind, kind_of_names
from dsec.images.oci.compression import sniff
from dsec.images.oci.documents import (
    ConfigFile,
    Descriptor,
    Platform,
    check_platform,
    decode,
    pick_platform,
)
from dsec.images.records import (
    ImageConfig,
    ImageRecord,
    LayerRecord,
    check_digest,
    digest_of,
    encode,
    env_from_pairs,
)
from dsec.images.records import (
    decode as decode_record,
)
from dsec.images.store.interface import BlobRef

ID = "ab" * 32


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["oci-layout", "index.json", "blobs/", f"blobs/sha256/{ID}"], ArchiveKind.OCI),
        (["./", "./blobs/", "./index.json", "./oci-layout"], ArchiveKind.OCI),
        (["manifest.json", "index.json", "oci-layout", "blobs/sha256/x"], ArchiveKind.OCI),
        ([f"{ID}/", f"{ID}/layer.tar", f"{ID}.json", "manifest.json"], ArchiveKind.DOCKER),
        ([f"{ID}.tar", "repositories", "manifest.json"], ArchiveKind.DOCKER),
        (["./", "./bin/", "./etc/passwd"], ArchiveKind.ROOTFS),
        (["manifest.json", "etc/passwd"], ArchiveKind.ROOTFS),
        (["blobs/", "index.json"], ArchiveKind.ROOTFS),
        ([], ArchiveKind.ROOTFS),
    ],
)
def test_archives_are_told_by_their_names(names: list[str], kind: ArchiveKind) -> None:
    assert kind_of_names(names) is kind


def test_a_root_file_system_is_told_by_its_first_name() -> None:
    def names() -> object:
        yield "bin/sh"
        pytest.fail("read on")

    assert kind_of_names(names()) is ArchiveKind.ROOTFS  # type: ignore[arg-type]


def test_compressions() -> None:
    heads = {b"\x1f\x8b\x08": "gzip", b"BZh9": "bzip2", b"\xfd7zXZ\x00": "xz"}
    heads |= {b"\x28\xb5\x2f\xfd": "zstd", b"etc/": "none", b"": "none"}
    assert {head: sniff(head) for head in heads} == heads


AMD = Descriptor("sha256:a", platform=Platform("amd64", "linux"))
ARM = Descriptor("sha256:b", platform=Platform("arm64", "linux", "v8"))
WINDOWS = Descriptor("sha256:c", platform=Platform("amd64", "windows"))
ATTESTATION = Descriptor("sha256:d", platform=Platform("unknown", "unknown"))
ANY = Descriptor("sha256:e")


def test_the_platform_is_chosen() -> None:
    assert pick_platform([WINDOWS, ATTESTATION, ARM, AMD], "amd64", "x") is AMD
    assert pick_platform([ANY], "amd64", "x") is ANY
    assert pick_platform([AMD, AMD], "amd64", "x") is AMD


def test_no_platform_fits() -> None:
    with pytest.raises(Unsupported, match="linux/arm64, unknown/unknown"):
        pick_platform([ARM, ATTESTATION], "amd64", "x")
    with pytest.raises(Unsupported, match="only nothing"):
        pick_platform([], "amd64", "x")
    with pytest.raises(Unsupported, match="linux/arm64, this node is linux/amd64"):
        check_platform(decode(b'{"rootfs":{},"architecture":"arm64","os":"linux"}', ConfigFile, "c"), "amd64", "x")  # fmt: skip


def test_several_images_are_not_guessed_between() -> None:
    with pytest.raises(InvalidRequest, match="several"):
        pick_platform([ANY, Descriptor("sha256:f")], "amd64", "x")


def test_nulls_of_docker() -> None:
    text = b'{"rootfs":{"diff_ids":[]},"config":{"Env":null,"Cmd":["a"],"User":null,"Labels":{}}}'
    config = decode(text, ConfigFile, "c").config
    assert config is not None
    assert config.plain() == ImageConfig(cmd=["a"])
    assert env_from_pairs(["A=1", "B", "A=2=3", "C="]) == {"A": "2=3", "C": ""}


def test_damaged_documents_are_named() -> None:
    with pytest.raises(InvalidRequest, match="the thing"):
        decode(b"{", ConfigFile, "the thing")
    with pytest.raises(InternalError, match=r"/x\.json"):
        decode_record(b"{}", ImageRecord, "/x.json")


@pytest.mark.parametrize(
    "text", ["", ID, f"sha256:{ID[1:]}", "sha256:" + "Z" * 64, "sha256:../" + ID[3:]]
)
def test_digests(text: str) -> None:
    with pytest.raises(InvalidRequest):
        check_digest(text)
    assert check_digest(f"sha256:{ID}")


def layer_of(digest: str, content_bytes: int, devices: list[str]) -> LayerRecord:
    return LayerRecord(
        digest=digest,
        source="s",
        created_at=2.5,
        meta=BlobRef("m", 1),
        devices=devices,
        content_bytes=content_bytes,
    )


def test_consecutive_layers_are_merged_up_to_a_size() -> None:
    limits = MergeLimits(content_bytes=100, devices=3)
    layers = [layer_of(name, 40, [name]) for name in "abcde"]
    assert plan_merges(layers, limits) == [["a", "b"], ["c", "d"], ["e"]]
    assert plan_merges(layers, MergeLimits(1000, 3)) == [["a", "b", "c"], ["d", "e"]]
    assert plan_merges([layer_of("a", 101, [])], limits) == [["a"]]
    assert plan_merges([layers[0], layers[1], layers[0]], limits) == [["b", "a"]]
    assert plan_merges([], limits) == []
    assert key_of_merged(["a", "b"], bottom=True) != key_of_merged(["a", "b"], bottom=False)


def test_what_other_images_stand_on_too_is_a_mount_of_its_own() -> None:
    for limit in ("content_bytes", "devices", "shared_bytes"):
        with pytest.raises(InvalidRequest, match=f"{limit} is 0: it must be at least 1"):
            MergeLimits(**{limit: 0})
    limits = MergeLimits(shared_bytes=80)
    layers = [layer_of(name, 40, [name]) for name in "abcd"]
    assert plan_merges(layers, limits, ["abx"]) == [["a", "b"], ["c", "d"]]
    assert plan_merges(layers, limits, ["ab", "abx", "xcd"]) == [["a", "b"], ["c", "d"]]
    assert plan_merges(layers, limits, ["abcd", "abcde"]) == [["a", "b", "c", "d"]]
    assert plan_merges(layers, limits, ["ax"]) == [["a", "b", "c", "d"]]  # too small to be worth it
    assert plan_merges(layers, limits, ["ax", "abcx"]) == [["a", "b", "c"], ["d"]]
    assert plan_merges(layers, limits, ["abx", "abcx"]) == [["a", "b"], ["c", "d"]]
    large = [layers[0], layers[1], layer_of("c", 4 << 30, ["c"])]
    assert plan_merges(large, limits, ["abx"]) == [["a", "b"], ["c"]]
    again = [*layers, layers[0]]
    assert plan_merges(again, limits, ["abcx"]) == [["b", "c"], ["d", "a"]]


def test_records_round_trip() -> None:
    layer = layer_of("a", 5, ["d1", "d2"])
    assert decode_record(encode(layer), LayerRecord, "f") == layer
    image = ImageRecord(
        name="a/b:c",
        digest=f"sha256:{ID}",
        layers=[layer.digest],
        size_bytes=1,
        created_at=2.5,
        source="ü",
        config=ImageConfig(env={"A": "b"}, workdir="/w", user="u", entrypoint=["e"], cmd=["c"]),
    )
    assert decode_record(encode(image), ImageRecord, "f") == image


def test_digests_of_images_depend_on_all() -> None:
    seen = {
        digest_of(["a"], ImageConfig()),
        digest_of(["b"], ImageConfig()),
        digest_of(["a"], ImageConfig(user="u")),
        key_over("a", []),
        key_over("a", ["b"]),
    }
    assert len(seen) == 5


def test_layers_of_a_sandbox_are_ordered() -> None:
    assert plan_layers(["i1", "i2"]) == ["i2", "i1"]
    assert plan_layers(["i1", "i2"], workspace=["w"], toolkits=[["s1", "s2"], ["t"]]) == [
        *("t", "s2", "s1", "w", "i2", "i1")
    ]
    assert plan_layers(["e", "a", "e"]) == ["e", "a"]  # overlayfs takes a directory once
    with pytest.raises(InvalidRequest):
        plan_layers([])
    with pytest.raises(InvalidRequest, match="500"):
        plan_layers([str(n) for n in range(501)])
