//! The end of a command: its first process gone, its output drained, its whole tree killed, its
//! cgroup cleared away.

use super::{Pipe, State};
use crate::serve::cgroup::Cgroup;
use crate::serve::conn::Op;
use crate::serve::proto::{self, OneCommand, Refusal};
use crate::serve::server::{Owner, Server, Source, Timer};
use crate::sys::poll::Interest;
use crate::sys::process;
use std::time::Duration;

/// How long a background child that holds the output open may delay the end.
const DRAIN: Duration = Duration::from_millis(250);

/// How long a killed tree may take to end before the command is called ended without it.
const FORCE: Duration = Duration::from_secs(5);

impl Server {
    /// The first process ended.
    pub(crate) fn command_ended(&mut self, key: u64, status: i32) {
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

    pub(crate) fn command_drained(&mut self, key: u64) {
        if self.commands.get(&key).is_some_and(|c| c.state == State::Draining) {
            self.drain_output(key);
            self.finish_command(key);
        }
    }

    /// It is over: the record stands.
    pub(crate) fn finish_command(&mut self, key: u64) {
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
        for dropped in command.dropped() {
            self.denials.note_output(dropped);
        }
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

    pub(crate) fn command_timeout(&mut self, key: u64) {
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

    pub(crate) fn command_force(&mut self, key: u64) {
        if let Some(command) = self.commands.get_mut(&key) {
            if command.state != State::Ended {
                command.status.get_or_insert(libc::SIGKILL);
                self.finish_command(key);
            }
        }
    }
}

/// Its cgroup.
impl Server {
    /// Remove the cgroup if nothing is in it, else wait until nothing is.
    pub(crate) fn settle_group(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        let (Some(group), Some(work)) = (&command.cgroup, &self.work) else { return };
        if group.remove(work) {
            command.cgroup = None;
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

    pub(crate) fn command_group(&mut self, key: u64) {
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
}

/// Methods.
impl Server {
    pub(crate) fn signal(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
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

    pub(crate) fn kill(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
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

    pub(crate) fn step_kill(&mut self, stream: u32, key: u64) -> Option<Op> {
        let command = self.commands.get(&key)?;
        if command.state != State::Ended || command.cgroup.is_some() || command.hunted > 0 {
            return Some(Op::Kill(key));
        }
        let view = command.view();
        self.leave(stream, key);
        self.conn.as_mut()?.result(stream, &view);
        None
    }
}
