//! How busy a sandbox is: the averages of /proc/loadavg, without looking while nobody asks.
//!
//! The kernel adds up what the sandbox has used of processors. So the use between two looks is known,
//! however far apart they are, and the averages decay over that time at once.

use std::time::Duration;

/// What the three averages go over, seconds.
const SPANS: [f64; 3] = [60.0, 300.0, 900.0];
/// Use over less than this says little about how many are running.
const LEAST: Duration = Duration::from_millis(100);

/// Since the start: nothing was used and nothing ran.
#[derive(Debug, Default)]
pub(super) struct Load {
    looked: Duration,
    used: Duration,
    averages: [f64; 3],
    /// Where the look began that `busy` is of.
    since: (Duration, Duration),
    busy: f64,
}

impl Load {
    /// Look: `age` since the start, in which `used` of processors' time was used.
    pub(super) fn look(&mut self, age: Duration, used: Duration) {
        let (passed, spent) = (age.saturating_sub(self.looked), used.saturating_sub(self.used));
        if passed.is_zero() {
            return;
        }
        let rate = spent.as_secs_f64() / passed.as_secs_f64();
        for (average, span) in self.averages.iter_mut().zip(SPANS) {
            let kept = (-passed.as_secs_f64() / span).exp();
            *average = average.mul_add(kept, rate * (1.0 - kept));
        }
        (self.looked, self.used) = (age, used);
        self.count(age, used);
    }

    fn count(&mut self, age: Duration, used: Duration) {
        let (begun, before) = self.since;
        let passed = age.saturating_sub(begun);
        if passed >= LEAST {
            self.busy = used.saturating_sub(before).as_secs_f64() / passed.as_secs_f64();
            self.since = (age, used);
        }
    }

    /// How many kept processors busy lately; one at least, which asks.
    fn running(&self, processes: u64) -> u64 {
        let most = processes.max(1);
        (1..most)
            .find(|count| f64::from(u32::try_from(*count).unwrap_or(u32::MAX)) + 0.5 >= self.busy)
            .unwrap_or(most)
    }

    /// The line, with how many processes there are and the last one's id.
    pub(super) fn line(&self, processes: u64, last: i32) -> String {
        let [one, five, fifteen] = self.averages;
        let running = self.running(processes);
        format!("{one:.2} {five:.2} {fifteen:.2} {running}/{processes} {last}\n")
    }
}

/// How many processes there are, and the id of the one made last, by what the kernel says of this
/// process id namespace; without that, the largest id.
pub(super) fn processes() -> (u64, i32) {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let (count, largest) = ids.fold((0, 0), |(count, largest), id| (count + 1, id.max(largest)));
    let last = std::fs::read_to_string("/proc/sys/kernel/ns_last_pid").ok();
    (count, last.and_then(|text| text.trim().parse().ok()).unwrap_or(largest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn averages_are_those_of_all_the_time_between_two_looks() {
        let (mut often, mut once) = (Load::default(), Load::default());
        for second in 1..=60 {
            often.look(seconds(second), seconds(2 * second));
        }
        once.look(seconds(60), seconds(120));
        assert_eq!(often.line(9, 7), once.line(9, 7));
        assert_eq!(once.line(9, 7), "1.26 0.36 0.13 2/9 7\n");
        once.look(seconds(3660), seconds(120));
        assert_eq!(once.line(1, 8), "0.00 0.00 0.00 1/1 8\n");
    }

    #[test]
    fn a_second_look_at_once_changes_nothing() {
        let mut load = Load::default();
        load.look(seconds(60), seconds(60));
        let line = load.line(3, 3);
        load.look(seconds(60), seconds(61));
        load.look(seconds(59), seconds(60));
        assert_eq!(load.line(3, 3), line);
    }

    #[test]
    fn no_more_run_than_there_are_and_one_at_least() {
        let mut load = Load::default();
        assert_eq!(load.running(0), 1);
        load.look(seconds(10), seconds(80));
        assert_eq!((load.running(3), load.running(100)), (3, 8));
    }
}
