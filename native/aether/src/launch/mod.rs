//! The fork server: spec in, sandbox out; words in spec/launch.md.

use std::process::ExitCode;

/// `aether launch`.
pub(crate) fn main(_args: impl Iterator<Item = String>) -> ExitCode {
    ExitCode::from(70)
}
