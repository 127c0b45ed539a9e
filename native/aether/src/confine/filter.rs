//! A profile as the kernel runs it.
//!
//! By default all is allowed; what is refused asks for the answer (`counted`), which aether gives and
//! counts, or is answered by the kernel itself (`plain`). Both refuse the same.

use super::profiles::{self, Case, Profile, Refusal, Test};
use seccompiler::{
    BackendError, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

pub(crate) type Program = Vec<libc::sock_filter>;

/// What every refused call is answered.
pub(crate) const REFUSED: i32 = libc::EPERM;

const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER_EQUAL: u16 = 0x35;
const RETURN: u16 = 0x06;
/// So many calls are compared one after the other.
const LEAF: usize = 4;

/// One profile in both forms.
#[derive(Debug, Clone, Default)]
pub(crate) struct Filter {
    pub(crate) plain: Program,
    pub(crate) counted: Program,
}

impl Filter {
    pub(crate) fn is_empty(&self) -> bool {
        self.plain.is_empty()
    }

    /// Refuses all that the profile does, but for what is allowed by number.
    pub(super) fn compile(profile: Profile, allow: &[i64]) -> Result<Self, BackendError> {
        let refusals = profile.refusals();
        let plain = program(refusals.iter().filter(|one| !allow.contains(&one.number)))?;
        let counted = plain.iter().map(|step| asking(*step)).collect();
        Ok(Self { plain, counted })
    }
}

fn program<'a>(refusals: impl Iterator<Item = &'a Refusal>) -> Result<Program, BackendError> {
    let rules: Vec<_> = rules(refusals)?.into_iter().collect();
    Ok(prelude().into_iter().chain(tree(&rules)?).collect())
}

/// Of rules sorted by number: halves, until few are left. The compiler's own order, one after the
/// other, costs each command that starts a fifth of a millisecond: the kernel tries every call there
/// is when it takes a filter.
fn tree(rules: &[(i64, Vec<SeccompRule>)]) -> Result<Program, BackendError> {
    let (low, high) = rules.split_at(rules.len() / 2);
    let Some((first, _)) = high.first().filter(|_| rules.len() > LEAF) else {
        return leaf(rules);
    };
    let first = u32::try_from(*first).unwrap_or(0);
    let (low, high) = (tree(low)?, tree(high)?);
    let beyond = u32::try_from(low.len()).unwrap_or(0);
    let choice = [step(JUMP_GREATER_EQUAL, 0, 1, first), step(JUMP, 0, 0, beyond)];
    Ok(choice.into_iter().chain(low).chain(high).collect())
}

/// A program for a few calls, which checks the architecture before them.
fn leaf(rules: &[(i64, Vec<SeccompRule>)]) -> Result<Program, BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let refuse = SeccompAction::Errno(REFUSED.unsigned_abs());
    let rules = rules.iter().cloned().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?;
    let compiled: seccompiler::BpfProgram = filter.try_into()?;
    Ok(compiled.iter().map(|one| step(one.code, one.jt, one.jf, one.k)).collect())
}

fn step(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// By number; a call refused always has no rules, whatever else is said of it.
fn rules<'a>(
    refusals: impl Iterator<Item = &'a Refusal>,
) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for refusal in refusals {
        let known = rules.get(&refusal.number);
        if refusal.cases.is_empty() {
            rules.insert(refusal.number, Vec::new());
        } else if known.is_none_or(|rules| !rules.is_empty()) {
            let cases = refusal.cases.iter().map(|case| rule(case));
            let cases = cases.collect::<Result<Vec<_>, _>>()?;
            rules.entry(refusal.number).or_default().extend(cases);
        }
    }
    Ok(rules)
}

fn rule(case: Case) -> Result<SeccompRule, BackendError> {
    let conditions = case.iter().map(|test| {
        let (argument, compare, value) = match *test {
            Test::Is(at, value) => (at, SeccompCmpOp::Eq, value),
            Test::Not(at, value) => (at, SeccompCmpOp::Ne, value),
            Test::Has(at, bits) => (at, SeccompCmpOp::MaskedEq(bits.into()), bits),
        };
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value.into())
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

/// The same step, asking for the answer instead of giving it.
fn asking(step: libc::sock_filter) -> libc::sock_filter {
    let answer = libc::SECCOMP_RET_ERRNO | REFUSED.unsigned_abs();
    if step.code == RETURN && step.k == answer {
        return libc::sock_filter { k: libc::SECCOMP_RET_USER_NOTIF, ..step };
    }
    step
}

/// First instructions, before the compiled rules (which check the architecture themselves): calls
/// that "do not exist". clone3 hides its flags in memory a filter cannot see, and the C library
/// falls back to clone; x32 is a second door to every call. Never counted: every thread that begins
/// tries clone3.
fn prelude() -> Program {
    let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    let clone3 = u32::try_from(libc::SYS_clone3).unwrap_or(0);
    vec![
        step(LOAD, 0, 0, 0),
        step(JUMP_EQUAL, 1, 0, clone3),
        step(JUMP_GREATER_EQUAL, 0, 1, 0x4000_0000),
        step(RETURN, 0, 0, missing),
    ]
}

/// Numbers of calls by name.
pub(super) fn numbers<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<i64>, &'a str> {
    names.map(|name| profiles::by_name(name).ok_or(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILES: [Profile; 3] = [Profile::Default, Profile::Strict, Profile::Loose];

    /// Run a program as the kernel would; only what is compiled here.
    fn answer(program: &[libc::sock_filter], number: i64, args: [u64; 6]) -> u32 {
        let mut data = [0_u32; 16];
        data[0] = u32::try_from(number).unwrap_or(0);
        data[1] = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
        for (at, value) in args.iter().enumerate() {
            data[4 + 2 * at] = u32::try_from(value & 0xffff_ffff).unwrap_or(0);
            data[5 + 2 * at] = u32::try_from(value >> 32).unwrap_or(0);
        }
        let (mut at, mut value) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            let jump = |taken| usize::from(if taken { step.jt } else { step.jf });
            match step.code {
                LOAD => value = data[step.k as usize / 4],
                0x54 => value &= step.k,
                JUMP => at += step.k as usize,
                JUMP_EQUAL => at += jump(value == step.k),
                0x25 => at += jump(value > step.k),
                JUMP_GREATER_EQUAL => at += jump(value >= step.k),
                RETURN => return step.k,
                other => panic!("an unknown instruction: {other:#x}"),
            }
        }
    }

    fn of(profile: Profile) -> Filter {
        Filter::compile(profile, &[]).unwrap()
    }

    const ERRNO: u32 = libc::SECCOMP_RET_ERRNO | 1;

    fn refused(profile: Profile, number: i64, args: [u64; 6]) -> bool {
        let filter = of(profile);
        let plain = answer(&filter.plain, number, args) == ERRNO;
        let counted = answer(&filter.counted, number, args) == libc::SECCOMP_RET_USER_NOTIF;
        assert_eq!(plain, counted, "both forms refuse the same");
        plain
    }

    fn on(profile: Profile, number: i64, at: usize, value: u64) -> bool {
        let mut args = [0; 6];
        args[at] = value;
        refused(profile, number, args)
    }

    #[test]
    fn every_profile_fits_the_kernel() {
        for profile in PROFILES {
            let length = of(profile).plain.len();
            assert!(length > 100 && length < 4096, "{length} instructions");
        }
    }

    #[test]
    fn each_call_is_found_in_the_tree() {
        for profile in PROFILES {
            let refusals = profile.refusals();
            let always = refusals.iter().filter(|refusal| refusal.cases.is_empty());
            for refusal in always {
                assert!(refused(profile, refusal.number, [0; 6]), "{profile:?} {refusal:?}");
            }
            let known: Vec<i64> = refusals.iter().map(|refusal| refusal.number).collect();
            for number in (0..600).filter(|number| !known.contains(number)) {
                assert!(!refused(profile, number, [0; 6]), "{profile:?} {number}");
            }
        }
    }

    #[test]
    fn calls_nobody_needs_are_refused_by_every_profile() {
        for profile in PROFILES {
            for number in [libc::SYS_bpf, libc::SYS_finit_module, libc::SYS_io_uring_setup, 460] {
                assert!(refused(profile, number, [0; 6]), "{profile:?} {number}");
            }
            assert!(!refused(profile, libc::SYS_openat, [0; 6]));
        }
    }

    #[test]
    fn families_of_sockets() {
        for profile in PROFILES {
            for family in [1, 2, 10, 16] {
                assert!(!on(profile, libc::SYS_socket, 0, family), "{profile:?} {family}");
            }
            for family in [0, 3, 15, 21, 30, 38, 40, 44, 1 << 33 | 38] {
                assert!(on(profile, libc::SYS_socket, 0, family), "{profile:?} {family}");
                assert!(on(profile, libc::SYS_socketpair, 0, family), "{profile:?} {family}");
            }
            assert!(refused(profile, libc::SYS_socket, [2, 5, 132, 0, 0, 0]));
            assert!(!refused(profile, libc::SYS_socket, [2, 1, 6, 0, 0, 0]));
        }
        assert!(!on(Profile::Default, libc::SYS_socket, 0, 17));
        assert!(on(Profile::Strict, libc::SYS_socket, 0, 17));
        assert!(refused(Profile::Strict, libc::SYS_socket, [16, 3, 4, 0, 0, 0]));
        assert!(!refused(Profile::Strict, libc::SYS_socket, [16, 3, 0, 0, 0, 0]));
    }

    #[test]
    fn namespaces_are_for_the_loose() {
        for flag in [0x0002_0000, 0x1000_0000, 0x4000_0000] {
            for number in [libc::SYS_clone, libc::SYS_unshare] {
                assert!(on(Profile::Default, number, 0, flag | 17));
                assert!(on(Profile::Strict, number, 0, flag | 17));
                assert!(!on(Profile::Loose, number, 0, flag | 17));
            }
        }
        assert!(on(Profile::Default, libc::SYS_unshare, 0, 0x80));
        assert!(!on(Profile::Default, libc::SYS_clone, 0, 0x80));
        assert!(!on(Profile::Default, libc::SYS_unshare, 0, 0x400));
    }

    #[test]
    fn strict_takes_what_default_leaves() {
        for number in [libc::SYS_chroot, libc::SYS_vmsplice, libc::SYS_memfd_secret] {
            assert!(!refused(Profile::Default, number, [0; 6]));
            assert!(refused(Profile::Strict, number, [0; 6]));
        }
        assert!(!refused(Profile::Default, libc::SYS_ptrace, [16, 7, 0, 0, 0, 0]));
        assert!(refused(Profile::Strict, libc::SYS_ptrace, [16, 7, 0, 0, 0, 0]));
        assert!(on(Profile::Strict, libc::SYS_personality, 0, 0x0040_0000));
        assert!(!on(Profile::Strict, libc::SYS_personality, 0, 0xffff_ffff));
    }

    #[test]
    fn the_first_process_is_out_of_reach() {
        for profile in [Profile::Default, Profile::Strict] {
            assert!(refused(profile, libc::SYS_kill, [1, 9, 0, 0, 0, 0]));
            assert!(!refused(profile, libc::SYS_kill, [1, 0, 0, 0, 0, 0]));
            assert!(!refused(profile, libc::SYS_kill, [u64::MAX, 15, 0, 0, 0, 0]));
            assert!(refused(profile, libc::SYS_ptrace, [16, 1, 0, 0, 0, 0]));
            assert!(on(profile, libc::SYS_pidfd_open, 0, 1));
        }
        assert!(profiles::at_agent(libc::SYS_kill, &[1, 9, 0, 0, 0, 0]));
        assert!(!profiles::at_agent(libc::SYS_ptrace, &[16, 2, 0, 0, 0, 0]));
        assert!(!profiles::at_agent(libc::SYS_bpf, &[1, 1, 1, 1, 1, 1]));
    }

    #[test]
    fn what_is_allowed_by_name_is_not_refused() {
        assert_eq!(numbers(["open"].into_iter()), Err("open"));
        let allow = numbers(["mount", "ptrace"].into_iter()).unwrap();
        let filter = Filter::compile(Profile::Strict, &allow).unwrap();
        assert_ne!(answer(&filter.plain, libc::SYS_mount, [0; 6]), ERRNO);
        assert_ne!(answer(&filter.plain, libc::SYS_ptrace, [16, 1, 0, 0, 0, 0]), ERRNO);
        assert_eq!(answer(&filter.plain, libc::SYS_fsopen, [0; 6]), ERRNO);
    }

    #[test]
    fn calls_that_do_not_exist() {
        let filter = of(Profile::Strict).counted;
        let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
        assert_eq!(answer(&filter, libc::SYS_clone3, [0; 6]), missing);
        assert_eq!(answer(&filter, 0x4000_0001, [0; 6]), missing);
    }
}
