//! Deliberate failures, so that a test can make every step fail; only in builds for debugging.
//! `AETHER_FAIL_AT=<step>` makes that step fail with EIO, `AETHER_STALL_AT=<step>` makes it hang.

use std::io;

#[cfg(not(debug_assertions))]
#[expect(clippy::unnecessary_wraps, reason = "the same signature as the one that fails")]
pub(super) fn over(_step: &str) -> io::Result<()> {
    Ok(())
}

#[cfg(debug_assertions)]
pub(super) fn over(step: &str) -> io::Result<()> {
    let names = |variable| std::env::var(variable).is_ok_and(|wanted| wanted == step);
    if names("AETHER_FAIL_AT") {
        return Err(io::Error::from_raw_os_error(libc::EIO));
    }
    while names("AETHER_STALL_AT") {
        std::thread::park();
    }
    Ok(())
}
