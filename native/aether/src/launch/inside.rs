//! The new process's part: PID 1 of new namespaces, until it serves. It is a copy of the launcher
//! with one thread; everything here is done once, in order, and a failure is told and is the end.

use super::plan::{self, FileSystem, InsideStep};
use super::report::{Report, Stopwatch, SHOWN};
use super::trip;
use crate::confine::Confinement;
use crate::error::{AtStep, StepError};
use crate::fuse;
use crate::rules::Rules;
use crate::serve::truth::{Meters, Truth};
use crate::serve::{self, Handover};
use crate::spec::LaunchSpec;
use crate::sys::beneath::{self, Kind, Purpose};
use crate::sys::mount::{self, Context, NO_DEVICES, NO_EXEC, NO_SUID, READ_ONLY};
use crate::sys::{caps, fdpass, identity, namespace, reap};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::{self, fs::PermissionsExt};
use std::time::Instant;

/// What the clone brings along.
#[derive(Debug)]
pub(super) struct Arrival<'a> {
    pub(super) spec: LaunchSpec,
    pub(super) steps: &'a [InsideStep],
    pub(super) confinement: Confinement,
    pub(super) listener: OwnedFd,
    pub(super) channel: OwnedFd,
    pub(super) work_v2: Option<OwnedFd>,
    pub(super) work_v1: Vec<OwnedFd>,
    pub(super) meters: Option<Meters>,
}

/// What serving needs: to give files away and to read and write anybody's (`CHOWN`, `DAC_*`,
/// `FOWNER`, `FSETID`, `SETFCAP`), to start commands as anybody with bounded rights (`SETGID`,
/// `SETUID`, `SETPCAP`), to end them (`KILL`), and `SYS_ADMIN` for their seccomp filter and cgroup
/// namespace.
const KEPT: [&str; 11] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_SYS_ADMIN",
    "CAP_SETFCAP",
];

/// Build the sandbox around this process, say so, serve.
pub(super) fn run(arrival: Arrival<'_>) -> ! {
    let mut watch = Stopwatch::default();
    let (built, mut report) = match build(&arrival, &mut watch) {
        Ok(built) => (built, Report::default()),
        Err(error) => (Built::default(), Report::from(error)),
    };
    let failed = !report.step.is_empty();
    report.micros = watch.micros;
    let told = rmp_serde::to_vec_named(&report)
        .is_ok_and(|bytes| fdpass::send(arrival.channel.as_fd(), &bytes, &[]).is_ok());
    if failed || !told {
        reap::exit_now(70);
    }
    let Arrival { spec, confinement, listener, channel, work_v2, work_v1, meters, .. } = arrival;
    drop(channel);
    let truth = built.device.zip(meters).map(|(device, meters)| Truth::new(device, meters));
    serve::run(Handover {
        spec,
        confinement,
        listener,
        work_v2,
        work_v1,
        truth,
        rules: built.rules,
    })
}

/// What serving needs of what was built.
#[derive(Default)]
struct Built {
    /// The connection of the file system that tells of limits.
    device: Option<OwnedFd>,
    rules: Rules,
}

fn build(arrival: &Arrival<'_>, watch: &mut Stopwatch) -> Result<Built, StepError> {
    let since = Instant::now();
    // Never dropped: one of the steps closes what it owns, by number.
    let mut site = ManuallyDrop::new(Site::arrive(arrival).at("receive mounts", "")?);
    watch.add("receive mounts", since);
    for step in arrival.steps {
        let since = Instant::now();
        trip::over(step.name()).at(step.name(), step.path())?;
        match step {
            InsideStep::ApplyFileRules => site.rules.apply(&arrival.spec.files)?,
            other => site.execute(other).at(step.name(), step.path())?,
        }
        watch.add(step.name(), since);
    }
    Ok(Built { device: site.device.take(), rules: std::mem::take(&mut site.rules) })
}

struct Site<'a> {
    arrival: &'a Arrival<'a>,
    root: OwnedFd,
    devices: OwnedFd,
    /// Of a network namespace that is not this one's own: only the launcher could mount it.
    system: Option<OwnedFd>,
    empty: Option<OwnedFd>,
    device: Option<OwnedFd>,
    rules: Rules,
}

impl<'a> Site<'a> {
    /// Wait for the mounts; they come when the id map is written.
    fn arrive(arrival: &'a Arrival<'a>) -> io::Result<Self> {
        let mut bytes = [0; 16];
        let (_, descriptors) = fdpass::receive(arrival.channel.as_fd(), &mut bytes)?;
        let mut descriptors = descriptors.into_iter();
        let (Some(root), Some(devices)) = (descriptors.next(), descriptors.next()) else {
            return Err(io::Error::from_raw_os_error(libc::EPIPE));
        };
        // Files made from here on belong to root inside. The other ids stay aether's, which are
        // not mapped, and by them the kernel decides who may touch this process.
        identity::file_id(0)?;
        namespace::set_umask(0);
        let system = descriptors.next();
        Ok(Self {
            arrival,
            root,
            devices,
            system,
            empty: None,
            device: None,
            rules: Rules::default(),
        })
    }

    fn execute(&mut self, step: &InsideStep) -> io::Result<()> {
        match step {
            InsideStep::AttachRoot => self.attach_root(),
            InsideStep::HideCovers => self.hide_covers(),
            // Says itself which path it is about.
            InsideStep::ApplyFileRules => Ok(()),
            InsideStep::Mend { path, mode, uid, gid } => self.mend(path, *mode, *uid, *gid),
            InsideStep::MakeMountPoint { path, mode } => self.make_mount_point(path, *mode),
            InsideStep::MakeDirectory { path, mode } => self.make_directory(path, *mode),
            InsideStep::Mount { what, at } => self.mount(what, at),
            InsideStep::AttachSystem => self.attach_system(),
            InsideStep::AttachDevices => mount::attach(&self.devices, self.place("dev")?),
            InsideStep::NoUserNamespaces => self.forbid_user_namespaces(),
            InsideStep::Mask { path } => self.mask(path),
            InsideStep::MakeReadOnly { path } => self.make_read_only(path),
            InsideStep::WriteIfMissing { directory, name, text } => {
                self.write_if_missing(directory, name, text)
            }
            InsideStep::Write { directory, name, text } => self.write(directory, name, text),
            InsideStep::ShowTruth => self.show_truth(),
            InsideStep::EnterRoot => mount::pivot(&self.root),
            InsideStep::SetHostname { name } => namespace::set_hostname(name),
            InsideStep::LoopbackUp => namespace::loopback_up(),
            InsideStep::StartSession => start_session(),
            InsideStep::CloseDescriptors => self.close_descriptors(),
            InsideStep::DropCapabilities => drop_capabilities(),
        }
    }

    fn attach_root(&self) -> io::Result<()> {
        let place = beneath::open(File::open("/")?, "newroot", Purpose::Directory)?;
        mount::attach(&self.root, place)
    }

    /// What is to be copied must be attached: here it is under what comes next.
    fn hide_covers(&mut self) -> io::Result<()> {
        let covers = mount::copy(None, c"/covers")?;
        mount::attach(&covers, self.place("proc")?)?;
        self.rules = Rules::new(Some(covers));
        Ok(())
    }

    /// A directory as the layers below have it; what is there instead is somebody's own.
    fn mend(&self, path: &str, mode: u32, uid: u32, gid: u32) -> io::Result<()> {
        let directory = match beneath::open(&self.root, path, Purpose::Change) {
            Err(error) if leads_nowhere(&error) => return Ok(()),
            opened => File::from(opened?),
        };
        unix::fs::fchown(&directory, Some(uid), Some(gid))?;
        // Last: a change of owner may take set-id bits away.
        directory.set_permissions(Permissions::from_mode(mode))
    }

    /// A mount point: a directory, reached without symbolic links.
    fn place(&self, path: &str) -> io::Result<OwnedFd> {
        beneath::open(&self.root, path, Purpose::Directory)
    }

    /// What is no directory gives way, a link to one too: two mounts could meet where it leads, and
    /// masks would be looked for under the wrong one.
    fn make_mount_point(&self, path: &str, mode: u32) -> io::Result<()> {
        match beneath::look(&self.root, path)? {
            Some(Kind::Directory) => return Ok(()),
            Some(_) => beneath::unlink(&self.root, path)?,
            None => {}
        }
        beneath::make_directory(&self.root, path, mode)
    }

    /// Whatever is there instead is somebody's own.
    fn make_directory(&self, path: &str, mode: u32) -> io::Result<()> {
        match beneath::look(&self.root, path)? {
            None => beneath::make_directory(&self.root, path, mode),
            Some(_) => Ok(()),
        }
    }

    fn mount(&self, what: &FileSystem, at: &str) -> io::Result<()> {
        let place = self.place(at)?;
        let context = Context::open(what.kind)?;
        context.string(c"source", what.source)?;
        for (key, value) in what.options {
            context.string(key, value)?;
        }
        mount::attach(context.mount(what.attributes)?, place)
    }

    /// The filter refuses them too; this holds for whatever the filter misses.
    fn forbid_user_namespaces(&self) -> io::Result<()> {
        let file = beneath::open(&self.root, plan::USER_NAMESPACES, Purpose::Write)?;
        File::from(file).write_all(b"0")
    }

    fn mask(&mut self, path: &str) -> io::Result<()> {
        let Some(place) = existing(beneath::open(&self.root, path, Purpose::Place))? else {
            return Ok(());
        };
        let cover = match beneath::look_at(&place)? {
            Kind::Directory => mount::copy(Some(self.empty()?), c"")?,
            _ => mount::copy(Some(self.devices.as_fd()), c"null")?,
        };
        mount::attach(cover, place)
    }

    /// One empty, read-only directory behind all masks of directories. A mount must be attached
    /// before it can be copied; where its first copy lies it is in nobody's way.
    fn empty(&mut self) -> io::Result<BorrowedFd<'_>> {
        if self.empty.is_none() {
            let context = Context::open(c"tmpfs")?;
            context.string(c"source", c"mask")?;
            context.string(c"mode", c"0555")?;
            context.string(c"size", c"4k")?;
            let made = context.mount(READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC)?;
            mount::attach(&made, beneath::open(File::open("/")?, "dev", Purpose::Directory)?)?;
            self.empty = Some(made);
        }
        self.empty
            .as_ref()
            .map(AsFd::as_fd)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    fn make_read_only(&self, path: &str) -> io::Result<()> {
        let Some(place) = existing(beneath::open(&self.root, path, Purpose::Place))? else {
            return Ok(());
        };
        let copy = mount::copy(Some(place.as_fd()), c"")?;
        mount::restrict(&copy, READ_ONLY, None)?;
        mount::attach(copy, place)
    }

    /// Files of a file system of our own over those that tell of the host. Opening them asks its
    /// server, which must not be this process, as it waits: the launcher answers meanwhile. And it
    /// alone holds the connection then, so that its death ends this wait too.
    fn show_truth(&mut self) -> io::Result<()> {
        let device = fuse::open_device("/fuse")?;
        let shown = mount_truth(&device)?;
        mount::attach(&shown, beneath::open(File::open("/")?, "truth", Purpose::Directory)?)?;
        let channel = self.arrival.channel.as_fd();
        fdpass::send(channel, SHOWN, &[device.as_fd()])?;
        drop(device);
        for (_, name, path) in fuse::FILES {
            if let Some(place) = existing(beneath::open(&self.root, path, Purpose::Place))? {
                let name = beneath::c_string(name)?;
                mount::attach(mount::copy(Some(shown.as_fd()), &name)?, place)?;
            }
        }
        fdpass::send(channel, SHOWN, &[])?;
        let (_, mut returned) = fdpass::receive(channel, &mut [0; 16])?;
        self.device = returned.pop();
        Ok(())
    }

    /// In place of whatever is there; a directory of that name stays.
    fn write(&self, place: &str, name: &str, text: &str) -> io::Result<()> {
        let Some(directory) = self.directory(place)? else { return Ok(()) };
        match beneath::look(&directory, name)? {
            Some(Kind::Directory) => return Ok(()),
            Some(_) => beneath::unlink(&directory, name)?,
            None => {}
        }
        File::from(beneath::create(&directory, name, 0o644)?).write_all(text.as_bytes())
    }

    /// It may be behind a link; without one there is nowhere to write.
    fn directory(&self, place: &str) -> io::Result<Option<OwnedFd>> {
        match beneath::follow(&self.root, place, Purpose::Directory) {
            Err(error) if leads_nowhere(&error) || leads_elsewhere(&error) => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn attach_system(&self) -> io::Result<()> {
        let system =
            self.system.as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        mount::attach(system, self.place("sys")?)
    }

    /// A name that is a link is not followed: one that leads nowhere counts as missing and is
    /// replaced.
    fn write_if_missing(&self, place: &str, name: &str, text: &str) -> io::Result<()> {
        let Some(directory) = self.directory(place)? else { return Ok(()) };
        let mut file = match beneath::look(&directory, name)? {
            None => File::from(beneath::create(&directory, name, 0o644)?),
            Some(Kind::File { empty: true }) => {
                File::from(beneath::open(&directory, name, Purpose::Write)?)
            }
            Some(Kind::Link) if self.dangles(&format!("{place}/{name}"))? => {
                beneath::unlink(&directory, name)?;
                File::from(beneath::create(&directory, name, 0o644)?)
            }
            Some(_) => return Ok(()),
        };
        file.write_all(text.as_bytes())
    }

    fn dangles(&self, path: &str) -> io::Result<bool> {
        match beneath::follow(&self.root, path, Purpose::Place) {
            Err(error) if leads_nowhere(&error) => Ok(true),
            Err(error) if leads_elsewhere(&error) => Ok(false),
            opened => opened.map(|_| false),
        }
    }

    fn close_descriptors(&self) -> io::Result<()> {
        let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
        fdpass::place_at(&null, &[0, 1, 2])?;
        drop(null);
        let arrival = self.arrival;
        let mut keep = vec![arrival.channel.as_fd(), arrival.listener.as_fd()];
        keep.extend(arrival.work_v2.iter().map(AsFd::as_fd));
        keep.extend(arrival.work_v1.iter().map(AsFd::as_fd));
        keep.extend(arrival.meters.iter().flat_map(Meters::descriptors));
        keep.extend(self.device.iter().map(AsFd::as_fd));
        keep.extend(self.rules.descriptors());
        fdpass::close_all_but(&keep)
    }
}

/// Readable by everybody inside, by nobody outside.
fn mount_truth(device: &OwnedFd) -> io::Result<OwnedFd> {
    let context = Context::open(c"fuse")?;
    context.string(c"source", c"limits")?;
    let number = beneath::c_string(&device.as_raw_fd().to_string())?;
    let options = [
        (c"fd", number.as_c_str()),
        (c"rootmode", c"40555"),
        (c"user_id", c"0"),
        (c"group_id", c"0"),
    ];
    for (key, value) in options {
        context.string(key, value)?;
    }
    for key in [c"ro", c"allow_other", c"default_permissions"] {
        context.flag(key)?;
    }
    context.mount(READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC)
}

/// Whether a path was not opened because it is missing, or leads through what is no directory, or
/// through links that are not or cannot be followed.
fn leads_nowhere(error: &io::Error) -> bool {
    let nowhere = [libc::ENOENT, libc::ENOTDIR, libc::ELOOP, libc::ENAMETOOLONG];
    error.raw_os_error().is_some_and(|number| nowhere.contains(&number))
}

/// Whether it was not opened because it leads into another mount.
fn leads_elsewhere(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EXDEV)
}

fn existing(opened: io::Result<OwnedFd>) -> io::Result<Option<OwnedFd>> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn start_session() -> io::Result<()> {
    namespace::new_session()?;
    namespace::new_keyring()?;
    namespace::set_umask(0o022);
    reap::unblock_signals()?;
    namespace::set_name(c"aether")
}

fn drop_capabilities() -> io::Result<()> {
    namespace::forbid_dumps()?;
    caps::keep(KEPT.iter().filter_map(|name| caps::by_name(name)).fold(0, |set, bit| set | bit))
}
