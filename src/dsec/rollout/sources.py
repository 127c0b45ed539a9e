"""Pinned source distributions, fetched once with the host's own pip and kept in a cache.

pip is used as the machine has it configured (index, certificates, proxies). It wants a
distribution's metadata even to download it, and would run the package's build code on the host
to get it. So it is given a build back end of ours, under the names of the usual ones, that reads
the name and version from the file every source distribution carries and does nothing else: no line
of the package runs. pip checks the hash before that, and it is checked again whenever the file
is taken from the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio

from dsec.base.errors import InvalidRequest, Unavailable, Unsupported
from dsec.kit.blocking import in_thread
from dsec.rollout.tasks import Pin

ATTEMPTS = 3
AT_ONCE = 4
DOWNLOAD_TIMEOUT_S = 120.0

_BACKENDS = (
    "setuptools.build_meta",
    "flit_core.buildapi",
    "hatchling.build",
    "poetry.core.masonry.api",
    "pdm.backend",
)
_BACKEND = """
import os, re
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    with open("PKG-INFO", encoding="utf-8", errors="replace") as info:
        head = info.read()
    name, version = (re.search(rf"(?im)^{key}: *(.+)$", head)[1] for key in ("Name", "Version"))
    made = re.sub(r"[-_.]+", "_", name) + "-" + version + ".dist-info"
    os.makedirs(os.path.join(directory, made))
    with open(os.path.join(directory, made, "METADATA"), "w", encoding="utf-8") as out:
        out.write(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return made
def get_requires_for_build_wheel(config_settings=None):
    return []
def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("nothing is built here")
class __legacy__:
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    build_wheel = staticmethod(build_wheel)
"""


def cache_dir() -> Path:
    """Where distributions are kept unless the caller says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache") / "dsec" / "sdists"


async def fetch_all(
    pins: Iterable[Pin],
    cache: Path | None = None,
    on_fetched: Callable[[Pin, bool], None] | None = None,
) -> dict[str, bytes]:
    """Get distributions, several at once, from the cache or with pip.

    Args:
        pins: what to get; one named twice is fetched once.
        cache: the directory they are kept in; None: `cache_dir()`.
        on_fetched: told each one when it is there, and whether it came from the cache.

    Returns:
        The files' bytes by their sha256.

    Raises:
        Unsupported: there is no pip.
        Unavailable: pip could not get one; what it said is in the message.
        InvalidRequest: what pip got has another hash.
    """
    wanted = {pin.sha256: pin for pin in pins}
    directory = cache or cache_dir()
    found: dict[str, bytes] = {}
    limit = anyio.CapacityLimiter(AT_ONCE)

    async def get(pin: Pin) -> None:
        async with limit:
            kept = await in_thread("disk", _from_cache, directory, pin)
            found[pin.sha256] = kept or await _download(pin, directory)
        if on_fetched:
            on_fetched(pin, kept is not None)

    errors: list[Exception] = []
    try:
        async with anyio.create_task_group() as group:
            for pin in wanted.values():
                group.start_soon(get, pin)
    except ExceptionGroup as several:
        errors = list(several.exceptions)
    if errors:
        raise errors[0]
    return found


def _cached_at(directory: Path, pin: Pin) -> Path:
    return directory / f"{pin.package.lower()}-{pin.version}-{pin.sha256[:16]}.sdist"


def _from_cache(directory: Path, pin: Pin) -> bytes | None:
    try:
        data = _cached_at(directory, pin).read_bytes()
    except FileNotFoundError:
        return None
    return data if hashlib.sha256(data).hexdigest() == pin.sha256 else None


async def _download(pin: Pin, directory: Path) -> bytes:
    pip = _pip()
    said = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await anyio.sleep(attempt * 2)
        scratch = await in_thread("disk", _scratch, pin)
        try:
            said = await _run_pip(pip, scratch)
            data = await in_thread("disk", _take, scratch, directory, pin)
        finally:
            with anyio.CancelScope(shield=True):
                await in_thread("disk", shutil.rmtree, scratch, True)
        if data is not None:
            return data
    raise Unavailable(f"pip could not fetch {pin.package} {pin.version}: {said}")


async def _run_pip(pip: list[str], scratch: Path) -> str:
    """Run pip; returns the last thing it complained about, empty if it did not."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(scratch / "backend"),
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    argv = [*pip, "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--use-pep517"]
    argv += ["--no-build-isolation", "--require-hashes", "--dest", str(scratch / "out")]
    argv += ["--requirement", str(scratch / "pins.txt")]
    try:
        with anyio.fail_after(DOWNLOAD_TIMEOUT_S):
            ended = await anyio.run_process(argv, check=False, env=environ)
    except TimeoutError:
        return f"no end after {DOWNLOAD_TIMEOUT_S:g} s"
    lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    return " / ".join(lines[-3:]) if ended.returncode else ""


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if not found:
        raise Unsupported("source distributions are fetched with pip, and there is none")
    return [found]


def _scratch(pin: Pin) -> Path:
    scratch = Path(tempfile.mkdtemp(prefix="dsec-sdist-"))
    (scratch / "out").mkdir()
    pinned = f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n"
    (scratch / "pins.txt").write_text(pinned)
    for backend in _BACKENDS:
        *packages, module = backend.split(".")
        place = scratch / "backend"
        for package in packages:
            place = place / package
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").touch()
        (place / f"{module}.py").write_text(_BACKEND)
    return scratch


def _take(scratch: Path, directory: Path, pin: Pin) -> bytes | None:
    files = list((scratch / "out").iterdir())
    if not files:
        return None
    data = files[0].read_bytes()
    got = hashlib.sha256(data).hexdigest()
    if got != pin.sha256:
        raise InvalidRequest(f"{pin.package} {pin.version} has sha256 {got}, not {pin.sha256}")
    directory.mkdir(parents=True, exist_ok=True)
    final = _cached_at(directory, pin)
    partial = final.with_name(f"{final.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(final)
    return data
