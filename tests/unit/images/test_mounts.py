from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.linux import mounts

LINES = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
36 22 0:31 / /run/a\040b\134c\011d rw,nosuid shared:12 master:1 - tmpfs tmp\043fs rw,size=1k
40 22 0:9 /sub /run/layers/x ro,nodev - erofs /store/image.erofs ro,user_xattr
41 22 0:9 / /run/caf\303\251 ro - erofs none ro
"""


def test_mountinfo_is_read_with_its_escapes() -> None:
    root, escaped, layer, accented = mounts.parse_mountinfo(LINES)
    assert (root.target, root.fstype, root.source) == ("/", "ext4", "/dev/vda")
    assert (escaped.target, escaped.source) == ("/run/a b\\c\td", "tmp#fs")
    assert (layer.root, layer.parent_id, layer.fstype) == ("/sub", 22, "erofs")
    assert accented.target == "/run/café"


def test_a_damaged_line() -> None:
    with pytest.raises(ValueError, match="mountinfo"):
        mounts.parse_mountinfo(b"nonsense\n")


def test_this_host() -> None:
    assert mounts.is_mounted(Path("/proc"))
    assert not mounts.is_mounted(Path("/nonesuch"))


def test_errors_name_call_and_path(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("as another user everything is EPERM")
    (tmp_path / "image").write_bytes(bytes(8192))
    with pytest.raises(OSError, match=r"mount erofs .*image.*target"):
        mounts.mount_erofs(tmp_path / "image", tmp_path / "target")
    with pytest.raises(OSError, match="umount2"):
        mounts.umount(tmp_path)


def test_a_missing_data_device_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="data device"):
        mounts.mount_erofs(tmp_path / "image", tmp_path, [tmp_path / "gone"])
