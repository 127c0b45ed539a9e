//! Commands: from the request over the clone to the record that is kept.

use super::cgroup::Cgroup;
use super::conn::{Conn, Copying, Op, Reader};
use super::proto::{self, CommandArgs, CommandView, Env, OneCommand, Refusal};
use super::ring::{Piece, Ring};
use super::server::{Owner, Server, Source, Timer, TimerId};
use super::users::{Accounts, User};
use crate::frame;
use crate::sys::poll::Interest;
use crate::sys::process::{self, Candidate, Exec, ExecStep, Forked};
use rustix::io::Errno;
use serde_bytes::{ByteBuf, Bytes};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Ended commands that are remembered, and how much of their output.
const MAX_RECORDS: usize = 16_384;
const KEPT_BYTES: usize = 16 << 20;
/// Of its arguments, what a view shows.
const SHOWN_ARGV: usize = 4096;
const MAX_OUTPUT_LIMIT: u64 = 64 << 20;
/// How long a background child that holds the output open may delay the end.
const DRAIN: Duration = Duration::from_millis(250);
/// How long a killed tree may take to end before the command is called ended without it.
const FORCE: Duration = Duration::from_secs(5);
/// Kept output up to this size comes inside the answer, more comes as DATA before it.
const INLINE: usize = 256 * 1024;
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Cloned, the program not yet executed.
    Starting,
    Running,
    /// The first process is gone, its output may still come.
    Draining,
    Ended,
}

#[derive(Debug)]
pub(super) struct Pipe {
    pub(super) fd: OwnedFd,
    pub(super) token: u64,
}

/// A command's standard input, seen from here.
#[derive(Debug)]
pub(super) struct Input {
    fd: OwnedFd,
    token: u64,
    terminal: bool,
    pending: Vec<u8>,
    at: usize,
    /// The `stdin` stream that is feeding it: (id, closes it afterwards, bytes taken, ended).
    stream: Option<InputStream>,
    close_when_done: bool,
}

#[derive(Debug)]
struct InputStream {
    id: u32,
    eof: bool,
    written: u64,
    ended: bool,
}

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts of the record")]
pub(super) struct Command {
    pub(super) id: String,
    pub(super) argv: Vec<String>,
    pub(super) session: Option<u64>,
    pub(super) session_id: String,
    pub(super) state: State,
    pub(super) pid: i32,
    started_at: f64,
    started: Instant,
    duration: Duration,
    timeout: Duration,
    pub(super) status: Option<i32>,
    pub(super) timed_out: bool,
    pub(super) killed: bool,
    pub(super) oom_killed: bool,
    pub(super) session_reset: bool,
    pub(super) rings: [Ring; 2],
    pub(super) pipes: [Option<Pipe>; 2],
    /// Whether it was started with a pipe or terminal that `stdin` may write to.
    takes_input: bool,
    input: Option<Input>,
    report: Option<Pipe>,
    /// Until the child has executed: what a failure is explained with.
    exec: Option<Exec>,
    /// Typed into its terminal as soon as there is one.
    typed: Vec<u8>,
    /// Workers that are ending its processes where there is no cgroup.
    pub(super) hunted: usize,
    pub(super) cgroup: Option<Cgroup>,
    group_events: Option<Pipe>,
    pub(super) timer: Option<TimerId>,
    /// Streams that want to know of changes.
    pub(super) streams: Vec<u32>,
}

impl Command {
    pub(super) fn view(&self) -> CommandView {
        let ended = self.state == State::Ended;
        let status = self.status.filter(|_| ended);
        let signal = status.map(|s| s & 0x7f).filter(|s| *s != 0);
        CommandView {
            command_id: self.id.clone(),
            argv: self.argv.clone(),
            session: self.session_id.clone(),
            running: !ended,
            pid: self.pid,
            started_at: self.started_at,
            exit_code: status.map(|s| signal.map_or((s >> 8) & 0xff, |signal| 128 + signal)),
            signal,
            timed_out: self.timed_out,
            oom_killed: self.oom_killed,
            killed: self.killed,
            duration_s: if ended { self.duration } else { self.started.elapsed() }.as_secs_f64(),
            timeout_s: self.timeout.as_secs_f64(),
            session_reset: self.session_reset,
            stdout_bytes: self.rings[0].total(),
            stderr_bytes: self.rings[1].total(),
        }
    }

    pub(super) fn kill_group(&self) {
        if let Some(group) = &self.cgroup {
            let _ = group.kill();
        }
    }

    fn kept(&self) -> usize {
        self.rings.iter().map(Ring::kept).sum()
    }
}

/// What a program is started with.
pub(super) struct Launch {
    pub(super) exec: Exec,
    pub(super) pid: i32,
    pub(super) report: OwnedFd,
    pub(super) cgroup: Option<Cgroup>,
}

pub(super) fn c_string(what: &str, bytes: &[u8]) -> Result<CString, Refusal> {
    CString::new(bytes).map_err(|_| Refusal::invalid(format!("{what} holds a NUL byte")))
}

/// NUL-terminated `NAME=value` strings, and the PATH among them.
pub(super) fn environment(
    user: &User,
    layers: [Option<&Env>; 2],
    terminal: bool,
) -> Result<(Vec<CString>, Vec<u8>), Refusal> {
    let mut all: BTreeMap<&[u8], &[u8]> = BTreeMap::from([
        (&b"PATH"[..], DEFAULT_PATH),
        (b"HOME", &user.home),
        (b"USER", &user.name),
        (b"LOGNAME", &user.name),
        (b"SHELL", &user.shell),
    ]);
    if terminal {
        all.insert(b"TERM", b"xterm-256color");
    }
    for layer in layers.into_iter().flatten() {
        for (name, value) in layer {
            if name.is_empty() || name.contains(&b'=') {
                return Err(Refusal::invalid("env: a name is empty or holds '='"));
            }
            all.insert(name, value);
        }
    }
    let path = all.get(&b"PATH"[..]).map_or_else(Vec::new, |p| p.to_vec());
    let strings =
        all.iter().map(|(name, value)| c_string("env", &[name, &b"="[..], value].concat()));
    Ok((strings.collect::<Result<_, _>>()?, path))
}

fn candidates(argv: &[ByteBuf], path: &[u8]) -> Result<Vec<Candidate>, Refusal> {
    let name = argv.first().filter(|n| !n.is_empty());
    let name = name.ok_or_else(|| Refusal::invalid("argv: the first word is empty"))?;
    let words = || argv.iter().map(|word| c_string("argv", word)).collect::<Result<Vec<_>, _>>();
    if name.contains(&b'/') {
        return Ok(vec![Candidate::new(c_string("argv", name)?, words()?, -1)]);
    }
    let places = path.split(|b| *b == b':').take(256);
    let files = places.map(|place| {
        let place: &[u8] = if place.is_empty() { b"." } else { place };
        c_string("argv", &[place, b"/", name].concat())
    });
    // The words are shared by the search, not copied for each place.
    let words = words()?;
    Ok(vec![Candidate::search(files.collect::<Result<_, _>>()?, words)])
}

pub(super) fn shells(text: &[u8]) -> Result<Vec<Candidate>, Refusal> {
    let shell = |path: &str| -> Result<Candidate, Refusal> {
        let name = path.rsplit('/').next().unwrap_or(path);
        let words = vec![
            c_string("shell", name.as_bytes())?,
            c_string("shell", b"-c")?,
            c_string("shell", text)?,
        ];
        Ok(Candidate::new(c_string("shell", path.as_bytes())?, words, -1))
    };
    Ok(vec![shell("/bin/bash")?, shell("/bin/sh")?])
}

/// What the environment of a command's processes says where no cgroup knows them.
pub(super) fn mark(generation: u64, key: u64) -> Vec<u8> {
    format!("DSEC_COMMAND={generation:x}-{key}").into_bytes()
}

/// A pipe: (read end, write end).
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), Refusal> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|e| Refusal::broken("pipe", &e.into()))
}

pub(super) fn nonblocking(fd: &OwnedFd) -> Result<(), Refusal> {
    rustix::io::ioctl_fionbio(fd, true).map_err(|e| Refusal::broken("pipe", &e.into()))
}

/// Why a child did not become its program, in the words of the error table.
pub(super) fn start_refusal(exec: &Exec, step: ExecStep, errno: i32) -> Refusal {
    let error = io::Error::from_raw_os_error(errno);
    let program = exec.name().to_bytes();
    let name = String::from_utf8_lossy(program).into_owned();
    let (path, refusal) = match (step, errno) {
        (ExecStep::Cwd, libc::ENOENT) => {
            let refusal = Refusal::new(proto::NOT_FOUND, "the working directory does not exist");
            (exec.cwd.as_bytes(), refusal.kind("cwd"))
        }
        (ExecStep::Cwd, _) => {
            return Refusal::file("cwd", exec.cwd.as_bytes(), &error);
        }
        (ExecStep::Execute, libc::ENOENT | libc::ENOTDIR) => {
            let refusal = Refusal::new(proto::NOT_FOUND, format!("{name}: no such program"));
            (program, refusal.kind("executable"))
        }
        (ExecStep::Execute, libc::EACCES | libc::EPERM) => {
            (program, Refusal::new(proto::DENIED, format!("{name}: not executable")))
        }
        (ExecStep::Execute, libc::E2BIG) => {
            (program, Refusal::new(proto::TOO_LARGE, "arguments and environment are too large"))
        }
        (ExecStep::Execute, libc::ENOEXEC | libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG) => {
            (program, Refusal::invalid(format!("{name}: {error}")))
        }
        (ExecStep::Terminal, libc::ENOSPC) => {
            (&b""[..], Refusal::new(proto::BUSY, "no more terminals").kind("terminals"))
        }
        _ => return Refusal::broken(step.name(), &error),
    };
    refusal.step(step.name()).path(path).errno(errno)
}

impl Server {
    /// Clone a child into a cgroup of its own and let it become `exec`.
    pub(super) fn launch(&mut self, exec: Exec, name: &str) -> Result<Launch, Refusal> {
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let (report, told) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            flags,
            None,
        )
        .map_err(|e| Refusal::broken("report", &e.into()))?;
        // Out of the way of the numbers a program may be given.
        let told = rustix::io::fcntl_dupfd_cloexec(&told, 100)
            .map_err(|e| Refusal::broken("report", &e.into()))?;
        let cgroup = match &self.work {
            Some(work) => {
                let group = Cgroup::create(work, name.to_owned());
                Some(group.map_err(|e| Refusal::broken("cgroup", &e))?)
            }
            None => None,
        };
        match process::fork(cgroup.as_ref().map(Cgroup::fd)) {
            Ok(Forked::Child) => {
                process::execute(&exec, told.as_raw_fd(), &self.tasks, &|| self.confinement.apply())
            }
            Ok(Forked::Parent(pid)) => Ok(Launch { exec, pid, report, cgroup }),
            Err(error) => {
                self.leftovers.extend(cgroup);
                Err(Refusal::broken("clone", &error))
            }
        }
    }

    pub(super) fn user(&self, name: Option<&str>) -> Result<User, Refusal> {
        let default = if self.spec.user.is_empty() { "root" } else { &self.spec.user };
        Accounts::read().resolve(name.filter(|n| !n.is_empty()).unwrap_or(default))
    }

    pub(super) fn spec_env(&self) -> Env {
        let all = self.spec.env.iter();
        all.map(|(k, v)| (ByteBuf::from(k.as_bytes()), ByteBuf::from(v.as_bytes()))).collect()
    }

    /// The directory to begin in: relative to the sandbox's own.
    pub(super) fn working_directory(&self, wanted: Option<&[u8]>) -> Result<CString, Refusal> {
        let base = if self.spec.workdir.is_empty() { "/" } else { &self.spec.workdir }.as_bytes();
        let path = match wanted {
            None | Some(b"") => base.to_vec(),
            Some(path) if path.starts_with(b"/") => path.to_vec(),
            Some(path) => [base, b"/", path].concat(),
        };
        c_string("cwd", &path)
    }

    fn time_limit(&self, wanted: Option<f64>) -> Result<Duration, Refusal> {
        let seconds = wanted.unwrap_or(self.spec.default_timeout_s).min(self.spec.max_timeout_s);
        match Duration::try_from_secs_f64(seconds) {
            Ok(limit) if !limit.is_zero() => Ok(limit),
            _ => Err(Refusal::invalid("timeout_s must be above 0")),
        }
    }

    /// The command of that id, or a new one started.
    fn find_or_start(&mut self, args: CommandArgs) -> Result<u64, Refusal> {
        let id = args.command_id.as_deref().unwrap_or("");
        if id.is_empty() || id.len() > 256 {
            return Err(Refusal::invalid("command_id must have 1 to 256 bytes"));
        }
        if let Some(key) = self.by_id.get(id) {
            return Ok(*key);
        }
        if self.ending.is_some() {
            return Err(Refusal::new(proto::CONFLICT, "the sandbox is ending"));
        }
        if self.running >= usize::try_from(self.spec.max_running_commands).unwrap_or(usize::MAX) {
            return Err(Refusal::new(proto::BUSY, "too many running commands").kind("commands"));
        }
        if args.session.as_deref().is_some_and(|s| !s.is_empty()) {
            self.start_in_session(args)
        } else {
            self.start_command(args)
        }
    }

    /// A record of a command about to run, with its time limit on.
    pub(super) fn record(
        &mut self,
        key: u64,
        args: &CommandArgs,
        shown: &[ByteBuf],
    ) -> Result<Command, Refusal> {
        let timeout = self.time_limit(args.timeout_s)?;
        let limit = args.output_limit_bytes.unwrap_or(self.spec.output_limit_bytes);
        let limit = limit.min(MAX_OUTPUT_LIMIT);
        let mut room = SHOWN_ARGV;
        let mut visible = Vec::new();
        for word in shown {
            let part = word.get(..word.len().min(room)).unwrap_or(&[]);
            room -= part.len();
            visible.push(String::from_utf8_lossy(part).into_owned());
            if room == 0 {
                break;
            }
        }
        let timer = Some(self.after(timeout, Timer::CommandTimeout(key)));
        Ok(Command {
            id: args.command_id.clone().unwrap_or_default(),
            argv: visible,
            session: None,
            session_id: String::new(),
            state: State::Starting,
            pid: 0,
            started_at: now(),
            started: Instant::now(),
            duration: Duration::ZERO,
            timeout,
            status: None,
            timed_out: false,
            killed: false,
            oom_killed: false,
            session_reset: false,
            rings: [Ring::new(limit), Ring::new(limit)],
            pipes: [None, None],
            takes_input: args.pty.is_some() || args.stdin.as_deref() == Some("pipe"),
            input: None,
            report: None,
            exec: None,
            typed: Vec::new(),
            hunted: 0,
            cgroup: None,
            group_events: None,
            timer,
            streams: Vec::new(),
        })
    }

    fn start_command(&mut self, args: CommandArgs) -> Result<u64, Refusal> {
        let user = self.user(args.user.as_ref().map(|u| u.0.as_str()))?;
        let own = self.spec_env();
        let (mut env, path) =
            environment(&user, [Some(&own), args.env.as_ref()], args.pty.is_some())?;
        let key = self.number();
        if self.work.is_none() {
            env.push(c_string("mark", &mark(self.generation(), key))?);
        }
        let (programs, shown) = match (&args.argv, &args.shell) {
            (Some(words), None) => (candidates(words, &path)?, words.clone()),
            (None, Some(text)) => {
                let shown = [b"sh", b"-c", text.as_slice()].map(ByteBuf::from);
                (shells(text)?, shown.to_vec())
            }
            _ => return Err(Refusal::invalid("exactly one of argv and shell")),
        };
        let piped = match args.stdin.as_deref() {
            None | Some("null") => args.input.is_some(),
            Some("pipe") => true,
            Some(_) => return Err(Refusal::invalid("stdin must be null or pipe")),
        };
        let cwd = self.working_directory(args.cwd.as_deref().map(Vec::as_slice))?;
        let mut exec = Exec::new(programs, env, cwd, user.ids);
        let mut theirs = Vec::new();
        let mut ours = [None, None];
        let mut input = None;
        if let Some(size) = args.pty {
            let devpts = self.devpts.as_ref();
            let devpts =
                devpts.ok_or_else(|| Refusal::new(proto::UNSUPPORTED, "no /dev/pts here"))?;
            exec.terminal = Some((devpts.as_raw_fd(), size.rows.max(1), size.cols.max(1)));
        } else {
            let mut stdio: [RawFd; 3] = [self.null.as_raw_fd(), -1, -1];
            if piped {
                let (read, write) = pipe()?;
                stdio[0] = read.as_raw_fd();
                nonblocking(&write)?;
                theirs.push(read);
                input = Some(write);
            }
            for (slot, number) in ours.iter_mut().zip([1, 2]) {
                let (read, write) = pipe()?;
                nonblocking(&read)?;
                if let Some(place) = stdio.get_mut(number) {
                    *place = write.as_raw_fd();
                }
                theirs.push(write);
                *slot = Some(read);
            }
            exec.stdio = stdio;
        }
        let mut command = self.record(key, &args, &shown)?;
        let launch = match self.launch(exec, &format!("command-{key}")) {
            Ok(launch) => launch,
            Err(refusal) => {
                self.disarm(command.timer);
                return Err(refusal);
            }
        };
        drop(theirs);
        command.pid = launch.pid;
        command.cgroup = launch.cgroup;
        command.exec = Some(launch.exec);
        self.owners.insert(launch.pid, Owner::Command(key));
        for (which, fd) in ours.into_iter().enumerate() {
            if let (Some(fd), Some(slot)) = (fd, command.pipes.get_mut(which)) {
                let token = self.watch_or_die(&fd, Source::Output(key, which));
                *slot = Some(Pipe { fd, token });
            }
        }
        let token = self.watch_or_die(&launch.report, Source::Report(key));
        command.report = Some(Pipe { fd: launch.report, token });
        self.commands.insert(key, command);
        self.by_id.insert(args.command_id.unwrap_or_default(), key);
        self.running += 1;
        if let Some(fd) = input {
            let bytes = args.input.map_or_else(Vec::new, ByteBuf::into_vec);
            self.set_input(key, fd, false, bytes, args.stdin.as_deref() != Some("pipe"));
        } else if let Some(bytes) = args.input {
            // A terminal: its input comes when its master does.
            if let Some(command) = self.commands.get_mut(&key) {
                command.typed = bytes.into_vec();
            }
        }
        Ok(key)
    }

    /// Registering fails only for want of memory or watches; then a descriptor is not watched and
    /// the time limit ends its command.
    pub(super) fn watch_or_die(&mut self, fd: impl AsFd, source: Source) -> u64 {
        self.watch(fd, source, Interest::IN).unwrap_or(0)
    }

    pub(super) fn poke_command(&mut self, key: u64) {
        if let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get(&key)) {
            for id in &command.streams {
                conn.poke(*id);
            }
        }
    }

    /// The child says where it got to.
    pub(super) fn command_report(&mut self, key: u64) {
        loop {
            let Some(command) = self.commands.get_mut(&key) else { return };
            let Some(report) = &command.report else { return };
            match process::receive_progress(report.fd.as_fd()) {
                Ok(Some(progress)) => match (progress.step, progress.fd) {
                    (ExecStep::Trying, _) => {}
                    (ExecStep::Master, Some(master)) => self.adopt_terminal(key, master),
                    (step, _) => return self.command_failed(key, step, progress.errno),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(None) | Err(_) => {
                    // Closed: by exec, or by a death before it that `reap` will tell of.
                    let report = command.report.take();
                    command.exec = None;
                    if command.state == State::Starting {
                        command.state = State::Running;
                    }
                    if let Some(report) = report {
                        self.unwatch(&report.fd, report.token);
                    }
                    return self.poke_command(key);
                }
            }
        }
    }

    /// It never ran: nothing of it stays, so that the same id may be tried again.
    fn command_failed(&mut self, key: u64, step: ExecStep, errno: i32) {
        let Some(mut command) = self.commands.remove(&key) else { return };
        self.by_id.remove(&command.id);
        self.running -= 1;
        self.disarm(command.timer);
        self.owners.remove(&command.pid);
        let refusal = match &command.exec {
            Some(exec) => start_refusal(exec, step, errno),
            None => Refusal::new(proto::INTERNAL, "the command did not start"),
        };
        for pipe in command.pipes.iter_mut().chain([&mut command.report]).filter_map(Option::take) {
            self.unwatch(&pipe.fd, pipe.token);
        }
        let mut streams = std::mem::take(&mut command.streams);
        if let Some(input) = command.input.take() {
            self.unwatch(&input.fd, input.token);
            streams.extend(input.stream.map(|s| s.id));
        }
        self.leftovers.extend(command.cgroup.take());
        if let Some(conn) = &mut self.conn {
            for id in streams {
                conn.refuse(id, &refusal);
            }
        }
    }

    fn adopt_terminal(&mut self, key: u64, master: OwnedFd) {
        let _ = rustix::io::ioctl_fionbio(&master, true);
        // The same file a second time: epoll knows a member by file and number.
        let input = master.try_clone();
        let token = self.watch_or_die(&master, Source::Output(key, 0));
        let mut typed = Vec::new();
        if let Some(command) = self.commands.get_mut(&key) {
            command.pipes[0] = Some(Pipe { fd: master, token });
            typed = std::mem::take(&mut command.typed);
        }
        if let Ok(input) = input {
            self.set_input(key, input, true, typed, false);
        }
    }

    /// Output is there: always taken, whoever listens.
    pub(super) fn command_output(&mut self, key: u64, which: usize) {
        for _ in 0..4 {
            match self.read_output(key, which) {
                Some(size) if size >= 32 * 1024 => {}
                _ => break,
            }
        }
        self.poke_command(key);
        let drained = self
            .commands
            .get(&key)
            .is_some_and(|c| c.state == State::Draining && c.pipes.iter().all(Option::is_none));
        if drained {
            self.finish_command(key);
        }
    }

    /// Read once; None when there is nothing (any more).
    fn read_output(&mut self, key: u64, which: usize) -> Option<usize> {
        let mut buffer = self.take_spare(64 * 1024);
        let size = self.read_output_with(key, which, &mut buffer);
        self.spare = buffer;
        size
    }

    fn read_output_with(&mut self, key: u64, which: usize, buffer: &mut Vec<u8>) -> Option<usize> {
        let command = self.commands.get_mut(&key)?;
        let slot = command.pipes.get_mut(which)?;
        let pipe = slot.as_ref()?;
        match rustix::io::read(&pipe.fd, rustix::buffer::spare_capacity(buffer)) {
            Ok(size) if size > 0 => {
                // What a background child says after the end is nobody's.
                if command.state != State::Ended {
                    if let Some(ring) = command.rings.get_mut(which) {
                        ring.push(buffer);
                    }
                }
                return Some(size);
            }
            Err(Errno::AGAIN | Errno::INTR) => return None,
            // The end; a terminal nobody has open any more says EIO.
            _ => {}
        }
        if let Some(pipe) = slot.take() {
            self.unwatch(&pipe.fd, pipe.token);
        }
        None
    }

    /// Take what is in the pipes now; one that is filled as fast as it is read is left at some point.
    fn drain_output(&mut self, key: u64) {
        for which in [0, 1] {
            let mut taken = 0;
            while let Some(size) = self.read_output(key, which) {
                taken += size;
                if taken > 2 << 20 {
                    break;
                }
            }
        }
    }

    /// The first process ended.
    pub(super) fn command_ended(&mut self, key: u64, status: i32) {
        self.command_report(key);
        let Some(command) = self.commands.get_mut(&key) else { return };
        if command.state == State::Ended {
            return;
        }
        command.status = Some(status);
        command.state = State::Draining;
        self.drain_output(key);
        let Some(command) = self.commands.get(&key) else { return };
        if command.pipes.iter().all(Option::is_none) {
            self.finish_command(key);
        } else if command.cgroup.as_ref().is_some_and(|g| !g.is_populated()) {
            // Nobody is left to write; what was written before they ended is in the pipes.
            self.drain_output(key);
            self.finish_command(key);
        } else {
            self.after(DRAIN, Timer::CommandDrain(key));
        }
    }

    pub(super) fn command_drained(&mut self, key: u64) {
        if self.commands.get(&key).is_some_and(|c| c.state == State::Draining) {
            self.drain_output(key);
            self.finish_command(key);
        }
    }

    /// It is over: the record stands.
    pub(super) fn finish_command(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        if command.state == State::Ended {
            return;
        }
        command.state = State::Ended;
        command.duration = command.started.elapsed();
        command.exec = None;
        let by_kill = command.status.is_some_and(|s| s & 0x7f == libc::SIGKILL);
        if by_kill && !command.killed && !command.timed_out {
            command.oom_killed = command.cgroup.as_ref().is_some_and(Cgroup::had_oom_kill);
        }
        for ring in &mut command.rings {
            ring.settle();
        }
        self.kept_bytes += command.kept();
        self.kept.push_back(key);
        self.running -= 1;
        let timer = command.timer.take();
        let input = command.input.take();
        let session = command.session;
        self.disarm(timer);
        if let Some(input) = input {
            self.end_input_stream(&input);
        }
        if self.commands.get(&key).is_some_and(|c| c.cgroup.is_some()) {
            self.unsettled.push(key);
        }
        self.poke_command(key);
        self.forget_old();
        if let Some(session) = session {
            self.session_free(session);
        }
        self.trim_later();
    }

    /// Remove the cgroup if nothing is in it, else wait until nothing is.
    pub(super) fn settle_group(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        let Some(group) = &command.cgroup else { return };
        if !group.is_populated() {
            self.leftovers.extend(command.cgroup.take());
            self.poke_command(key);
            return;
        }
        if command.group_events.is_some() {
            return;
        }
        let Ok(fd) = group.events() else {
            self.leftovers.extend(command.cgroup.take());
            return;
        };
        if let Ok(token) = self.watch(&fd, Source::Group(key), Interest::PRI) {
            let events = Some(Pipe { fd, token });
            if let Some(command) = self.commands.get_mut(&key) {
                command.group_events = events;
            }
        }
        // It may have become empty before it was watched.
        self.command_group(key);
    }

    pub(super) fn command_group(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        // Read where the event comes from: that takes it back, and the answer is no older than it.
        let Some(events) = &command.group_events else { return };
        let mut text = [0_u8; 256];
        let size = rustix::io::pread(&events.fd, &mut text, 0).unwrap_or(0);
        let text = text.get(..size).unwrap_or(&[]);
        if command.state != State::Ended || text.windows(11).any(|part| part == b"populated 1") {
            return;
        }
        self.leftovers.extend(command.cgroup.take());
        if let Some(events) = command.group_events.take() {
            self.unwatch(&events.fd, events.token);
        }
        self.poke_command(key);
    }

    /// Keep to the budget of what ended commands leave behind.
    pub(super) fn forget_old(&mut self) {
        let mut spared = Vec::new();
        while self.kept_bytes > KEPT_BYTES && self.kept.len() > 1 {
            let Some(key) = self.kept.pop_front() else { break };
            let Some(command) = self.commands.get_mut(&key) else { continue };
            // Somebody is still reading it.
            if !command.streams.is_empty() {
                spared.push(key);
                continue;
            }
            self.kept_bytes -= command.kept();
            command.rings.iter_mut().for_each(Ring::forget);
        }
        for key in spared.into_iter().rev() {
            self.kept.push_front(key);
        }
        while self.commands.len() - self.running > MAX_RECORDS {
            let oldest = self.commands.iter();
            let oldest = oldest.filter(|(_, c)| {
                c.state == State::Ended && c.streams.is_empty() && c.cgroup.is_none()
            });
            let Some((&key, _)) = oldest.into_iter().next() else { break };
            if let Some(mut gone) = self.commands.remove(&key) {
                self.by_id.remove(&gone.id);
                self.kept_bytes -= gone.kept();
                self.kept.retain(|k| *k != key);
                for pipe in gone.pipes.iter_mut().filter_map(Option::take) {
                    self.unwatch(&pipe.fd, pipe.token);
                }
            }
        }
    }

    pub(super) fn command_timeout(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        command.timer = None;
        if command.state == State::Ended {
            return;
        }
        // The first process may be gone and only its output be waited for: then it was in time.
        if command.state != State::Draining {
            command.timed_out = true;
        }
        self.kill_tree(key);
    }

    /// End everything the command started.
    fn kill_tree(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        if command.session.is_some() {
            return self.kill_in_session(key);
        }
        let (pid, ended) = (command.pid, command.state == State::Ended);
        let first_alive = matches!(self.owners.get(&pid), Some(Owner::Command(k)) if *k == key);
        if let Some(group) = &command.cgroup {
            if group.kill().is_err() {
                for pid in group.processes() {
                    let _ = process::kill(pid, libc::SIGKILL);
                }
            }
        } else {
            if first_alive {
                let _ = process::kill(-pid, libc::SIGKILL);
            }
            if self.work.is_none() {
                self.hunt(key, pid);
            }
        }
        if !ended {
            self.after(FORCE, Timer::CommandForce(key));
        }
    }

    pub(super) fn command_force(&mut self, key: u64) {
        if let Some(command) = self.commands.get_mut(&key) {
            if command.state != State::Ended {
                command.status.get_or_insert(libc::SIGKILL);
                self.finish_command(key);
            }
        }
    }
}

/// Methods.
impl Server {
    fn key(&self, id: &str) -> Result<u64, Refusal> {
        self.by_id.get(id).copied().ok_or_else(|| {
            Refusal::new(proto::NOT_FOUND, format!("no command {id}")).kind("command")
        })
    }

    fn follow(&mut self, stream: u32, key: u64, op: Op) {
        if let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get_mut(&key)) {
            conn.open(stream, op);
            command.streams.push(stream);
        }
    }

    fn leave(&mut self, stream: u32, key: u64) {
        if let Some(command) = self.commands.get_mut(&key) {
            command.streams.retain(|s| *s != stream);
        }
        self.forget_old();
    }

    fn begin(&mut self, stream: u32, payload: &[u8], op: impl Fn(u64) -> Op) {
        let key = proto::unpack(payload).and_then(|args| self.find_or_start(args));
        match key {
            Ok(key) => self.follow(stream, key, op(key)),
            Err(refusal) => {
                if let Some(conn) = &mut self.conn {
                    conn.refuse(stream, &refusal);
                }
            }
        }
    }

    pub(super) fn start(&mut self, stream: u32, payload: &[u8]) {
        self.begin(stream, payload, Op::Start);
    }

    pub(super) fn run(&mut self, stream: u32, payload: &[u8]) {
        self.begin(stream, payload, |key| Op::Wait(key, None));
    }

    pub(super) fn wait(&mut self, stream: u32, payload: &[u8]) {
        let key = proto::unpack::<OneCommand>(payload).and_then(|args| self.key(&args.command_id));
        match key {
            Ok(key) => self.follow(stream, key, Op::Wait(key, None)),
            Err(refusal) => {
                if let Some(conn) = &mut self.conn {
                    conn.refuse(stream, &refusal);
                }
            }
        }
    }

    pub(super) fn step_start(&mut self, stream: u32, key: u64) -> Option<Op> {
        let command = self.commands.get(&key)?;
        if command.state == State::Starting {
            return Some(Op::Start(key));
        }
        let view = command.view();
        self.leave(stream, key);
        self.conn.as_mut()?.result(stream, &view);
        None
    }

    pub(super) fn step_wait(
        &mut self,
        stream: u32,
        key: u64,
        copying: Option<Copying>,
    ) -> Option<Op> {
        let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get_mut(&key)) else {
            return None;
        };
        if command.state != State::Ended {
            return Some(Op::Wait(key, copying));
        }
        let inline = copying.is_none() && command.kept() <= INLINE;
        if !inline {
            let mut copying = copying.unwrap_or_default();
            if !copy_out(conn, stream, command, &mut copying) {
                return Some(Op::Wait(key, Some(copying)));
            }
        }
        let view = command.view();
        let [out, err] = &mut command.rings;
        let result = proto::CommandResult {
            view,
            stdout: captured(out, inline),
            stderr: captured(err, inline),
        };
        conn.result(stream, &result);
        self.leave(stream, key);
        None
    }

    pub(super) fn attach(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        let from = [args.stdout_from, args.stderr_from];
        let reader = Reader { command: key, at: [0, 0], from, begun: false };
        self.follow(stream, key, Op::Attach(reader));
        Ok(())
    }

    pub(super) fn step_attach(&mut self, stream: u32, mut reader: Reader) -> Option<Op> {
        let key = reader.command;
        let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get(&key)) else {
            return None;
        };
        if command.state == State::Starting {
            return Some(Op::Attach(reader));
        }
        if !reader.begun {
            reader.begun = true;
            for ((at, from), ring) in reader.at.iter_mut().zip(reader.from).zip(&command.rings) {
                *at = from.unwrap_or(ring.total());
                if *at > ring.total() {
                    let refusal = Refusal::invalid("an offset beyond what has been written");
                    conn.refuse(stream, &refusal);
                    self.leave(stream, key);
                    return None;
                }
            }
            conn.event(stream, &proto::Started { started: command.view() });
        }
        let mut quota = 128 * 1024;
        for ((at, ring), channel) in reader.at.iter_mut().zip(&command.rings).zip(frame::STDOUT..) {
            while quota > 0 {
                match ring.at(*at) {
                    Piece::Data(data) => {
                        let size = data.len().min(conn.credit(stream)).min(quota);
                        if size == 0 {
                            break;
                        }
                        conn.data(stream, channel, data.get(..size).unwrap_or(&[]));
                        *at += super::long(size);
                        quota -= size;
                    }
                    Piece::Gap { offset, dropped } => {
                        // Said only when it can be followed by data, so there is one per data.
                        if conn.credit(stream) == 0 {
                            break;
                        }
                        let gap = proto::Gap { channel, offset, dropped_bytes: dropped };
                        conn.event(stream, &proto::GapEvent { gap });
                        *at = offset;
                    }
                    Piece::Nothing => break,
                }
            }
        }
        let done = reader.at.iter().zip(&command.rings).all(|(at, ring)| *at >= ring.total());
        if command.state == State::Ended && done {
            conn.event(stream, &proto::Exited { exited: command.view() });
            conn.result(stream, &());
            self.leave(stream, key);
            return None;
        }
        if !done && conn.credit(stream) > 0 {
            conn.poke(stream);
        }
        Some(Op::Attach(reader))
    }

    pub(super) fn resize(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        let (Some(rows), Some(cols)) = (args.rows, args.cols) else {
            return Err(Refusal::invalid("rows and cols are needed"));
        };
        let input = self.commands.get(&key).and_then(|c| c.input.as_ref()).filter(|i| i.terminal);
        let input = input.ok_or_else(|| Refusal::new(proto::CONFLICT, "it has no terminal"))?;
        crate::sys::pty::set_size(input.fd.as_fd(), rows, cols)
            .map_err(|e| Refusal::broken("resize", &e))?;
        if let Some(conn) = &mut self.conn {
            conn.result(stream, &());
        }
        Ok(())
    }

    pub(super) fn signal(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        let signal = args.signal.filter(|s| (1..=64).contains(s));
        let signal = signal.ok_or_else(|| Refusal::invalid("signal must be 1 to 64"))?;
        let gone = || Refusal::new(proto::NOT_FOUND, "it has ended").kind("process");
        let command = self.commands.get(&key).ok_or_else(gone)?;
        if let Some(session) = command.session.filter(|_| command.state != State::Ended) {
            self.signal_session(session, signal);
        } else {
            // Only while its first process is not reaped is its number its own.
            if !matches!(self.owners.get(&command.pid), Some(Owner::Command(k)) if *k == key) {
                return Err(gone());
            }
            process::kill(-command.pid, signal).map_err(|_| gone())?;
        }
        if let Some(conn) = &mut self.conn {
            conn.result(stream, &());
        }
        Ok(())
    }

    pub(super) fn kill(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        if let Some(command) = self.commands.get_mut(&key) {
            if command.state != State::Ended {
                command.killed = true;
            }
        }
        self.follow(stream, key, Op::Kill(key));
        self.kill_tree(key);
        Ok(())
    }

    pub(super) fn step_kill(&mut self, stream: u32, key: u64) -> Option<Op> {
        let command = self.commands.get(&key)?;
        if command.state != State::Ended || command.cgroup.is_some() || command.hunted > 0 {
            return Some(Op::Kill(key));
        }
        let view = command.view();
        self.leave(stream, key);
        self.conn.as_mut()?.result(stream, &view);
        None
    }

    pub(super) fn view(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        if let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get(&key)) {
            conn.result(stream, &command.view());
        }
        Ok(())
    }

    pub(super) fn list(&mut self, stream: u32) {
        let Some(conn) = &mut self.conn else { return };
        let mut batch = Vec::new();
        for command in self.commands.values() {
            // A view is at most its arguments and less than a kilobyte.
            if batch.len() == 100 {
                conn.event(stream, &proto::More { more: std::mem::take(&mut batch) });
            }
            batch.push(command.view());
        }
        conn.result(stream, &batch);
    }
}

fn captured(ring: &mut Ring, inline: bool) -> proto::Captured<'_> {
    let dropped_bytes = ring.dropped();
    let (head, tail) = (ring.head().len(), ring.kept() - ring.head().len());
    if !inline {
        return proto::Captured {
            head: None,
            tail: None,
            head_bytes: Some(super::long(head)),
            tail_bytes: Some(super::long(tail)),
            dropped_bytes,
        };
    }
    let (head, tail) = ring.halves();
    proto::Captured {
        head: Some(Bytes::new(head)),
        tail: Some(Bytes::new(tail)),
        head_bytes: None,
        tail_bytes: None,
        dropped_bytes,
    }
}

/// Send some of the kept output as DATA; true when all of it is out.
fn copy_out(conn: &mut Conn, stream: u32, command: &mut Command, copying: &mut Copying) -> bool {
    let mut quota = 128 * 1024;
    while let Some(ring) = command.rings.get_mut(copying.part / 2) {
        let (head, tail) = ring.halves();
        let part = if copying.part % 2 == 0 { head } else { tail };
        let rest = part.get(copying.at..).unwrap_or(&[]);
        if rest.is_empty() {
            copying.part += 1;
            copying.at = 0;
            continue;
        }
        let credit = conn.credit(stream);
        let size = rest.len().min(credit).min(quota);
        if size == 0 {
            if credit > 0 {
                conn.poke(stream);
            }
            return false;
        }
        let channel = if copying.part < 2 { frame::STDOUT } else { frame::STDOUT + 1 };
        conn.data(stream, channel, rest.get(..size).unwrap_or(&[]));
        copying.at += size;
        quota -= size;
    }
    true
}

/// Standard input.
impl Server {
    fn set_input(&mut self, key: u64, fd: OwnedFd, terminal: bool, pending: Vec<u8>, close: bool) {
        // Armed when a write would block, for one event.
        let Ok(token) = self.watch(&fd, Source::Input(key), Interest::ONESHOT) else { return };
        if let Some(command) = self.commands.get_mut(&key) {
            command.input = Some(Input {
                fd,
                token,
                terminal,
                pending,
                at: 0,
                stream: None,
                close_when_done: close,
            });
        }
        self.feed_input(key);
    }

    pub(super) fn stdin(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        let Some(command) = self.commands.get_mut(&key) else { return Ok(()) };
        let eof = args.eof.unwrap_or(false);
        let op = match &mut command.input {
            Some(input) if input.stream.is_some() || input.close_when_done => {
                return Err(Refusal::new(proto::CONFLICT, "its standard input is being written"));
            }
            Some(input) => {
                input.stream = Some(InputStream { id: stream, eof, written: 0, ended: false });
                Op::Stdin(key)
            }
            // The end may be said again, so that it can be after a lost connection.
            None if eof && command.takes_input => Op::ClosedStdin,
            None => return Err(no_input()),
        };
        if let Some(conn) = &mut self.conn {
            conn.open(stream, op);
        }
        Ok(())
    }

    /// DATA for a standard input that is closed already.
    pub(super) fn unwanted_input(&mut self, stream: u32) {
        if let Some(conn) = &mut self.conn {
            conn.refuse(stream, &no_input());
        }
    }

    /// The end of a standard input that is closed already.
    pub(super) fn closed_again(&mut self, stream: u32) {
        if let Some(conn) = &mut self.conn {
            conn.result(stream, &proto::Written { written: 0 });
        }
    }

    pub(super) fn input_data(&mut self, key: u64, payload: &[u8]) {
        let input = self.commands.get_mut(&key).and_then(|c| c.input.as_mut());
        if let Some(input) = input {
            input.pending.extend_from_slice(payload);
            self.feed_input(key);
        }
    }

    pub(super) fn input_end(&mut self, key: u64) {
        let input = self.commands.get_mut(&key).and_then(|c| c.input.as_mut());
        if let Some(stream) = input.and_then(|i| i.stream.as_mut()) {
            stream.ended = true;
            self.feed_input(key);
        }
    }

    pub(super) fn abandon_input(&mut self, key: u64) {
        if let Some(input) = self.commands.get_mut(&key).and_then(|c| c.input.as_mut()) {
            input.stream = None;
        }
    }

    /// Write what is waiting; the stream's credit follows what was taken.
    pub(super) fn feed_input(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        let Some(input) = &mut command.input else { return };
        let before = input.at;
        let mut closed = false;
        while let Some(rest) = input.pending.get(input.at..).filter(|r| !r.is_empty()) {
            match rustix::io::write(&input.fd, rest) {
                Ok(size) => input.at += size,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    closed = true;
                    break;
                }
            }
        }
        let taken = input.at - before;
        if closed || input.at >= input.pending.len() {
            input.pending = Vec::new();
            input.at = 0;
        } else {
            let _ = self.poll.modify(&input.fd, input.token, Interest::OUT | Interest::ONESHOT);
        }
        let empty = input.pending.is_empty();
        let mut close = closed || (empty && input.close_when_done);
        if let (Some(stream), Some(conn)) = (&mut input.stream, &mut self.conn) {
            stream.written += super::long(taken);
            if taken > 0 && !closed {
                conn.grant(stream.id, taken);
            }
            if closed || (empty && stream.ended) {
                conn.result(stream.id, &proto::Written { written: stream.written });
                close |= stream.eof && !input.terminal;
                if stream.eof && input.terminal {
                    // End of file, as it is typed.
                    let _ = rustix::io::write(&input.fd, b"\x04");
                }
                input.stream = None;
            }
        }
        if close && !input.terminal {
            if let Some(input) = command.input.take() {
                self.unwatch(&input.fd, input.token);
            }
        }
    }

    fn end_input_stream(&mut self, input: &Input) {
        self.unwatch(&input.fd, input.token);
        if let (Some(stream), Some(conn)) = (&input.stream, &mut self.conn) {
            conn.result(stream.id, &proto::Written { written: stream.written });
        }
    }
}

fn no_input() -> Refusal {
    Refusal::new(proto::CONFLICT, "it has no open standard input")
}

pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
