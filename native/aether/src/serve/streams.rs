//! Streams: which method begins one, and what its frames mean to it.

use super::conn::{Op, MAX_STREAMS};
use super::proto::{self, Hello, Refusal};
use super::server::Server;

/// What is answered while one phase is over and the next has not begun.
const BETWEEN_PHASES: [&str; 12] = [
    "hello",
    "hold",
    "kill",
    "list",
    "phase",
    "phase_done",
    "release",
    "session_list",
    "shutdown",
    "tamper",
    "usage",
    "view",
];

impl Server {
    pub(super) fn open(&mut self, id: u32, payload: &[u8]) {
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
        if self.changing && !BETWEEN_PHASES.contains(&method) {
            let words = "it is entering another phase; ask again";
            return Err(Refusal::new(proto::BUSY, words).kind("phase"));
        }
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
            "tamper" => self.tamper(id),
            "hold" => {
                self.hold();
                self.done(id);
            }
            "release" => {
                self.release();
                self.done(id);
            }
            "phase" => self.phase(id, payload)?,
            "phase_done" => self.phase_done(id),
            "shutdown" => self.shutdown(id, payload)?,
            _ => self.file_method(id, method, payload)?,
        }
        Ok(())
    }

    pub(super) fn done(&mut self, id: u32) {
        if let Some(conn) = &mut self.conn {
            conn.result(id, &());
        }
    }

    fn hello(&mut self, id: u32) {
        // Whoever held it is not there any more.
        self.release();
        let hello = Hello {
            protocol: 1,
            version: env!("CARGO_PKG_VERSION"),
            id: &self.spec.id,
            generation: self.generation(),
            pid: std::process::id(),
        };
        if let Some(conn) = &mut self.conn {
            conn.result(id, &hello);
        }
    }

    pub(super) fn step(&mut self, id: u32, op: Op) -> Option<Op> {
        match op {
            Op::Start(key) => self.step_start(id, key),
            Op::Wait(key, copying) => self.step_wait(id, key, copying),
            Op::Attach(reader) => self.step_attach(id, reader),
            Op::Kill(key) => self.step_kill(id, key),
            Op::Work(work) => self.step_work(id, work),
            Op::Relay(relay) => self.step_relay(id, relay),
            Op::SessionOpen(key) => self.step_session_open(id, key),
            Op::Stdin(_) | Op::ClosedStdin(_) | Op::SessionClose | Op::Shutdown => Some(op),
        }
    }

    pub(super) fn data(&mut self, id: u32, payload: &[u8]) {
        let Some(conn) = &mut self.conn else { return };
        let Some(stream) = conn.streams.get_mut(&id) else { return };
        match &mut stream.op {
            Some(Op::Stdin(key)) => {
                let key = *key;
                self.input_data(key, payload);
            }
            Some(Op::ClosedStdin(skip)) if !payload.is_empty() => {
                let skip = *skip;
                self.unwanted_input(id, skip, payload.len());
            }
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

    pub(super) fn data_end(&mut self, id: u32) {
        let Some(conn) = &mut self.conn else { return };
        let Some(stream) = conn.streams.get_mut(&id) else { return };
        match &mut stream.op {
            Some(Op::Stdin(key)) => {
                let key = *key;
                self.input_end(key);
            }
            Some(Op::ClosedStdin(_)) => self.closed_again(id),
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

    pub(super) fn cancel(&mut self, id: u32) {
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

    /// What a stream held outside the connection.
    pub(super) fn abandon(&mut self, op: Op) {
        match op {
            Op::Work(work) => self.abandon_work(*work),
            Op::Relay(relay) => self.abandon_relay(&relay),
            Op::Stdin(key) => self.abandon_input(key),
            _ => {}
        }
    }
}
