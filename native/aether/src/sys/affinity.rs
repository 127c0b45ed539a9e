//! Which processors this process may run on. Its children inherit it.

use super::kernel::check_long;
use std::io;

/// Room for 8192 processors, as many as kernels are built for.
const WORDS: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Mask([u64; WORDS]);

impl Mask {
    fn has(&self, cpu: usize) -> bool {
        self.0.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1)
    }

    fn add(&mut self, cpu: usize) {
        if let Some(word) = self.0.get_mut(cpu / 64) {
            *word |= 1 << (cpu % 64);
        }
    }

    fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// So many of these: `first` and those after it, around the end.
    fn some(&self, count: u32, first: usize) -> Self {
        let mut some = Self([0; WORDS]);
        let mut left = count;
        for cpu in (first..WORDS * 64).chain(0..first) {
            if left > 0 && self.has(cpu) {
                some.add(cpu);
                left -= 1;
            }
        }
        some
    }
}

fn mine() -> io::Result<Mask> {
    let mut mask = [0_u64; WORDS];
    let (call, size) = (libc::SYS_sched_getaffinity, std::mem::size_of_val(&mask));
    // SAFETY: the mask is there to be written and the size is its own; 0 is this process.
    check_long(unsafe { libc::syscall(call, 0, size, mask.as_mut_ptr()) })?;
    Ok(Mask(mask))
}

/// On how many it may run.
pub(crate) fn count() -> io::Result<u32> {
    mine().map(|mask| mask.count())
}

/// Run on no more than so many from now on: where it is, and beside that. Allocates nothing.
pub(crate) fn narrow(count: u32) -> io::Result<()> {
    let mask = mine()?;
    if count == 0 || count >= mask.count() {
        return Ok(());
    }
    // SAFETY: no arguments.
    let here = usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0);
    let mask = mask.some(count, here);
    let (call, size) = (libc::SYS_sched_setaffinity, std::mem::size_of_val(&mask.0));
    // SAFETY: the mask lives through the call and the size is its own; 0 is this process.
    check_long(unsafe { libc::syscall(call, 0, size, mask.0.as_ptr()) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cpus: &[usize]) -> Mask {
        let mut mask = Mask([0; WORDS]);
        cpus.iter().for_each(|cpu| mask.add(*cpu));
        mask
    }

    #[test]
    fn some_begin_where_it_is_and_go_around() {
        let all = of(&[0, 2, 63, 64, 8191]);
        assert_eq!(all.some(1, 2), of(&[2]));
        assert_eq!(all.some(3, 63), of(&[63, 64, 8191]));
        assert_eq!(all.some(3, 64), of(&[64, 8191, 0]));
        assert_eq!(all.some(2, 1), of(&[2, 63]));
        assert_eq!(all.some(9, 0), all);
    }

    #[test]
    fn there_is_a_processor() {
        assert!(count().is_ok_and(|count| count > 0));
        assert!(narrow(u32::MAX).is_ok());
    }
}
