"""The process that holds what the kernel gave, and does nothing else that could fail.

`python -m dsec.images.lazy.keeper [--background] CONFIG`. It mounts, and starts the worker with
the connection; a worker that dies is started again, and those who read meanwhile wait. Signals:
SIGTERM ends it and the front, SIGHUP reads CONFIG again and replaces the worker. A worker that hangs
is killed (`pulse.py`). A fanotify group outlives the keeper for as long as anything is mounted over
it (`anchor.py`). With `--background` the command returns when the worker has been started, or with
the reason why not.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import Conflict, DsecError, InternalError, InvalidRequest, StorageFull
from dsec.images.lazy import kernel_side
from dsec.images.lazy.config import load_config
from dsec.images.lazy.handed import VARIABLE, Handed
from dsec.images.lazy.holder import Holder, Lock, digest_of
from dsec.images.lazy.kernel_side import KernelSide
from dsec.images.lazy.places import Places
from dsec.images.lazy.pulse import BEAT_EVERY_S, Pulse, longest_silence_s
from dsec.kit import log
from dsec.linux import fanotify, pidfd
from dsec.linux.spawn import Child, spawn
from dsec.wire.public_v1 import ErrorBody

logger = logging.getLogger("dsec.filler.keeper")

WORKER = (sys.executable, "-m", "dsec.images.lazy.worker")
MAX_LOG_BYTES = 4 << 20
"""When the log is this long it becomes `log.1`."""
_MAX_ENDS, _WINDOW_S = 10, 60.0
_PATIENCE_S = 5.0
"""How long a worker may take to end in order."""
_LOCK_TRIES, _LOCK_PAUSE_S = 40, 0.05
"""Who looks whether the lock is held has it for a moment."""
_ANCHOR_PAUSE_S = 1.0
"""Between two anchors that end."""
_KERNEL_IN_WORKER, _CONNECTION_IN_WORKER, _PULSE_IN_WORKER = 3, 4, 5
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})
_SIGNALS = _ENDING | {signal.SIGHUP, signal.SIGCHLD}


class Restarts:
    """When to start a worker again: at once, then ever later, then not at all."""

    def __init__(self, clock: Clock) -> None:
        """Know of no end yet."""
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)

    def delay_after_end(self) -> float | None:
        """Note an end; seconds to wait before the next start, None after too many."""
        now = self._clock.monotonic()
        self._ends.append(now)
        recent = sum(now - end < _WINDOW_S for end in self._ends)
        if recent >= _MAX_ENDS:
            return None
        return 0.0 if recent == 1 else min(1.0, 0.05 * 2 ** (recent - 2))

    def forget(self) -> None:
        """Begin anew: the worker gets other settings."""
        self._ends.clear()


class Keeper:
    """Looks after one worker. Single-threaded and blocking; all its signals are blocked."""

    def __init__(self, file: Path, lock: Lock, worker: Sequence[str], clock: Clock) -> None:
        """Read the settings.

        Raises:
            InvalidRequest: they cannot be read.
        """
        self._file = file
        self._config = load_config(file)
        self._lock = lock
        self._argv = [*worker, str(file)]
        self._clock = clock
        self._restarts = Restarts(clock)
        self._generation = 0
        self._child: Child | None = None
        self._pulse: Pulse | None = None
        self._start_at = self._renew_at = clock.monotonic()
        self._inherited = False

    def run(self, started: Callable[[], None]) -> int:
        """Keep the worker alive until told to end; the exit status.

        Args:
            started: called when the first worker has been started.
        """
        config = self._config
        with kernel_side.opened(config.front, Places(config.home), Path(config.cache)) as kernel:
            self._inherited = kernel.inherited
            self._generation += kernel.inherited
            try:
                self._start(kernel)
                started()
                return self._watch(kernel)
            finally:
                self._stop()

    def _watch(self, kernel: KernelSide) -> int:
        while True:
            received = _next_signal(self._pause_s())
            if received in _ENDING:
                return 0
            if received == signal.SIGHUP:
                self._reload()
            bound_log(Places(self._config.home).log)
            self._kill_if_lost()
            status = self._ended()
            self._tend(kernel)
            if status == 0 or (status is not None and not self._plan_restart(kernel, status)):
                return min(status, 1)
            if self._child is None and self._clock.monotonic() >= self._start_at:
                self._start(kernel)

    def _pause_s(self) -> float:
        if self._child is not None:
            return BEAT_EVERY_S
        return max(0.0, self._start_at - self._clock.monotonic())

    def _tend(self, kernel: KernelSide) -> None:
        now = self._clock.monotonic()
        if now >= self._renew_at and kernel.renew_anchor():
            self._renew_at = now + _ANCHOR_PAUSE_S
            self._stop()
            self._start_at = now

    def _start(self, kernel: KernelSide) -> None:
        handed = Handed(_KERNEL_IN_WORKER, self._generation, os.getpid(), _PULSE_IN_WORKER)
        environ = {**os.environ, VARIABLE: handed.encode()}
        pulse = self._listen()
        given = {_KERNEL_IN_WORKER: kernel.descriptor, _PULSE_IN_WORKER: pulse.beating}
        if kernel.connection is not None:
            given[_CONNECTION_IN_WORKER] = kernel.connection
        self._child = spawn(self._argv, given, environ)
        pulse.given()
        logger.info("worker started", extra={"pid": self._child.pid, "nth": self._generation})
        self._generation += 1
        self._say(resting=False)

    def _listen(self) -> Pulse:
        self._listen_no_more()
        silence_s = longest_silence_s(self._config.longest_read_s)
        self._pulse = Pulse(silence_s, self._clock)
        return self._pulse

    def _listen_no_more(self) -> None:
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.close()

    def _kill_if_lost(self) -> None:
        """Kill a worker that hangs; it is replaced like any that has ended."""
        if self._child is not None and self._pulse is not None and self._pulse.is_lost():
            logger.error("worker hangs: killing it", extra={"pid": self._child.pid})
            self._listen_no_more()
            pidfd.kill(self._child.descriptor)

    def _say(self, *, resting: bool) -> None:
        config = self._config
        self._lock.write(
            Holder(
                pid=os.getpid(),
                config=digest_of(config),
                front=config.front,
                resting=resting,
                inherited=self._inherited,
            )
        )

    def _ended(self) -> int | None:
        """The worker's raw exit status, if it has ended."""
        if self._child is None or not pidfd.wait_end(self._child.descriptor, 0.0):
            return None
        child, self._child = self._child, None
        return child.reap()

    def _plan_restart(self, kernel: KernelSide, status: int) -> bool:
        """Whether to go on after the worker has failed."""
        delay = self._restarts.delay_after_end()
        logger.warning("worker ended", extra={"status": status, "again_in_s": delay})
        if delay is not None:
            self._start_at = self._clock.monotonic() + delay
            return True
        logger.error("too many ends: reads fail from now on")
        if self._config.front == "fuse":
            return False  # the connection closes, which fails them
        self._say(resting=True)
        return self._deny_until_told(kernel.descriptor)

    def _deny_until_told(self, kernel: int) -> bool:
        """Fail all reads by hand: to close a fanotify group would give zeros."""
        fanotify.deny_unanswered(kernel)
        while True:
            received = _next_signal(0.0)
            if received in _ENDING:
                return False
            if received == signal.SIGHUP:
                self._reload()
                return True
            _wait_readable(kernel, 1.0)
            for event in fanotify.read_events(kernel):
                fanotify.deny(kernel, event.descriptor)
                os.close(event.descriptor)

    def _reload(self) -> None:
        try:
            config = load_config(self._file)
        except InvalidRequest:
            logger.exception("the settings stay as they are")
            return
        if (config.front, config.run) != (self._config.front, self._config.run):
            logger.error("another front or directory takes another keeper")
            return
        self._config = config
        self._stop()
        self._restarts.forget()
        self._start_at = self._clock.monotonic()

    def _stop(self) -> None:
        """End the worker; what it leaves unanswered is the next one's."""
        child, self._child = self._child, None
        self._listen_no_more()
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.descriptor, signal.SIGTERM)
            child.reap(_PATIENCE_S)


def _next_signal(timeout_s: float) -> int | None:
    received = signal.sigtimedwait(_SIGNALS, timeout_s)
    return None if received is None else received.si_signo


def _wait_readable(descriptor: int, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(timeout_s * 1000)


def bound_log(file: Path) -> None:
    """Keep the log short, under those who write to it."""
    with contextlib.suppress(OSError):
        if file.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(file, file.with_suffix(".1"))
            os.truncate(file, 0)


def keep(file: Path, worker: Sequence[str], started: Callable[[], None]) -> int:
    """Be the keeper of these settings; the exit status.

    Raises:
        InvalidRequest: the settings cannot be read.
        Conflict: there is a keeper already.
        Unsupported: this host has no such front.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.umask(0o077)
    with contextlib.suppress(OSError):  # not root, or in a container
        Path("/proc/self/oom_score_adj").write_text("-1000")
    places = Places(load_config(file).home)
    places.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _take(places.lock) as lock:
        return Keeper(file, lock, worker, SystemClock()).run(started)


def _take(path: Path) -> Lock:
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            return Lock(path)
        if _next_signal(_LOCK_PAUSE_S) in _ENDING:
            break
    raise Conflict(f"{path} is held: this node has a keeper already")


def in_background(file: Path, worker: Sequence[str]) -> int:
    """Start the keeper as a process nobody waits for; the exit status of the command.

    What kept it from starting is written to standard error, as one line of JSON.
    """
    ours, theirs = os.pipe()
    if os.fork():
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            said = pipe.read()
        if said == b"+":
            return 0
        sys.stderr.buffer.write(said or _encode(InternalError("the keeper ended at once")))
        return 1
    os.close(ours)
    os._exit(_daemon(file, worker, theirs))


def _daemon(file: Path, worker: Sequence[str], pipe: int) -> int:
    told = False

    def tell(text: bytes) -> None:
        nonlocal told
        if not told:
            told = True
            os.write(pipe, text)
            os.close(pipe)

    try:
        _leave_terminal(Places(load_config(file).home).log)
        log.configure()
        return keep(file, worker, lambda: tell(b"+"))
    except BaseException as error:
        if told:  # nobody hears it; it belongs in the log
            logger.exception("the keeper ends")
        tell(_encode(_as_error(error)))
        return 1


def _leave_terminal(file: Path) -> None:
    os.setsid()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    os.chdir("/")


def _as_error(error: BaseException) -> DsecError:
    match error:
        case DsecError():
            return error
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return StorageFull(f"the disk is full: {error.filename or error.strerror}")
        case _:
            return InternalError(f"{type(error).__name__}: {error}")


def _encode(error: DsecError) -> bytes:
    return msgspec.json.encode(ErrorBody(code=error.code, message=error.message)) + b"\n"


def main(arguments: Sequence[str], worker: Sequence[str] = WORKER) -> int:
    """The command; its exit status."""
    os.closerange(3, 1 << 16)
    *flags, name = arguments
    file = Path(name).resolve()
    if flags == ["--background"]:
        return in_background(file, worker)
    log.configure()
    return keep(file, worker, lambda: None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
