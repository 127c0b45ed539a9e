//! Methods that start, find and show commands, and the streams that follow one.

use super::State;
use crate::serve::conn::Op;
use crate::serve::proto::{self, OneCommand, Refusal};
use crate::serve::server::Server;

impl Server {
    pub(super) fn key(&self, id: &str) -> Result<u64, Refusal> {
        self.by_id.get(id).copied().ok_or_else(|| {
            Refusal::new(proto::NOT_FOUND, format!("no command {id}")).kind("command")
        })
    }

    pub(super) fn follow(&mut self, stream: u32, key: u64, op: Op) {
        if let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get_mut(&key)) {
            conn.open(stream, op);
            command.streams.push(stream);
        }
    }

    pub(super) fn leave(&mut self, stream: u32, key: u64) {
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

    pub(crate) fn start(&mut self, stream: u32, payload: &[u8]) {
        self.begin(stream, payload, Op::Start);
    }

    pub(crate) fn run(&mut self, stream: u32, payload: &[u8]) {
        self.begin(stream, payload, |key| Op::Wait(key, None));
    }

    pub(crate) fn wait(&mut self, stream: u32, payload: &[u8]) {
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

    pub(crate) fn step_start(&mut self, stream: u32, key: u64) -> Option<Op> {
        let command = self.commands.get(&key)?;
        if command.state == State::Starting {
            return Some(Op::Start(key));
        }
        let view = command.view();
        self.leave(stream, key);
        self.conn.as_mut()?.result(stream, &view);
        None
    }

    pub(crate) fn view(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        if let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get(&key)) {
            conn.result(stream, &command.view());
        }
        Ok(())
    }

    pub(crate) fn list(&mut self, stream: u32) {
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
