//! A failure names the step, the path and the errno, so that Python shows the same words.

use std::fmt;
use std::io;

/// What failed while the world was being changed.
#[derive(Debug)]
pub(crate) struct StepError {
    pub(crate) step: &'static str,
    pub(crate) path: String,
    pub(crate) source: io::Error,
}

impl StepError {
    pub(crate) fn new(step: &'static str, path: impl Into<String>, source: io::Error) -> Self {
        Self { step, path: path.into(), source }
    }

    pub(crate) fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(0)
    }
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.step, self.path, self.source)
    }
}

impl std::error::Error for StepError {}

/// Puts the step and path on an `io::Result`.
pub(crate) trait AtStep<T> {
    fn at(self, step: &'static str, path: impl Into<String>) -> Result<T, StepError>;
}

impl<T> AtStep<T> for io::Result<T> {
    fn at(self, step: &'static str, path: impl Into<String>) -> Result<T, StepError> {
        self.map_err(|source| StepError::new(step, path, source))
    }
}
