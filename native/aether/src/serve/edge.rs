//! The edge: its connection comes and goes, its frames are taken apart and handed to what they are
//! for.

use super::conn::{Closed, Conn, BACKLOG};
use super::server::{Door, Server, Source, Timer};
use crate::frame::{self, Broken, Header, Kind};
use crate::sys::poll::Interest;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The connection.
impl Server {
    pub(super) fn accept(&mut self) {
        let Door::Listener(listener) = &self.door else { return };
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        if let Ok(fd) = rustix::net::accept_with(listener, flags) {
            self.drop_edge();
            self.welcome(fd);
        }
    }

    fn welcome(&mut self, fd: OwnedFd) {
        if let Ok(token) = self.watch(&fd, Source::Edge, Interest::IN) {
            self.conn = Some(Conn::new(fd, token));
        }
    }

    pub(super) fn open_port(&mut self) {
        use rustix::fs::{Mode, OFlags};
        let Door::Port(path) = &self.door else { return };
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => self.welcome(fd),
            Err(_) => {
                self.after(Duration::from_millis(100), Timer::Reopen);
            }
        }
    }

    /// Streams die with their connection; commands and sessions go on.
    pub(super) fn drop_edge(&mut self) {
        let Some(mut conn) = self.conn.take() else { return };
        self.unwatch(&conn.fd, conn.token);
        for (_, stream) in conn.streams.drain() {
            if let Some(op) = stream.op {
                self.abandon(op);
            }
        }
        for command in self.commands.values_mut() {
            command.streams.clear();
        }
        for session in self.sessions.values_mut() {
            session.streams.clear();
        }
        self.forget_old();
        self.trim_later();
        if matches!(self.door, Door::Port(_)) {
            self.after(Duration::from_millis(50), Timer::Reopen);
        }
    }
}

/// Bytes in, bytes out.
impl Server {
    pub(super) fn edge(&mut self, happened: Interest) {
        if happened.contains(Interest::OUT) {
            if let Some(Err(Closed)) = self.conn.as_mut().map(Conn::flush) {
                self.drop_edge();
                return;
            }
        }
        if happened.intersects(Interest::IN | Interest::HUP | Interest::ERR) {
            self.read_edge();
        }
    }

    fn read_edge(&mut self) {
        let Some(conn) = &mut self.conn else { return };
        // A peer that fills the buffer gets a larger one.
        let room = if conn.input.capacity() - conn.input.len() < 1024 { 256 * 1024 } else { 4096 };
        conn.input.reserve(room);
        match rustix::io::read(&conn.fd, rustix::buffer::spare_capacity(&mut conn.input)) {
            Ok(0) => return self.drop_edge(),
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => return self.drop_edge(),
        }
        let token = conn.token;
        let mut input = std::mem::take(&mut conn.input);
        let whole = self.take_frames(&input);
        let Some(conn) = self.conn.as_mut().filter(|c| c.token == token) else { return };
        match whole {
            Ok(size) => {
                input.drain(..size);
                conn.input = input;
            }
            Err(Broken) => self.drop_edge(),
        }
    }

    fn take_frames(&mut self, input: &[u8]) -> Result<usize, Broken> {
        let mut taken = 0;
        loop {
            let rest = input.get(taken..).unwrap_or(&[]);
            let Some(header) = frame::parse(rest)? else { return Ok(taken) };
            let end = frame::HEADER + header.size;
            let Some(payload) = rest.get(frame::HEADER..end) else { return Ok(taken) };
            taken += end;
            self.frame(header, payload)?;
        }
    }

    fn frame(&mut self, header: Header, payload: &[u8]) -> Result<(), Broken> {
        let id = header.stream;
        let Some(conn) = &mut self.conn else { return Ok(()) };
        match header.kind {
            Kind::Ping if id == 0 && payload.len() <= 16 => {
                conn.push(Kind::Pong, 0, frame::MAIN, payload);
            }
            Kind::Pong if id == 0 => {}
            Kind::Open if id != 0 && !conn.streams.contains_key(&id) => self.open(id, payload),
            Kind::Credit => {
                let more = u32::from_be_bytes(payload.try_into().map_err(|_| Broken)?);
                if let Some(stream) = conn.streams.get_mut(&id) {
                    stream.credit = stream.credit.saturating_add(u64::from(more));
                }
                conn.poke(id);
            }
            Kind::Cancel => self.cancel(id),
            Kind::Data => {
                // A stream that has ended may still be on its way to the edge.
                let Some(stream) = conn.streams.get_mut(&id) else { return Ok(()) };
                let size = super::long(payload.len());
                stream.window = stream.window.checked_sub(size).ok_or(Broken)?;
                self.data(id, payload);
            }
            Kind::End => self.data_end(id),
            _ => return Err(Broken),
        }
        Ok(())
    }

    /// Produce what can be produced, and send it.
    pub(super) fn pump(&mut self) {
        for _ in 0..256 {
            let Some(conn) = &mut self.conn else { return };
            let Some(id) = conn.next_ready() else { break };
            let Some(op) = conn.streams.get_mut(&id).and_then(|s| s.op.take()) else { continue };
            if let Some(op) = self.step(id, op) {
                if let Some(stream) = self.conn.as_mut().and_then(|c| c.streams.get_mut(&id)) {
                    stream.op = Some(op);
                }
            }
        }
        if let Some(Err(Closed)) = self.conn.as_mut().map(Conn::flush) {
            self.drop_edge();
        }
    }

    /// Wait for what makes sense: no request is read while too much is unsent.
    pub(super) fn arm_edge(&mut self) {
        let Some(conn) = &mut self.conn else { return };
        let wanted = (conn.backlog() < BACKLOG, conn.backlog() > 0);
        if wanted != conn.armed {
            conn.armed = wanted;
            let mut interest = Interest::empty();
            interest.set(Interest::IN, wanted.0);
            interest.set(Interest::OUT, wanted.1);
            if self.poll.modify(&conn.fd, conn.token, interest).is_err() {
                self.drop_edge();
            }
        }
    }
}
