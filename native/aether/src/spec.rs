//! The launch specification, as `src/dsec/wire/launch.py` writes it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A cgroup directory to make, and what to write into its files, in order.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct CgroupDir {
    pub(crate) path: String,
    #[serde(default)]
    pub(crate) writes: Vec<(String, String)>,
    #[serde(default)]
    pub(crate) delegate: bool,
}

/// A directory to give other attributes: path, mode, uid and gid inside.
pub(crate) type Mend = (String, u32, u32, u32);

/// Files of the host that say what a sandbox may use and uses.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Meters {
    pub(crate) memory_limit: String,
    pub(crate) memory_usage: String,
    pub(crate) memory_stat: String,
    pub(crate) cpu_time: String,
    pub(crate) cpu_limit: String,
}

impl Meters {
    pub(crate) fn paths(&self) -> [&String; 5] {
        let memory = [&self.memory_limit, &self.memory_usage, &self.memory_stat];
        [memory[0], memory[1], memory[2], &self.cpu_time, &self.cpu_limit]
    }
}

/// A network namespace made beforehand, and who answers DNS in it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Network {
    pub(crate) namespace: String,
    #[serde(default)]
    pub(crate) resolvers: Vec<String>,
}

/// What a file rule lets be done; in the order in which rules for one path are made to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Access {
    ReadOnly,
    NoExec,
    Deny,
}

/// A path inside and what may not be done with it, nor with what is below it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct FileRule {
    pub(crate) path: String,
    pub(crate) access: Access,
}

/// One sandbox to launch; see the Python side for the meaning of each field.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct LaunchSpec {
    pub(crate) id: String,
    pub(crate) hostname: String,
    #[serde(default)]
    pub(crate) machine_id: String,
    pub(crate) uid_base: u32,
    pub(crate) layers: Vec<String>,
    #[serde(default)]
    pub(crate) mends: Vec<Mend>,
    pub(crate) upper: String,
    pub(crate) work: String,
    pub(crate) socket: String,
    #[serde(default)]
    pub(crate) cgroups: Vec<CgroupDir>,
    #[serde(default)]
    pub(crate) agent_v2: String,
    #[serde(default)]
    pub(crate) work_v2: String,
    #[serde(default)]
    pub(crate) work_v1: Vec<String>,
    #[serde(default)]
    pub(crate) meters: Option<Meters>,
    #[serde(default)]
    pub(crate) network: Option<Network>,
    #[serde(default)]
    pub(crate) masked_paths: Vec<String>,
    #[serde(default)]
    pub(crate) readonly_paths: Vec<String>,
    #[serde(default)]
    pub(crate) files: Vec<FileRule>,
    /// Whether file rules may come later.
    #[serde(default)]
    pub(crate) files_change: bool,
    #[serde(default)]
    pub(crate) capabilities: Vec<String>,
    #[serde(default)]
    pub(crate) seccomp: String,
    #[serde(default)]
    pub(crate) seccomp_allow: Vec<String>,
    #[serde(default)]
    pub(crate) no_new_privs: bool,
    #[serde(default)]
    pub(crate) rlimits: BTreeMap<String, (u64, u64)>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) workdir: String,
    #[serde(default)]
    pub(crate) user: String,
    /// Commands and sessions may ask for no other.
    #[serde(default)]
    pub(crate) only_user: bool,
    pub(crate) default_timeout_s: f64,
    pub(crate) max_timeout_s: f64,
    pub(crate) output_limit_bytes: u64,
    pub(crate) max_running_commands: u32,
}

/// Edge -> launcher.
#[derive(Debug, Deserialize)]
pub(crate) struct LaunchRequest {
    pub(crate) id: u64,
    pub(crate) spec: LaunchSpec,
}

/// Launcher -> edge; `pid` 0 means that it failed.
#[derive(Debug, Default, Serialize)]
pub(crate) struct LaunchReply {
    pub(crate) id: u64,
    pub(crate) pid: i32,
    pub(crate) step: String,
    pub(crate) path: String,
    pub(crate) errno: i32,
    pub(crate) message: String,
    pub(crate) micros: BTreeMap<String, u64>,
}

/// Launcher -> edge, unasked.
#[derive(Debug, Serialize)]
pub(crate) struct ExitNotice {
    pub(crate) exited: String,
    pub(crate) status: i32,
}
