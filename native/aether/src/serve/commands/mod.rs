//! Commands: from the request over the clone to the record that is kept.
//!
//! `methods` is what the edge may ask; `program` says what is to be executed, `start` executes it;
//! `output`, `input` and `attach` carry its streams; `ending` is its end, `records` what stays of it.

mod attach;
mod ending;
mod input;
mod methods;
mod output;
mod program;
mod records;
mod start;

use super::cgroup::Cgroup;
use super::proto::{CommandView, Refusal};
use super::ring::Ring;
use super::server::{Server, Source, TimerId};
use crate::sys::poll::Interest;
use crate::sys::process::Exec;
use input::Input;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(super) use program::{c_string, environment, mark, start_refusal};

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
    /// Bytes of its standard input that were accepted so far.
    fed: u64,
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

    /// Whether its output may still come.
    pub(super) fn runs(&self) -> bool {
        self.state != State::Ended
    }

    /// Bytes of each stream that could not be kept.
    pub(super) fn dropped(&self) -> [u64; 2] {
        [self.rings[0].dropped(), self.rings[1].dropped()]
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

/// A pipe: (read end, write end).
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), Refusal> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|e| Refusal::broken("pipe", &e.into()))
}

pub(super) fn nonblocking(fd: &OwnedFd) -> Result<(), Refusal> {
    rustix::io::ioctl_fionbio(fd, true).map_err(|e| Refusal::broken("pipe", &e.into()))
}

pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

impl Server {
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
}
