//! The launcher's part: real root, host mount namespace. What was made is noted as it is made and
//! undone backwards should a later step fail.

use super::ground::Ground;
use super::inside;
use super::plan::{self, HostStep, Plan, IDS_INSIDE};
use super::report::{Report, Stopwatch, SHOWN};
use super::trip;
use crate::confine::Confinement;
use crate::error::{AtStep, StepError};
use crate::fuse;
use crate::serve::truth::Meters;
use crate::spec::LaunchSpec;
use crate::sys::beneath::{self, Purpose};
use crate::sys::clone::{self, Side};
use crate::sys::io::eprint_line;
use crate::sys::mount::{self, Context, NO_DEVICES, NO_SUID, READ_ONLY};
use crate::sys::{fdpass, identity, namespace, reap};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

/// A child that says nothing for so long is given up.
const SILENCE_MS: i32 = if cfg!(debug_assertions) { 1_000 } else { 20_000 };

/// What an upper directory means must not depend on how a host's kernel was configured, and it
/// becomes a layer: it must hold files, not references to other files or to this mount. Besides,
/// `volatile`: a sandbox's own fsync need not reach the disk, and above all its end must not sync
/// the whole file system below it. A work directory is therefore good for one mount only.
const OVERLAY: [(&CStr, &CStr); 6] = [
    (c"source", c"overlay"),
    (c"redirect_dir", c"off"),
    (c"metacopy", c"off"),
    (c"index", c"off"),
    (c"uuid", c"null"),
    // One st_dev and lasting inode numbers, where the layers' numbers leave room for it.
    (c"xino", c"auto"),
];

/// Something made that a failure takes back.
#[derive(Debug)]
enum Made {
    Cgroup(String),
    Directory(String),
    Socket(String),
    Child(i32),
}

/// A sandbox that runs.
#[derive(Debug)]
pub(super) struct Launched {
    pub(super) pid: i32,
    pub(super) micros: BTreeMap<String, u64>,
}

/// One launch under way.
#[derive(Debug)]
struct Site<'a> {
    ground: &'a Ground,
    spec: &'a LaunchSpec,
    plan: &'a Plan,
    confinement: Option<Confinement>,
    made: Vec<Made>,
    watch: Stopwatch,
    listener: Option<OwnedFd>,
    work_v2: Option<OwnedFd>,
    work_v1: Vec<OwnedFd>,
    meters: Option<Meters>,
    child: i32,
    channel: Option<OwnedFd>,
    owners: Option<OwnedFd>,
    devices: Option<OwnedFd>,
    system: Option<OwnedFd>,
    layers: Vec<OwnedFd>,
    upper: Vec<OwnedFd>,
    root: Option<OwnedFd>,
    /// The child's file system, while it is ours to answer.
    shown: Option<OwnedFd>,
}

/// Do the plan. In the new process this does not return.
pub(super) fn launch(ground: &Ground, spec: &LaunchSpec, plan: &Plan) -> Result<Launched, Report> {
    let begun = Instant::now();
    let confinement = Confinement::from_spec(spec)?;
    let mut site = Site {
        ground,
        spec,
        plan,
        confinement: Some(confinement),
        made: Vec::new(),
        watch: Stopwatch::default(),
        listener: None,
        work_v2: None,
        work_v1: Vec::new(),
        meters: None,
        child: 0,
        channel: None,
        owners: None,
        devices: None,
        system: None,
        layers: Vec::new(),
        upper: Vec::new(),
        root: None,
        shown: None,
    };
    for step in &plan.host {
        let since = Instant::now();
        let done = trip::over(step.name()).at(step.name(), step.path());
        if let Err(report) = done.map_err(Report::from).and_then(|()| site.execute(step)) {
            site.undo();
            return Err(report);
        }
        site.watch.add(step.name(), since);
    }
    site.watch.add("total", begun);
    Ok(Launched { pid: site.child, micros: site.watch.micros })
}

impl Site<'_> {
    fn execute(&mut self, step: &HostStep) -> Result<(), Report> {
        let done = match step {
            HostStep::MakeCgroup { path, writes, owner } => {
                self.make_cgroup(path, writes, *owner)?
            }
            HostStep::MakeDirectory { path } => self.make_directory(path),
            HostStep::Listen { socket } => self.listen(socket),
            HostStep::OpenGroups { work_v2, work_v1 } => self.open_groups(work_v2, work_v1)?,
            HostStep::OpenMeters { paths } => self.open_meters(paths)?,
            HostStep::Clone { aether, agent_v2, network } => {
                self.clone(*aether, agent_v2, network.as_deref())
            }
            HostStep::MapIds { base } => self.map_ids(*base),
            HostStep::CopyLayer { path } => self.copy_layer(path),
            HostStep::CopyUpper { parent, upper, work } => self.copy_upper(parent, upper, work),
            HostStep::MountOverlay { .. } => self.mount_overlay()?,
            HostStep::MapDevices => self.map_devices(),
            HostStep::SendMounts => self.send_mounts(),
            HostStep::AwaitReady => self.await_ready()?,
        };
        Ok(done.at(step.name(), step.path())?)
    }

    fn make_cgroup(
        &mut self,
        path: &str,
        writes: &[(String, String)],
        owner: Option<u32>,
    ) -> Result<io::Result<()>, StepError> {
        make_empty_cgroup(path).at("make cgroup", path)?;
        self.made.push(Made::Cgroup(path.to_owned()));
        for (file, text) in writes {
            let file = format!("{path}/{file}");
            let opened = OpenOptions::new().write(true).open(&file);
            let written = opened.and_then(|mut opened| opened.write_all(text.as_bytes()));
            written.at("write cgroup", format!("{file} {text:?}"))?;
        }
        if let Some(owner) = owner {
            for file in
                ["", "/cgroup.procs", "/cgroup.threads", "/cgroup.subtree_control", "/cgroup.kill"]
            {
                let file = format!("{path}{file}");
                give(&file, owner).at("delegate cgroup", file)?;
            }
        }
        Ok(Ok(()))
    }

    fn make_directory(&mut self, path: &str) -> io::Result<()> {
        match fs::DirBuilder::new().mode(0o755).create(path) {
            Ok(()) => self.made.push(Made::Directory(path.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn listen(&mut self, socket: &str) -> io::Result<()> {
        let listener = UnixListener::bind(socket)?;
        self.made.push(Made::Socket(socket.to_owned()));
        fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
        self.listener = Some(listener.into());
        Ok(())
    }

    fn open_groups(
        &mut self,
        work_v2: &str,
        work_v1: &[String],
    ) -> Result<io::Result<()>, StepError> {
        for path in work_v1 {
            let opened = OpenOptions::new().write(true).open(path).at("open groups", path)?;
            self.work_v1.push(opened.into());
        }
        if !work_v2.is_empty() {
            // A copy of the mount, rooted here: from a descriptor on the host's own mount ".."
            // would lead up into the host.
            let path = beneath::c_string(work_v2).at("open groups", work_v2)?;
            self.work_v2 = Some(mount::copy(None, &path).at("open groups", work_v2)?);
        }
        Ok(Ok(()))
    }

    fn open_meters(&mut self, paths: &[String]) -> Result<io::Result<()>, StepError> {
        let open = |path: &String| File::open(path).map(OwnedFd::from).at("open meters", path);
        self.meters = Meters::new(paths.iter().map(open).collect::<Result<_, _>>()?);
        Ok(Ok(()))
    }

    /// The user namespace belongs to the id its maker has, and so does the child: an id that is
    /// not mapped inside. While it is at it in the template, it copies the shared /dev.
    fn clone(&mut self, aether: u32, agent_v2: &str, network: Option<&str>) -> io::Result<()> {
        let agent = match agent_v2 {
            "" => None,
            path => Some(File::open(path)?),
        };
        let network = network.map(File::open).transpose()?;
        let (ours, theirs) = fdpass::pair()?;
        namespace::begin_time()?;
        let side = self.clone_from_template(aether, agent.as_ref(), network.as_ref());
        if !matches!(side, Ok(Side::Child)) {
            self.go_home();
        }
        match side? {
            Side::Parent { child } => {
                self.child = child;
                self.made.push(Made::Child(child));
                self.channel = Some(ours);
                Ok(())
            }
            Side::Child => self.become_inside(theirs),
        }
    }

    fn clone_from_template(
        &mut self,
        aether: u32,
        agent: Option<&File>,
        network: Option<&File>,
    ) -> io::Result<Side> {
        namespace::enter_mounts(&self.ground.template)?;
        self.devices = Some(mount::copy(None, c"/dev")?);
        if let Some(network) = network {
            self.enter_network(network)?;
        }
        // In this group, too, so that files delegated to it can be opened whatever its fs ids.
        identity::become_id(aether, &[aether])?;
        let namespaces = clone::NEW_USER
            | clone::NEW_MOUNT
            | clone::NEW_PID
            | clone::NEW_IPC
            | clone::NEW_UTS
            | network.map_or(clone::NEW_NET, |_| 0);
        clone::clone(namespaces, agent.map(AsFd::as_fd))
    }

    /// Its owner is the host's user namespace: root inside has no power over it, not to change it
    /// nor to open raw sockets. Only here can its /sys be mounted, for the same reason.
    fn enter_network(&mut self, network: &File) -> io::Result<()> {
        namespace::enter_network(network)?;
        let system = Context::open(plan::SYS.kind)?;
        system.string(c"source", plan::SYS.source)?;
        self.system = Some(system.mount(plan::SYS.attributes)?);
        Ok(())
    }

    /// Back to root in the host's mounts. A launcher that cannot is of no use to anybody.
    fn go_home(&self) {
        let home = identity::become_id(0, &[])
            .and_then(|()| namespace::enter_mounts(&self.ground.host))
            .and_then(|()| match self.spec.network {
                Some(_) => namespace::enter_network(&self.ground.network),
                None => Ok(()),
            });
        if let Err(error) = home {
            eprint_line(&format!("aether launch: cannot return to the host: {error}"));
            reap::exit_now(71);
        }
    }

    fn become_inside(&mut self, channel: OwnedFd) -> ! {
        let (Some(confinement), Some(listener)) = (self.confinement.take(), self.listener.take())
        else {
            reap::exit_now(70)
        };
        inside::run(inside::Arrival {
            spec: self.spec.clone(),
            steps: &self.plan.inside,
            confinement,
            listener,
            channel,
            work_v2: self.work_v2.take(),
            work_v1: std::mem::take(&mut self.work_v1),
            meters: self.meters.take(),
        })
    }

    fn map_ids(&mut self, base: u32) -> io::Result<()> {
        let map = format!("0 {base} {IDS_INSIDE}");
        let child = self.child;
        for file in ["uid_map", "gid_map"] {
            let mut file = OpenOptions::new().write(true).open(format!("/proc/{child}/{file}"))?;
            file.write_all(map.as_bytes())?;
        }
        self.owners = Some(File::open(format!("/proc/{child}/ns/user"))?.into());
        Ok(())
    }

    fn copy_mapped(&self, path: &str, attributes: u64) -> io::Result<OwnedFd> {
        let copy = mount::copy(None, &beneath::c_string(path)?)?;
        mount::restrict(&copy, attributes, self.owners.as_ref().map(AsFd::as_fd))?;
        Ok(copy)
    }

    fn copy_layer(&mut self, path: &str) -> io::Result<()> {
        let layer = self.copy_mapped(path, READ_ONLY | NO_DEVICES)?;
        self.layers.push(layer);
        Ok(())
    }

    fn copy_upper(&mut self, parent: &str, upper: &str, work: &str) -> io::Result<()> {
        let parent = self.copy_mapped(parent, NO_DEVICES)?;
        for path in [upper, work] {
            self.upper.push(beneath::open(&parent, path, Purpose::Directory)?);
        }
        // Closing the last descriptor of an unattached mount takes it apart under the others.
        self.layers.push(parent);
        Ok(())
    }

    fn mount_overlay(&mut self) -> Result<io::Result<()>, StepError> {
        let context = Context::open(c"overlay").at("mount overlay", "/")?;
        match self.fill_overlay(&context) {
            Ok(root) => self.root = Some(root),
            Err(error) => {
                let path = format!("/ ({})", context.complaint());
                return Err(StepError::new("mount overlay", path, error));
            }
        }
        Ok(Ok(()))
    }

    fn fill_overlay(&self, context: &Context) -> io::Result<OwnedFd> {
        for layer in self.layers.iter().take(self.spec.layers.len()) {
            context.descriptor(c"lowerdir+", layer.as_fd())?;
        }
        for (key, directory) in [c"upperdir", c"workdir"].into_iter().zip(&self.upper) {
            context.descriptor(key, directory.as_fd())?;
        }
        for (key, value) in OVERLAY {
            context.string(key, value)?;
        }
        context.flag(c"volatile")?;
        // Overlay works in the upper directory with the credentials of this moment. Our own ids
        // are not mapped there; all the rest of root is wanted (trusted.* attributes, devices).
        identity::file_id(self.spec.uid_base)?;
        let mounted = context.mount(NO_DEVICES);
        identity::file_id(0)?;
        mounted
    }

    fn map_devices(&mut self) -> io::Result<()> {
        let Some(devices) = &self.devices else { return Ok(()) };
        mount::restrict(devices, READ_ONLY | NO_SUID, self.owners.as_ref().map(AsFd::as_fd))
    }

    fn send_mounts(&mut self) -> io::Result<()> {
        let (Some(channel), Some(root), Some(devices)) = (&self.channel, &self.root, &self.devices)
        else {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        };
        let mut mounts = vec![root.as_fd(), devices.as_fd()];
        mounts.extend(self.system.as_ref().map(AsFd::as_fd));
        fdpass::send(channel.as_fd(), b"mounts", &mounts)
    }

    fn await_ready(&mut self) -> Result<io::Result<()>, Report> {
        let mut bytes = [0; 8192];
        let message = loop {
            let heard = self.hear(&mut bytes).at("await ready", &self.spec.id)?;
            let Some((length, sent)) = heard else {
                return Err(self.lost(libc::ETIMEDOUT, "child silent"));
            };
            let message = bytes.get(..length).unwrap_or_default();
            if message != SHOWN {
                break message;
            }
            self.answer_for(sent).at("await ready", &self.spec.id)?;
        };
        let heard = rmp_serde::from_slice::<Report>(message);
        match heard {
            Ok(report) if report.step.is_empty() => self.watch.micros.extend(report.micros),
            Ok(report) => return Err(report),
            Err(_) => return Err(self.lost(libc::EPIPE, "child died without a word")),
        }
        Ok(Ok(()))
    }

    /// The length of the child's message, and what came with it; `None` if it says nothing.
    fn hear(&self, bytes: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
        let Some(channel) = &self.channel else {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        };
        loop {
            let asked = self.shown.as_ref().unwrap_or(channel);
            match fdpass::wait_readable([channel.as_fd(), asked.as_fd()], SILENCE_MS)? {
                [false, false] => return Ok(None),
                [true, _] => return fdpass::receive(channel.as_fd(), bytes).map(Some),
                // Nobody reads yet, so there is nothing to say.
                [false, true] => fuse::serve(asked, |_| String::new()).map(drop)?,
            }
        }
    }

    /// Take over the child's file system, or give it back.
    fn answer_for(&mut self, sent: Vec<OwnedFd>) -> io::Result<()> {
        let shown = std::mem::replace(&mut self.shown, sent.into_iter().next());
        match (&self.channel, shown) {
            (Some(channel), Some(shown)) => fdpass::send(channel.as_fd(), SHOWN, &[shown.as_fd()]),
            _ => Ok(()),
        }
    }

    fn lost(&self, errno: i32, why: &str) -> Report {
        let (step, path) = ("await ready".to_owned(), self.spec.id.clone());
        let message = format!("{step} {path}: {why}");
        Report { step, path, errno, message, micros: BTreeMap::new() }
    }

    fn undo(&mut self) {
        // Nothing here may be held open by us when the child is gone, nor may it wait for us.
        self.root = None;
        self.shown = None;
        while let Some(made) = self.made.pop() {
            if let Err(error) = made.undo() {
                eprint_line(&format!("aether launch: undoing {made:?}: {error}"));
            }
        }
    }
}

impl Made {
    fn undo(&self) -> io::Result<()> {
        match self {
            Self::Cgroup(path) => remove_cgroup(path),
            // Made by this launch, and no command ever ran: all in it is the launch's own.
            Self::Directory(path) => fs::remove_dir_all(path),
            Self::Socket(path) => fs::remove_file(path),
            Self::Child(pid) => {
                reap::kill(*pid);
                let _ = reap::wait_for(*pid);
                Ok(())
            }
        }
    }
}

/// One that is left over is used anew only if nothing is in it: the kernel removes no other.
fn make_empty_cgroup(path: &str) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_dir(path).map_err(|_| error)?;
            fs::create_dir(path)
        }
        done => done,
    }
}

/// A cgroup can stay busy for a moment after its last process was waited for.
fn remove_cgroup(path: &str) -> io::Result<()> {
    for _ in 0..100 {
        match fs::remove_dir(path) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            done => return done,
        }
    }
    fs::remove_dir(path)
}

/// Owner and group: aether reaches it by its group, whatever its file-system id is at the time.
fn give(path: &str, owner: u32) -> io::Result<()> {
    let mode = match fs::symlink_metadata(path) {
        Ok(about) => about.permissions().mode(),
        // cgroup v1 has fewer files.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    std::os::unix::fs::chown(path, Some(owner), Some(owner))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode | 0o020))
}
