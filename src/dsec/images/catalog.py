"""The images by name: one small file each, all of them in memory."""

from __future__ import annotations

import difflib
import threading
from pathlib import Path

from dsec.base.errors import NotFound
from dsec.images import disk
from dsec.images.names import ImageName, file_name, image_name, name_of_file
from dsec.images.records import ImageRecord, decode_image, encode


class Catalog:
    """`<root>/images/<quoted name>.json`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute() / "images"
        self._scratch = root.absolute() / "tmp"
        self._writing = threading.Lock()
        """Held over disk writes; readers on the event loop need no lock to look into a dict."""
        self._records: dict[ImageName, ImageRecord] = {}

    def open(self) -> None:
        """Read all records.

        Raises:
            InternalError: one is damaged; it names the file.
            InvalidRequest: a file there is no record.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        for file in sorted(self._root.glob("*.json")):
            name = name_of_file(file.name)
            self._records[name] = decode_image(file.read_bytes(), str(file))

    def put(self, record: ImageRecord) -> None:
        """Write a record, replacing one of the same name.

        Raises:
            StorageFull: no room; the old record stays.
        """
        name = image_name(record.name)
        with disk.full_disk_named(self._root), self._writing:
            disk.write_atomically(self._root / file_name(name), encode(record), self._scratch)
            self._records[name] = record

    def remove(self, text: str) -> ImageRecord:
        """Forget an image's name.

        Raises:
            NotFound: no image has it.
        """
        with self._writing:
            record = self._find(text)
            (self._root / file_name(image_name(text))).unlink(missing_ok=True)
            del self._records[image_name(text)]
            disk.fsync_path(self._root)
        return record

    def get(self, text: str) -> ImageRecord:
        """The image of a name; without a tag, `latest`.

        Raises:
            InvalidRequest: it is no name.
            NotFound: no image has it; the message lists near names.
        """
        return self._find(text)

    def _find(self, text: str) -> ImageRecord:
        name = image_name(text)
        if name not in self._records:
            raise NotFound(
                f"no image {name!r} on this node. {self._hint(name)}", kind="image", name=name
            )
        return self._records[name]

    def _hint(self, name: ImageName) -> str:
        known = sorted(self._records)
        if not known:
            return "There are none yet: build, pull or import one first"
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"Did you mean {' or '.join(near)}?"
        more = f" and {len(known) - 5} more" if len(known) > 5 else ""
        return f"There are {', '.join(known[:5])}{more}; pull, build or import others first"

    def records(self) -> list[ImageRecord]:
        """All images, by name."""
        return [record for _, record in sorted(self._records.copy().items())]

    def layers_in_use(self) -> set[str]:
        """Every layer some image has."""
        return {layer for record in self.records() for layer in record.layers}
