"""The conversion child from its parent's side: what comes back, and what is left."""

from __future__ import annotations

import gzip
import subprocess
import sys
import tarfile
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import DsecError, InternalError, InvalidRequest, PayloadTooLarge
from dsec.images.converting import convert_directory, convert_merge, convert_tar
from dsec.images.oci.layer import Limits
from dsec.images.oci.source import Blob
from dsec.images.store.interface import nothing
from tests.tars import Tar

pytestmark = pytest.mark.anyio

ROOMY = Limits(10_000, 1 << 30)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def blob_of(place: Path, data: bytes) -> Blob:
    (place / "blob").write_bytes(data)
    return Blob(place / "blob", 0, len(data))


def processes_naming(path: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(path).encode() in words:
            found.append(process.name)
    return found


async def test_a_tar_with_progress(tmp_path: Path, out: Path) -> None:
    data = Tar().add("f", content=bytes(20 << 20)).data()
    told: list[int] = []
    converted = await convert_tar(
        out, blob_of(tmp_path, data), [], ROOMY, told.append, need_end=True
    )
    assert converted.meta.size_bytes == (out / "meta.erofs").stat().st_size
    assert told == sorted(told)
    assert told[0] >= 8 << 20
    assert told[-1] <= len(data)


async def test_directories_it_does_not_list_though_their_paths_are_long(
    tmp_path: Path, out: Path
) -> None:
    parts = ["d" * 20] * 150
    data = Tar().dirs(".").add("/".join([*parts, "end"])).data()
    converted = await convert_tar(out, blob_of(tmp_path, data), [], ROOMY, nothing, need_end=True)
    assert converted.implied == ["/" + "/".join(parts[:count]) for count in range(1, 151)]


async def test_directories_and_merges(tmp_path: Path, out: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_bytes(b"1")
    converted = await convert_directory(out, tmp_path / "tree", ROOMY, nothing)
    assert (converted.entries, converted.own_data != "") == (1, True)
    (tmp_path / "merged").mkdir()
    image = out / "meta.erofs"
    merged = await convert_merge(tmp_path / "merged", [image, image], keep_whiteouts=False)
    assert (merged.entries, merged.devices) == (1, converted.devices)


@pytest.mark.parametrize(
    ("data", "limits", "error"),
    [
        (Tar().add("../f").data(), ROOMY, InvalidRequest),
        (Tar().add("f", content=b"12").data(), Limits(10, 1), PayloadTooLarge),
        (Tar().dirs("d").data()[:512], ROOMY, InvalidRequest),
        (b"", ROOMY, InvalidRequest),
    ],
)
async def test_refusals_are_typed(
    tmp_path: Path, out: Path, data: bytes, limits: Limits, error: type[DsecError]
) -> None:
    with pytest.raises(error):
        await convert_tar(out, blob_of(tmp_path, data), [], limits, nothing, need_end=True)


async def test_a_child_that_fails_is_our_bug(tmp_path: Path, out: Path) -> None:
    missing = Blob(tmp_path / "missing", 0, 1)
    with pytest.raises(InternalError, match=r"dsec\.images\.convert"):
        await convert_tar(out, missing, [], ROOMY, nothing, need_end=True)


async def test_cancelling_leaves_no_child(tmp_path: Path, out: Path) -> None:
    blob = blob_of(tmp_path, Tar().add("f", content=bytes(200 << 20)).data())
    with anyio.CancelScope() as scope:
        await convert_tar(out, blob, [], ROOMY, lambda _: scope.cancel(), need_end=True)
    assert scope.cancelled_caught
    assert processes_naming(out) == []
    assert not (out / "meta.erofs").exists()


_TIGHT = """
import sys
from dsec.images import convert
convert._MEMORY_BYTES = 200 << 20
sys.exit(convert.main(sys.argv[1:]))
"""


def hungry_tar() -> bytes:
    """A small blob of which each entry keeps 50 KB in memory."""
    info = tarfile.TarInfo("name")
    info.pax_headers = {"SCHILY.xattr.user.a": "x" * 50_000}
    head = gzip.compress(info.tobuf(tarfile.PAX_FORMAT)[:-512])
    names = (tarfile.TarInfo(str(number)) for number in range(4000))
    return b"".join(head + gzip.compress(n.tobuf(tarfile.USTAR_FORMAT), 0) for n in names)


@pytest.mark.adversarial
def test_a_tar_that_wants_too_much_memory_is_refused(tmp_path: Path, out: Path) -> None:
    blob = blob_of(tmp_path, hungry_tar())
    what = ["--out", str(out), "tar", "--blob", str(blob.path), "--size", str(blob.size)]
    done = subprocess.run(
        [sys.executable, "-c", _TIGHT, *what], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert '"code":"payload_too_large"' in done.stdout.splitlines()[-1]
