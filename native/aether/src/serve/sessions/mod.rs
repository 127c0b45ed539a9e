//! chronus: a shell that stays. It is fed on a private descriptor and says how each command ended on
//! another; what commands print never meets either.
//!
//! Here are the methods; `shell` is the shell's own life, `script` what it is told, `talk` how it is
//! told and how it answers, `ending` how what runs in it is ended.

mod ending;
mod script;
mod shell;
mod talk;

use super::cgroup::Cgroup;
use super::commands::{Pipe, State};
use super::conn::Op;
use super::proto::{self, CommandArgs, Refusal, SessionArgs, SessionView};
use super::server::Server;
use crate::sys::process::{self, Exec};
use script::quote;
use serde_bytes::ByteBuf;
use std::time::Instant;

/// Where the shell finds the descriptor it answers on: high for bash, so that scripts may use 3 to 9;
/// other shells understand one digit only.
const HIGH: i32 = 63;
const LOW: i32 = 8;
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

    fn new(id: String, args: SessionArgs) -> Self {
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

    fn view(&self) -> SessionView {
        SessionView {
            session_id: self.id.clone(),
            pid: self.pid,
            busy: self.current.is_some(),
            user: self.user.clone(),
        }
    }
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
                self.sessions.insert(key, Session::new(id, args));
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

    fn session_streams(&mut self, key: u64) {
        if let (Some(conn), Some(session)) = (&mut self.conn, self.sessions.get(&key)) {
            for id in &session.streams {
                conn.poke(*id);
            }
        }
    }

    pub(super) fn forget_session(&mut self, key: u64) {
        self.drop_shell(key);
        if let (Some(conn), Some(session)) = (&mut self.conn, self.sessions.remove(&key)) {
            for id in session.streams {
                conn.result(id, &());
            }
        }
        self.sessions.remove(&key);
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
}
