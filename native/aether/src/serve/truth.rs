//! What programs inside are told of the machine they run on: their limits, not the host's.
//!
//! Each text is made from what the kernel enforces at that moment (the sandbox's control groups), so a
//! change of limits needs no word here.

use super::load::{self, Load};
use crate::fuse::{self, File};
use crate::sys::{affinity, clock};
use std::fmt::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

/// Requests answered before the rest of the loop has its turn again.
const AT_ONCE: usize = 16;
/// A text is not made anew within this time: who reads all the time costs little, and who reads in
/// pieces gets pieces of one text.
const FRESH: Duration = Duration::from_millis(1);
/// Of one of the control group's files; the longest has some kilobytes.
const LONGEST: usize = 16 << 10;
/// Over which a quota of version 1 goes, microseconds: what the edge sets.
const PERIOD: u64 = 100_000;
/// Ticks of processor time in /proc/stat, a second.
const TICKS: u64 = 100;

/// The lines of /proc/cpuinfo on one processor: the same for all sandboxes of a host, read once by
/// the launcher they are copies of.
static PROCESSOR: OnceLock<String> = OnceLock::new();

/// Look at the host.
pub(crate) fn learn() {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let _ = PROCESSOR.set(processors.split("\n\n").next().unwrap_or_default().to_owned());
}

/// The open connection and files it takes.
#[derive(Debug)]
pub(crate) struct Truth {
    device: OwnedFd,
    meters: Meters,
    load: Load,
    kept: Option<(File, Instant, String)>,
}

/// Control files, open for reading whatever this process's rights.
#[derive(Debug)]
pub(crate) struct Meters {
    pub(crate) limit: OwnedFd,
    pub(crate) usage: OwnedFd,
    pub(crate) stat: OwnedFd,
    pub(crate) cpu: OwnedFd,
    pub(crate) quota: OwnedFd,
}

impl Meters {
    pub(crate) fn new(files: Vec<OwnedFd>) -> Option<Self> {
        let [limit, usage, stat, cpu, quota] = <[OwnedFd; 5]>::try_from(files).ok()?;
        Some(Self { limit, usage, stat, cpu, quota })
    }

    /// As many as its share of time, rounded up; no more than there are.
    fn processors(&self) -> u32 {
        let all = affinity::count().unwrap_or(1).max(1);
        processors_for(&text_of(&self.quota)).map_or(all, |share| share.clamp(1, all))
    }

    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 5] {
        [&self.limit, &self.usage, &self.stat, &self.cpu, &self.quota].map(AsFd::as_fd)
    }
}

impl Truth {
    pub(crate) fn new(device: OwnedFd, meters: Meters) -> Self {
        Self { device, meters, load: Load::default(), kept: None }
    }

    pub(super) fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// How many processors the sandbox may use.
    pub(super) fn processors(&self) -> u32 {
        self.meters.processors()
    }

    /// Answer who waits. False once there is nothing more to come.
    pub(super) fn tell(&mut self) -> bool {
        let Self { device, meters, load, kept } = self;
        for _ in 0..AT_ONCE {
            match fuse::serve(&*device, |file| fresh(file, meters, load, kept)) {
                Ok(true) => {}
                Ok(false) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    pub(super) fn forget(&mut self) {
        self.kept = None;
    }
}

fn fresh(
    file: File,
    meters: &Meters,
    load: &mut Load,
    kept: &mut Option<(File, Instant, String)>,
) -> String {
    let now = Instant::now();
    if let Some((_, _, text)) =
        kept.as_ref().filter(|(known, at, _)| *known == file && now.duration_since(*at) < FRESH)
    {
        return text.clone();
    }
    let text = make(file, meters, load);
    *kept = Some((file, now, text.clone()));
    text
}

fn make(file: File, meters: &Meters, load: &mut Load) -> String {
    let processors = meters.processors();
    let spent = || processor_time(&text_of(&meters.cpu));
    let age = clock::since_start();
    match file {
        File::Memory => memory(&Memory::read(meters)),
        File::Processors => processor_list(PROCESSOR.get_or_init(String::new), processors),
        File::Statistics => statistics(spent(), ticks(age), processors, started(age)),
        File::Uptime => uptime(spent(), ticks(age), processors),
        File::Load => {
            let (user, system) = spent();
            load.look(age, Duration::from_millis((user + system) * (1000 / TICKS)));
            let (count, last) = load::processes();
            load.line(count, last)
        }
        File::Online if processors == 1 => "0\n".to_owned(),
        File::Online => format!("0-{}\n", processors - 1),
    }
}

/// In bytes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    total: u64,
    usage: u64,
    cached: u64,
    shared: u64,
    active: u64,
    inactive: u64,
    anonymous: u64,
}

impl Memory {
    fn read(meters: &Meters) -> Self {
        let host = rustix::system::sysinfo();
        let host = host.totalram.saturating_mul(u64::from(host.mem_unit.max(1)));
        let usage = text_of(&meters.usage).trim().parse().unwrap_or(0);
        let limit = text_of(&meters.limit).trim().parse().unwrap_or(u64::MAX);
        Self::from_stat(limit.min(host), usage, &text_of(&meters.stat))
    }

    /// Of both versions of control groups; version 1 says of a group and all below it `total_`.
    fn from_stat(total: u64, usage: u64, stat: &str) -> Self {
        let of = |names: [&str; 2]| names.iter().find_map(|name| value(stat, name)).unwrap_or(0);
        Self {
            total,
            usage: usage.min(total),
            cached: of(["total_cache", "file"]),
            shared: of(["total_shmem", "shmem"]),
            active: of(["total_active_file", "active_file"]),
            inactive: of(["total_inactive_file", "inactive_file"]),
            anonymous: of(["total_rss", "anon"]),
        }
    }
}

fn memory(memory: &Memory) -> String {
    let free = memory.total - memory.usage;
    // What the kernel would take back before it kills for want of memory.
    let available = memory.total.min(free + memory.active + memory.inactive);
    let lines = [
        ("MemTotal", memory.total),
        ("MemFree", free),
        ("MemAvailable", available),
        ("Buffers", 0),
        ("Cached", memory.cached),
        ("SwapCached", 0),
        ("Active", memory.active),
        ("Inactive", memory.inactive + memory.anonymous),
        ("Active(file)", memory.active),
        ("Inactive(file)", memory.inactive),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("AnonPages", memory.anonymous),
        ("Mapped", 0),
        ("Shmem", memory.shared),
        ("Slab", 0),
        ("SReclaimable", 0),
        ("SUnreclaim", 0),
    ];
    // As wide as the kernel writes it: places stay the same while a reader goes through.
    let line =
        |(name, bytes): (&str, u64)| format!("{:<15}{:>9} kB\n", format!("{name}:"), bytes >> 10);
    lines.into_iter().map(line).collect()
}

/// As many as there are, numbered from 0.
fn processor_list(one: &str, processors: u32) -> String {
    let mut text =
        String::with_capacity((one.len() + 2) * usize::try_from(processors).unwrap_or(1));
    for number in 0..processors {
        for line in one.lines() {
            let name = line.split(':').next().unwrap_or_default();
            let value = match name.trim_end() {
                "processor" | "core id" | "apicid" | "initial apicid" => number,
                "siblings" | "cpu cores" => processors,
                "physical id" => 0,
                _ => {
                    let _ = writeln!(text, "{line}");
                    continue;
                }
            };
            let _ = writeln!(text, "{name}: {value}");
        }
        text.push('\n');
    }
    text
}

/// Of a quota in a period, both in microseconds: `cpu.max` has both, version 1 has the quota alone.
/// `None` without a quota: `max`, or -1.
fn processors_for(quota: &str) -> Option<u32> {
    let mut words = quota.split_whitespace();
    let quota: u64 = words.next()?.parse().ok()?;
    let period = words.next().and_then(|word| word.parse().ok()).unwrap_or(PERIOD).max(1);
    u32::try_from(quota.div_ceil(period)).ok()
}

/// Ticks spent in programs and in the kernel, of both versions of control groups.
fn processor_time(stat: &str) -> (u64, u64) {
    let of = |micros, old| {
        let version_2 = value(stat, micros).map(|micros| micros / (1_000_000 / TICKS));
        version_2.or_else(|| value(stat, old)).unwrap_or(0)
    };
    (of("user_usec", "user"), of("system_usec", "system"))
}

fn ticks(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(0) / (1000 / TICKS)
}

/// When that was, seconds since the epoch.
fn started(age: Duration) -> u64 {
    let begun = SystemTime::now().checked_sub(age);
    let since = begun.and_then(|begun| begun.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}

/// Ticks in which its processors had nothing of its own to do.
fn idle((user, system): (u64, u64), age: u64, processors: u32) -> u64 {
    (age * u64::from(processors)).saturating_sub(user + system)
}

fn uptime(used: (u64, u64), age: u64, processors: u32) -> String {
    let idle = idle(used, age, processors);
    let seconds = |ticks: u64| format!("{}.{:02}", ticks / TICKS, ticks % TICKS);
    format!("{} {}\n", seconds(age), seconds(idle))
}

fn statistics((user, system): (u64, u64), age: u64, processors: u32, started: u64) -> String {
    let count = u64::from(processors);
    let idle = idle((user, system), age, processors);
    let mut text = format!("cpu  {user} 0 {system} {idle} 0 0 0 0 0 0\n");
    for number in 0..processors {
        let share = [user, system, idle].map(|ticks| ticks / count);
        let _ = writeln!(text, "cpu{number} {} 0 {} {} 0 0 0 0 0 0", share[0], share[1], share[2]);
    }
    let _ = writeln!(text, "intr 0\nctxt 0\nbtime {started}\nprocesses 1");
    let _ = writeln!(text, "procs_running 1\nprocs_blocked 0\nsoftirq 0 0 0 0 0 0 0 0 0 0 0");
    text
}

/// The number after a name, in lines of both.
fn value(text: &str, name: &str) -> Option<u64> {
    let of_line = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(of_line)
}

/// A small file of the kernel's, from its start.
fn text_of(file: &OwnedFd) -> String {
    let mut bytes = vec![0; LONGEST];
    let length = rustix::io::pread(file, &mut bytes, 0).unwrap_or(0);
    bytes.truncate(length);
    String::from_utf8(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "cache 4096\nrss 8192\ntotal_cache 40960\ntotal_rss 20480\n\
        total_shmem 4096\ntotal_inactive_file 16384\ntotal_active_file 8192\n";
    const V2: &str = "anon 20480\nfile 40960\nshmem 4096\ninactive_file 16384\nactive_file 8192\n";

    #[test]
    fn both_versions_say_the_same() {
        let (one, two) =
            (Memory::from_stat(1 << 20, 65536, V1), Memory::from_stat(1 << 20, 65536, V2));
        assert_eq!(one, two);
        let text = memory(&one);
        assert!(
            text.starts_with("MemTotal:           1024 kB\nMemFree:             960 kB\n"),
            "{text}"
        );
        assert!(text.contains("MemAvailable:        984 kB\n"), "{text}");
        assert_eq!(processor_time("user 5\nsystem 7\n"), (5, 7));
        assert_eq!(processor_time("usage_usec 1\nuser_usec 50000\nsystem_usec 70000\n"), (5, 7));
    }

    #[test]
    fn a_share_of_time_is_rounded_up_to_processors() {
        assert_eq!(processors_for("1000\n"), Some(1));
        assert_eq!(processors_for("150000\n"), Some(2));
        assert_eq!(processors_for("200000 100000\n"), Some(2));
        assert_eq!(processors_for("-1\n"), None);
        assert_eq!(processors_for("max 100000\n"), None);
    }

    #[test]
    fn more_used_than_there_is_leaves_nothing_free() {
        let text = memory(&Memory::from_stat(1 << 20, 2 << 20, ""));
        assert!(text.contains("MemFree:               0 kB\n"), "{text}");
    }

    #[test]
    fn processors_are_numbered_from_the_first() {
        let text = processor_list("processor\t: 5\nmodel name\t: x\nsiblings\t: 64", 2);
        let one = |number| format!("processor\t: {number}\nmodel name\t: x\nsiblings\t: 2\n\n");
        assert_eq!(text, one(0) + &one(1));
        assert_eq!(uptime((10, 4), 105, 2), "1.05 1.96\n");
        assert_eq!(uptime((999, 4), 105, 2), "1.05 0.00\n");
        let text = statistics((10, 4), 100, 2, 99);
        assert!(text.starts_with("cpu  10 0 4 186 0 0 0 0 0 0\ncpu0 5 0 2 93 "), "{text}");
        assert!(text.contains("\ncpu1 5 0 2 93 ") && text.contains("\nbtime 99\n"), "{text}");
    }
}
