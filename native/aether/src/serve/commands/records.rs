//! What stays of commands that have ended, within bounds.

use super::State;
use crate::serve::ring::Ring;
use crate::serve::server::Server;

/// Ended commands that are remembered, and how much of their output.
const MAX_RECORDS: usize = 16_384;
const KEPT_BYTES: usize = 16 << 20;

impl Server {
    /// Keep to the budget of what ended commands leave behind.
    pub(crate) fn forget_old(&mut self) {
        let mut spared = Vec::new();
        while self.kept_bytes > KEPT_BYTES && self.kept.len() > 1 {
            let Some(key) = self.kept.pop_front() else { break };
            let Some(command) = self.commands.get_mut(&key) else { continue };
            // Somebody is still reading it.
            if !command.streams.is_empty() {
                spared.push(key);
                continue;
            }
            self.kept_bytes -= command.kept();
            command.rings.iter_mut().for_each(Ring::forget);
        }
        for key in spared.into_iter().rev() {
            self.kept.push_front(key);
        }
        while self.commands.len() - self.running > MAX_RECORDS {
            let oldest = self.commands.iter();
            let oldest = oldest.filter(|(_, c)| {
                c.state == State::Ended && c.streams.is_empty() && c.cgroup.is_none()
            });
            let Some((&key, _)) = oldest.into_iter().next() else { break };
            if let Some(mut gone) = self.commands.remove(&key) {
                self.by_id.remove(&gone.id);
                self.kept_bytes -= gone.kept();
                self.kept.retain(|k| *k != key);
                for pipe in gone.pipes.iter_mut().filter_map(Option::take) {
                    self.unwatch(&pipe.fd, pipe.token);
                }
            }
        }
    }
}
