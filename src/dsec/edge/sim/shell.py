"""The tiny shell: walks what `grammar.py` has read, inside a simulated process.

`find_program` is how any command, not only a shell's, becomes something that can run.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from dsec.edge.sim.errors import AetherError
from dsec.edge.sim.grammar import Item, Part, Redirect, Simple, SyntaxFault, Word, parse
from dsec.edge.sim.lookup import find_program, open_sink, open_source
from dsec.edge.sim.pipes import BytePipe
from dsec.edge.sim.processes import Process, Program, Surroundings
from dsec.edge.sim.streams import (
    NullSource,
    PipeSink,
    PipeSource,
    Sink,
    Source,
)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_IN_WORD = re.compile(r"\0\$|\$(?:\{(\w+)\}|(\w+|[?$!#@*]))")


class ShellExit(Exception):
    """`exit N`."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Shell:
    """An interpreter bound to the process it runs in; its state is the process's."""

    process: Process
    programs: Mapping[str, Program]
    builtins: Mapping[str, Builtin]
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """Assigned but not exported."""
    status: int = 0
    last_background: Process | None = None
    in_background: bool = False
    foreground: set[Process] = field(default_factory=set)

    @property
    def around(self) -> Surroundings:
        """Where it stands."""
        return self.process.around

    async def run_text(self, text: str) -> int:
        """Run a program text and return its status.

        Raises:
            ShellExit: it said `exit`.
        """
        try:
            items = parse(text)
        except SyntaxFault as fault:
            await self.process.err(f"sh: syntax error: {fault}\n")
            self.status = 2
            return 2
        return await self.run_items(items)

    async def run_items(self, items: list[Item]) -> int:
        """Run a list."""
        for item in items:
            if item.background:
                await self._background(item)
            else:
                await self._chain(item)
        return self.status

    async def _chain(self, item: Item) -> None:
        for joint, stages in item.chain:
            if (joint == "&&" and self.status) or (joint == "||" and not self.status):
                continue
            self.status = await self._pipeline(stages)

    async def _background(self, item: Item) -> None:
        _, stages = item.chain[0]
        alone = len(item.chain) == len(stages) == 1
        body = stages[0] if alone else Simple(body=[Item(item.chain)])
        around = replace(self.around, stdin=NullSource())
        child = await self._fork(body, around, ignore_interrupt=True)
        self.last_background = child
        self.status = 0 if child else 1

    async def _pipeline(self, stages: list[Simple]) -> int:
        if len(stages) == 1:
            return await self._simple(stages[0])
        children: list[Process | None] = []
        source: Source = self.around.stdin
        for stage in stages[:-1]:
            pipe = BytePipe()
            around = replace(self.around, stdin=source, stdout=PipeSink(pipe))
            children.append(await self._fork(stage, around, reader=source))
            source = PipeSource(pipe)
        around = replace(self.around, stdin=source)
        children.append(await self._fork(stages[-1], around, reader=source))
        return [await self._wait(child) for child in children][-1]

    async def _simple(self, command: Simple) -> int:
        if command.body is not None:
            return await self._wait(await self._fork(command, self.around))
        try:
            around = self._redirected(command.redirects)
        except AetherError as error:
            await self.process.err(f"sh: {error.message}\n")
            return 1
        assigned, words = self._fields(command.words)
        if not words:
            self._assign(assigned)
            _touch(around)
            return 0
        builtin = self.builtins.get(words[0])
        if builtin is None:
            return await self._wait(await self._spawn(words, assigned, around))
        return await self._builtin(builtin, words, around)

    async def _builtin(self, builtin: Builtin, words: list[str], around: Surroundings) -> int:
        own = self.around.stdout, self.around.stderr
        around.stdout.hold()
        around.stderr.hold()
        self.around.stdout, self.around.stderr = around.stdout, around.stderr
        try:
            return await builtin(self, words)
        finally:
            self.around.stdout, self.around.stderr = own
            around.stdout.release()
            around.stderr.release()

    async def _fork(
        self,
        command: Simple,
        around: Surroundings,
        *,
        reader: Source | None = None,
        ignore_interrupt: bool = False,
    ) -> Process | None:
        """A subshell."""

        async def child(process: Process) -> int:
            if ignore_interrupt:
                process.ignored |= {signal.SIGINT, signal.SIGQUIT}
            sub = replace(self, process=process, variables=dict(self.variables), foreground=set())
            try:
                return await sub.run_in_place(command)
            except ShellExit as leave:
                return leave.status
            finally:
                if isinstance(reader, PipeSource) and reader is not self.around.stdin:
                    reader.pipe.close_reader()

        return await self._start(child, ["sh"], around)

    async def run_in_place(self, command: Simple) -> int:
        """Run a command in this very process, as a shell does after it has forked.

        Raises:
            ShellExit: it said `exit`.
        """
        try:
            self._redirect_self(self._redirected(command.redirects))
        except AetherError as error:
            await self.process.err(f"sh: {error.message}\n")
            return 1
        if command.body is not None:
            return await self.run_items(command.body)
        assigned, words = self._fields(command.words)
        if not words:
            return 0
        if builtin := self.builtins.get(words[0]):
            return await builtin(self, words)
        self.around.env.update(assigned)
        try:
            program = find_program(self.process.table.fs, self.programs, words[0], self.around)
        except AetherError as error:
            await self.process.err(f"sh: {words[0]}: {error.message}\n")
            return 127 if error.code == "not_found" else 126
        self.process.argv = words
        return await program(self.process)

    def _redirect_self(self, around: Surroundings) -> None:
        own = self.around.stdout, self.around.stderr
        self.around.stdin = around.stdin
        self.around.stdout, self.around.stderr = around.stdout.hold(), around.stderr.hold()
        for sink in own:
            sink.release()

    async def _spawn(
        self, words: list[str], assigned: dict[str, str], around: Surroundings
    ) -> Process | int:
        around = replace(around, env={**around.env, **assigned})
        try:
            program = find_program(self.process.table.fs, self.programs, words[0], around)
        except AetherError as error:
            await self.process.err(f"sh: {words[0]}: {error.message}\n")
            return 127 if error.code == "not_found" else 126
        return await self._start(program, words, around) or 254

    async def _start(
        self, program: Program, argv: list[str], around: Surroundings
    ) -> Process | None:
        fresh = replace(around, env=dict(around.env))
        try:
            return self.process.table.spawn(program, argv, fresh, parent=self.process)
        except OSError as error:
            await self.process.err(f"sh: fork: {error.strerror}\n")
            return None

    async def _wait(self, child: Process | int | None) -> int:
        if not isinstance(child, Process):
            return 254 if child is None else child
        self.foreground.add(child)
        try:
            await child.ended.wait()
        finally:
            self.foreground.discard(child)
        return child.status

    def _redirected(self, redirects: list[Redirect]) -> Surroundings:
        around = replace(self.around)
        for redirect in redirects:
            target = "".join(self._expand(redirect.target))
            if redirect.op == "<":
                around.stdin = open_source(self.process.table.fs, target, around)
            elif redirect.op == ">&":
                sink = around.stdout if target == "1" else around.stderr
                _set_sink(around, redirect.fd, sink)
            else:
                sink = open_sink(self.process.table.fs, target, around, redirect.op)
                _set_sink(around, redirect.fd, sink)
        return around

    def _fields(self, words: list[Word]) -> tuple[dict[str, str], list[str]]:
        assigned: dict[str, str] = {}
        for index, word in enumerate(words):
            match = _ASSIGNMENT.match(word[0].text) if not word[0].quoted else None
            if match is None:
                return assigned, [f for w in words[index:] for f in self._expand(w)]
            whole = "".join(self._text(part) for part in word)
            assigned[match[1]] = whole[match.end() :]
        return assigned, []

    def _assign(self, assigned: dict[str, str]) -> None:
        for name, value in assigned.items():
            (self.around.env if name in self.around.env else self.variables)[name] = value

    def _expand(self, word: Word) -> list[str]:
        fields: list[str] = [""]
        keep = any(part.quoted for part in word)
        for part in word:
            text = self._text(part)
            if part.quoted or not part.expand or "$" not in part.text:
                fields[-1] += text
                continue
            pieces = re.split(r"[ \t\n]+", text)
            fields[-1] += pieces[0]
            fields += pieces[1:]
        return [f for f in fields if f or (keep and len(fields) == 1)]

    def _text(self, part: Part) -> str:
        if not part.expand:
            return part.text
        return _IN_WORD.sub(
            lambda m: "$" if m[0] == "\0$" else self._value(m[1] or m[2]), part.text
        )

    def _value(self, name: str) -> str:
        if name.isdigit():
            index = int(name)
            return self.arguments[index] if index < len(self.arguments) else ""
        special: dict[str, Callable[[], object]] = {
            "?": lambda: self.status,
            "$": lambda: self.process.pid,
            "!": lambda: self.last_background.pid if self.last_background else "",
            "#": lambda: max(len(self.arguments) - 1, 0),
            "@": lambda: " ".join(self.arguments[1:]),
            "*": lambda: " ".join(self.arguments[1:]),
            "PWD": lambda: os.fsdecode(self.around.cwd),
        }
        if name in special:
            return str(special[name]())
        return self.variables.get(name, self.around.env.get(name, ""))


def _set_sink(around: Surroundings, fd: int, sink: Sink) -> None:
    if fd == 2:
        around.stderr = sink
    else:
        around.stdout = sink


def _touch(around: Surroundings) -> None:
    """Open and close what a bare redirection named."""
    for sink in (around.stdout, around.stderr):
        sink.hold()
        sink.release()


Builtin = Callable[[Shell, list[str]], Awaitable[int]]
