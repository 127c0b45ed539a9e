"""Tars made by hand, entry by entry, with whatever a layer may hold."""

from __future__ import annotations

import io
import os
import tarfile
from typing import Any


class Tar:
    """A layer's tar, entry by entry."""

    def __init__(self, form: int = tarfile.PAX_FORMAT) -> None:
        self._bytes = io.BytesIO()
        self._tar = tarfile.TarFile(
            fileobj=self._bytes, mode="w", format=form, encoding="utf-8", errors="surrogateescape"
        )

    def add(self, name: str | bytes, kind: bytes = tarfile.REGTYPE, **fields: Any) -> Tar:
        info = tarfile.TarInfo(os.fsdecode(name))
        info.type = kind
        info.mtime = fields.pop("mtime", 1_500_000_000)
        info.mode = fields.pop("mode", 0o755 if kind == tarfile.DIRTYPE else 0o644)
        content = fields.pop("content", b"")
        info.pax_headers = {
            f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape")
            for key, value in fields.pop("xattrs", {}).items()
        }
        info.size = len(content)
        for key, value in fields.items():
            setattr(info, key, value)
        self._tar.addfile(info, io.BytesIO(content))
        return self

    def dirs(self, *names: str) -> Tar:
        for name in names:
            self.add(name, tarfile.DIRTYPE)
        return self

    def link(self, name: str, target: str) -> Tar:
        return self.add(name, tarfile.LNKTYPE, linkname=target)

    def symlink(self, name: str, target: str, **fields: Any) -> Tar:
        return self.add(name, tarfile.SYMTYPE, linkname=target, mode=0o777, **fields)

    def data(self) -> bytes:
        self._tar.close()
        return self._bytes.getvalue()
