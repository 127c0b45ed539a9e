"""Foreign bytes into a metadata image and a data file, in a process of its own.

`python -m dsec.images.convert tar|directory|merge`; `converting` starts it. What it reads is not
trusted. It opens nothing by a name that an archive says, has a bound on its memory, dies with its
parent, and says on standard output, as lines of JSON, how far it is and what came of it. Killed at
any moment it leaves nothing but files in `--out`:

    <out>/meta.erofs    the metadata image
    <out>/data          the contents of its files, unless there are none
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, cast

import msgspec
from msgspec import Struct
from typing_extensions import override

from dsec.base.errors import DsecError, PayloadTooLarge
from dsec.images.children import Refused, refusal
from dsec.images.disk import full_disk_named
from dsec.images.erofs.data import DataWriter, Readable, Zeros
from dsec.images.erofs.merge import merge
from dsec.images.erofs.read import read_image
from dsec.images.erofs.scan import scan
from dsec.images.erofs.tree import Device, Extent, Inode, Tree
from dsec.images.erofs.write import write_image
from dsec.images.oci.compression import decompressed, sniff
from dsec.images.oci.layer import MAX_IMPLIED, LayerBuilder, Limits
from dsec.images.oci.members import members
from dsec.images.oci.stream import BlobReader, TarStream
from dsec.images.store.interface import BlobRef
from dsec.linux.process import die_with_parent

META, DATA = "meta.erofs", "data"
_MEMORY_BYTES = 6 << 30
_DESCRIPTORS = 64
_PROGRESS_BYTES = 8 << 20


class Progress(Struct, tag="progress"):
    """Bytes read so far: of the blob, or of a directory's files."""

    done: int


class Implied(Struct, tag="implied"):
    """A directory the tar does not list; said before `Converted`, which has all of them."""

    path: str


class Converted(Struct, tag="converted", kw_only=True, frozen=True):
    """It worked."""

    diff_id: str
    """sha256 of the uncompressed tar; of a directory one that equal directories share; of merged
    images empty."""
    self_contained: bool
    """Whether it is right over any layers."""
    entries: int
    """Names in it."""
    content_bytes: int
    """Of its regular files, each counted once."""
    dropped_xattrs: int = 0
    """Extended attributes the kernel would not have taken."""
    implied: list[str] = []
    """As in `LayerRecord`."""
    meta: BlobRef
    devices: list[BlobRef]
    """What the image points into, in the order of its device table."""
    own_data: str = ""
    """Digest of that one of them which is `<out>/data`; empty if there is none."""


Said = Progress | Implied | Converted | Refused


def main(argv: Sequence[str]) -> int:
    """Do what the command line says; 0 also when the input is refused, which is an answer."""
    arguments = _arguments(argv)
    if arguments.parent:
        die_with_parent(arguments.parent)
    _confine()
    for said in in_lines(answer(arguments)):
        say(said)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dsec.images.convert")
    parser.add_argument("--parent", type=int, default=0, help="die with this process")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-entries", type=int, default=sys.maxsize)
    parser.add_argument("--max-bytes", type=int, default=sys.maxsize)
    jobs = parser.add_subparsers(required=True)
    tar = jobs.add_parser("tar")
    tar.set_defaults(job=_convert_tar)
    tar.add_argument("--blob", type=Path, required=True)
    tar.add_argument("--offset", type=int, default=0)
    tar.add_argument("--size", type=int, required=True)
    tar.add_argument("--need-end", action="store_true")
    tar.add_argument("lowers", type=Path, nargs="*", help="images below, bottom first")
    directory = jobs.add_parser("directory")
    directory.set_defaults(job=_convert_directory)
    directory.add_argument("directory", type=Path)
    merging = jobs.add_parser("merge")
    merging.set_defaults(job=_convert_merge)
    merging.add_argument("--keep-whiteouts", action="store_true")
    merging.add_argument("images", type=Path, nargs="+", help="bottom first")
    return parser.parse_args(argv)


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    os.umask(0o077)
    gc.disable()  # a tree has no cycles, and looking through millions of inodes for some takes long


def in_lines(answered: Converted | Refused) -> list[Said]:
    """An answer in parts, for a line has a bound and a thousand paths have none."""
    if isinstance(answered, Refused):
        return [answered]
    paths = [Implied(path) for path in answered.implied]
    return [*paths, msgspec.structs.replace(answered, implied=[])]


def say(what: Said) -> None:
    """Write one line to the parent."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def answer(arguments: argparse.Namespace) -> Converted | Refused:
    """Do the job, or say why not.

    Raises:
        OSError: this host failed, not the input.
    """
    job = cast("Callable[[argparse.Namespace], Converted]", arguments.job)
    try:
        with full_disk_named(cast("Path", arguments.out)):
            return job(arguments)
    except DsecError as error:
        return refusal(error)
    except MemoryError:
        pass  # with the exception goes what took the memory
    return refusal(PayloadTooLarge("it takes more memory than a conversion may have"))


# -- the jobs --------------------------------------------------------------------------------------


def _convert_tar(arguments: argparse.Namespace) -> Converted:
    with cast("Path", arguments.blob).open("rb", buffering=0) as file:
        file.seek(arguments.offset)
        blob = BlobReader(file, arguments.size, lambda done: say(Progress(done)))
        with decompressed(cast("IO[bytes]", blob), sniff(blob.peek())) as plain:
            with TarStream(plain) as stream:
                return _convert_stream(stream, arguments)


def _convert_stream(stream: TarStream, arguments: argparse.Namespace) -> Converted:
    out = cast("Path", arguments.out)
    with DataWriter(out / DATA) as data:
        builder = LayerBuilder(lambda: _merged(arguments.lowers), data, _limits(arguments))
        for member, content in members(stream, need_end=arguments.need_end):
            builder.add(member, content)
        stream.drain()
        tree = builder.finish()
    return write_layer(
        out,
        tree,
        builder.own_data,
        diff_id=stream.digest,
        self_contained=builder.self_contained,
        dropped_xattrs=builder.dropped_xattrs,
        implied=builder.implied[: MAX_IMPLIED + 1],
    )


def _merged(images: Iterable[Path]) -> Tree | None:
    trees = [read_image(image) for image in images]
    return merge(trees, keep_whiteouts=False) if trees else None


def _convert_directory(arguments: argparse.Namespace) -> Converted:
    """The image says all that a directory is, its data's digest too, and is the same every time."""
    out, limits = cast("Path", arguments.out), _limits(arguments)
    with _Metered(out / DATA, limits) as data:
        tree = scan(arguments.directory, data)
        own = data.finish()
    tree.devices = [own] if own is not None else []
    converted = write_layer(out, tree, own)
    if converted.entries > limits.entries:
        raise PayloadTooLarge(f"the directory has more than {limits.entries} entries")
    return msgspec.structs.replace(converted, diff_id=converted.meta.digest)


def _convert_merge(arguments: argparse.Namespace) -> Converted:
    trees = [read_image(image) for image in arguments.images]
    return write_layer(arguments.out, merge(trees, keep_whiteouts=arguments.keep_whiteouts), None)


def _limits(arguments: argparse.Namespace) -> Limits:
    return Limits(arguments.max_entries, arguments.max_bytes)


def write_layer(  # noqa: PLR0913 - what is known of it
    out: Path,
    tree: Tree,
    own: Device | None,
    *,
    diff_id: str = "",
    self_contained: bool = True,
    dropped_xattrs: int = 0,
    implied: Sequence[str] = (),
) -> Converted:
    """Write the metadata image of a tree beside its data, `out / DATA`, which goes if it is empty.

    Raises:
        InvalidRequest: EROFS cannot hold it.
        StorageFull: no room.
    """
    if own is None:
        (out / DATA).unlink(missing_ok=True)
    entries, content_bytes = _tally(tree)
    return Converted(
        diff_id=diff_id,
        self_contained=self_contained,
        entries=entries,
        content_bytes=content_bytes,
        dropped_xattrs=dropped_xattrs,
        implied=list(implied),
        meta=write_image(tree, out / META),
        devices=[BlobRef(device.digest, device.size_bytes) for device in tree.devices],
        own_data=own.digest if own is not None else "",
    )


def _tally(tree: Tree) -> tuple[int, int]:
    """Names in a tree, and the size of its regular files, each counted once."""
    names, sizes = 0, dict[Inode, int]()
    pending = [tree.root]
    while pending:
        children = pending.pop().children.values()
        names += len(children)
        pending += [inode for inode in children if inode.is_dir]
        sizes.update((inode, inode.size) for inode in children if stat.S_ISREG(inode.mode))
    return names, sum(sizes.values())


class _Metered(DataWriter):
    """Holds a directory's files to the limit, and tells how far it is."""

    def __init__(self, path: Path, limits: Limits) -> None:
        super().__init__(path)
        self._limit = limits.size_bytes
        self._taken = 0
        self._told = 0

    @override
    def append(self, stream: Readable | Iterable[bytes | Zeros], size: int) -> list[Extent]:
        if self._taken + size > self._limit:
            raise PayloadTooLarge(f"the directory holds more than {self._limit} bytes")
        extents = super().append(stream, size)
        self._taken += size
        if self._taken - self._told >= _PROGRESS_BYTES:
            self._told = self._taken
            say(Progress(self._taken))
        return extents


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
