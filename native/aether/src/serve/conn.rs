//! The one connection to the edge: bytes in, bytes out, and the streams open on it.

use super::connect::Relay;
use super::proto::{pack, Refusal};
use super::worker::Work;
use crate::frame::{self, Kind};
use rustix::io::Errno;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;

/// Above this much unsent output nothing more is produced and no request is read.
pub(super) const BACKLOG: usize = 256 * 1024;
pub(super) const MAX_STREAMS: usize = 4096;

/// What a stream is about.
#[derive(Debug)]
pub(super) enum Op {
    /// `start`: answered when the program runs.
    Start(u64),
    /// `run`, `wait`: answered when it has ended. How much of the kept output is already sent.
    Wait(u64, Option<Copying>),
    Attach(Reader),
    Stdin(u64),
    /// `stdin` that repeats what a closed one has taken (so many bytes at most), or its end.
    ClosedStdin(u64),
    Kill(u64),
    Work(Box<Work>),
    Relay(Box<Relay>),
    SessionOpen(u64),
    SessionClose,
    Shutdown,
}

/// Kept output on its way as DATA: stdout head, stdout tail, stderr head, stderr tail.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Copying {
    pub(super) part: usize,
    pub(super) at: usize,
}

#[derive(Debug)]
pub(super) struct Reader {
    pub(super) command: u64,
    pub(super) at: [u64; 2],
    pub(super) from: [Option<u64>; 2],
    pub(super) begun: bool,
}

#[derive(Debug)]
pub(super) struct Stream {
    /// Empty while it is being worked on.
    pub(super) op: Option<Op>,
    /// DATA we may still send.
    pub(super) credit: u64,
    /// DATA the edge may still send.
    pub(super) window: u64,
    queued: bool,
}

#[derive(Debug)]
pub(super) struct Conn {
    pub(super) fd: OwnedFd,
    pub(super) token: u64,
    pub(super) input: Vec<u8>,
    output: Vec<u8>,
    sent: usize,
    pub(super) streams: HashMap<u32, Stream>,
    ready: VecDeque<u32>,
    /// What epoll waits for: (reading, writing).
    pub(super) armed: (bool, bool),
}

/// The connection is over.
#[derive(Debug)]
pub(super) struct Closed;

impl Conn {
    pub(super) fn new(fd: OwnedFd, token: u64) -> Self {
        Self {
            fd,
            token,
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            streams: HashMap::new(),
            ready: VecDeque::new(),
            armed: (true, false),
        }
    }

    pub(super) fn open(&mut self, id: u32, op: Op) {
        let stream = Stream {
            op: Some(op),
            credit: frame::INITIAL_CREDIT,
            window: frame::INITIAL_CREDIT,
            queued: false,
        };
        self.streams.insert(id, stream);
        self.poke(id);
    }

    /// A stream goes on as another.
    pub(super) fn become_op(&mut self, id: u32, op: Op) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.op = Some(op);
        }
    }

    /// Something may have changed for this stream: look at it soon.
    pub(super) fn poke(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            if !stream.queued {
                stream.queued = true;
                self.ready.push_back(id);
            }
        }
    }

    /// The next stream to look at, unless too much is unsent.
    pub(super) fn next_ready(&mut self) -> Option<u32> {
        while self.backlog() < BACKLOG {
            let id = self.ready.pop_front()?;
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.queued = false;
                return Some(id);
            }
        }
        None
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty() && self.backlog() < BACKLOG
    }

    pub(super) fn backlog(&self) -> usize {
        self.output.len() - self.sent
    }

    pub(super) fn push(&mut self, kind: Kind, stream: u32, channel: u16, payload: &[u8]) {
        frame::push(&mut self.output, kind, stream, channel, payload);
    }

    /// DATA within the stream's credit; the caller has looked at it.
    pub(super) fn data(&mut self, id: u32, channel: u16, payload: &[u8]) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.credit = stream.credit.saturating_sub(super::long(payload.len()));
        }
        self.push(Kind::Data, id, channel, payload);
    }

    pub(super) fn credit(&self, id: u32) -> usize {
        let credit = self.streams.get(&id).map_or(0, |s| s.credit);
        usize::try_from(credit).unwrap_or(usize::MAX)
    }

    /// Let the edge send `size` more.
    pub(super) fn grant(&mut self, id: u32, size: usize) {
        if let (Some(stream), Ok(more)) = (self.streams.get_mut(&id), u32::try_from(size)) {
            stream.window += u64::from(more);
            self.push(Kind::Credit, id, frame::MAIN, &more.to_be_bytes());
        }
    }

    pub(super) fn event(&mut self, id: u32, value: &impl Serialize) {
        self.push(Kind::Event, id, frame::MAIN, &pack(value));
    }

    /// The stream's answer: it is over.
    pub(super) fn result(&mut self, id: u32, value: &impl Serialize) {
        self.push(Kind::Result, id, frame::MAIN, &pack(value));
        self.streams.remove(&id);
    }

    pub(super) fn refuse(&mut self, id: u32, refusal: &Refusal) {
        self.push(Kind::Error, id, frame::MAIN, &pack(refusal));
        self.streams.remove(&id);
    }

    pub(super) fn flush(&mut self) -> Result<(), Closed> {
        while self.sent < self.output.len() {
            let unsent = self.output.get(self.sent..).unwrap_or(&[]);
            match rustix::io::write(&self.fd, unsent) {
                Ok(size) => self.sent += size,
                Err(Errno::AGAIN) => {
                    // Keep the part that is already sent from piling up in front.
                    if self.sent > BACKLOG {
                        self.output.drain(..self.sent);
                        self.sent = 0;
                    }
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(_) => return Err(Closed),
            }
        }
        self.sent = 0;
        self.output.clear();
        Ok(())
    }

    /// Give back what a busy time has left.
    pub(super) fn shrink(&mut self) {
        self.output.shrink_to(4096);
        self.input.shrink_to(4096);
    }
}
