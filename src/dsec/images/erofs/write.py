"""A tree into an EROFS metadata image: equal trees give equal bytes.

`layout` numbers the inodes and finds out what each needs; here they get a place and are encoded.
See `format` for what goes where.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dsec.base.digests import digest_of
from dsec.base.errors import InvalidRequest
from dsec.images import disk
from dsec.images.erofs import format as fmt
from dsec.images.erofs.layout import Misfit, Node, measure, number
from dsec.images.erofs.tree import BLOCK, Device, Inode, Tree
from dsec.images.store.interface import BlobRef


def write_image(tree: Tree, image: Path) -> BlobRef:
    """Write the metadata image of a tree. Blocks.

    Args:
        tree: what it shall say; its extents point into `tree.devices`.
        image: replaced if it exists.

    Returns:
        Digest and size of the image.

    Raises:
        InvalidRequest: EROFS cannot hold it; the message names the file.
        StorageFull: no room for the image.
    """
    content = encode(tree)
    with disk.full_disk_named(image):
        image.write_bytes(content)
    return BlobRef(digest_of(content), len(content))


def encode(tree: Tree) -> bytes:
    """The image's bytes.

    Raises:
        InvalidRequest: EROFS cannot hold the tree; the message names the file.
    """
    try:
        nodes = number(tree)
        for node in nodes.values():
            measure(node, tree.devices)
        return _Image(tree.devices, nodes).encode()
    except Misfit as misfit:
        raise InvalidRequest(f"{_path_of(tree, misfit.inode)} cannot be kept: {misfit}") from None


def _path_of(tree: Tree, inode: Inode | None) -> str:
    if inode is None:
        return "the tree"
    path = next((path for path, found in tree.walk() if found is inode), b"?")
    return ascii(os.fsdecode(path))[1:-1] or "/"


class _Image:
    """Gives every node its place and encodes them all."""

    def __init__(self, devices: list[Device], nodes: dict[Inode, Node]) -> None:
        self._devices = devices
        self._nodes = nodes
        if len(devices) > fmt.MAX_DEVICES:
            raise Misfit(None, f"it has more than {fmt.MAX_DEVICES} data devices")
        end = self._assign_places((fmt.DEVICE_SLOT + len(devices)) * fmt.DEVICE.size)
        self._free_block = fmt.align(end, BLOCK) // BLOCK
        self._blocks = self._free_block + sum(node.blocks for node in nodes.values())

    def _assign_places(self, end: int) -> int:
        """Place the inodes from `end` on; returns where they end.

        An inode shares a block with its inline tail: EROFS wants a tail within one block, and a
        symbolic link that way costs the kernel no second read.
        """
        for node in self._nodes.values():
            length = node.length
            if node.layout == fmt.INLINE and end % BLOCK + length > BLOCK:
                end = fmt.align(end, BLOCK)
            node.place = end
            end = fmt.align(end + length, fmt.SLOT)
        return end

    def encode(self) -> bytes:
        """All of it."""
        if self._blocks + self._device_blocks() >= fmt.NO_BLOCK:
            raise Misfit(None, "with its data it is larger than 16 TiB")
        if self._blocks * BLOCK > fmt.MAX_IMAGE_BYTES:
            raise Misfit(None, "its metadata is larger than 256 MiB")
        out = bytearray(self._blocks * BLOCK)
        for ino, node in enumerate(self._nodes.values(), 1):
            self._encode_node(out, node, ino)
        self._encode_devices(out)
        self._encode_super(out)
        return bytes(out)

    def _device_blocks(self) -> int:
        return sum(device.size_bytes for device in self._devices) // BLOCK

    def _encode_node(self, out: bytearray, node: Node, ino: int) -> None:
        after = node.place + fmt.INODE.size
        out[after : after + len(node.xattrs)] = node.xattrs
        after += len(node.xattrs)
        if node.indexes:
            after = fmt.align(after, 8)
            out[after : after + len(node.indexes)] = node.indexes
        elif node.size:
            self._encode_content(out, node, after)
        self._encode_inode(out, node, ino)

    def _encode_content(self, out: bytearray, node: Node, after: int) -> None:
        content = self._encode_entries(node) if node.groups else node.inode.target
        apart = len(content)
        if node.layout == fmt.INLINE:
            apart -= apart % BLOCK
            out[after : after + len(content) - apart] = content[apart:]
        if apart:
            node.info = self._free_block
            start = self._free_block * BLOCK
            out[start : start + apart] = content[:apart]
            self._free_block += node.blocks

    def _encode_entries(self, node: Node) -> bytes:
        nodes = self._nodes
        special = {b".": node, b"..": node.parent or node}
        blocks: list[bytes] = []
        for names in node.groups:
            offset = fmt.DIRENT.size * len(names)
            entries: list[bytes] = []
            for name in names:
                child = special.get(name) or nodes[node.inode.children[name]]
                kind = fmt.KINDS[stat.S_IFMT(child.inode.mode)]
                entries.append(fmt.DIRENT.pack(child.nid, offset, kind, 0))
                offset += len(name)
            blocks.append(b"".join([*entries, *names]))
        return b"".join([*(block.ljust(BLOCK, b"\0") for block in blocks[:-1]), blocks[-1]])

    def _encode_inode(self, out: bytearray, node: Node, ino: int) -> None:
        inode = node.inode
        seconds, nanoseconds = divmod(inode.mtime_ns, 10**9)
        xattr_count = (len(node.xattrs) - fmt.XATTR_HEADER) // 4 + 1 if node.xattrs else 0
        on_disk = fmt.DiskInode(
            format=fmt.EXTENDED | node.layout << 1,
            xattr_icount=xattr_count,
            mode=inode.mode,
            reserved=0,
            size=node.size,
            info=node.info,
            ino=ino,
            uid=inode.uid,
            gid=inode.gid,
            mtime=seconds,
            mtime_nsec=nanoseconds,
            nlink=node.links,
        )
        fmt.INODE.pack_into(out, node.place, *on_disk)

    def _encode_devices(self, out: bytearray) -> None:
        """The table, as if the devices' data followed the image in one file.

        Whoever mounts the image without its devices then reads behind its end, not in it.
        """
        block = self._blocks
        for slot, device in enumerate(self._devices, fmt.DEVICE_SLOT):
            tag = device.digest.removeprefix("sha256:").encode()
            blocks = device.size_bytes // BLOCK
            fmt.DEVICE.pack_into(out, slot * fmt.DEVICE.size, tag, blocks, block, bytes(56))
            block += blocks

    def _encode_super(self, out: bytearray) -> None:
        found = fmt.Super.of(
            root_nid=next(iter(self._nodes.values())).nid,
            inodes=len(self._nodes),
            blocks=self._blocks,
            devices=len(self._devices),
        )
        fmt.SUPER.pack_into(out, fmt.SUPER_AT, *found)
        out[fmt.CHECKSUM_AT : fmt.CHECKSUM_AT + 4] = fmt.checksum(out).to_bytes(4, "little")
