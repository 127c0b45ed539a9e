//! What child and launcher say to each other while a sandbox comes to be, and how long steps took.

use crate::error::StepError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Instant;

/// Of the child: here is the connection of its file system, answer it; and, without one, give it
/// back. Also the launcher's answer to the second.
pub(super) const SHOWN: &[u8] = b"shown";

/// Time per step, microseconds; steps of one name add up.
#[derive(Debug, Default)]
pub(super) struct Stopwatch {
    pub(super) micros: BTreeMap<String, u64>,
}

impl Stopwatch {
    pub(super) fn add(&mut self, step: &str, since: Instant) {
        let took = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        match self.micros.get_mut(step) {
            Some(sum) => *sum += took,
            None => drop(self.micros.insert(step.to_owned(), took)),
        }
    }
}

/// A step that failed, whoever did it. From a child that is ready: an empty step.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) step: String,
    pub(super) path: String,
    pub(super) errno: i32,
    pub(super) message: String,
    pub(super) micros: BTreeMap<String, u64>,
}

impl From<StepError> for Report {
    fn from(error: StepError) -> Self {
        Self {
            step: error.step.to_owned(),
            message: error.to_string(),
            errno: error.errno(),
            path: error.path,
            micros: BTreeMap::new(),
        }
    }
}
