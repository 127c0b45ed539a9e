"""Pull from a registry by Debian's skopeo, which knows its protocols and the node's credentials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

from dsec.base.errors import (
    DsecError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from dsec.images.disk import storage_full
from dsec.images.names import parse_reference
from dsec.images.oci.documents import Manifest, MediaTyped, decode, pick_platform
from dsec.kit.blocking import in_thread
from dsec.linux.process import CommandFailed, run_async

ADVICE = "install Debian's package skopeo"
_INSPECT_TIMEOUT_S = 120.0
_COPY_TIMEOUT_S = 6 * 3600.0
_POLL_S = 0.5

_MEANINGS: tuple[tuple[tuple[str, ...], type[DsecError]], ...] = (
    (("manifest unknown", "name unknown", "not found", "NotFound"), NotFound),
    (("unauthorized", "denied", "authentication required"), PermissionDenied),
    (("no image found in manifest list", "no matching manifest"), Unsupported),
    (("invalid reference format",), InvalidRequest),
)


def explain(failure: CommandFailed, reference: str, directory: Path) -> DsecError:
    """What skopeo's failure means for the caller."""
    said = failure.stderr
    if "no space left" in said.lower():
        return storage_full(directory)
    for signs, error in _MEANINGS:
        if any(sign in said for sign in signs):
            return error(f"cannot pull {reference}: {said.strip()[-500:]}", kind="image")
    return Unavailable(f"cannot pull {reference}: {failure}")


class Registry:
    """One reference in a registry, for one architecture."""

    def __init__(self, reference: str, architecture: str, *, tls_verify: bool) -> None:
        """Check the reference.

        Raises:
            InvalidRequest: it is none.
        """
        self._parsed = parse_reference(reference)
        self._reference = reference
        self._architecture = architecture
        self._tls_verify = tls_verify

    def copy_command(self) -> list[str]:
        """The command that copies the image to the layout `pulled` in its working directory."""
        return [
            *("skopeo", "--override-os", "linux", "--override-arch", self._architecture),
            *("copy", "--quiet", "--retry-times", "3"),
            *([] if self._tls_verify else ["--src-tls-verify=false"]),
            f"docker://{self._named()}",
            "oci:pulled:pulled",
        ]

    def _named(self) -> str:
        """The reference as skopeo takes it: a tag or a digest, not both."""
        parsed = self._parsed
        last = f"@{parsed.digest}" if parsed.digest else f":{parsed.tag or 'latest'}"
        return f"{parsed.repository}{last}"

    async def total_bytes(self) -> int:
        """Bytes to be transferred, from the manifest.

        Raises:
            NotFound: no such image. PermissionDenied: not without (other) credentials.
            Unavailable: the registry cannot be reached.
            Unsupported: nothing in it fits this host, or skopeo is missing.
        """
        data = await self._inspect(self._named())
        kind = decode(data, MediaTyped, "the manifest")
        if kind.manifests is not None:
            chosen = pick_platform(kind.manifests, self._architecture, self._reference)
            data = await self._inspect(f"{self._parsed.repository}@{chosen.digest}")
        manifest = decode(data, Manifest, "the manifest")
        return manifest.config.size + sum(layer.size for layer in manifest.layers)

    async def _inspect(self, named: str) -> bytes:
        tls = [] if self._tls_verify else ["--tls-verify=false"]
        argv = ["skopeo", "inspect", "--raw", "--retry-times", "1", *tls, f"docker://{named}"]
        return await self._skopeo(argv, Path("/"), _INSPECT_TIMEOUT_S)

    async def _skopeo(self, argv: list[str], directory: Path, timeout_s: float) -> bytes:
        try:
            done = await run_async(argv, timeout_s=timeout_s, cwd=directory)
        except FileNotFoundError:
            raise Unsupported("skopeo is not installed", advice=ADVICE) from None
        except CommandFailed as failure:
            raise explain(failure, self._reference, directory) from failure
        return done.stdout

    async def copy(self, directory: Path, on_progress: Callable[[int], None]) -> Path:
        """Copy the image into an OCI layout below `directory`.

        Args:
            directory: exists; on failure what is in it is rubbish.
            on_progress: called with the bytes on disk.

        Returns:
            The layout.

        Raises:
            NotFound, PermissionDenied, Unavailable, Unsupported: see `total_bytes`.
            StorageFull: no room.
        """
        failure: DsecError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, directory, on_progress)
            try:
                await self._skopeo(self.copy_command(), directory, _COPY_TIMEOUT_S)
            except DsecError as error:
                failure = error  # raised below, not inside an exception group
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return directory / "pulled"


async def _watch(directory: Path, on_progress: Callable[[int], None]) -> None:
    while True:
        on_progress(await in_thread("disk", bytes_below, directory))
        await anyio.sleep(_POLL_S)


def bytes_below(directory: Path) -> int:
    """Bytes of the files below a directory that something else is writing."""
    total = 0
    for path in directory.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # renamed meanwhile
        total += 0 if path.is_dir() else status.st_size
    return total
