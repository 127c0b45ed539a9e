//! chronus: a shell that stays. It is fed on a private descriptor and says how each command ended on
//! another; what commands print never meets either.

use super::cgroup::Cgroup;
use super::commands::{c_string, environment, mark, nonblocking, pipe, start_refusal, Pipe, State};
use super::conn::Op;
use super::proto::{self, CommandArgs, Refusal, SessionArgs, SessionView};
use super::server::{Owner, Server, Source, Timer};
use crate::sys::poll::Interest;
use crate::sys::process::{self, Candidate, Exec, ExecStep};
use rustix::io::Errno;
use serde_bytes::ByteBuf;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Where the shell finds the descriptor it answers on: high for bash, so that scripts may use 3 to 9;
/// other shells understand one digit only.
const HIGH: i32 = 63;
const LOW: i32 = 8;
/// How long a shell has to come back after its command was killed.
const COME_BACK: Duration = Duration::from_secs(1);
const FORCE: Duration = Duration::from_secs(5);
const MAX_SESSIONS: usize = 256;

#[derive(Debug)]
pub(super) struct Session {
    id: String,
    args: SessionArgs,
    user: String,
    /// 0: there is no shell now; the next command gets a new one.
    pid: i32,
    /// Which shell it is: its processes are marked with this number where there is no cgroup.
    shell: u64,
    /// The shell is not yet executed.
    starting: bool,
    answers_at: i32,
    /// The current command's, and which command the shell was told last.
    text: Vec<u8>,
    told: Option<u64>,
    /// What the last command's status was to the shell.
    last_code: i32,
    exec: Option<Exec>,
    report: Option<Pipe>,
    feed: Option<Pipe>,
    pending: Vec<u8>,
    fed: usize,
    status: Option<Pipe>,
    said: Vec<u8>,
    pipes: [Option<Pipe>; 2],
    pub(super) cgroup: Option<Cgroup>,
    current: Option<u64>,
    /// A shell ended while nothing ran in it: the next command is told.
    lost: bool,
    closing: bool,
    stuck_since: Option<Instant>,
    /// Streams that want to know of opening or closing.
    pub(super) streams: Vec<u32>,
}

impl Session {
    pub(super) fn kill_group(&self) {
        if let Some(group) = &self.cgroup {
            let _ = group.kill();
        } else if self.pid > 0 {
            let _ = process::kill(-self.pid, libc::SIGKILL);
        }
    }

    fn view(&self) -> SessionView {
        SessionView {
            session_id: self.id.clone(),
            pid: self.pid,
            busy: self.current.is_some(),
            user: self.user.clone(),
        }
    }
}

/// A word the shell takes as it is.
fn quote(text: &[u8]) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in text {
        if *byte == b'\'' {
            quoted.extend_from_slice(b"'\\''");
        } else {
            quoted.push(*byte);
        }
    }
    quoted.push(b'\'');
    quoted
}

/// What the shell is told to do. `command` keeps a syntax error in the text from ending the shell.
/// First `$?` becomes what the text before left, and not the status of what was told in between; as a
/// part of a list that is neither "set -e"'s nor a trap's business.
fn script(text: &[u8], answers_at: i32, key: u64, before: i32) -> Vec<u8> {
    let mut script = Vec::new();
    if before != 0 {
        script.extend_from_slice(format!("(command exit {before}) && :\n").as_bytes());
    }
    script.extend_from_slice(b"command eval ");
    script.extend_from_slice(&quote(text));
    let rest = format!(
        " </dev/null {answers_at}>&-\ncommand printf '%s %s\\n' {key} \"$?\" >&{answers_at}\n"
    );
    script.extend_from_slice(rest.as_bytes());
    script
}

/// Nothing in it could run after a part of it was killed, so the shell may go on: one command or
/// pipeline, or several joined by "&&". Errs to "no": then the shell is ended as well.
fn stops_when_killed(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text.trim_ascii()).replace("2>&1", "").replace("&&", "");
    !text.contains(['&', ';', '\n', '(', '{', '`', '!']) && !text.contains("||")
}

impl Server {
    fn session(&self, id: &str) -> Result<u64, Refusal> {
        let found = self.sessions.iter().find(|(_, s)| s.id == id && !s.closing);
        found.map(|(key, _)| *key).ok_or_else(|| {
            Refusal::new(proto::NOT_FOUND, format!("no session {id}")).kind("session")
        })
    }

    pub(super) fn session_open(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: SessionArgs = proto::unpack(payload)?;
        let id = args.session_id.clone().unwrap_or_default();
        if id.is_empty() || id.len() > 256 {
            return Err(Refusal::invalid("session_id must have 1 to 256 bytes"));
        }
        let key = match self.session(&id) {
            Ok(key) => key,
            Err(_) if self.sessions.len() >= MAX_SESSIONS => {
                return Err(Refusal::new(proto::BUSY, "too many sessions").kind("sessions"));
            }
            Err(_) => {
                let key = self.number();
                self.sessions.insert(key, new_session(id, args));
                if let Err(refusal) = self.start_shell(key) {
                    self.sessions.remove(&key);
                    return Err(refusal);
                }
                key
            }
        };
        if let (Some(conn), Some(session)) = (&mut self.conn, self.sessions.get_mut(&key)) {
            session.streams.push(stream);
            conn.open(stream, Op::SessionOpen(key));
        }
        Ok(())
    }

    pub(super) fn step_session_open(&mut self, stream: u32, key: u64) -> Option<Op> {
        let session = self.sessions.get_mut(&key)?;
        if session.starting {
            return Some(Op::SessionOpen(key));
        }
        session.streams.retain(|s| *s != stream);
        let view = session.view();
        self.conn.as_mut()?.result(stream, &view);
        None
    }

    fn start_shell(&mut self, key: u64) -> Result<(), Refusal> {
        let Some(session) = self.sessions.get(&key) else { return Ok(()) };
        let args = session.args.clone();
        let user = self.user(args.user.as_ref().map(|u| u.0.as_str()))?;
        let own = self.spec_env();
        let (mut env, _) = environment(&user, [Some(&own), args.env.as_ref()], false)?;
        let number = self.number();
        if self.work.is_none() {
            env.push(c_string("mark", &mark(self.generation(), number))?);
        }
        let shell = |path: &[u8]| -> Result<Candidate, Refusal> {
            let name = path.rsplit(|b| *b == b'/').next().unwrap_or(path);
            let at = if name == b"bash" { HIGH } else { LOW };
            let words = vec![c_string("shell", name)?, c_string("shell", b"-s")?];
            Ok(Candidate::new(c_string("shell", path)?, words, at))
        };
        let candidates = match &args.shell {
            Some(path) => vec![shell(path)?],
            None => vec![shell(b"/bin/bash")?, shell(b"/bin/sh")?],
        };
        let cwd = self.working_directory(args.cwd.as_deref().map(Vec::as_slice))?;
        let mut exec = Exec::new(candidates, env, cwd, user.ids);
        let (feed_read, feed) = pipe()?;
        let (status, status_write) = pipe()?;
        let (out, out_write) = pipe()?;
        let (err, err_write) = pipe()?;
        for fd in [&feed, &status, &out, &err] {
            nonblocking(fd)?;
        }
        exec.stdio = [feed_read.as_raw_fd(), out_write.as_raw_fd(), err_write.as_raw_fd()];
        // Out of the way of the numbers it may get.
        let extra = rustix::io::fcntl_dupfd_cloexec(&status_write, 100)
            .map_err(|e| Refusal::broken("session", &e.into()))?;
        exec.extra = Some(extra.as_raw_fd());
        let launch = self.launch(exec, &format!("session-{key}-{number}"))?;
        self.owners.insert(launch.pid, Owner::Session(key));
        let mut member = |fd: OwnedFd, source: Source, interest: Interest| {
            let token = self.watch(&fd, source, interest).unwrap_or(0);
            Some(Pipe { fd, token })
        };
        let report = member(launch.report, Source::SessionReport(key), Interest::IN);
        let feed = member(feed, Source::SessionFeed(key), Interest::ONESHOT);
        let status = member(status, Source::SessionStatus(key), Interest::IN);
        let out = member(out, Source::SessionOutput(key, 0), Interest::IN);
        let err = member(err, Source::SessionOutput(key, 1), Interest::IN);
        if let Some(session) = self.sessions.get_mut(&key) {
            session.user = String::from_utf8_lossy(&user.name).into_owned();
            session.pid = launch.pid;
            session.shell = number;
            session.starting = true;
            session.exec = Some(launch.exec);
            session.cgroup = launch.cgroup;
            session.report = report;
            session.feed = feed;
            session.status = status;
            session.pipes = [out, err];
        }
        Ok(())
    }

    /// The shell's child says where it got to.
    pub(super) fn session_report(&mut self, key: u64) {
        loop {
            let Some(session) = self.sessions.get_mut(&key) else { return };
            let Some(report) = &session.report else { return };
            match process::receive_progress(report.fd.as_fd()) {
                Ok(Some(progress)) if progress.step == ExecStep::Trying => {
                    let exec = session.exec.as_ref();
                    session.answers_at =
                        exec.map_or(LOW, |e| e.extra_at(usize::from(progress.candidate)));
                }
                Ok(Some(progress)) => {
                    let refusal = session.exec.as_ref().map_or_else(
                        || Refusal::new(proto::INTERNAL, "the shell did not start"),
                        |exec| start_refusal(exec, progress.step, progress.errno),
                    );
                    return self.session_failed(key, &refusal);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(None) | Err(_) => {
                    session.starting = false;
                    session.exec = None;
                    let report = session.report.take();
                    if let Some(report) = report {
                        self.unwatch(&report.fd, report.token);
                    }
                    self.feed_command(key);
                    return self.session_streams(key);
                }
            }
        }
    }

    /// The shell cannot be started: there is no such session.
    fn session_failed(&mut self, key: u64, refusal: &Refusal) {
        self.drop_shell(key);
        let Some(session) = self.sessions.remove(&key) else { return };
        if let Some(command) = session.current {
            self.end_session_command(command, 127 << 8, true);
        }
        if let Some(conn) = &mut self.conn {
            for id in session.streams {
                conn.refuse(id, refusal);
            }
        }
    }

    fn session_streams(&mut self, key: u64) {
        if let (Some(conn), Some(session)) = (&mut self.conn, self.sessions.get(&key)) {
            for id in &session.streams {
                conn.poke(*id);
            }
        }
    }

    pub(super) fn start_in_session(&mut self, args: CommandArgs) -> Result<u64, Refusal> {
        let id = args.session.clone().unwrap_or_default();
        let session_key = self.session(&id)?;
        if args.user.is_some()
            || args.pty.is_some()
            || args.input.is_some()
            || args.cwd.is_some()
            || args.env.as_ref().is_some_and(|e| !e.is_empty())
            || args.stdin.as_deref().is_some_and(|s| s != "null")
        {
            return Err(Refusal::invalid(
                "a session's command has the session's user, directory, environment and no input",
            ));
        }
        let text: Vec<u8> = match (&args.argv, &args.shell) {
            (None, Some(text)) => text.to_vec(),
            (Some(words), None) => words.iter().map(|w| quote(w)).collect::<Vec<_>>().join(&b' '),
            _ => return Err(Refusal::invalid("exactly one of argv and shell")),
        };
        if text.contains(&0) {
            return Err(Refusal::invalid("the command holds a NUL byte"));
        }
        let session = self.sessions.get(&session_key);
        if session.is_some_and(|s| s.current.is_some()) {
            return Err(
                Refusal::new(proto::CONFLICT, format!("session {id} is busy")).kind("session")
            );
        }
        if session.is_some_and(|s| s.pid == 0) {
            self.start_shell(session_key)?;
        }
        let key = self.number();
        let shown = [ByteBuf::from(text.clone())];
        let mut command = self.record(key, &args, &shown)?;
        command.state = State::Running;
        command.session = Some(session_key);
        command.session_id = id;
        if let Some(session) = self.sessions.get_mut(&session_key) {
            command.pid = session.pid;
            command.session_reset = std::mem::take(&mut session.lost);
            session.current = Some(key);
            session.text = text;
        }
        self.commands.insert(key, command);
        self.by_id.insert(args.command_id.unwrap_or_default(), key);
        self.running += 1;
        self.feed_command(session_key);
        Ok(key)
    }

    /// Tell the shell its command, once it is known which shell it is.
    fn feed_command(&mut self, key: u64) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        let (Some(current), false) = (session.current, session.starting) else { return };
        if session.told == Some(current) {
            return;
        }
        session.told = Some(current);
        session.pending = script(&session.text, session.answers_at, current, session.last_code);
        session.fed = 0;
        self.session_feed(key);
    }

    pub(super) fn session_feed(&mut self, key: u64) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        let Some(feed) = &session.feed else { return };
        while let Some(rest) = session.pending.get(session.fed..).filter(|r| !r.is_empty()) {
            match rustix::io::write(&feed.fd, rest) {
                Ok(size) => session.fed += size,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let interest = Interest::OUT | Interest::ONESHOT;
                    let _ = self.poll.modify(&feed.fd, feed.token, interest);
                    return;
                }
                // Its end will be told by `reap`.
                Err(_) => break,
            }
        }
        session.pending = Vec::new();
        session.fed = 0;
    }

    pub(super) fn session_output(&mut self, key: u64, which: usize) {
        for _ in 0..4 {
            match self.read_session(key, which) {
                Some(size) if size >= 32 * 1024 => {}
                _ => break,
            }
        }
        if let Some(command) = self.sessions.get(&key).and_then(|s| s.current) {
            self.poke_command(command);
        }
    }

    fn read_session(&mut self, key: u64, which: usize) -> Option<usize> {
        let mut buffer = self.take_spare(64 * 1024);
        let size = self.read_session_with(key, which, &mut buffer);
        self.spare = buffer;
        size
    }

    fn read_session_with(&mut self, key: u64, which: usize, buffer: &mut Vec<u8>) -> Option<usize> {
        let session = self.sessions.get_mut(&key)?;
        let slot = session.pipes.get_mut(which)?;
        let pipe = slot.as_ref()?;
        match rustix::io::read(&pipe.fd, rustix::buffer::spare_capacity(buffer)) {
            Ok(size) if size > 0 => {
                // Between commands it is a background process's, and nobody's.
                let command = session.current.and_then(|c| self.commands.get_mut(&c));
                if let Some(ring) = command.and_then(|c| c.rings.get_mut(which)) {
                    ring.push(buffer);
                }
                return Some(size);
            }
            Err(Errno::AGAIN | Errno::INTR) => return None,
            _ => {}
        }
        if let Some(pipe) = slot.take() {
            self.unwatch(&pipe.fd, pipe.token);
        }
        None
    }

    fn drain_session(&mut self, key: u64) {
        for which in [0, 1] {
            let mut taken = 0;
            while let Some(size) = self.read_session(key, which) {
                taken += size;
                if taken > 2 << 20 {
                    break;
                }
            }
        }
    }

    /// The shell says how its command ended.
    pub(super) fn session_status(&mut self, key: u64) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        let Some(pipe) = &session.status else { return };
        let mut buffer = [0_u8; 512];
        match rustix::io::read(&pipe.fd, &mut buffer) {
            Ok(size) if size > 0 => {
                session.said.extend_from_slice(buffer.get(..size).unwrap_or(&[]));
            }
            Err(Errno::AGAIN | Errno::INTR) => return,
            _ => {
                // It closed what it answers on, or has become another program: it can never answer
                // again. Without more to read it ends after this command, and that is the answer.
                let pipes = [session.status.take(), session.feed.take()];
                for pipe in pipes.into_iter().flatten() {
                    self.unwatch(&pipe.fd, pipe.token);
                }
                return;
            }
        }
        if session.said.len() > 4096 {
            session.said.clear();
        }
        while let Some(session) = self.sessions.get_mut(&key) {
            let Some(end) = session.said.iter().position(|b| *b == b'\n') else { return };
            let line: Vec<u8> = session.said.drain(..=end).collect();
            let text = String::from_utf8_lossy(&line);
            let mut words = text.split_ascii_whitespace();
            let which = words.next().and_then(|w| w.parse::<u64>().ok());
            let code = words.next().and_then(|w| w.parse::<i32>().ok());
            if let (Some(code), true) = (code, which.is_some() && which == session.current) {
                session.last_code = code & 0xff;
                self.drain_session(key);
                if let Some(command) = which {
                    self.end_session_command(command, (code & 0xff) << 8, false);
                }
            }
        }
    }

    fn end_session_command(&mut self, key: u64, status: i32, reset: bool) {
        if let Some(command) = self.commands.get_mut(&key) {
            let ended_by_us = command.timed_out || command.killed;
            command.status = Some(if ended_by_us { libc::SIGKILL } else { status });
            command.session_reset |= reset;
            self.finish_command(key);
        }
    }

    /// Its command has ended, however.
    pub(super) fn session_free(&mut self, key: u64) {
        if let Some(session) = self.sessions.get_mut(&key) {
            session.current = None;
            session.stuck_since = None;
            session.text = Vec::new();
        }
    }

    /// The shell itself ended: the command in it did too, and all it had left behind.
    pub(super) fn session_ended(&mut self, key: u64, status: i32) {
        self.session_report(key);
        self.drain_session(key);
        self.drop_shell(key);
        let Some(session) = self.sessions.get_mut(&key) else { return };
        session.lost = session.current.is_none();
        if let Some(command) = session.current {
            self.end_session_command(command, status, true);
        }
        if self.sessions.get(&key).is_some_and(|s| s.closing) {
            self.forget_session(key);
        } else {
            self.session_streams(key);
        }
    }

    /// Everything of the shell that is no more (or is not to be).
    fn drop_shell(&mut self, key: u64) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        session.kill_group();
        let pid = std::mem::take(&mut session.pid);
        session.starting = false;
        session.exec = None;
        session.told = None;
        session.last_code = 0;
        session.said.clear();
        session.pending = Vec::new();
        let [out, err] = &mut session.pipes;
        let slots = [out, err, &mut session.report, &mut session.feed, &mut session.status];
        let pipes: Vec<Pipe> = slots.into_iter().filter_map(Option::take).collect();
        let group = session.cgroup.take();
        self.leftovers.extend(group);
        self.owners.remove(&pid);
        for pipe in pipes {
            self.unwatch(&pipe.fd, pipe.token);
        }
    }

    fn forget_session(&mut self, key: u64) {
        self.drop_shell(key);
        if let (Some(conn), Some(session)) = (&mut self.conn, self.sessions.remove(&key)) {
            for id in session.streams {
                conn.result(id, &());
            }
        }
        self.sessions.remove(&key);
    }

    /// End what runs in the session for a command that is out of time or killed.
    pub(super) fn kill_in_session(&mut self, command: u64) {
        let key = self.commands.get(&command).and_then(|c| c.session);
        let Some(key) = key else { return };
        let Some(session) = self.sessions.get_mut(&key) else { return };
        // Ended: what it left behind belongs to the session.
        if session.current != Some(command) {
            return;
        }
        if session.cgroup.is_some() && stops_when_killed(&session.text) {
            if session.stuck_since.is_none() {
                session.stuck_since = Some(Instant::now());
            }
            self.session_stuck(key);
        } else {
            self.kill_shell(key);
        }
    }

    fn kill_shell(&mut self, key: u64) {
        let Some(session) = self.sessions.get(&key) else { return };
        session.kill_group();
        let (pid, shell) = (session.pid, session.shell);
        if self.work.is_none() && pid > 0 {
            self.hunt(shell, pid);
        }
        self.after(FORCE, Timer::SessionForce(key));
    }

    /// Kill all but the shell, again and again until it is back or its time is up.
    pub(super) fn session_stuck(&mut self, key: u64) {
        let Some(session) = self.sessions.get(&key) else { return };
        let Some(since) = session.stuck_since else { return };
        if since.elapsed() >= COME_BACK {
            return self.kill_shell(key);
        }
        self.signal_session(key, libc::SIGKILL);
        self.after(Duration::from_millis(20), Timer::SessionStuck(key));
    }

    pub(super) fn session_force(&mut self, key: u64) {
        // A shell that is still there five seconds after SIGKILL: it is over without it. One that
        // was started since then is younger than that and not meant.
        let Some(session) = self.sessions.get(&key) else { return };
        let doomed = session.closing || session.stuck_since.is_some();
        if doomed && session.pid > 0 {
            self.session_ended(key, libc::SIGKILL);
        }
    }

    /// To everything in the session but its shell.
    pub(super) fn signal_session(&self, key: u64, signal: i32) {
        let Some(session) = self.sessions.get(&key) else { return };
        let members = session.cgroup.as_ref().map_or_else(Vec::new, Cgroup::processes);
        for pid in members.into_iter().filter(|pid| *pid != session.pid) {
            let _ = process::kill(pid, signal);
        }
    }

    pub(super) fn session_close(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: SessionArgs = proto::unpack(payload)?;
        let key = self.session(args.session_id.as_deref().unwrap_or(""))?;
        let Some(session) = self.sessions.get_mut(&key) else { return Ok(()) };
        session.closing = true;
        session.streams.push(stream);
        let (pid, current) = (session.pid, session.current);
        if let Some(conn) = &mut self.conn {
            conn.open(stream, Op::SessionClose);
        }
        if let Some(command) = current.and_then(|c| self.commands.get_mut(&c)) {
            command.killed = true;
        }
        if pid == 0 {
            self.forget_session(key);
        } else {
            self.kill_shell(key);
        }
        Ok(())
    }

    pub(super) fn session_list(&mut self, stream: u32) {
        let views = self.sessions.values().filter(|s| !s.closing).map(Session::view);
        let views: Vec<SessionView> = views.collect();
        if let Some(conn) = &mut self.conn {
            conn.result(stream, &views);
        }
    }
}

fn new_session(id: String, args: SessionArgs) -> Session {
    Session {
        id,
        args,
        user: String::new(),
        pid: 0,
        shell: 0,
        starting: false,
        answers_at: LOW,
        text: Vec::new(),
        told: None,
        last_code: 0,
        exec: None,
        report: None,
        feed: None,
        pending: Vec::new(),
        fed: 0,
        status: None,
        said: Vec::new(),
        pipes: [None, None],
        cgroup: None,
        current: None,
        lost: false,
        closing: false,
        stuck_since: None,
        streams: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_anything() {
        assert_eq!(quote(b"it's\n\\ \xff"), b"'it'\\''s\n\\ \xff'");
        let text = script(b"echo 'a'", 63, 7, 0);
        let wanted = "command eval 'echo '\\''a'\\''' </dev/null 63>&-\n\
            command printf '%s %s\\n' 7 \"$?\" >&63\n";
        assert_eq!(String::from_utf8_lossy(&text), wanted);
        let text = script(b"echo 'a'", 63, 7, 3);
        assert_eq!(String::from_utf8_lossy(&text), format!("(command exit 3) && :\n{wanted}"));
    }

    #[test]
    fn knows_what_would_go_on() {
        for text in
            ["sleep 100", " sleep 100\n", "cd /x && make test", "a | b", "A=1 sleep 9 >x 2>y"]
        {
            assert!(stops_when_killed(text.as_bytes()), "{text}");
        }
        for text in [
            "sleep 9; rm x",
            "sleep 9\nrm x",
            "sleep 9 || rm x",
            "sleep 9 & rm x",
            "while :; do a; done",
            "(a)",
            "$(a) b",
            "`a` b",
            "! a && b",
            "a 2>&1 & b",
        ] {
            assert!(!stops_when_killed(text.as_bytes()), "{text}");
        }
    }
}
