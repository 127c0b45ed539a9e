//! Which processors this process may run on. Its children inherit it.

use super::kernel::check_long;
use std::io;

/// Room for 8192 processors, as many as kernels are built for.
const WORDS: usize = 128;

/// Run on these alone.
pub(crate) fn set(cpus: &[u32]) -> io::Result<()> {
    let mut mask = [0_u64; WORDS];
    for cpu in cpus {
        let word = usize::try_from(cpu / 64).ok().and_then(|word| mask.get_mut(word));
        *word.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))? |= 1 << (cpu % 64);
    }
    let (call, size) = (libc::SYS_sched_setaffinity, std::mem::size_of_val(&mask));
    // SAFETY: the mask lives through the call and the size is its own; 0 is this process.
    check_long(unsafe { libc::syscall(call, 0, size, mask.as_ptr()) }).map(drop)
}

/// On how many it may run.
pub(crate) fn count() -> io::Result<u32> {
    let mut mask = [0_u64; WORDS];
    let (call, size) = (libc::SYS_sched_getaffinity, std::mem::size_of_val(&mask));
    // SAFETY: the mask is there to be written and the size is its own; 0 is this process.
    check_long(unsafe { libc::syscall(call, 0, size, mask.as_mut_ptr()) })?;
    Ok(mask.iter().map(|word| word.count_ones()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_processor_and_no_nine_thousandth() {
        assert!(count().is_ok_and(|count| count > 0));
        assert!(set(&[9000]).is_err());
        assert!(set(&[]).is_err());
    }
}
