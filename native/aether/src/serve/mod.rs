//! PID 1 of a sandbox: one channel to the edge, commands, sessions, files; words in spec/frames.md.

use crate::confine::Confinement;
use crate::spec::LaunchSpec;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

/// What the launcher hands over. Every other descriptor is closed.
#[derive(Debug)]
pub(crate) struct Handover {
    pub(crate) spec: LaunchSpec,
    pub(crate) confinement: Confinement,
    /// Listening Unix stream socket; the edge connects to it.
    pub(crate) listener: OwnedFd,
    /// Delegated cgroup v2 directory for commands, if the host has v2.
    pub(crate) work_v2: Option<OwnedFd>,
    /// Open `tasks` files (cgroup v1): a child writes "0" to each before it executes.
    pub(crate) work_v1: Vec<OwnedFd>,
}

/// Serve until shutdown. Everything about the sandbox's surroundings is already in place.
pub(crate) fn run(_handover: Handover) -> ! {
    std::process::exit(70)
}

/// `aether serve`, for kernels of our own (VMs).
pub(crate) fn main(_args: impl Iterator<Item = String>) -> ExitCode {
    ExitCode::from(70)
}
