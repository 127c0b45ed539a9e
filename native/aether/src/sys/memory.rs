//! What the allocator keeps back: PID 1 lives in every sandbox, so what it holds counts.

/// Large blocks come from mmap and go back at once; without this glibc raises the threshold at the
/// first large block that is freed and keeps everything afterwards.
pub(crate) fn keep_little() {
    // SAFETY: mallopt takes two integers and is called before anything depends on its effect.
    let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024) };
    // SAFETY: as above.
    let _ = unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024) };
    // SAFETY: as above.
    let _ = unsafe { libc::mallopt(libc::M_TOP_PAD, 0) };
}

/// Give free pages back to the kernel.
pub(crate) fn trim() {
    // SAFETY: takes the padding to keep; the allocator's own locks make it safe at any time.
    let _ = unsafe { libc::malloc_trim(0) };
}
