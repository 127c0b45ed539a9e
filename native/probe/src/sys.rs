//! The system calls the standard library does not offer.
#![expect(unsafe_code, reason = "system calls")]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) fn bytes(text: &OsStr) -> &[u8] {
    text.as_bytes()
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Child,
    Parent,
}

/// Copy this process; None when that was refused.
pub(crate) fn fork() -> Option<Side> {
    // SAFETY: called before any thread is started, so no lock can be held by one that is gone.
    match unsafe { libc::fork() } {
        0 => Some(Side::Child),
        pid if pid > 0 => Some(Side::Parent),
        _ => None,
    }
}

pub(crate) fn new_session() {
    // SAFETY: takes nothing.
    let _ = unsafe { libc::setsid() };
}

pub(crate) fn leave(status: i32) -> ! {
    // SAFETY: ends the process; takes an integer.
    unsafe { libc::_exit(status) }
}

pub(crate) fn ignore_polite_signals() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: installs "ignore".
        let _ = unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

static RESIZED: AtomicBool = AtomicBool::new(false);

extern "C" fn resized(_signal: libc::c_int) {
    RESIZED.store(true, Ordering::SeqCst);
}

/// From now on a change of size is noticed.
pub(crate) fn watch_size() {
    let handler: extern "C" fn(libc::c_int) = resized;
    // SAFETY: the handler only stores to an atomic, which is safe in a signal handler. The cast to
    // an address is what the interface of `signal` asks for.
    #[expect(clippy::as_conversions, reason = "signal takes the handler's address")]
    let _ = unsafe { libc::signal(libc::SIGWINCH, handler as libc::sighandler_t) };
}

pub(crate) fn wait_for_size() {
    while !RESIZED.load(Ordering::SeqCst) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Rows and columns of standard output, if it is a terminal.
pub(crate) fn terminal_size() -> Option<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ writes one winsize.
    let done = unsafe { libc::ioctl(1, libc::TIOCGWINSZ, &raw mut size) };
    (done == 0).then_some((size.ws_row, size.ws_col))
}

/// Soft and hard limit, `u64::MAX` for none.
pub(crate) fn limit(which: libc::__rlimit_resource_t) -> (u64, u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one rlimit.
    let _ = unsafe { libc::getrlimit(which, &raw mut limit) };
    (limit.rlim_cur, limit.rlim_max)
}
