//! Calls that the filter refused: answered as they come, counted, and told of (`tamper`).
//!
//! The kernel holds up whoever makes such a call until aether has answered. So a flood of them costs
//! its sender: each filter has its turn once in a round of the loop, and beyond `BURST` in `WINDOW`
//! it waits for the next one. A filter whose listener is gone answers "no such call": nothing that
//! happens to aether lets a call through.

use super::commands::{now, Command};
use super::server::{Server, Source, Timer};
use crate::confine::{self, REFUSED};
use crate::sys::poll::Interest;
use crate::sys::seccomp::{self, Asked};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Kinds of calls that are told apart; the rest is only counted.
const KINDS: usize = 128;
const BURST: u32 = 100;
const WINDOW: Duration = Duration::from_millis(50);

/// One filter: of a command or of a session's shell, and of all they have started.
#[derive(Debug)]
struct Listener {
    fd: OwnedFd,
    token: u64,
    since: Instant,
    answered: u32,
}

/// A call by number and telling argument, and whether it was aimed at PID 1.
type Kind = (libc::c_long, Option<u32>, bool);

#[derive(Debug)]
struct Tally {
    count: u64,
    first_at: f64,
    last_at: f64,
}

#[derive(Debug, Default)]
pub(super) struct Denials {
    listeners: HashMap<u64, Listener>,
    tallies: BTreeMap<Kind, Tally>,
    /// Calls of further kinds.
    others: u64,
    /// Something runs whose refused calls nobody counts.
    blind: bool,
    flooded: u64,
    dropped_bytes: u64,
}

/// One line of the report.
#[derive(Debug, Serialize)]
struct CallView {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    argument: Option<u32>,
    at_agent: bool,
    count: u64,
    first_at: f64,
    last_at: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    counted: bool,
    calls: Vec<CallView>,
    other_calls: u64,
    flooded_streams: u64,
    dropped_bytes: u64,
}

impl Denials {
    /// Note a call.
    fn note(&mut self, number: libc::c_long, args: &[u64; 6], at: f64) {
        let kind = (number, confine::telling(number, args), confine::at_agent(number, args));
        if let Some(tally) = self.tallies.get_mut(&kind) {
            tally.count += 1;
            tally.last_at = at;
        } else if self.tallies.len() < KINDS {
            self.tallies.insert(kind, Tally { count: 1, first_at: at, last_at: at });
        } else {
            self.others += 1;
        }
    }

    /// Note output that a stream of an ended command could not keep.
    pub(super) fn note_output(&mut self, dropped: u64) {
        self.flooded += u64::from(dropped > 0);
        self.dropped_bytes += dropped;
    }

    fn views(&self) -> Vec<CallView> {
        let view = |(&(number, argument, at_agent), tally): (&Kind, &Tally)| CallView {
            name: confine::name_of(number).map_or_else(|| number.to_string(), str::to_owned),
            argument,
            at_agent,
            count: tally.count,
            first_at: tally.first_at,
            last_at: tally.last_at,
        };
        self.tallies.iter().map(view).collect()
    }
}

impl Listener {
    /// Take one more into account; how long this one has to rest now.
    fn spend(&mut self, now: Instant) -> Option<Duration> {
        let age = now.saturating_duration_since(self.since);
        if age >= WINDOW {
            self.since = now;
            self.answered = 0;
        }
        self.answered += 1;
        (self.answered >= BURST).then(|| WINDOW.saturating_sub(age))
    }
}

impl Server {
    /// A started program's filter; None: what it refuses is not counted here.
    pub(super) fn adopt_listener(&mut self, listener: Option<OwnedFd>) {
        let Some(fd) = listener else {
            self.denials.blind |= self.confinement.filters();
            return;
        };
        let key = self.number();
        // Unwatched, nobody would answer; closed, the kernel refuses.
        let Ok(token) = self.watch(&fd, Source::Denied(key), Interest::IN) else {
            self.denials.blind = true;
            return;
        };
        let listener = Listener { fd, token, since: Instant::now(), answered: 0 };
        self.denials.listeners.insert(key, listener);
    }

    /// Somebody waits for an answer, or nobody is left who could ask.
    pub(super) fn denied(&mut self, key: u64, happened: Interest) {
        let Some(listener) = self.denials.listeners.get_mut(&key) else { return };
        if !happened.contains(Interest::IN) {
            return self.drop_listener(key);
        }
        // An error: whoever asked has been interrupted.
        let Ok(asked) = seccomp::receive(listener.fd.as_fd()) else { return };
        seccomp::refuse(listener.fd.as_fd(), asked, REFUSED);
        let rest = listener.spend(Instant::now());
        let Asked { number, args, .. } = asked;
        self.denials.note(number, &args, now());
        if let Some(rest) = rest {
            self.listen_for(key, Interest::empty());
            self.after(rest, Timer::Denied(key));
        }
    }

    /// It has rested.
    pub(super) fn hear_again(&mut self, key: u64) {
        self.listen_for(key, Interest::IN);
    }

    fn listen_for(&mut self, key: u64, interest: Interest) {
        let Some(listener) = self.denials.listeners.get(&key) else { return };
        if self.poll.modify(&listener.fd, listener.token, interest).is_err() {
            self.denials.blind = true;
            self.drop_listener(key);
        }
    }

    fn drop_listener(&mut self, key: u64) {
        if let Some(listener) = self.denials.listeners.remove(&key) {
            self.unwatch(&listener.fd, listener.token);
        }
    }

    /// `tamper`: what was tried.
    pub(super) fn tamper(&mut self, id: u32) {
        let running = self.commands.values().filter(|command| command.runs());
        let dropped: Vec<u64> = running.flat_map(Command::dropped).collect();
        let floods = dropped.iter().filter(|dropped| **dropped > 0).count();
        let report = Report {
            counted: self.confinement.filters() && !self.denials.blind,
            calls: self.denials.views(),
            other_calls: self.denials.others,
            flooded_streams: self.denials.flooded + super::long(floods),
            dropped_bytes: self.denials.dropped_bytes + dropped.iter().sum::<u64>(),
        };
        if let Some(conn) = &mut self.conn {
            conn.result(id, &report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_calls_are_counted_together() {
        let mut denials = Denials::default();
        for at in [1.0, 2.0] {
            denials.note(libc::SYS_socket, &[38, 5, 0, 0, 0, 0], at);
        }
        denials.note(libc::SYS_socket, &[40, 1, 0, 0, 0, 0], 3.0);
        denials.note(libc::SYS_kill, &[1, 9, 0, 0, 0, 0], 4.0);
        let views = denials.views();
        let find = |name: &str, argument| {
            views.iter().find(|view| view.name == name && view.argument == Some(argument)).unwrap()
        };
        let alg = find("socket", 38);
        assert_eq!((alg.count, alg.first_at, alg.last_at), (2, 1.0, 2.0));
        assert_eq!(find("socket", 40).count, 1);
        assert!(find("kill", 9).at_agent && !alg.at_agent);
    }

    #[test]
    fn no_more_kinds_than_there_is_room_for() {
        let mut denials = Denials::default();
        for number in 0..1000 {
            denials.note(libc::SYS_ioctl, &[0, number, 0, 0, 0, 0], 1.0);
        }
        assert_eq!(denials.views().len(), KINDS);
        assert_eq!(denials.others, 1000 - super::super::long(KINDS));
    }

    #[test]
    fn a_flood_rests_until_its_window_is_over() {
        let begin = Instant::now();
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let mut listener = Listener { fd, token: 0, since: begin, answered: 0 };
        for _ in 1..BURST {
            assert_eq!(listener.spend(begin), None);
        }
        assert_eq!(listener.spend(begin + WINDOW / 2), Some(WINDOW / 2));
        assert_eq!(listener.spend(begin + WINDOW), None);
    }
}
