//! Ending what runs in a session: all but the shell if that is safe, else the shell as well.

use super::script::stops_when_killed;
use crate::serve::cgroup::Cgroup;
use crate::serve::server::{Server, Timer};
use crate::sys::process;
use std::time::{Duration, Instant};

/// How long a shell has to come back after its command was killed.
const COME_BACK: Duration = Duration::from_secs(1);
const FORCE: Duration = Duration::from_secs(5);

impl Server {
    /// End what runs in the session for a command that is out of time or killed.
    pub(crate) fn kill_in_session(&mut self, command: u64) {
        let key = self.commands.get(&command).and_then(|c| c.session);
        let Some(key) = key else { return };
        let Some(session) = self.sessions.get_mut(&key) else { return };
        // Ended: what it left behind belongs to the session.
        if session.current != Some(command) {
            return;
        }
        if session.cgroup.is_some() && stops_when_killed(&session.text) {
            if session.stuck_since.is_none() {
                session.stuck_since = Some(Instant::now());
            }
            self.session_stuck(key);
        } else {
            self.kill_shell(key);
        }
    }

    pub(super) fn kill_shell(&mut self, key: u64) {
        let Some(session) = self.sessions.get(&key) else { return };
        session.kill_group();
        let (pid, shell) = (session.pid, session.shell);
        if self.work.is_none() && pid > 0 {
            self.hunt(shell, pid);
        }
        self.after(FORCE, Timer::SessionForce(key));
    }

    /// Kill all but the shell, again and again until it is back or its time is up.
    pub(crate) fn session_stuck(&mut self, key: u64) {
        let Some(session) = self.sessions.get(&key) else { return };
        let Some(since) = session.stuck_since else { return };
        if since.elapsed() >= COME_BACK {
            return self.kill_shell(key);
        }
        self.signal_session(key, libc::SIGKILL);
        self.after(Duration::from_millis(20), Timer::SessionStuck(key));
    }

    pub(crate) fn session_force(&mut self, key: u64) {
        // A shell that is still there five seconds after SIGKILL: it is over without it. One that
        // was started since then is younger than that and not meant.
        let Some(session) = self.sessions.get(&key) else { return };
        let doomed = session.closing || session.stuck_since.is_some();
        if doomed && session.pid > 0 {
            self.session_ended(key, libc::SIGKILL);
        }
    }

    /// To everything in the session but its shell.
    pub(crate) fn signal_session(&self, key: u64, signal: i32) {
        let Some(session) = self.sessions.get(&key) else { return };
        let members = session.cgroup.as_ref().map_or_else(Vec::new, Cgroup::processes);
        for pid in members.into_iter().filter(|pid| *pid != session.pid) {
            let _ = process::kill(pid, signal);
        }
    }
}
