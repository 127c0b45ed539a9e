//! Making, signalling and reaping processes.

use super::pty;
use std::ffi::{c_char, CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

/// Who a process runs as.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ids {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
}

/// Which side of a fork this is.
#[derive(Debug)]
pub(crate) enum Forked {
    Child,
    Parent(i32),
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;

/// Copy this process, straight into a cgroup if one is given.
///
/// The process has one thread, so the child may do all that the parent may.
pub(crate) fn fork(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
    // SAFETY: clone_args is plain data for which all zero means "nothing special".
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = u64::from(libc::SIGCHLD.unsigned_abs());
    args.flags = CLONE_CLEAR_SIGHAND;
    if let Some(dir) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(dir.as_raw_fd().unsigned_abs());
    }
    let size = std::mem::size_of::<libc::clone_args>();
    // SAFETY: without CLONE_VM this is fork: the child has its own copy of the memory and goes on
    // on its own copy of this stack; there is no other thread whose locks could be held for ever.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size) };
    match i32::try_from(pid) {
        Ok(0) => Ok(Forked::Child),
        Ok(pid) if pid > 0 => Ok(Forked::Parent(pid)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Leave without running anything more of this program.
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: ends the process; takes an integer.
    unsafe { libc::_exit(status) }
}

/// An ended child: its pid and raw wait status. None when there is none to be had now.
pub(crate) fn reap() -> Reaped {
    let mut status = 0;
    // SAFETY: writes one int.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    match pid {
        0 => Reaped::NoneYet,
        pid if pid > 0 => Reaped::Ended(pid, status),
        _ => Reaped::NoChildren,
    }
}

/// What `reap` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reaped {
    Ended(i32, i32),
    NoneYet,
    NoChildren,
}

/// Send a signal to a process, to a group (negative) or to everything (-1).
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes integers; a pid that does not exist is an error, not a danger.
    if unsafe { libc::kill(pid, signal) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Orphans of commands come to this process even where it is not PID 1.
pub(crate) fn adopt_orphans() {
    // SAFETY: takes integers.
    let _ = unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
}

/// Neither ptrace nor /proc/PID/mem from the same user.
pub(crate) fn set_undumpable() {
    // SAFETY: takes integers.
    let _ = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
}

/// End with the parent.
pub(crate) fn die_with_parent() {
    // SAFETY: takes integers.
    let _ = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
}

/// Let every signal through, and a broken pipe kill again: this process ignores SIGPIPE.
fn reset_signals() {
    // SAFETY: installs the default action.
    let _ = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    // SAFETY: sigset_t is plain data; all zero is the empty set.
    let none: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a valid set; the old mask is not asked for.
    let _ = unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) };
}

/// All signals back to their default action; what was ignored by the parent would stay so in every
/// command. Called once, at start.
pub(crate) fn default_signals() {
    for signal in 1..=64 {
        if signal != libc::SIGKILL && signal != libc::SIGSTOP && signal != libc::SIGPIPE {
            // SAFETY: installs the default action; numbers libc keeps to itself are refused.
            let _ = unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn set_ids(ids: &Ids) -> io::Result<()> {
    // SAFETY: reads `len` ids from the slice.
    check(unsafe { libc::setgroups(ids.groups.len(), ids.groups.as_ptr()) })?;
    // SAFETY: takes integers.
    check(unsafe { libc::setresgid(ids.gid, ids.gid, ids.gid) })?;
    // SAFETY: takes integers.
    check(unsafe { libc::setresuid(ids.uid, ids.uid, ids.uid) })
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Hold no more than `keep`, all of it in effect.
fn limit_capabilities(keep: u64) -> io::Result<()> {
    let mut header = CapHeader { version: 0x2008_0522, pid: 0 };
    let mut data = [CapData::default(); 2];
    // SAFETY: version 3 reads one header and writes two data blocks, which are there.
    let got = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    let halves = [keep & 0xffff_ffff, keep >> 32];
    for (block, half) in data.iter_mut().zip(halves) {
        let half = u32::try_from(half).unwrap_or(0);
        block.permitted &= half;
        block.effective = block.permitted;
        block.inheritable = 0;
    }
    // SAFETY: version 3 reads one header and two data blocks, which are there.
    let set = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// In a forked worker that goes on in this program: become `ids` with only the capabilities that a
/// program started as that user would have.
pub(crate) fn become_user(ids: &Ids, keep_capabilities: u64) -> io::Result<()> {
    set_ids(ids)?;
    // The unmapped id this process had is not root's, so the kernel took nothing away with it.
    limit_capabilities(if ids.uid == 0 { keep_capabilities } else { 0 })?;
    set_undumpable();
    reset_signals();
    ignore_broken_pipes();
    Ok(())
}

/// A write to a closed pipe is an error to be handled, not an end.
pub(crate) fn ignore_broken_pipes() {
    // SAFETY: installs "ignore".
    let _ = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Join v1 control groups: "0" written to their `tasks` files means the writer.
pub(crate) fn join_groups(tasks: &[OwnedFd]) -> io::Result<()> {
    for fd in tasks {
        // SAFETY: reads one byte of a constant.
        if unsafe { libc::write(fd.as_raw_fd(), c"0".as_ptr().cast(), 1) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Best effort: in a user namespace the file may belong to nobody.
pub(crate) fn prefer_for_oom() {
    let flags = libc::O_WRONLY | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: a NUL-terminated constant path.
    let fd = unsafe { libc::open(c"/proc/self/oom_score_adj".as_ptr(), flags) };
    if fd < 0 {
        return;
    }
    // SAFETY: reads three bytes of a constant.
    let _ = unsafe { libc::write(fd, c"500".as_ptr().cast(), 3) };
    // SAFETY: opened above and owned by nobody else.
    let _ = unsafe { libc::close(fd) };
}

/// Close every descriptor from 3 up except one. For workers, which never execute a program.
pub(crate) fn close_others(keep: RawFd) {
    let keep = keep.unsigned_abs();
    if keep > 3 {
        // SAFETY: nothing below `keep` is used again in this process: the caller goes on with that
        // descriptor alone and ends by `exit_now`, so no owner closes a number twice.
        let _ = unsafe { libc::syscall(libc::SYS_close_range, 3_u32, keep - 1, 0_u32) };
    }
    // SAFETY: as above, for those above `keep`.
    let _ = unsafe { libc::syscall(libc::SYS_close_range, keep + 1, u32::MAX, 0_u32) };
}

/// A program to try, and its argument list.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// Places the program may be at, in order.
    paths: Vec<CString>,
    words: Vec<CString>,
    argv: Vec<*const c_char>,
    /// Number at which the extra descriptor appears for this program.
    extra_at: RawFd,
}

impl Candidate {
    pub(crate) fn new(path: CString, argv: Vec<CString>, extra_at: RawFd) -> Self {
        let pointers = pointers(&argv);
        Self { paths: vec![path], words: argv, argv: pointers, extra_at }
    }

    /// A program looked for in many places.
    pub(crate) fn search(paths: Vec<CString>, argv: Vec<CString>) -> Self {
        let pointers = pointers(&argv);
        Self { paths, words: argv, argv: pointers, extra_at: -1 }
    }
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain(std::iter::once(ptr::null())).collect()
}

/// Everything a command's child needs, made before the clone so that the child allocates nothing.
#[derive(Debug)]
pub(crate) struct Exec {
    candidates: Vec<Candidate>,
    _env: Vec<CString>,
    env: Vec<*const c_char>,
    pub(crate) cwd: CString,
    pub(crate) ids: Ids,
    /// Ignored with a terminal.
    pub(crate) stdio: [RawFd; 3],
    pub(crate) extra: Option<RawFd>,
    /// devpts, rows, columns.
    pub(crate) terminal: Option<(RawFd, u16, u16)>,
}

impl Exec {
    pub(crate) fn new(
        candidates: Vec<Candidate>,
        env: Vec<CString>,
        cwd: CString,
        ids: Ids,
    ) -> Self {
        let pointers = pointers(&env);
        Self {
            candidates,
            _env: env,
            env: pointers,
            cwd,
            ids,
            stdio: [-1; 3],
            extra: None,
            terminal: None,
        }
    }

    /// Where the extra descriptor is for the program of that index.
    pub(crate) fn extra_at(&self, index: usize) -> RawFd {
        self.candidates.get(index).map_or(-1, |c| c.extra_at)
    }

    /// The program's name as it was asked for, for messages.
    pub(crate) fn name(&self) -> &CStr {
        let first = self.candidates.first();
        let first =
            first.and_then(|c| if c.paths.len() > 1 { c.words.first() } else { c.paths.first() });
        first.map_or(c"", |name| name.as_c_str())
    }
}

/// Where a command's child got to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExecStep {
    Session,
    Terminal,
    Streams,
    Groups,
    Confine,
    User,
    Cwd,
    Execute,
    /// Not a failure: this candidate is tried next.
    Trying,
    /// Not a failure: the terminal's master comes with this record.
    Master,
    /// Not a failure: the filter's listener comes with this record, or there is none.
    Listener,
}

const STEPS: [(ExecStep, &str); 11] = [
    (ExecStep::Session, "session"),
    (ExecStep::Terminal, "terminal"),
    (ExecStep::Streams, "streams"),
    (ExecStep::Groups, "groups"),
    (ExecStep::Confine, "confine"),
    (ExecStep::User, "user"),
    (ExecStep::Cwd, "cwd"),
    (ExecStep::Execute, "execute"),
    (ExecStep::Trying, "trying"),
    (ExecStep::Master, "master"),
    (ExecStep::Listener, "listener"),
];

impl ExecStep {
    pub(crate) fn name(self) -> &'static str {
        STEPS.iter().find(|(step, _)| *step == self).map_or("", |(_, name)| name)
    }
}

/// What a child said before it executed its program.
#[derive(Debug)]
pub(crate) struct Progress {
    pub(crate) step: ExecStep,
    pub(crate) candidate: u8,
    pub(crate) errno: i32,
    pub(crate) fd: Option<OwnedFd>,
}

/// Read one record of the child's; None once it has executed or ended.
pub(crate) fn receive_progress(channel: BorrowedFd<'_>) -> io::Result<Option<Progress>> {
    let Some((record, fd)) = pty::receive_record(channel)? else { return Ok(None) };
    let [step, candidate, _, _, errno @ ..] = record;
    let step = STEPS.get(usize::from(step)).map_or(ExecStep::Execute, |(step, _)| *step);
    Ok(Some(Progress { step, candidate, errno: i32::from_ne_bytes(errno), fd }))
}

fn tell(channel: RawFd, step: ExecStep, candidate: usize, errno: i32, fd: Option<RawFd>) {
    let index = STEPS.iter().position(|(known, _)| *known == step).unwrap_or(0);
    let mut record = [0_u8; 8];
    let [at, which, _, _, number @ ..] = &mut record;
    *at = u8::try_from(index).unwrap_or(0);
    *which = u8::try_from(candidate).unwrap_or(u8::MAX);
    number.copy_from_slice(&errno.to_ne_bytes());
    let _ = pty::send_record(channel, record, fd);
}

fn stop_at(channel: RawFd, step: ExecStep, error: &io::Error) -> ! {
    tell(channel, step, 0, error.raw_os_error().unwrap_or(0), None);
    exit_now(127)
}

/// In the child of `fork`: become the command. Only system calls, no allocation.
pub(crate) fn execute(
    exec: &Exec,
    channel: RawFd,
    tasks: &[OwnedFd],
    confine: &dyn Fn() -> io::Result<Option<RawFd>>,
) -> ! {
    let at = |step: ExecStep, result: io::Result<()>| {
        if let Err(error) = result {
            stop_at(channel, step, &error);
        }
    };
    // SAFETY: takes nothing.
    at(ExecStep::Session, check(unsafe { libc::setsid() }));
    at(ExecStep::Groups, join_groups(tasks));
    prefer_for_oom();
    if let Some((devpts, rows, cols)) = exec.terminal {
        at(ExecStep::Terminal, give_terminal(exec, channel, devpts, rows, cols));
    } else {
        at(ExecStep::Streams, give_streams(exec.stdio));
    }
    // SAFETY: takes integers. Marks, not closes: the channel stays until exec.
    let _ =
        unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    // SAFETY: takes an integer.
    let _ = unsafe { libc::umask(0o022) };
    match confine() {
        Ok(listener) => hand_over(channel, listener),
        Err(error) => stop_at(channel, ExecStep::Confine, &error),
    }
    at(ExecStep::User, set_ids(&exec.ids));
    // SAFETY: a NUL-terminated string that outlives the call.
    at(ExecStep::Cwd, check(unsafe { libc::chdir(exec.cwd.as_ptr()) }));
    reset_signals();
    let error = try_candidates(exec, channel);
    stop_at(channel, ExecStep::Execute, &error)
}

/// The listener is aether's: nothing that is executed may ever hold it.
fn hand_over(channel: RawFd, listener: Option<RawFd>) {
    tell(channel, ExecStep::Listener, 0, 0, listener);
    if let Some(fd) = listener {
        // SAFETY: made a moment ago and owned by nobody else; the copy on its way remains.
        let _ = unsafe { libc::close(fd) };
    }
}

fn give_streams(stdio: [RawFd; 3]) -> io::Result<()> {
    for (number, fd) in (0..).zip(stdio) {
        // SAFETY: takes integers; the sources are all above 2, so no copy overwrites a later source.
        check(unsafe { libc::dup2(fd, number) })?;
    }
    Ok(())
}

fn give_terminal(
    exec: &Exec,
    channel: RawFd,
    devpts: RawFd,
    rows: u16,
    cols: u16,
) -> io::Result<()> {
    // The terminal belongs to whom the file system thinks is calling; from an unmapped id there is
    // no other way to give it away. Nothing needs to go back: the child becomes this user anyway.
    // SAFETY: takes an integer.
    let _ = unsafe { libc::setfsgid(exec.ids.gid) };
    // SAFETY: takes an integer.
    let _ = unsafe { libc::setfsuid(exec.ids.uid) };
    let (master, slave) = match pty::open(devpts) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            // Real root has just lost its way past a closed ptmx; it can give the terminal away.
            // SAFETY: takes nothing.
            let me = unsafe { libc::geteuid() };
            // SAFETY: takes an integer.
            let _ = unsafe { libc::setfsuid(me) };
            let opened = pty::open(devpts)?;
            // SAFETY: takes integers.
            check(unsafe { libc::fchown(opened.1, exec.ids.uid, exec.ids.gid) })?;
            opened
        }
        opened => opened?,
    };
    pty::take_control(slave)?;
    // SAFETY: slave was opened above and stays open until the end of this function.
    pty::set_size(unsafe { BorrowedFd::borrow_raw(slave) }, rows, cols)?;
    tell(channel, ExecStep::Master, 0, 0, Some(master));
    give_streams([slave; 3])?;
    // SAFETY: opened above and owned by nobody else.
    let _ = unsafe { libc::close(master) };
    // SAFETY: opened above and owned by nobody else; the copies at 0 to 2 remain.
    let _ = unsafe { libc::close(slave) };
    Ok(())
}

fn try_candidates(exec: &Exec, channel: RawFd) -> io::Error {
    let mut denied = false;
    for (index, candidate) in exec.candidates.iter().enumerate() {
        if let Some(extra) = exec.extra {
            tell(channel, ExecStep::Trying, index, 0, None);
            // SAFETY: takes integers; the copy is not close-on-exec, which is what is wanted.
            let _ = unsafe { libc::dup2(extra, candidate.extra_at) };
        }
        for path in &candidate.paths {
            // SAFETY: a NUL-terminated path and two NULL-terminated arrays of NUL-terminated
            // strings, all owned by `exec`, which lives until the process is replaced.
            unsafe { libc::execve(path.as_ptr(), candidate.argv.as_ptr(), exec.env.as_ptr()) };
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => {}
                Some(libc::EACCES) => denied = true,
                _ => return error,
            }
        }
        if exec.extra.is_some() {
            // SAFETY: the copy made above.
            let _ = unsafe { libc::close(candidate.extra_at) };
        }
    }
    io::Error::from_raw_os_error(if denied { libc::EACCES } else { libc::ENOENT })
}
