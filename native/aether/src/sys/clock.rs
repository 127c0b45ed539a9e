//! The time since the start, as processes of this time namespace see it.

use std::time::Duration;

/// Since this sandbox began; where the kernel has no time namespaces, since the host did. The same
/// clock that processes' start times are told by.
pub(crate) fn since_start() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure lives through the call, which fills it in.
    if unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) } != 0 {
        return Duration::ZERO;
    }
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}
