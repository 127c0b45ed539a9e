//! The end of the sandbox: SIGTERM to all, after the grace SIGKILL, the answer, exit.

use super::conn::Op;
use super::proto::{self, Refusal};
use super::server::{Server, Timer};
use crate::sys::process;
use std::time::Duration;

impl Server {
    pub(super) fn shutdown(&mut self, id: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: proto::ShutdownArgs = proto::unpack(payload)?;
        let grace = args.grace_s.unwrap_or(5.0);
        let grace = Duration::try_from_secs_f64(grace)
            .map_err(|_| Refusal::invalid("grace_s is not a duration"))?;
        if self.ending.is_some() {
            return Err(Refusal::new(proto::CONFLICT, "it is ending already"));
        }
        self.ending = Some(id);
        if let Some(conn) = &mut self.conn {
            conn.open(id, Op::Shutdown);
        }
        self.signal_all(libc::SIGTERM);
        // A stopped process would not see it.
        self.signal_all(libc::SIGCONT);
        self.after(grace.min(Duration::from_secs(3600)), Timer::ShutdownGrace);
        self.reap();
        Ok(())
    }

    /// To every process but this one. Outside a pid namespace of its own that would be the host's,
    /// so there only to what was started here.
    fn signal_all(&self, signal: i32) {
        if std::process::id() == 1 {
            let _ = process::kill(-1, signal);
            return;
        }
        for pid in self.owners.keys() {
            let _ = process::kill(-pid, signal);
        }
    }

    pub(super) fn shutdown_now(&mut self) {
        self.signal_all(libc::SIGKILL);
        for command in self.commands.values() {
            command.kill_group();
        }
        for session in self.sessions.values() {
            session.kill_group();
        }
        // They are gone as soon as the kernel gets to it; wait for that, not for ever.
        self.after(Duration::from_secs(2), Timer::ShutdownEnd);
        self.reap();
    }

    pub(super) fn end(&mut self) -> ! {
        if let (Some(conn), Some(id)) = (&mut self.conn, self.ending) {
            conn.result(id, &());
            let _ = rustix::io::ioctl_fionbio(&conn.fd, false);
            let _ = rustix::net::sockopt::set_socket_timeout(
                &conn.fd,
                rustix::net::sockopt::Timeout::Send,
                Some(Duration::from_secs(1)),
            );
            let _ = conn.flush();
        }
        if let Some(work) = &self.work {
            let groups = self.commands.values_mut().filter_map(|c| c.cgroup.take());
            let groups = groups.chain(self.sessions.values_mut().filter_map(|s| s.cgroup.take()));
            for group in groups.chain(self.leftovers.drain(..)) {
                let _ = group.remove(work);
            }
        }
        process::exit_now(0)
    }
}
