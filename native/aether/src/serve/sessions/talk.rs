//! Feeding the shell its commands, taking what they print and what it says of their end.

use super::script::script;
use crate::serve::server::Server;
use crate::sys::poll::Interest;
use rustix::io::Errno;

impl Server {
    /// Tell the shell its command, once it is known which shell it is.
    pub(super) fn feed_command(&mut self, key: u64) {
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

    pub(crate) fn session_feed(&mut self, key: u64) {
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

    pub(crate) fn session_output(&mut self, key: u64, which: usize) {
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

    pub(super) fn drain_session(&mut self, key: u64) {
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
    pub(crate) fn session_status(&mut self, key: u64) {
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

    pub(super) fn end_session_command(&mut self, key: u64, status: i32, reset: bool) {
        if let Some(command) = self.commands.get_mut(&key) {
            let ended_by_us = command.timed_out || command.killed;
            command.status = Some(if ended_by_us { libc::SIGKILL } else { status });
            command.session_reset |= reset;
            self.finish_command(key);
        }
    }

    /// Its command has ended, however.
    pub(crate) fn session_free(&mut self, key: u64) {
        if let Some(session) = self.sessions.get_mut(&key) {
            session.current = None;
            session.stuck_since = None;
            session.text = Vec::new();
        }
    }
}
