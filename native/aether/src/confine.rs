//! What a command is held to from before its first instruction: cgroup namespace, bounding set,
//! seccomp, rlimits.
//!
//! The filter allows by default and refuses by reason, so that tools of any age work inside; what
//! bounds a sandbox is its namespaces. It takes away parts of the kernel that a sandbox has no
//! business with and that were the way out of others.

use crate::error::{AtStep, StepError};
use crate::spec::LaunchSpec;
use crate::sys::{caps, namespace, seccomp};
use seccompiler::{
    BackendError, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;
use std::io;
use std::sync::OnceLock;

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
            filter: read_filter(&spec.seccomp)?,
            no_new_privs: spec.no_new_privs,
            rlimits,
        })
    }

    /// In the child, once it is in its cgroups, still with aether's capabilities, before ids
    /// change: rlimits, cgroup namespace, bounding set, `no_new_privs`, filter. Allocates nothing.
    pub(crate) fn apply(&self) -> io::Result<()> {
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
        if self.filter.is_empty() {
            return Ok(());
        }
        seccomp::install(&self.filter)
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

fn read_filter(profile: &str) -> Result<Vec<libc::sock_filter>, StepError> {
    static COMPILED: OnceLock<Vec<libc::sock_filter>> = OnceLock::new();
    match profile {
        "none" => Ok(Vec::new()),
        "default" | "" => {
            if COMPILED.get().is_none() {
                let filter = default_filter().map_err(|error| {
                    StepError::new("confine", "seccomp default", io::Error::other(error))
                })?;
                let _ = COMPILED.set(filter);
            }
            Ok(COMPILED.get().cloned().unwrap_or_default())
        }
        _ => Err(unknown("seccomp profile", profile)),
    }
}

/// Refused whatever their arguments, by the reason.
#[rustfmt::skip]
const DENIED: &[&[libc::c_long]] = &[
    // Code in the kernel, or another kernel.
    &[libc::SYS_bpf, libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_init_module,
      libc::SYS_finit_module, libc::SYS_delete_module],
    // Kernel objects no namespace divides.
    &[libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key, libc::SYS_syslog, libc::SYS_acct,
      libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_swapon, libc::SYS_swapoff,
      libc::SYS_reboot, libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_clock_adjtime,
      libc::SYS_adjtimex, libc::SYS_nfsservctl, libc::SYS_lookup_dcookie],
    // Large, often-broken parts; the last ones would also pass by this filter.
    &[libc::SYS_userfaultfd, libc::SYS_perf_event_open, libc::SYS_io_uring_setup,
      libc::SYS_io_uring_enter, libc::SYS_io_uring_register],
    // Mounts and other namespaces.
    &[libc::SYS_mount, libc::SYS_umount2, libc::SYS_move_mount, libc::SYS_open_tree,
      OPEN_TREE_ATTR, libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fspick,
      libc::SYS_mount_setattr, libc::SYS_pivot_root, libc::SYS_setns],
    // Opens files by number, past every directory.
    &[libc::SYS_open_by_handle_at],
];

/// Since Linux 6.15.
const OPEN_TREE_ATTR: libc::c_long = 467;

#[cfg(target_arch = "x86_64")]
const DENIED_HERE: &[libc::c_long] = &[libc::SYS_iopl, libc::SYS_ioperm];
#[cfg(not(target_arch = "x86_64"))]
const DENIED_HERE: &[libc::c_long] = &[];

/// `CLONE_NEW*`: mount, cgroup, uts, ipc, user, pid, net.
const NEW_NAMESPACES: [u64; 7] =
    [0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000];
/// `CLONE_NEWTIME`; for clone the same bit belongs to the exit signal.
const NEW_TIME: u64 = 0x80;

/// Typing for another process on a shared terminal (`TIOCSTI`, `TIOCLINUX`), and exchanging the data
/// of two files behind the back of the overlay (XFS swap, exchange and commit, ext4 move).
const DENIED_IOCTLS: [u64; 6] =
    [0x5412, 0x541c, 0xc0c0_586d, 0x4028_5881, 0x4058_5883, 0xc028_660f];

/// `AF_ALG`, `AF_VSOCK`: the kernel's own crypto, and the hypervisor; neither is namespaced.
const DENIED_FAMILIES: [u64; 2] = [38, 40];

fn any_of(
    argument: u8,
    values: &[u64],
    compare: fn(u64) -> SeccompCmpOp,
) -> Result<Vec<SeccompRule>, BackendError> {
    values
        .iter()
        .map(|&value| {
            // 32 bits, as the kernel reads these arguments: set high bits hide nothing.
            let length = SeccompCmpArgLen::Dword;
            let condition = SeccompCondition::new(argument, length, compare(value), value)?;
            SeccompRule::new(vec![condition])
        })
        .collect()
}

fn default_filter() -> Result<Vec<libc::sock_filter>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in DENIED.iter().copied().flatten().chain(DENIED_HERE) {
        rules.insert(*call, Vec::new());
    }
    let equal = |_| SeccompCmpOp::Eq;
    rules.insert(libc::SYS_clone, any_of(0, &NEW_NAMESPACES, SeccompCmpOp::MaskedEq)?);
    let mut unshared = NEW_NAMESPACES.to_vec();
    unshared.push(NEW_TIME);
    rules.insert(libc::SYS_unshare, any_of(0, &unshared, SeccompCmpOp::MaskedEq)?);
    rules.insert(libc::SYS_ioctl, any_of(1, &DENIED_IOCTLS, equal)?);
    rules.insert(libc::SYS_socket, any_of(0, &DENIED_FAMILIES, equal)?);

    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?;
    let program: seccompiler::BpfProgram = filter.try_into()?;
    let mut whole = prelude();
    whole.extend(program.iter().map(|one| libc::sock_filter {
        code: one.code,
        jt: one.jt,
        jf: one.jf,
        k: one.k,
    }));
    Ok(whole)
}

/// First instructions, before the compiled rules (which check the architecture themselves): calls
/// that "do not exist". clone3 hides its flags in memory a filter cannot see, and the C library
/// falls back to clone; x32 is a second door to every call.
fn prelude() -> Vec<libc::sock_filter> {
    const LOAD_NUMBER: u16 = 0x20;
    const JUMP_EQUAL: u16 = 0x15;
    const JUMP_GREATER_EQUAL: u16 = 0x35;
    const RETURN: u16 = 0x06;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    let clone3 = u32::try_from(libc::SYS_clone3).unwrap_or(0);
    vec![
        step(LOAD_NUMBER, 0, 0, 0),
        step(JUMP_EQUAL, 1, 0, clone3),
        step(JUMP_GREATER_EQUAL, 0, 1, 0x4000_0000),
        step(RETURN, 0, 0, missing),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_filter_fits_the_kernel() {
        let length = default_filter().map_or(0, |filter| filter.len());
        assert!(length > 100 && length < 4096, "{length} instructions");
    }

    #[test]
    fn unknown_names_are_refused() {
        assert_eq!(caps::by_name("CAP_CHECKPOINT_RESTORE"), Some(1 << 40));
        assert_eq!(caps::by_name("CAP_EVERYTHING"), None);
        assert!(read_limit("files", 1, 1).is_err());
        assert!(read_filter("strict").is_err());
    }

    #[test]
    fn a_hard_limit_nobody_could_set_is_refused_before_any_command() {
        let error = read_limit("nofile", 1, u64::MAX).map_err(|error| error.errno());
        assert_eq!(error, Err(libc::EPERM));
    }
}
