//! Another phase: what ran before is ended, file rules, environment and user change, and until the
//! edge has changed the rest nothing new begins. The loop stands still for it, so that nothing comes
//! in between.

use super::proto::{self, Refusal};
use super::server::Server;
use crate::error::StepError;
use crate::spec::FileRule;
use crate::sys::process::{self, Reaped};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Killed processes are gone by then, or hang in the kernel.
const PATIENCE: Duration = Duration::from_secs(5);

/// All that a phase is to aether; each part comes in place of what was.
#[derive(Debug, Deserialize)]
struct PhaseArgs {
    #[serde(default)]
    files: Vec<FileRule>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    user: String,
    #[serde(default)]
    only_user: bool,
}

impl Server {
    /// Enter a phase. What ran is ended also where the phase is refused then; nothing else changes.
    pub(super) fn phase(&mut self, id: u32, payload: &[u8]) -> Result<(), Refusal> {
        let wanted: PhaseArgs = proto::unpack(payload)?;
        if std::process::id() != 1 {
            return Err(Refusal::new(proto::UNSUPPORTED, "no processes of its own to end here"));
        }
        self.changing = true;
        let entered = self.end_all().and_then(|()| self.take(wanted));
        if entered.is_err() {
            self.changing = false;
        }
        entered.map(|()| self.done(id))
    }

    /// All of it is changed: what is asked for begins again.
    pub(super) fn phase_done(&mut self, id: u32) {
        self.changing = false;
        self.done(id);
    }

    fn take(&mut self, wanted: PhaseArgs) -> Result<(), Refusal> {
        self.rules.switch(&self.spec.files, &wanted.files).map_err(|error| told(&error))?;
        self.spec.files = wanted.files;
        self.spec.env = wanted.env;
        self.spec.user = wanted.user;
        self.spec.only_user = wanted.only_user;
        Ok(())
    }

    /// Every process but this one is a child of this one once its parents are gone: when there are
    /// no children, there is nobody.
    fn end_all(&mut self) -> Result<(), Refusal> {
        let until = Instant::now() + PATIENCE;
        for command in self.commands.values_mut().filter(|command| command.runs()) {
            command.killed = true;
        }
        while !self.alone() {
            let _ = process::kill(-1, libc::SIGKILL);
            if Instant::now() > until {
                return Err(Refusal::new(proto::CONFLICT, "some of its processes do not end"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for key in self.sessions.keys().copied().collect::<Vec<_>>() {
            self.forget_session(key);
        }
        Ok(())
    }

    fn alone(&mut self) -> bool {
        loop {
            match process::reap() {
                Reaped::Ended(pid, status) => self.ended(pid, status),
                Reaped::NoneYet => return false,
                Reaped::NoChildren => return true,
            }
        }
    }
}

fn told(error: &StepError) -> Refusal {
    let refusal = Refusal::new(proto::CONFLICT, error.to_string()).step(error.step);
    refusal.path(error.path.as_bytes()).errno(error.errno())
}
