"""One rollout: a sandbox for the agent, a fresh one for the verdict, and who is to blame otherwise.

The agent works in one sandbox, without a network. What it leaves - its work tree and nothing else -
goes as a tar into a second sandbox that the agent has never seen, and only there the verifier is
put beside it. Files it wrote elsewhere, processes it left running, an interpreter it tampered with
stay behind. Both sandboxes are stopped whatever happens.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from importlib import resources

import anyio
from msgspec import Struct

from dsec.base.clock import Clock
from dsec.base.errors import DsecError
from dsec.rollout.outcomes import Verdict, blames_agent, judge, reward_of
from dsec.rollout.platform import ClientLike, Ran, SandboxLike
from dsec.rollout.records import CallRecord, Event, Phase, RolloutResult
from dsec.rollout.tasks import (
    Agent,
    Call,
    Ended,
    FinishCall,
    ReadCall,
    ReplaceCall,
    ShellCall,
    Task,
    WriteCall,
)
from dsec.sdk import DSecContainerRunArgs

logger = logging.getLogger("dsec.rollout")

TREE = "/task/tree"
"""The agent's work tree, in both sandboxes."""
DEPS = "/task/deps"
VERIFY = "/verify"
CREATE_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
GRACE_S = 30.0
VERDICT_LIMIT_BYTES = 1 << 20
READ_LIMIT_BYTES = 16 << 20


class Job(Struct, frozen=True, kw_only=True):
    """A rollout to be done."""

    rollout_id: str
    task: Task
    agent: Agent


class _Ended(Exception):  # no error: the outcome is settled
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


async def roll_out(
    client: ClientLike,
    job: Job,
    *,
    image: str,
    distributions: Mapping[str, bytes],
    clock: Clock,
    on_event: Callable[[Event], None],
) -> RolloutResult:
    """Do one rollout to its end. Errors of the platform become the outcome `infrastructure`."""
    rollout = _Rollout(client, job, image, distributions, clock, on_event)
    return await rollout.run()


class _Rollout:
    def __init__(
        self,
        client: ClientLike,
        job: Job,
        image: str,
        distributions: Mapping[str, bytes],
        clock: Clock,
        on_event: Callable[[Event], None],
    ) -> None:
        self._client = client
        self._job = job
        self._task = job.task
        self._image = image
        self._distributions = distributions
        self._clock = clock
        self._on_event = on_event
        self._phase: Phase = "create"
        self._phases_s: dict[str, float] = {}
        self._calls: list[CallRecord] = []
        self._create_s: list[float] = []
        self._surprises: list[str] = []
        self._tree_bytes = 0
        self._peak_bytes = 0
        self._unstopped = 0

    async def run(self) -> RolloutResult:
        began = self._clock.monotonic()
        self._tell("started", self._job.agent.note)
        try:
            verdict = await self._run_phases()
        except _Ended as ended:
            verdict = ended.verdict
        except DsecError as error:
            detail = f"{self._phase}: {error.code}: {error.message}"
            verdict = Verdict(outcome="infrastructure", detail=detail)
        except TimeoutError:
            detail = f"{self._phase}: the platform gave no answer in time"
            verdict = Verdict(outcome="infrastructure", detail=detail)
        except Exception as error:  # a bug met in one rollout must not end all the others
            logger.exception("a rollout met a bug", extra={"rollout_id": self._job.rollout_id})
            detail = f"{self._phase}: {type(error).__name__}: {error}"
            verdict = Verdict(outcome="infrastructure", detail=detail)
        result = RolloutResult(
            rollout_id=self._job.rollout_id,
            task=self._task.name,
            agent=self._job.agent.name,
            expected=self._job.agent.expected,
            outcome=verdict.outcome,
            reward=reward_of(verdict.outcome),
            detail=verdict.detail,
            checks=verdict.checks,
            calls=self._calls,
            surprises=self._surprises,
            create_s=self._create_s,
            phases_s=self._phases_s,
            tree_bytes=self._tree_bytes,
            peak_memory_bytes=self._peak_bytes,
            unstopped=self._unstopped,
            wall_s=self._clock.monotonic() - began,
        )
        self._tell("ended", verdict.detail, result)
        return result

    async def _run_phases(self) -> Verdict:
        async with self._sandbox("agent") as sandbox:
            with self._in_phase("setup"), anyio.fail_after(self._task.timeouts.setup + GRACE_S):
                await self._set_up(sandbox)
            with self._in_phase("agent"):
                await self._replay(sandbox)
            with self._in_phase("collect"), anyio.fail_after(self._task.timeouts.setup + GRACE_S):
                tree = await self._take_tree(sandbox)
        async with self._sandbox("verify") as sandbox:
            with self._in_phase("verify"), anyio.fail_after(self._task.timeouts.verify + GRACE_S):
                return await self._verify(sandbox, tree)

    # -- sandboxes ---------------------------------------------------------------------------

    def _args(self, role: str) -> DSecContainerRunArgs:
        task, limits, times = self._task, self._task.limits, self._task.timeouts
        agent_s = self._job.agent.timeout_s or times.agent
        # As long as the declared phases can take: a sandbox must not expire under its agent.
        life_s = times.setup + (agent_s if role == "agent" else times.verify) + 4 * GRACE_S
        return DSecContainerRunArgs(
            container_image=self._image,
            memory_limit_mb=limits.memory_mb,
            cpu_cores_limit=limits.cpu_cores,
            pids_limit=limits.pids,
            ttl_running_stop=life_s,
            max_lifetime_s=life_s,
            network_rules={},
            labels={"rollout": self._job.rollout_id, "task": task.name, "role": role},
        )

    @asynccontextmanager
    async def _sandbox(self, role: str) -> AsyncIterator[SandboxLike]:
        with self._in_phase("create"):
            began = self._clock.monotonic()
            with anyio.fail_after(CREATE_TIMEOUT_S + GRACE_S):
                sandbox = await self._client.run_container(
                    self._args(role), timeout=CREATE_TIMEOUT_S
                )
            self._create_s.append(self._clock.monotonic() - began)
        try:
            yield sandbox
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop(sandbox)

    async def _stop(self, sandbox: SandboxLike) -> None:
        began = self._clock.monotonic()
        try:
            with anyio.fail_after(STOP_TIMEOUT_S):
                used = await sandbox.usage()
            self._peak_bytes = max(self._peak_bytes, used.memory_peak_bytes, used.memory_bytes)
        except (DsecError, TimeoutError):
            pass  # it is over already, or cannot say; stopping it is what matters
        try:
            with anyio.fail_after(STOP_TIMEOUT_S):
                await sandbox.stop()
        except (DsecError, TimeoutError):
            self._unstopped += 1
        self._spend("stop", self._clock.monotonic() - began)

    # -- phases ------------------------------------------------------------------------------

    async def _set_up(self, sandbox: SandboxLike) -> None:
        places = [TREE, *self._dep_places()]
        await self._unpack(sandbox, places, self._task.timeouts.setup)

    async def _unpack(self, sandbox: SandboxLike, places: list[str], timeout_s: float) -> None:
        """Upload the distributions and unpack them; the last `len(places)` of the task's pins."""
        pins = self._task.pins[-len(places) :] if places else []
        lines = [
            f"command -v {shlex.quote(need)} >/dev/null || "
            f"{{ echo the image lacks {shlex.quote(need)} >&2; exit 90; }}"
            for need in self._task.image.needs
        ]
        for number, (pin, place) in enumerate(zip(pins, places, strict=True)):
            archive = f"/task/sdist-{number}"
            data = self._distributions[pin.sha256]
            await sandbox.files.write(archive, data, parents=True)
            lines += [
                f"mkdir -p {place}",
                f"tar -xf {archive} -C {place} --strip-components=1 --no-same-owner",
                f"chmod -R u+w,a+rX {place}",
                f"rm {archive}",
            ]
        ran = await sandbox.run_shell(
            "set -e\n" + "\n".join(lines), timeout=timeout_s, command_id=self._command_id("setup")
        )
        if ran.exit_code != 0 or ran.timed_out:
            detail = f"setup ended with status {ran.exit_code}: {ran.stderr.strip()[-300:]}"
            raise _Ended(Verdict(outcome="infrastructure", detail=detail))

    async def _replay(self, sandbox: SandboxLike) -> None:
        limit_s = self._job.agent.timeout_s or self._task.timeouts.agent
        with anyio.move_on_after(limit_s) as scope:
            for step, call in enumerate(self._job.agent.calls):
                if isinstance(call, FinishCall):
                    break
                await self._call(sandbox, step, call)
        if scope.cancelled_caught:
            detail = f"not done after {limit_s:g} s and {len(self._calls)} tool calls"
            raise _Ended(Verdict(outcome="agent_timeout", detail=detail))

    async def _call(self, sandbox: SandboxLike, step: int, call: Call) -> None:
        began = self._clock.monotonic()
        try:
            record = await self._tool(sandbox, step, call)
        except DsecError as error:
            if not blames_agent(error):
                raise
            record = _record(step, call, ended="failed")
        latency_s = self._clock.monotonic() - began
        self._calls.append(_timed(record, latency_s))
        wanted = None if isinstance(call, FinishCall) else call.expect
        if wanted is not None and wanted != record.ended:
            status = "" if record.exit_code is None else f", status {record.exit_code}"
            text = f"step {step}, {record.summary}: {record.ended}{status}, not {wanted}"
            self._surprises.append(text)
        self._tell("call", f"{record.summary}: {record.ended}")

    async def _tool(self, sandbox: SandboxLike, step: int, call: Call) -> CallRecord:
        match call:
            case ShellCall():
                command_id = self._command_id(str(step))
                ran = await sandbox.run_shell(
                    call.command,
                    cwd=TREE,
                    env=self._agent_env(),
                    timeout=call.timeout_s or self._task.timeouts.tool,
                    command_id=command_id,
                    output_limit_bytes=self._task.limits.output_kb << 10,
                )
                return _ran_record(step, call, ran, command_id)
            case ReadCall():
                data = await _read(sandbox, call.path)
                ended: Ended = "ok" if len(data) <= READ_LIMIT_BYTES else "truncated"
                return _record(step, call, ended=ended, output_bytes=len(data))
            case WriteCall():
                await sandbox.files.write(_absolute(call.path), call.content.encode(), parents=True)
                return _record(step, call)
            case ReplaceCall():
                data = await _read(sandbox, call.path)
                before = data.decode("utf-8", "replace")
                if len(data) > READ_LIMIT_BYTES or before.count(call.old) != 1:
                    return _record(step, call, ended="failed")
                after = before.replace(call.old, call.new)
                await sandbox.files.write(_absolute(call.path), after.encode())
                return _record(step, call)
            case FinishCall():
                return _record(step, call)

    async def _take_tree(self, sandbox: SandboxLike) -> list[bytes]:
        limit_bytes = self._task.limits.tree_mb << 20
        chunks: list[bytes] = []
        try:
            async with aclosing(sandbox.files.get_tar(TREE)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    self._tree_bytes += len(chunk)
                    if self._tree_bytes > limit_bytes:
                        detail = f"the work tree is larger than {self._task.limits.tree_mb} MiB"
                        raise _Ended(Verdict(outcome="failed", detail=detail))
        except DsecError as error:
            if not blames_agent(error):
                raise
            detail = f"the work tree is gone: {error.message}"
            raise _Ended(Verdict(outcome="failed", detail=detail)) from error
        return chunks

    async def _verify(self, sandbox: SandboxLike, tree: list[bytes]) -> Verdict:
        await sandbox.files.mkdir(TREE, parents=True)
        await sandbox.files.put_tar(TREE, _chunks(tree))
        await self._unpack(sandbox, self._dep_places(), self._task.timeouts.setup)
        grading = resources.files("dsec.rollout").joinpath("grading.py").read_bytes()
        for name, data in {**self._task.verify, "grading.py": grading}.items():
            await sandbox.files.write(f"{VERIFY}/{name}", data, mode=0o600, parents=True)
        # Closed before anything of the tree runs: the checks run as a user of their own.
        script = f'chmod 700 {VERIFY} && exec python3 -I -B {VERIFY}/verify.py "$@"'
        ran = await sandbox.exec(
            ["sh", "-c", script, "verify", TREE, *self._import_paths()],
            timeout=self._task.timeouts.verify,
            command_id=self._command_id("verify"),
            output_limit_bytes=VERDICT_LIMIT_BYTES,
        )
        verdict = judge(
            ran.stdout, exit_code=ran.exit_code, timed_out=ran.timed_out, truncated=ran.truncated
        )
        if verdict.outcome == "verifier":
            detail = f"{verdict.detail}: {ran.stderr.strip()[-300:]}".rstrip(": ")
            return Verdict(outcome="verifier", detail=detail, checks=verdict.checks)
        return verdict

    # -- small things ------------------------------------------------------------------------

    def _dep_places(self) -> list[str]:
        return [f"{DEPS}/{number}" for number in range(len(self._task.requires))]

    def _import_paths(self) -> list[str]:
        places = [TREE, *self._dep_places()]
        return [
            place if pin.import_path == "." else f"{place}/{pin.import_path}"
            for place, pin in zip(places, self._task.pins, strict=True)
        ]

    def _agent_env(self) -> dict[str, str]:
        return {"PYTHONPATH": ":".join(self._import_paths()), "PYTHONDONTWRITEBYTECODE": "1"}

    def _command_id(self, step: str) -> str:
        # The phase is part of it: `setup` is run in both sandboxes.
        return f"{self._job.rollout_id}.{self._phase[0]}{step}"

    @contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        self._phase = phase
        self._tell("phase", phase)
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self._spend(phase, self._clock.monotonic() - began)

    def _spend(self, phase: Phase, seconds: float) -> None:
        self._phases_s[phase] = self._phases_s.get(phase, 0.0) + seconds

    def _tell(self, kind: str, text: str, result: RolloutResult | None = None) -> None:
        self._on_event(
            Event(
                kind=kind,  # type: ignore[arg-type]
                rollout_id=self._job.rollout_id,
                task=self._task.name,
                agent=self._job.agent.name,
                text=text,
                result=result,
            )
        )


async def _read(sandbox: SandboxLike, path: str) -> bytes:
    """A file's first bytes: what the agent names may have no end (/dev/zero)."""
    return await sandbox.files.read(_absolute(path), length=READ_LIMIT_BYTES + 1)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{TREE}/{path}"


async def _chunks(tree: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in tree:
        yield chunk


def _summary(call: Call) -> str:
    match call:
        case ShellCall():
            return call.command.strip().partition("\n")[0][:60]
        case FinishCall():
            return "finish"
        case _:
            return f"{type(call).__struct_config__.tag} {call.path}"


def _record(step: int, call: Call, *, ended: Ended = "ok", output_bytes: int = 0) -> CallRecord:
    return CallRecord(
        step=step,
        tool=str(type(call).__struct_config__.tag),
        summary=_summary(call),
        ended=ended,
        output_bytes=output_bytes,
    )


def _ran_record(step: int, call: Call, ran: Ran, command_id: str) -> CallRecord:
    ended: Ended = "ok" if ran.exit_code == 0 else "failed"
    if ran.timed_out:
        ended = "timed_out"
    elif ran.truncated:
        ended = "truncated"
    return CallRecord(
        step=step,
        tool="shell",
        summary=_summary(call),
        ended=ended,
        exit_code=ran.exit_code,
        output_bytes=len(ran.stdout) + len(ran.stderr),
        command_id=command_id,
    )


def _timed(record: CallRecord, latency_s: float) -> CallRecord:
    return CallRecord(
        **{
            **{name: getattr(record, name) for name in record.__struct_fields__},
            "latency_s": latency_s,
        }
    )
