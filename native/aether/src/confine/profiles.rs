//! What each profile refuses, and why: the one place where calls are named.
//!
//! `default` is what an agent's work never needs. `strict` takes more, and ordinary tools (bash, apt,
//! pip, gcc, git, node, go) still work. `loose` gives some back, for nested sandboxes.

use libc::c_long;

/// One comparison of an argument; arguments are compared as the 32 bits the kernel reads of them, so
/// that set high bits hide nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    Is(u8, u32),
    Not(u8, u32),
    /// All these bits are set.
    Has(u8, u32),
}

/// Tests that all hold.
pub(super) type Case = &'static [Test];

/// A call that is refused in each of its cases; without any, always.
#[derive(Debug, Clone, Copy)]
pub(super) struct Refusal {
    /// As libc calls its number: after `SYS_` comes the name.
    name: &'static str,
    pub(super) number: c_long,
    pub(super) cases: &'static [Case],
}

impl Refusal {
    fn name(&self) -> &'static str {
        self.name.strip_prefix("SYS_").unwrap_or(self.name)
    }
}

/// Refusals of calls with a name and a constant of libc's: `names => cases`.
macro_rules! refuse {
    ($($($name:ident)+ => $cases:expr;)+) => {
        &[$($(Refusal {
            name: stringify!($name),
            number: libc::$name,
            cases: $cases,
        },)+)+]
    };
}

const ALWAYS: &[Case] = &[];

use Test::{Has, Is, Not};

/// For every profile.
const ALL: &[Refusal] = refuse![
    // Code in the kernel, or another kernel.
    SYS_bpf SYS_kexec_load SYS_kexec_file_load SYS_init_module SYS_finit_module
        SYS_delete_module => ALWAYS;
    // Kernel objects no namespace divides.
    SYS_syslog SYS_acct SYS_quotactl SYS_quotactl_fd SYS_swapon SYS_swapoff SYS_reboot
        SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex SYS_nfsservctl
        SYS_lookup_dcookie SYS_keyctl SYS_add_key SYS_request_key => ALWAYS;
    // Stops the kernel in the middle of a copy, which makes races easy to win.
    SYS_userfaultfd => ALWAYS;
    // Large, often-broken parts; the last ones would also pass by this filter.
    SYS_perf_event_open SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register => ALWAYS;
    // Opens files by number, past every directory.
    SYS_open_by_handle_at => ALWAYS;
    // Typing for another process on a shared terminal (TIOCSTI, TIOCLINUX); drivers of serial lines,
    // loaded on demand and often broken (TIOCSETD); and exchanging the data of two files behind the
    // back of the overlay (XFS swap, exchange and commit, ext4 move).
    SYS_ioctl => &[
        &[Is(1, 0x5412)], &[Is(1, 0x541c)], &[Is(1, 0x5423)], &[Is(1, 0xc0c0_586d)],
        &[Is(1, 0x4028_5881)], &[Is(1, 0x4058_5883)], &[Is(1, 0xc028_660f)],
    ];
    // All families but UNIX, INET, INET6, NETLINK and PACKET: the kernel's own crypto, the
    // hypervisor, and drivers that nobody uses, loaded by whoever asks for them. Of the internet's
    // protocols SCTP, DCCP, L2TP and SMC likewise.
    SYS_socket SYS_socketpair => &[
        &[Not(0, 1), Not(0, 2), Not(0, 10), Not(0, 16), Not(0, 17)],
        &[Is(0, 2), Is(2, 132)], &[Is(0, 2), Is(2, 33)], &[Is(0, 2), Is(2, 115)],
        &[Is(0, 2), Is(2, 256)],
        &[Is(0, 10), Is(2, 132)], &[Is(0, 10), Is(2, 33)], &[Is(0, 10), Is(2, 115)],
        &[Is(0, 10), Is(2, 256)],
    ];
];

/// For `default` and `strict`: what `loose` gives back.
const NOT_LOOSE: &[Refusal] = refuse![
    // Mounts and other namespaces.
    SYS_mount SYS_umount2 SYS_move_mount SYS_open_tree SYS_fsopen SYS_fsconfig SYS_fsmount
        SYS_fspick SYS_mount_setattr SYS_pivot_root SYS_setns => ALWAYS;
    // New ones: mount, cgroup, uts, ipc, user, pid, net.
    SYS_clone => NEW_NAMESPACES;
    SYS_unshare => NEW_NAMESPACES;
];

const NEW_NAMESPACES: &[Case] = &[
    &[Has(0, 0x0002_0000)],
    &[Has(0, 0x0200_0000)],
    &[Has(0, 0x0400_0000)],
    &[Has(0, 0x0800_0000)],
    &[Has(0, 0x1000_0000)],
    &[Has(0, 0x2000_0000)],
    &[Has(0, 0x4000_0000)],
];

/// `CLONE_NEWTIME`; for clone the same bit belongs to the exit signal.
const NEW_TIME: Refusal =
    Refusal { name: "SYS_unshare", number: libc::SYS_unshare, cases: &[&[Has(0, 0x80)]] };

/// Newer than libc's names: `open_tree_attr` (Linux 6.15), `lsm_set_self_attr` (6.8), by which a
/// program could leave the profile it was started under.
const NEWER: [Refusal; 2] = [
    Refusal { name: "SYS_open_tree_attr", number: 467, cases: ALWAYS },
    Refusal { name: "SYS_lsm_set_self_attr", number: 460, cases: ALWAYS },
];

/// At PID 1, which is the platform's: refused by the kernel anyway or without effect, and here so
/// that it is known. Asking whether it is there (signal 0) is no harm.
const AGENT: &[Refusal] = refuse![
    SYS_kill => &[&[Is(0, 1), Not(1, 0)]];
    SYS_tkill => &[&[Is(0, 1), Not(1, 0)]];
    SYS_tgkill => &[&[Is(0, 1), Not(2, 0)]];
    SYS_rt_sigqueueinfo => &[&[Is(0, 1), Not(1, 0)]];
    SYS_rt_tgsigqueueinfo => &[&[Is(0, 1), Not(2, 0)]];
    // All that is done by descriptor begins here: signals, taking descriptors, ending its memory.
    SYS_pidfd_open => &[&[Is(0, 1)]];
    SYS_ptrace => &[&[Is(1, 1), Not(0, 0)]];
    SYS_process_vm_readv SYS_process_vm_writev => &[&[Is(0, 1)]];
    SYS_kcmp => &[&[Is(0, 1)], &[Is(1, 1)]];
];

/// For `strict` alone.
const STRICT: &[Refusal] = refuse![
    // Other processes: debuggers, and what reads or takes from them.
    SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise SYS_kcmp
        SYS_pidfd_getfd => ALWAYS;
    // Another root for path look-ups, which open directories lead out of.
    SYS_chroot => ALWAYS;
    // Watching whole mounts; naming files without their directories.
    SYS_fanotify_init SYS_fanotify_mark SYS_name_to_handle_at => ALWAYS;
    // Where memory lies: of use to attacks that lay out memory.
    SYS_move_pages SYS_migrate_pages SYS_mbind SYS_set_mempolicy
        SYS_set_mempolicy_home_node SYS_remap_file_pages => ALWAYS;
    // Memory the host can neither see nor take back.
    SYS_memfd_secret => ALWAYS;
    // Pages given to a pipe and kept: the tool of choice of attacks on page caches.
    SYS_vmsplice => ALWAYS;
    // Asynchronous I/O of old, whose number of slots is one for the whole host.
    SYS_io_setup => ALWAYS;
    // Old personalities weaken the layout of memory. The plain ones: Linux, 32 bits, an old number
    // of version, both, and the question.
    SYS_personality => &[&[
        Not(0, 0), Not(0, 8), Not(0, 0x0002_0000), Not(0, 0x0002_0008), Not(0, 0xffff_ffff),
    ]];
    // No raw frames, and of the kernel's own sockets routes alone.
    SYS_socket SYS_socketpair => &[&[Is(0, 17)], &[Is(0, 16), Not(2, 0)]];
    // Protocols that the kernel lays over TCP (TCP_ULP).
    SYS_setsockopt => &[&[Is(1, 6), Is(2, 31)]];
];

#[cfg(target_arch = "x86_64")]
const HERE: &[Refusal] = refuse![SYS_iopl SYS_ioperm => ALWAYS;];
#[cfg(not(target_arch = "x86_64"))]
const HERE: &[Refusal] = &[];

/// Segments of 16 bits, for programs of the nineties.
#[cfg(target_arch = "x86_64")]
const STRICT_HERE: &[Refusal] = refuse![SYS_modify_ldt => ALWAYS;];
#[cfg(not(target_arch = "x86_64"))]
const STRICT_HERE: &[Refusal] = &[];

/// A set of refusals by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Profile {
    Default,
    Strict,
    /// Gives up that user namespaces, and so much of the kernel that only root of one can reach
    /// (mounts, packet filters, overlays), are out of reach: whoever breaks that code is on the host.
    Loose,
}

impl Profile {
    pub(super) fn by_name(name: &str) -> Option<Self> {
        match name {
            "default" | "" => Some(Self::Default),
            "strict" => Some(Self::Strict),
            "loose" => Some(Self::Loose),
            _ => None,
        }
    }

    /// All it refuses; a call may come more than once, and one without cases is always refused.
    pub(super) fn refusals(self) -> Vec<Refusal> {
        let common = ALL.iter().chain(HERE).chain(&NEWER[1..]);
        let held = NOT_LOOSE.iter().chain(&NEWER[..1]).chain([&NEW_TIME]).chain(AGENT);
        match self {
            Self::Default => common.chain(held).copied().collect(),
            Self::Strict => common.chain(held).chain(STRICT).chain(STRICT_HERE).copied().collect(),
            Self::Loose => common.copied().collect(),
        }
    }
}

fn all() -> impl Iterator<Item = &'static Refusal> {
    let default = ALL.iter().chain(HERE).chain(&NEWER).chain(NOT_LOOSE).chain(AGENT);
    default.chain(STRICT).chain(STRICT_HERE)
}

/// The number of a call some profile refuses.
pub(super) fn by_name(name: &str) -> Option<c_long> {
    all().find(|refusal| refusal.name() == name).map(|refusal| refusal.number)
}

/// The name of a call some profile refuses.
pub(crate) fn name_of(number: c_long) -> Option<&'static str> {
    all().find(|refusal| refusal.number == number).map(Refusal::name)
}

/// The argument that tells what was wanted, of calls that are many in one.
pub(crate) fn telling(number: c_long, args: &[u64; 6]) -> Option<u32> {
    let at = match number {
        libc::SYS_socket
        | libc::SYS_socketpair
        | libc::SYS_unshare
        | libc::SYS_clone
        | libc::SYS_keyctl
        | libc::SYS_bpf
        | libc::SYS_ptrace
        | libc::SYS_personality => 0,
        libc::SYS_ioctl | libc::SYS_kill | libc::SYS_tkill | libc::SYS_rt_sigqueueinfo => 1,
        libc::SYS_tgkill | libc::SYS_rt_tgsigqueueinfo | libc::SYS_setsockopt => 2,
        _ => return None,
    };
    args.get(at).map(|value| low(*value))
}

/// Whether a refused call was aimed at PID 1.
pub(crate) fn at_agent(number: c_long, args: &[u64; 6]) -> bool {
    let holds = |test: &Test| test.holds(args);
    let aimed = AGENT.iter().filter(|refusal| refusal.number == number);
    aimed.flat_map(|refusal| refusal.cases).any(|case| case.iter().all(holds))
}

fn low(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap_or(0)
}

impl Test {
    fn holds(self, args: &[u64; 6]) -> bool {
        let (Is(at, _) | Not(at, _) | Has(at, _)) = self;
        let value = args.get(usize::from(at)).map_or(0, |value| low(*value));
        match self {
            Is(_, wanted) => value == wanted,
            Not(_, wanted) => value != wanted,
            Has(_, bits) => value & bits == bits,
        }
    }
}
