//! What a command is held to from before its first instruction: cgroup namespace, bounding set,
//! seccomp, rlimits.
//!
//! The filter allows by default and refuses by reason, so that tools of any age work inside; what
//! bounds a sandbox is its namespaces. It takes away parts of the kernel that a sandbox has no
//! business with and that were the way out of others (`profiles`). What it refuses is counted: the
//! kernel asks whoever holds the filter's *listener*, which is aether (`serve/denials.rs`).

mod filter;
mod profiles;

pub(crate) use filter::REFUSED;
pub(crate) use profiles::{at_agent, name_of, telling};

use crate::error::{AtStep, StepError};
use crate::spec::LaunchSpec;
use crate::sys::{caps, namespace, seccomp};
use filter::Filter;
use profiles::Profile;
use std::io;
use std::os::fd::RawFd;
use std::sync::OnceLock;

/// Computed once per sandbox, applied in every command's child.
#[derive(Debug)]
pub(crate) struct Confinement {
    /// Bit n set: capability n stays in the bounding set.
    pub(crate) keep_capabilities: u64,
    filter: Filter,
    pub(crate) no_new_privs: bool,
    /// (RLIMIT_ constant, soft, hard)
    pub(crate) rlimits: Vec<(i32, u64, u64)>,
}

impl Confinement {
    /// Read it from the launch specification.
    pub(crate) fn from_spec(spec: &LaunchSpec) -> Result<Self, StepError> {
        let mut keep_capabilities = 0;
        for name in &spec.capabilities {
            keep_capabilities |= caps::by_name(name).ok_or_else(|| unknown("capability", name))?;
        }
        let mut rlimits = Vec::with_capacity(spec.rlimits.len());
        for (name, &(soft, hard)) in &spec.rlimits {
            rlimits.push(read_limit(name, soft, hard)?);
        }
        Ok(Self {
            keep_capabilities,
            filter: read_filter(&spec.seccomp, &spec.seccomp_allow)?,
            no_new_privs: spec.no_new_privs,
            rlimits,
        })
    }

    /// Whether commands are held to a filter at all.
    pub(crate) fn filters(&self) -> bool {
        !self.filter.is_empty()
    }

    /// In the child, once it is in its cgroups, still with aether's capabilities, before ids
    /// change: rlimits, cgroup namespace, bounding set, `no_new_privs`, filter. Allocates nothing.
    pub(crate) fn apply(&self) -> io::Result<()> {
        self.bound()?;
        seccomp::install(&self.filter.plain)
    }

    /// As `apply`, with refused calls counted if the kernel can: then this is the filter's listener,
    /// for aether alone. It is closed on exec.
    pub(crate) fn apply_counted(&self) -> io::Result<Option<RawFd>> {
        self.bound()?;
        if self.filter.is_empty() {
            return Ok(None);
        }
        // Refused where this whole host is held to a filter with a listener of its own.
        if let Ok(listener) = seccomp::install_listened(&self.filter.counted) {
            return Ok(Some(listener));
        }
        seccomp::install(&self.filter.plain).map(|()| None)
    }

    fn bound(&self) -> io::Result<()> {
        for &(resource, soft, hard) in &self.rlimits {
            seccomp::set_limit(resource, soft, hard)?;
        }
        // Here and not where the sandbox is cloned: a cgroup namespace is rooted where its maker
        // is at that moment, and the launcher is outside. A command's is rooted in its own
        // cgroups, so /proc/self/cgroup says nothing about the host.
        namespace::unshare_cgroups()?;
        caps::bound(self.keep_capabilities)?;
        if self.no_new_privs {
            seccomp::no_new_privileges()?;
        }
        Ok(())
    }
}

fn refused(what: &str, name: &str, errno: i32) -> StepError {
    StepError::new("confine", format!("{what} {name}"), io::Error::from_raw_os_error(errno))
}

fn unknown(what: &str, name: &str) -> StepError {
    refused(what, name, libc::EINVAL)
}

const LIMITS: [(&str, i32); 16] = [
    ("cpu", 0),
    ("fsize", 1),
    ("data", 2),
    ("stack", 3),
    ("core", 4),
    ("rss", 5),
    ("nproc", 6),
    ("nofile", 7),
    ("memlock", 8),
    ("as", 9),
    ("locks", 10),
    ("sigpending", 11),
    ("msgqueue", 12),
    ("nice", 13),
    ("rtprio", 14),
    ("rttime", 15),
];

/// A limit that could not be set is refused now: nobody may raise a hard limit inside, and every
/// command would fail.
fn read_limit(name: &str, soft: u64, hard: u64) -> Result<(i32, u64, u64), StepError> {
    let known = LIMITS.iter().find(|(known, _)| *known == name);
    let &(_, resource) = known.ok_or_else(|| unknown("rlimit", name))?;
    if soft > hard {
        return Err(unknown("rlimit", name));
    }
    if hard > seccomp::hard_limit(resource).at("confine", name)? {
        return Err(refused("rlimit", name, libc::EPERM));
    }
    Ok((resource, soft, hard))
}

fn read_filter(profile: &str, allow: &[String]) -> Result<Filter, StepError> {
    static DEFAULT: OnceLock<Filter> = OnceLock::new();
    if profile == "none" {
        return Ok(Filter::default());
    }
    let named = Profile::by_name(profile).ok_or_else(|| unknown("seccomp profile", profile))?;
    let allowed = filter::numbers(allow.iter().map(String::as_str));
    let allowed = allowed.map_err(|name| unknown("system call", name))?;
    let compile = || {
        let compiled = Filter::compile(named, &allowed);
        compiled.map_err(|error| StepError::new("confine", "seccomp", io::Error::other(error)))
    };
    if named != Profile::Default || !allowed.is_empty() {
        return compile();
    }
    if DEFAULT.get().is_none() {
        let _ = DEFAULT.set(compile()?);
    }
    Ok(DEFAULT.get().cloned().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_refused() {
        assert_eq!(caps::by_name("CAP_CHECKPOINT_RESTORE"), Some(1 << 40));
        assert_eq!(caps::by_name("CAP_EVERYTHING"), None);
        assert!(read_limit("files", 1, 1).is_err());
        assert!(read_filter("lenient", &[]).is_err());
        assert!(read_filter("strict", &["read".to_owned()]).is_err());
    }

    #[test]
    fn a_hard_limit_nobody_could_set_is_refused_before_any_command() {
        let error = read_limit("nofile", 1, u64::MAX).map_err(|error| error.errno());
        assert_eq!(error, Err(libc::EPERM));
    }
}
