//! The loop: one thread, one epoll set, every wait in it. Nothing here may block.

use super::commands::Command;
use super::conn::{Closed, Conn, Op, BACKLOG, MAX_STREAMS};
use super::proto::{self, Hello, Refusal};
use super::sessions::Session;
use super::worker::Bereaved;
use super::Handover;
use crate::confine::Confinement;
use crate::frame::{self, Broken, Header, Kind};
use crate::spec::LaunchSpec;
use crate::sys::memory;
use crate::sys::poll::{child_signals, Interest, Poll};
use crate::sys::process::{self, Reaped};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// What a descriptor in the epoll set is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Listener,
    Edge,
    Children,
    /// A command's child before exec.
    Report(u64),
    /// A command's output: 0 standard output, 1 standard error.
    Output(u64, usize),
    Input(u64),
    /// The population of a command's cgroup.
    Group(u64),
    SessionReport(u64),
    SessionOutput(u64, usize),
    SessionFeed(u64),
    SessionStatus(u64),
    /// A worker or a relay, by its stream.
    Stream(u32),
}

/// What is to happen at some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    CommandTimeout(u64),
    /// Output of a command whose first process is gone is waited for no longer.
    CommandDrain(u64),
    /// A killed command that does not end is over all the same.
    CommandForce(u64),
    /// Look again whether a cgroup can be removed.
    Sweep,
    /// A session's shell did not come back.
    SessionStuck(u64),
    SessionForce(u64),
    KillWorker(i32),
    ShutdownGrace,
    ShutdownEnd,
    Trim,
    /// A channel that cannot be listened on is opened again.
    Reopen,
}

pub(super) type TimerId = (Instant, u64);

/// Whose child a pid is.
#[derive(Debug)]
pub(super) enum Owner {
    Command(u64),
    Session(u64),
    Worker(Bereaved),
}

/// Where the edge comes from.
#[derive(Debug)]
pub(super) enum Door {
    Listener(OwnedFd),
    /// A character device of the hypervisor's: one connection after the other.
    Port(std::path::PathBuf),
}

#[derive(Debug)]
pub(super) struct Server {
    pub(super) spec: LaunchSpec,
    pub(super) confinement: Confinement,
    door: Door,
    pub(super) work: Option<OwnedFd>,
    pub(super) tasks: Vec<OwnedFd>,
    pub(super) devpts: Option<OwnedFd>,
    pub(super) null: OwnedFd,
    children: OwnedFd,
    pub(super) poll: Poll,
    sources: HashMap<u64, Source>,
    pub(super) timers: BTreeMap<TimerId, Timer>,
    serial: u64,
    generation: u64,
    pub(super) conn: Option<Conn>,
    pub(super) commands: BTreeMap<u64, Command>,
    pub(super) by_id: HashMap<String, u64>,
    pub(super) sessions: BTreeMap<u64, Session>,
    pub(super) owners: HashMap<i32, Owner>,
    /// Ended commands whose output is still kept, oldest first, and how much that is.
    pub(super) kept: VecDeque<u64>,
    pub(super) kept_bytes: usize,
    pub(super) running: usize,
    /// Cgroups to remove after answers are out.
    pub(super) leftovers: Vec<super::cgroup::Cgroup>,
    /// Ended commands whose cgroup may be empty; looked at after answers are out.
    pub(super) unsettled: Vec<u64>,
    sweeping: bool,
    /// A buffer for whoever reads next; kept as long as it is busy here.
    pub(super) spare: Vec<u8>,
    pub(super) trim: Option<TimerId>,
    /// The stream that asked for the end.
    pub(super) ending: Option<u32>,
}

impl Server {
    pub(super) fn new(handover: Handover, door: Option<Door>) -> io::Result<Self> {
        let null = super::standard_streams()?;
        let poll = Poll::new()?;
        let children = child_signals()?;
        let mut sources = HashMap::new();
        poll.add(&children, 1, Interest::IN)?;
        sources.insert(1, Source::Children);
        let door = door.unwrap_or(Door::Listener(handover.listener));
        if let Door::Listener(listener) = &door {
            rustix::io::ioctl_fionbio(listener, true)?;
            poll.add(listener, 2, Interest::IN)?;
            sources.insert(2, Source::Listener);
        }
        let mut server = Self {
            spec: handover.spec,
            confinement: handover.confinement,
            door,
            work: handover.work_v2,
            tasks: handover.work_v1,
            devpts: super::open_directory("/dev/pts").ok(),
            null,
            children,
            poll,
            sources,
            timers: BTreeMap::new(),
            serial: 2,
            generation: super::random(),
            conn: None,
            commands: BTreeMap::new(),
            by_id: HashMap::new(),
            sessions: BTreeMap::new(),
            owners: HashMap::new(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            running: 0,
            leftovers: Vec::new(),
            unsettled: Vec::new(),
            sweeping: false,
            spare: Vec::new(),
            trim: None,
            ending: None,
        };
        server.open_port();
        Ok(server)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// A number never used before.
    pub(super) fn number(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// An empty buffer with room for `size`; to be put back.
    pub(super) fn take_spare(&mut self, size: usize) -> Vec<u8> {
        let mut buffer = std::mem::take(&mut self.spare);
        buffer.clear();
        buffer.reserve(size);
        buffer
    }

    /// Wait for `fd`; the token is for `forget` and `rearm`.
    pub(super) fn watch(
        &mut self,
        fd: impl AsFd,
        source: Source,
        interest: Interest,
    ) -> io::Result<u64> {
        let token = self.number();
        self.poll.add(fd, token, interest)?;
        self.sources.insert(token, source);
        Ok(token)
    }

    pub(super) fn unwatch(&mut self, fd: impl AsFd, token: u64) {
        self.poll.remove(fd);
        self.sources.remove(&token);
    }

    pub(super) fn after(&mut self, delay: Duration, timer: Timer) -> TimerId {
        let id = (Instant::now() + delay, self.number());
        self.timers.insert(id, timer);
        id
    }

    pub(super) fn disarm(&mut self, id: Option<TimerId>) {
        if let Some(id) = id {
            self.timers.remove(&id);
        }
    }

    /// Serve until the end of the sandbox.
    pub(super) fn serve(mut self) -> ! {
        let mut ready = Vec::new();
        loop {
            let timeout = self.next_timeout();
            if self.poll.wait(&mut ready, timeout).is_err() {
                // Nothing can be done without it; the edge sees the sandbox end.
                process::exit_now(70);
            }
            for (token, happened) in ready.drain(..) {
                if let Some(source) = self.sources.get(&token).copied() {
                    self.handle(source, happened);
                }
            }
            self.run_timers();
            self.pump();
            self.arm_edge();
            self.sweep();
        }
    }

    fn next_timeout(&self) -> Option<Duration> {
        if self.conn.as_ref().is_some_and(Conn::has_ready) {
            return Some(Duration::ZERO);
        }
        let (at, _) = self.timers.keys().next()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    fn handle(&mut self, source: Source, happened: Interest) {
        match source {
            Source::Listener => self.accept(),
            Source::Edge => self.edge(happened),
            Source::Children => self.reap(),
            Source::Report(key) => self.command_report(key),
            Source::Output(key, which) => self.command_output(key, which),
            Source::Input(key) => self.feed_input(key),
            Source::Group(key) => self.command_group(key),
            Source::SessionReport(key) => self.session_report(key),
            Source::SessionOutput(key, which) => self.session_output(key, which),
            Source::SessionFeed(key) => self.session_feed(key),
            Source::SessionStatus(key) => self.session_status(key),
            Source::Stream(id) => {
                if let Some(conn) = &mut self.conn {
                    conn.poke(id);
                }
            }
        }
    }

    fn run_timers(&mut self) {
        let now = Instant::now();
        while let Some(entry) = self.timers.first_entry() {
            if entry.key().0 > now {
                return;
            }
            match entry.remove() {
                Timer::CommandTimeout(key) => self.command_timeout(key),
                Timer::CommandDrain(key) => self.command_drained(key),
                Timer::CommandForce(key) => self.command_force(key),
                Timer::Sweep => self.sweeping = false,
                Timer::SessionStuck(key) => self.session_stuck(key),
                Timer::SessionForce(key) => self.session_force(key),
                Timer::KillWorker(pid) => self.kill_worker(pid),
                Timer::ShutdownGrace => self.shutdown_now(),
                Timer::ShutdownEnd => self.end(),
                Timer::Trim => {
                    self.trim = None;
                    self.spare = Vec::new();
                    if let Some(conn) = &mut self.conn {
                        conn.shrink();
                    }
                    memory::trim();
                }
                Timer::Reopen => self.open_port(),
            }
        }
    }

    /// A moment after the last command, memory goes back.
    pub(super) fn trim_later(&mut self) {
        if self.trim.is_none() {
            self.trim = Some(self.after(Duration::from_secs(1), Timer::Trim));
        }
    }

    fn reap(&mut self) {
        let mut buffer = [0_u8; 128 * 16];
        while rustix::io::read(&self.children, &mut buffer).is_ok_and(|n| n > 0) {}
        loop {
            match process::reap() {
                Reaped::Ended(pid, status) => match self.owners.remove(&pid) {
                    Some(Owner::Command(key)) => self.command_ended(key, status),
                    Some(Owner::Session(key)) => self.session_ended(key, status),
                    Some(Owner::Worker(bereaved)) => self.worker_ended(bereaved),
                    None => {}
                },
                Reaped::NoneYet => return,
                Reaped::NoChildren => {
                    if self.ending.is_some() {
                        self.end();
                    }
                    return;
                }
            }
        }
    }

    /// Remove cgroups that are over; what is still populated is looked at again.
    fn sweep(&mut self) {
        for key in std::mem::take(&mut self.unsettled) {
            self.settle_group(key);
        }
        let Some(work) = &self.work else { return };
        if self.leftovers.is_empty() {
            return;
        }
        self.leftovers.retain(|group| !group.remove(work));
        if !self.leftovers.is_empty() && !self.sweeping {
            self.sweeping = true;
            self.after(Duration::from_millis(20), Timer::Sweep);
        }
    }
}

/// The edge.
impl Server {
    fn accept(&mut self) {
        let Door::Listener(listener) = &self.door else { return };
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        if let Ok(fd) = rustix::net::accept_with(listener, flags) {
            self.drop_edge();
            self.welcome(fd);
        }
    }

    fn welcome(&mut self, fd: OwnedFd) {
        if let Ok(token) = self.watch(&fd, Source::Edge, Interest::IN) {
            self.conn = Some(Conn::new(fd, token));
        }
    }

    fn open_port(&mut self) {
        use rustix::fs::{Mode, OFlags};
        let Door::Port(path) = &self.door else { return };
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => self.welcome(fd),
            Err(_) => {
                self.after(Duration::from_millis(100), Timer::Reopen);
            }
        }
    }

    /// Streams die with their connection; commands and sessions go on.
    pub(super) fn drop_edge(&mut self) {
        let Some(mut conn) = self.conn.take() else { return };
        self.unwatch(&conn.fd, conn.token);
        for (_, stream) in conn.streams.drain() {
            if let Some(op) = stream.op {
                self.abandon(op);
            }
        }
        for command in self.commands.values_mut() {
            command.streams.clear();
        }
        for session in self.sessions.values_mut() {
            session.streams.clear();
        }
        self.forget_old();
        self.trim_later();
        if matches!(self.door, Door::Port(_)) {
            self.after(Duration::from_millis(50), Timer::Reopen);
        }
    }

    /// What a stream held outside the connection.
    fn abandon(&mut self, op: Op) {
        match op {
            Op::Work(work) => self.abandon_work(*work),
            Op::Relay(relay) => self.abandon_relay(&relay),
            Op::Stdin(key) => self.abandon_input(key),
            _ => {}
        }
    }

    fn edge(&mut self, happened: Interest) {
        if happened.contains(Interest::OUT) {
            if let Some(Err(Closed)) = self.conn.as_mut().map(Conn::flush) {
                self.drop_edge();
                return;
            }
        }
        if happened.intersects(Interest::IN | Interest::HUP | Interest::ERR) {
            self.read_edge();
        }
    }

    fn read_edge(&mut self) {
        let Some(conn) = &mut self.conn else { return };
        // A peer that fills the buffer gets a larger one.
        let room = if conn.input.capacity() - conn.input.len() < 1024 { 256 * 1024 } else { 4096 };
        conn.input.reserve(room);
        match rustix::io::read(&conn.fd, rustix::buffer::spare_capacity(&mut conn.input)) {
            Ok(0) => return self.drop_edge(),
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => return self.drop_edge(),
        }
        let token = conn.token;
        let mut input = std::mem::take(&mut conn.input);
        let whole = self.take_frames(&input);
        let Some(conn) = self.conn.as_mut().filter(|c| c.token == token) else { return };
        match whole {
            Ok(size) => {
                input.drain(..size);
                conn.input = input;
            }
            Err(Broken) => self.drop_edge(),
        }
    }

    fn take_frames(&mut self, input: &[u8]) -> Result<usize, Broken> {
        let mut taken = 0;
        loop {
            let rest = input.get(taken..).unwrap_or(&[]);
            let Some(header) = frame::parse(rest)? else { return Ok(taken) };
            let end = frame::HEADER + header.size;
            let Some(payload) = rest.get(frame::HEADER..end) else { return Ok(taken) };
            taken += end;
            self.frame(header, payload)?;
        }
    }

    fn frame(&mut self, header: Header, payload: &[u8]) -> Result<(), Broken> {
        let id = header.stream;
        let Some(conn) = &mut self.conn else { return Ok(()) };
        match header.kind {
            Kind::Ping if id == 0 && payload.len() <= 16 => {
                conn.push(Kind::Pong, 0, frame::MAIN, payload);
            }
            Kind::Pong if id == 0 => {}
            Kind::Open if id != 0 && !conn.streams.contains_key(&id) => self.open(id, payload),
            Kind::Credit => {
                let more = u32::from_be_bytes(payload.try_into().map_err(|_| Broken)?);
                if let Some(stream) = conn.streams.get_mut(&id) {
                    stream.credit = stream.credit.saturating_add(u64::from(more));
                }
                conn.poke(id);
            }
            Kind::Cancel => self.cancel(id),
            Kind::Data => {
                // A stream that has ended may still be on its way to the edge.
                let Some(stream) = conn.streams.get_mut(&id) else { return Ok(()) };
                let size = super::long(payload.len());
                stream.window = stream.window.checked_sub(size).ok_or(Broken)?;
                self.data(id, payload);
            }
            Kind::End => self.data_end(id),
            _ => return Err(Broken),
        }
        Ok(())
    }

    /// Produce what can be produced, and send it.
    fn pump(&mut self) {
        for _ in 0..256 {
            let Some(conn) = &mut self.conn else { return };
            let Some(id) = conn.next_ready() else { break };
            let Some(op) = conn.streams.get_mut(&id).and_then(|s| s.op.take()) else { continue };
            if let Some(op) = self.step(id, op) {
                if let Some(stream) = self.conn.as_mut().and_then(|c| c.streams.get_mut(&id)) {
                    stream.op = Some(op);
                }
            }
        }
        if let Some(Err(Closed)) = self.conn.as_mut().map(Conn::flush) {
            self.drop_edge();
        }
    }

    /// Wait for what makes sense: no request is read while too much is unsent.
    fn arm_edge(&mut self) {
        let Some(conn) = &mut self.conn else { return };
        let wanted = (conn.backlog() < BACKLOG, conn.backlog() > 0);
        if wanted != conn.armed {
            conn.armed = wanted;
            let mut interest = Interest::empty();
            interest.set(Interest::IN, wanted.0);
            interest.set(Interest::OUT, wanted.1);
            if self.poll.modify(&conn.fd, conn.token, interest).is_err() {
                self.drop_edge();
            }
        }
    }

    fn open(&mut self, id: u32, payload: &[u8]) {
        let outcome = if self.conn.as_ref().is_some_and(|c| c.streams.len() >= MAX_STREAMS) {
            Err(Refusal::new(proto::BUSY, "too many open streams").kind("streams"))
        } else {
            proto::unpack::<proto::Method<'_>>(payload).and_then(|m| self.call(id, m.m, payload))
        };
        if let (Err(refusal), Some(conn)) = (outcome, &mut self.conn) {
            conn.refuse(id, &refusal);
        }
    }

    fn call(&mut self, id: u32, method: &str, payload: &[u8]) -> Result<(), Refusal> {
        match method {
            "hello" => self.hello(id),
            "start" => self.start(id, payload),
            "run" => self.run(id, payload),
            "wait" => self.wait(id, payload),
            "attach" => self.attach(id, payload)?,
            "stdin" => self.stdin(id, payload)?,
            "resize" => self.resize(id, payload)?,
            "signal" => self.signal(id, payload)?,
            "kill" => self.kill(id, payload)?,
            "list" => self.list(id),
            "view" => self.view(id, payload)?,
            "session_open" => self.session_open(id, payload)?,
            "session_close" => self.session_close(id, payload)?,
            "session_list" => self.session_list(id),
            "connect" => self.connect(id, payload)?,
            "usage" => self.usage(id),
            "shutdown" => self.shutdown(id, payload)?,
            _ => self.file_method(id, method, payload)?,
        }
        Ok(())
    }

    fn hello(&mut self, id: u32) {
        let hello = Hello {
            protocol: 1,
            version: env!("CARGO_PKG_VERSION"),
            id: &self.spec.id,
            generation: self.generation,
            pid: std::process::id(),
        };
        if let Some(conn) = &mut self.conn {
            conn.result(id, &hello);
        }
    }

    fn step(&mut self, id: u32, op: Op) -> Option<Op> {
        match op {
            Op::Start(key) => self.step_start(id, key),
            Op::Wait(key, copying) => self.step_wait(id, key, copying),
            Op::Attach(reader) => self.step_attach(id, reader),
            Op::Kill(key) => self.step_kill(id, key),
            Op::Work(work) => self.step_work(id, work),
            Op::Relay(relay) => self.step_relay(id, relay),
            Op::SessionOpen(key) => self.step_session_open(id, key),
            Op::Stdin(_) | Op::ClosedStdin | Op::SessionClose | Op::Shutdown => Some(op),
        }
    }

    fn data(&mut self, id: u32, payload: &[u8]) {
        let Some(conn) = &mut self.conn else { return };
        let Some(stream) = conn.streams.get_mut(&id) else { return };
        match &mut stream.op {
            Some(Op::Stdin(key)) => {
                let key = *key;
                self.input_data(key, payload);
            }
            Some(Op::ClosedStdin) if !payload.is_empty() => self.unwanted_input(id),
            Some(Op::Work(work)) => {
                work.take_data(payload);
                conn.poke(id);
            }
            Some(Op::Relay(relay)) => {
                relay.take_data(payload);
                conn.poke(id);
            }
            // Nobody wants it: no more credit, so at most one window is wasted.
            _ => {}
        }
    }

    fn data_end(&mut self, id: u32) {
        let Some(conn) = &mut self.conn else { return };
        let Some(stream) = conn.streams.get_mut(&id) else { return };
        match &mut stream.op {
            Some(Op::Stdin(key)) => {
                let key = *key;
                self.input_end(key);
            }
            Some(Op::ClosedStdin) => self.closed_again(id),
            Some(Op::Work(work)) => {
                work.take_end();
                conn.poke(id);
            }
            Some(Op::Relay(relay)) => {
                relay.take_end();
                conn.poke(id);
            }
            _ => {}
        }
    }

    fn cancel(&mut self, id: u32) {
        let Some(conn) = &mut self.conn else { return };
        let Some(op) = conn.streams.get_mut(&id).and_then(|s| s.op.take()) else { return };
        if let Op::Shutdown = op {
            // There is no way back from it.
            if let Some(stream) = conn.streams.get_mut(&id) {
                stream.op = Some(op);
            }
            return;
        }
        conn.refuse(id, &Refusal::cancelled());
        for command in self.commands.values_mut() {
            command.streams.retain(|s| *s != id);
        }
        for session in self.sessions.values_mut() {
            session.streams.retain(|s| *s != id);
        }
        self.forget_old();
        self.abandon(op);
    }
}

/// The end.
impl Server {
    fn shutdown(&mut self, id: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: proto::ShutdownArgs = proto::unpack(payload)?;
        let grace = args.grace_s.unwrap_or(5.0);
        let grace = Duration::try_from_secs_f64(grace)
            .map_err(|_| Refusal::invalid("grace_s is not a duration"))?;
        if self.ending.is_some() {
            return Err(Refusal::new(proto::CONFLICT, "it is ending already"));
        }
        self.ending = Some(id);
        if let Some(conn) = &mut self.conn {
            conn.open(id, Op::Shutdown);
        }
        self.signal_all(libc::SIGTERM);
        // A stopped process would not see it.
        self.signal_all(libc::SIGCONT);
        self.after(grace.min(Duration::from_secs(3600)), Timer::ShutdownGrace);
        self.reap();
        Ok(())
    }

    /// To every process but this one. Outside a pid namespace of its own that would be the host's,
    /// so there only to what was started here.
    fn signal_all(&self, signal: i32) {
        if std::process::id() == 1 {
            let _ = process::kill(-1, signal);
            return;
        }
        for pid in self.owners.keys() {
            let _ = process::kill(-pid, signal);
        }
    }

    fn shutdown_now(&mut self) {
        self.signal_all(libc::SIGKILL);
        for command in self.commands.values() {
            command.kill_group();
        }
        for session in self.sessions.values() {
            session.kill_group();
        }
        // They are gone as soon as the kernel gets to it; wait for that, not for ever.
        self.after(Duration::from_secs(2), Timer::ShutdownEnd);
        self.reap();
    }

    fn end(&mut self) -> ! {
        if let (Some(conn), Some(id)) = (&mut self.conn, self.ending) {
            conn.result(id, &());
            let _ = rustix::io::ioctl_fionbio(&conn.fd, false);
            let _ = rustix::net::sockopt::set_socket_timeout(
                &conn.fd,
                rustix::net::sockopt::Timeout::Send,
                Some(Duration::from_secs(1)),
            );
            let _ = conn.flush();
        }
        if let Some(work) = &self.work {
            let groups = self.commands.values_mut().filter_map(|c| c.cgroup.take());
            let groups = groups.chain(self.sessions.values_mut().filter_map(|s| s.cgroup.take()));
            for group in groups.chain(self.leftovers.drain(..)) {
                let _ = group.remove(work);
            }
        }
        process::exit_now(0)
    }
}
