//! What a command is held to from before its first instruction: bounding set, seccomp, rlimits.

use crate::error::StepError;
use crate::spec::LaunchSpec;
use std::io;

/// Computed once per sandbox, applied in every command's child.
#[derive(Debug)]
pub(crate) struct Confinement {
    /// Bit n set: capability n stays in the bounding set.
    pub(crate) keep_capabilities: u64,
    /// Compiled filter; applied as is.
    pub(crate) filter: Vec<libc::sock_filter>,
    pub(crate) no_new_privs: bool,
    /// (RLIMIT_ constant, soft, hard)
    pub(crate) rlimits: Vec<(i32, u64, u64)>,
}

impl Confinement {
    /// Read it from the launch specification.
    pub(crate) fn from_spec(_spec: &LaunchSpec) -> Result<Self, StepError> {
        Err(StepError::new("confine", "", io::Error::from_raw_os_error(libc::ENOSYS)))
    }

    /// In the child, still with aether's capabilities, before ids change: rlimits, bounding set,
    /// `no_new_privs`, filter. Allocates nothing.
    pub(crate) fn apply(&self) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
}
