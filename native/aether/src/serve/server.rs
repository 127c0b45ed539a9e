//! The loop: one thread, one epoll set, every wait in it. Nothing here may block.

use super::commands::Command;
use super::conn::Conn;
use super::denials::Denials;
use super::sessions::Session;
use super::truth::Truth;
use super::worker::Bereaved;
use super::Handover;
use crate::confine::Confinement;
use crate::rules::Rules;
use crate::spec::LaunchSpec;
use crate::sys::memory;
use crate::sys::poll::{child_signals, Interest, Poll};
use crate::sys::process::{self, Reaped};
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
    /// Somebody looks at the sandbox's limits.
    Truth,
    /// A filter whose refused calls wait for their answer.
    Denied(u64),
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
    /// A filter that was asked too much is listened to again.
    Denied(u64),
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
    pub(super) door: Door,
    pub(super) work: Option<OwnedFd>,
    pub(super) tasks: Vec<OwnedFd>,
    pub(super) devpts: Option<OwnedFd>,
    truth: Option<Truth>,
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
    /// What was tried and refused.
    pub(super) denials: Denials,
    /// Cgroups to remove after answers are out.
    pub(super) leftovers: Vec<super::cgroup::Cgroup>,
    /// Ended commands whose cgroup may be empty; looked at after answers are out.
    pub(super) unsettled: Vec<u64>,
    sweeping: bool,
    /// A buffer for whoever reads next; kept as long as it is busy here.
    pub(super) spare: Vec<u8>,
    pub(super) trim: Option<TimerId>,
    /// Since when time does not count, and how long it has not counted before.
    held: Option<Instant>,
    uncounted: Duration,
    /// Its file rules, in force.
    pub(super) rules: Rules,
    /// Between two phases: nothing new begins.
    pub(super) changing: bool,
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
        if let Some(truth) = &handover.truth {
            poll.add(truth.device(), 3, Interest::IN)?;
            sources.insert(3, Source::Truth);
        }
        let mut server = Self {
            spec: handover.spec,
            confinement: handover.confinement,
            door,
            work: handover.work_v2,
            tasks: handover.work_v1,
            devpts: super::open_directory("/dev/pts").ok(),
            truth: handover.truth,
            null,
            children,
            poll,
            sources,
            timers: BTreeMap::new(),
            serial: 3,
            generation: super::random(),
            conn: None,
            commands: BTreeMap::new(),
            by_id: HashMap::new(),
            sessions: BTreeMap::new(),
            owners: HashMap::new(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            running: 0,
            denials: Denials::default(),
            leftovers: Vec::new(),
            unsettled: Vec::new(),
            sweeping: false,
            spare: Vec::new(),
            trim: None,
            held: None,
            uncounted: Duration::ZERO,
            rules: handover.rules,
            changing: false,
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
        let id = (self.now() + delay, self.number());
        self.timers.insert(id, timer);
        id
    }

    /// The clock of all limits: it stands still while the sandbox is paused.
    fn now(&self) -> Instant {
        let now = self.held.unwrap_or_else(Instant::now);
        now.checked_sub(self.uncounted).unwrap_or(now) // never more than has passed
    }

    /// Time does not count from here on: the sandbox is about to be frozen.
    pub(super) fn hold(&mut self) {
        self.held.get_or_insert_with(Instant::now);
    }

    /// Time counts again.
    pub(super) fn release(&mut self) {
        if let Some(at) = self.held.take() {
            self.uncounted += at.elapsed();
        }
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
        Some(at.saturating_duration_since(self.now()))
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
            Source::Truth => self.tell_truth(),
            Source::Denied(key) => self.denied(key, happened),
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

    /// How many processors whatever is started may use; 0 = all.
    pub(super) fn processors(&self) -> u32 {
        self.truth.as_ref().map_or(0, Truth::processors)
    }

    fn tell_truth(&mut self) {
        let Some(truth) = &mut self.truth else { return };
        if !truth.tell() {
            // Nobody can ask any more; it would be told of for ever.
            self.poll.remove(truth.device());
            self.sources.remove(&3);
        }
        self.trim_later();
    }

    fn run_timers(&mut self) {
        let now = self.now();
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
                    if let Some(truth) = &mut self.truth {
                        truth.forget();
                    }
                    if let Some(conn) = &mut self.conn {
                        conn.shrink();
                    }
                    memory::trim();
                }
                Timer::Denied(key) => self.hear_again(key),
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

    pub(super) fn reap(&mut self) {
        // However many children ended, there is no more than one such signal to take.
        let mut signal = [0_u8; 128];
        let _ = rustix::io::read(&self.children, &mut signal);
        loop {
            match process::reap() {
                Reaped::Ended(pid, status) => self.ended(pid, status),
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

    pub(super) fn ended(&mut self, pid: i32, status: i32) {
        match self.owners.remove(&pid) {
            Some(Owner::Command(key)) => self.command_ended(key, status),
            Some(Owner::Session(key)) => self.session_ended(key, status),
            Some(Owner::Worker(bereaved)) => self.worker_ended(bereaved),
            None => {}
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
