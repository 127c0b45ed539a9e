//! Standard input: bytes of a `stdin` stream on their way to a pipe or terminal.

use crate::serve::conn::Op;
use crate::serve::long;
use crate::serve::proto::{self, OneCommand, Refusal};
use crate::serve::server::{Server, Source};
use crate::sys::poll::Interest;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// A command's standard input, seen from here.
#[derive(Debug)]
pub(crate) struct Input {
    pub(super) fd: OwnedFd,
    pub(super) token: u64,
    terminal: bool,
    pending: Vec<u8>,
    at: usize,
    /// The `stdin` stream that is feeding it: (id, closes it afterwards, bytes taken, ended).
    pub(super) stream: Option<InputStream>,
    close_when_done: bool,
}

#[derive(Debug)]
pub(super) struct InputStream {
    pub(super) id: u32,
    eof: bool,
    /// Bytes it repeats: they were taken before.
    skip: u64,
    written: u64,
    ended: bool,
}

impl Server {
    pub(super) fn set_input(
        &mut self,
        key: u64,
        fd: OwnedFd,
        terminal: bool,
        pending: Vec<u8>,
        close: bool,
    ) {
        // Armed when a write would block, for one event.
        let Ok(token) = self.watch(&fd, Source::Input(key), Interest::ONESHOT) else { return };
        if let Some(command) = self.commands.get_mut(&key) {
            command.input = Some(Input {
                fd,
                token,
                terminal,
                pending,
                at: 0,
                stream: None,
                close_when_done: close,
            });
        }
        self.feed_input(key);
    }

    pub(crate) fn stdin(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        let Some(command) = self.commands.get_mut(&key) else { return Ok(()) };
        let eof = args.eof.unwrap_or(false);
        let skip = match args.offset {
            Some(offset) => command.fed.checked_sub(offset).ok_or_else(|| gap(command.fed))?,
            None => 0,
        };
        let mut superseded = None;
        let op = match &mut command.input {
            Some(input) if input.close_when_done => return Err(being_written()),
            // Who says where it begins may take over: the other's connection was lost further away.
            Some(input) if input.stream.is_some() && args.offset.is_none() => {
                return Err(being_written());
            }
            Some(input) => {
                let fresh = InputStream { id: stream, eof, skip, written: 0, ended: false };
                superseded = input.stream.replace(fresh).map(|old| old.id);
                Op::Stdin(key)
            }
            // What was taken, and the end, may be said again, so that they can be after a lost
            // connection.
            None if command.takes_input && (eof || args.offset.is_some()) => Op::ClosedStdin(skip),
            None => return Err(no_input()),
        };
        if let (Some(conn), Some(old)) = (&mut self.conn, superseded) {
            conn.refuse(old, &Refusal::cancelled());
        }
        if let Some(conn) = &mut self.conn {
            conn.open(stream, op);
        }
        Ok(())
    }

    /// DATA for a standard input that is closed already: only what was taken before it was.
    pub(crate) fn unwanted_input(&mut self, stream: u32, skip: u64, size: usize) {
        let Some(conn) = &mut self.conn else { return };
        match skip.checked_sub(long(size)) {
            Some(left) => {
                conn.grant(stream, size);
                conn.become_op(stream, Op::ClosedStdin(left));
            }
            None => conn.refuse(stream, &no_input()),
        }
    }

    /// The end of a standard input that is closed already.
    pub(crate) fn closed_again(&mut self, stream: u32) {
        if let Some(conn) = &mut self.conn {
            conn.result(stream, &proto::Written { written: 0 });
        }
    }

    pub(crate) fn input_data(&mut self, key: u64, payload: &[u8]) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        let Some(input) = &mut command.input else { return };
        let mut fresh = payload;
        if let (Some(stream), Some(conn)) = (&mut input.stream, &mut self.conn) {
            let known = payload.len().min(usize::try_from(stream.skip).unwrap_or(usize::MAX));
            if known > 0 {
                stream.skip -= long(known);
                conn.grant(stream.id, known);
                fresh = payload.get(known..).unwrap_or(&[]);
            }
        }
        command.fed += long(fresh.len());
        input.pending.extend_from_slice(fresh);
        self.feed_input(key);
    }

    pub(crate) fn input_end(&mut self, key: u64) {
        let input = self.commands.get_mut(&key).and_then(|c| c.input.as_mut());
        if let Some(stream) = input.and_then(|i| i.stream.as_mut()) {
            stream.ended = true;
            self.feed_input(key);
        }
    }

    pub(crate) fn abandon_input(&mut self, key: u64) {
        if let Some(input) = self.commands.get_mut(&key).and_then(|c| c.input.as_mut()) {
            input.stream = None;
        }
    }

    /// Write what is waiting; the stream's credit follows what was taken.
    pub(crate) fn feed_input(&mut self, key: u64) {
        let Some(command) = self.commands.get_mut(&key) else { return };
        let Some(input) = &mut command.input else { return };
        let before = input.at;
        let mut closed = false;
        while let Some(rest) = input.pending.get(input.at..).filter(|r| !r.is_empty()) {
            match rustix::io::write(&input.fd, rest) {
                Ok(size) => input.at += size,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    closed = true;
                    break;
                }
            }
        }
        let taken = input.at - before;
        if closed || input.at >= input.pending.len() {
            input.pending = Vec::new();
            input.at = 0;
        } else {
            let _ = self.poll.modify(&input.fd, input.token, Interest::OUT | Interest::ONESHOT);
        }
        let empty = input.pending.is_empty();
        let mut close = closed || (empty && input.close_when_done);
        if let (Some(stream), Some(conn)) = (&mut input.stream, &mut self.conn) {
            stream.written += long(taken);
            if taken > 0 && !closed {
                conn.grant(stream.id, taken);
            }
            if closed || (empty && stream.ended) {
                conn.result(stream.id, &proto::Written { written: stream.written });
                close |= stream.eof && !input.terminal;
                if stream.eof && input.terminal {
                    // End of file, as it is typed.
                    let _ = rustix::io::write(&input.fd, b"\x04");
                }
                input.stream = None;
            }
        }
        if close && !input.terminal {
            if let Some(input) = command.input.take() {
                self.unwatch(&input.fd, input.token);
            }
        }
    }

    pub(super) fn end_input_stream(&mut self, input: &Input) {
        self.unwatch(&input.fd, input.token);
        if let (Some(stream), Some(conn)) = (&input.stream, &mut self.conn) {
            conn.result(stream.id, &proto::Written { written: stream.written });
        }
    }

    pub(crate) fn resize(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        let (Some(rows), Some(cols)) = (args.rows, args.cols) else {
            return Err(Refusal::invalid("rows and cols are needed"));
        };
        let input = self.commands.get(&key).and_then(|c| c.input.as_ref()).filter(|i| i.terminal);
        let input = input.ok_or_else(|| Refusal::new(proto::CONFLICT, "it has no terminal"))?;
        crate::sys::pty::set_size(input.fd.as_fd(), rows, cols)
            .map_err(|e| Refusal::broken("resize", &e))?;
        if let Some(conn) = &mut self.conn {
            conn.result(stream, &());
        }
        Ok(())
    }
}

fn being_written() -> Refusal {
    Refusal::new(proto::CONFLICT, "its standard input is being written")
}

fn gap(fed: u64) -> Refusal {
    let message = format!("its standard input has taken {fed} bytes; what comes next is missing");
    Refusal::new(proto::CONFLICT, message).kind("offset")
}

fn no_input() -> Refusal {
    Refusal::new(proto::CONFLICT, "it has no open standard input")
}
