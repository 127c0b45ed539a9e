//! Output on its way from the pipes into the rings: always taken, whoever listens.

use super::State;
use crate::serve::server::Server;
use rustix::io::Errno;

impl Server {
    /// Output is there: always taken, whoever listens.
    pub(crate) fn command_output(&mut self, key: u64, which: usize) {
        for _ in 0..4 {
            match self.read_output(key, which) {
                Some(size) if size >= 32 * 1024 => {}
                _ => break,
            }
        }
        self.poke_command(key);
        let drained = self
            .commands
            .get(&key)
            .is_some_and(|c| c.state == State::Draining && c.pipes.iter().all(Option::is_none));
        if drained {
            self.finish_command(key);
        }
    }

    /// Read once; None when there is nothing (any more).
    fn read_output(&mut self, key: u64, which: usize) -> Option<usize> {
        let mut buffer = self.take_spare(64 * 1024);
        let size = self.read_output_with(key, which, &mut buffer);
        self.spare = buffer;
        size
    }

    fn read_output_with(&mut self, key: u64, which: usize, buffer: &mut Vec<u8>) -> Option<usize> {
        let command = self.commands.get_mut(&key)?;
        let slot = command.pipes.get_mut(which)?;
        let pipe = slot.as_ref()?;
        match rustix::io::read(&pipe.fd, rustix::buffer::spare_capacity(buffer)) {
            Ok(size) if size > 0 => {
                // What a background child says after the end is nobody's.
                if command.state != State::Ended {
                    if let Some(ring) = command.rings.get_mut(which) {
                        ring.push(buffer);
                    }
                }
                return Some(size);
            }
            Err(Errno::AGAIN | Errno::INTR) => return None,
            // The end; a terminal nobody has open any more says EIO.
            _ => {}
        }
        if let Some(pipe) = slot.take() {
            self.unwatch(&pipe.fd, pipe.token);
        }
        None
    }

    /// Take what is in the pipes now; one that is filled as fast as it is read is left at some point.
    pub(super) fn drain_output(&mut self, key: u64) {
        for which in [0, 1] {
            let mut taken = 0;
            while let Some(size) = self.read_output(key, which) {
                taken += size;
                if taken > 2 << 20 {
                    break;
                }
            }
        }
    }
}
