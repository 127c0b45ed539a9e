//! Starting: the record, the streams, the clone, and what the child says until it has executed.

use super::program::{c_string, candidates, environment, mark, shells, start_refusal};
use super::{nonblocking, now, pipe, Command, Pipe, State};
use crate::serve::cgroup::Cgroup;
use crate::serve::proto::{self, CommandArgs, Env, Refusal};
use crate::serve::ring::Ring;
use crate::serve::server::{Owner, Server, Source, Timer};
use crate::serve::users::{Accounts, User};
use crate::sys::affinity;
use crate::sys::process::{self, Exec, ExecStep, Forked};
use serde_bytes::ByteBuf;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Of its arguments, what a view shows.
const SHOWN_ARGV: usize = 4096;
const MAX_OUTPUT_LIMIT: u64 = 64 << 20;

/// What a program is started with.
pub(crate) struct Launch {
    pub(crate) exec: Exec,
    pub(crate) pid: i32,
    pub(crate) report: OwnedFd,
    pub(crate) cgroup: Option<Cgroup>,
}

impl Server {
    /// Clone a child into a cgroup of its own and let it become `exec`.
    pub(crate) fn launch(&mut self, exec: Exec, name: &str) -> Result<Launch, Refusal> {
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let (report, told) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            flags,
            None,
        )
        .map_err(|e| Refusal::broken("report", &e.into()))?;
        let told = if exec.extra.is_some() {
            // Out of the way of the numbers that one may appear at.
            rustix::io::fcntl_dupfd_cloexec(&told, 100)
                .map_err(|e| Refusal::broken("report", &e.into()))?
        } else {
            told
        };
        let cgroup = match &self.work {
            Some(work) => {
                let group = Cgroup::create(work, name.to_owned());
                Some(group.map_err(|e| Refusal::broken("cgroup", &e))?)
            }
            None => None,
        };
        let processors = self.processors();
        // Where the kernel has put it, which is where there is room.
        let confine =
            || affinity::narrow(processors).and_then(|()| self.confinement.apply_counted());
        match process::fork(cgroup.as_ref().map(Cgroup::fd)) {
            Ok(Forked::Child) => process::execute(&exec, told.as_raw_fd(), &self.tasks, &confine),
            Ok(Forked::Parent(pid)) => Ok(Launch { exec, pid, report, cgroup }),
            Err(error) => {
                self.leftovers.extend(cgroup);
                Err(Refusal::broken("clone", &error))
            }
        }
    }

    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, Refusal> {
        let default = if self.spec.user.is_empty() { "root" } else { &self.spec.user };
        let accounts = Accounts::read(self.rules.any());
        let name = name.filter(|n| !n.is_empty()).unwrap_or(default);
        let user = accounts.resolve(name)?;
        if self.spec.only_user && user.ids != accounts.only(default)?.ids {
            let words = format!("user {name}: in this phase there is no other than {default}");
            return Err(Refusal::new(proto::DENIED, words).kind("user"));
        }
        Ok(user)
    }

    pub(crate) fn spec_env(&self) -> Env {
        let all = self.spec.env.iter();
        all.map(|(k, v)| (ByteBuf::from(k.as_bytes()), ByteBuf::from(v.as_bytes()))).collect()
    }

    /// The directory to begin in: relative to the sandbox's own.
    pub(crate) fn working_directory(&self, wanted: Option<&[u8]>) -> Result<CString, Refusal> {
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
    pub(super) fn find_or_start(&mut self, args: CommandArgs) -> Result<u64, Refusal> {
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
    pub(crate) fn record(
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
            fed: 0,
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

    /// The child says where it got to.
    pub(crate) fn command_report(&mut self, key: u64) {
        loop {
            let Some(command) = self.commands.get_mut(&key) else { return };
            let Some(report) = &command.report else { return };
            match process::receive_progress(report.fd.as_fd()) {
                Ok(Some(progress)) => match (progress.step, progress.fd) {
                    (ExecStep::Trying, _) => {}
                    (ExecStep::Master, Some(master)) => self.adopt_terminal(key, master),
                    (ExecStep::Listener, listener) => self.adopt_listener(listener),
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
}
