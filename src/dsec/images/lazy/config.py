"""What a filler is told when it starts: one JSON file, written by the edge, for root only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from dsec.base.errors import InvalidRequest

Positive = Annotated[float, Meta(gt=0)]
FrontName = Literal["fuse", "fanotify"]


class FillerConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Settings of the node's filler.

    How long a read may take: one attempt at the store `attempt_timeout_s`, at most `attempts` of
    them with growing pauses (`pause_s`, doubled each time), and waiting for a turn and the disk
    included never more than `read_timeout_s`. The kernel repeats a failed read about three times;
    those fail at once, because a device that failed is not asked again for `retry_after_s`. So a
    dead store gives EIO after about `attempts * attempt_timeout_s` plus the pauses, and whatever
    happens after three times `read_timeout_s`.
    """

    store: str
    """URL of the store; credentials come by the environment."""
    cache: str
    """Directory of the cache."""
    run: str
    """The node's run directory; the filler's own is `filler` in it."""
    version: str = ""
    """Of the program that wrote this."""
    front: FrontName = "fuse"
    store_options: dict[str, str] = field(default_factory=dict)
    """Fields of `StoreOptions` by name, where they shall differ from what follows below."""
    budget_bytes: Annotated[int, Meta(ge=0)] = 0
    """What the cache may take of the disk; 0 = no limit of ours."""
    window_bytes: Annotated[int, Meta(ge=4096)] = 1 << 20
    """A miss fetches what is missing of the whole window around it, if anything near was wanted
    before; also the unit of eviction."""
    first_window_bytes: Annotated[int, Meta(ge=4096)] = 256 << 10
    """Of the first miss of a window: what is read here and there brings little else with it."""
    gap_bytes: Annotated[int, Meta(ge=0)] = 128 << 10
    """Stored bytes that are here already and are fetched again rather than ask twice."""
    range_bytes: Annotated[int, Meta(ge=4096)] = 1 << 20
    """Stored bytes of one request of a prefetch, at most; a longer chunk is asked for alone."""
    parallel: Annotated[int, Meta(ge=1, le=256)] = 16
    """Requests to the store at once."""
    attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    attempt_timeout_s: Positive = 10.0
    pause_s: Positive = 0.1
    read_timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    """0 = half as much again as the attempts of one fetch take."""
    retry_after_s: Positive = 2.0
    """A device that failed is not asked again so long by readers."""
    probe_every_s: Positive = 3.0
    """A device that fails is asked so often whether it works again."""

    @property
    def longest_read_s(self) -> float:
        """When a read has certainly ended, one way or the other."""
        return self.read_timeout_s or 1.5 * self.attempts * self.attempt_timeout_s

    @property
    def home(self) -> Path:
        """Where the filler keeps its socket, locks and what is open."""
        return Path(self.run) / "filler"

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.home / "socket"


def load_config(path: Path) -> FillerConfig:
    """Read the file.

    Raises:
        InvalidRequest: it cannot be read, or is wrong; the message names the place.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=FillerConfig)
    except OSError as exc:
        raise InvalidRequest(f"cannot read {path}: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise InvalidRequest(f"{path}: {exc}") from exc
