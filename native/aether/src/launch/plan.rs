//! What will be done to make a sandbox, as values: made without root, shown by `--plan`, executed
//! by `host.rs` (outside) and `inside.rs` (in the new process).

use crate::error::StepError;
use crate::spec::{CgroupDir, LaunchSpec, Mend, Meters};
use crate::sys::mount::{NO_DEVICES, NO_EXEC, NO_SUID, READ_ONLY};
use std::ffi::CStr;
use std::io;

/// Ids of a sandbox: 0 to 65534 of a run are its own, the last is aether's.
pub(crate) const IDS_INSIDE: u32 = 65535;

/// Everything for one sandbox, in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) host: Vec<HostStep>,
    pub(crate) inside: Vec<InsideStep>,
}

/// Done by the launcher, as real root, in the host's mount namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HostStep {
    MakeCgroup { path: String, writes: Vec<(String, String)>, owner: Option<u32> },
    MakeDirectory { path: String },
    Listen { socket: String },
    OpenGroups { work_v2: String, work_v1: Vec<String> },
    OpenMeters { paths: Vec<String> },
    Clone { aether: u32, agent_v2: String, network: Option<String> },
    MapIds { base: u32 },
    CopyLayer { path: String },
    CopyUpper { parent: String, upper: String, work: String },
    MountOverlay { layers: usize },
    MapDevices,
    SendMounts,
    AwaitReady,
}

/// Done by the new process, as all-powerful in its own user namespace and nobody outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InsideStep {
    AttachRoot,
    HideCovers,
    Mend { path: String, mode: u32, uid: u32, gid: u32 },
    MakeMountPoint { path: &'static str, mode: u32 },
    MakeDirectory { path: &'static str, mode: u32 },
    Mount { what: &'static FileSystem, at: &'static str },
    AttachSystem,
    AttachDevices,
    NoUserNamespaces,
    Mask { path: String },
    MakeReadOnly { path: String },
    WriteIfMissing { directory: &'static str, name: &'static str, text: String },
    Write { directory: &'static str, name: &'static str, text: String },
    ShowTruth,
    EnterRoot,
    ApplyFileRules,
    SetHostname { name: String },
    LoopbackUp,
    StartSession,
    CloseDescriptors,
    DropCapabilities,
}

/// A file system every sandbox gets one of.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub(crate) kind: &'static CStr,
    /// What listings of mounts call it.
    pub(crate) source: &'static CStr,
    pub(crate) options: &'static [(&'static CStr, &'static CStr)],
    pub(crate) attributes: u64,
}

const QUIET: u64 = NO_SUID | NO_DEVICES | NO_EXEC;

static PROC: FileSystem =
    FileSystem { kind: c"proc", source: c"proc", options: &[], attributes: QUIET };
pub(super) static SYS: FileSystem =
    FileSystem { kind: c"sysfs", source: c"sysfs", options: &[], attributes: QUIET | READ_ONLY };
static PTS: FileSystem = FileSystem {
    kind: c"devpts",
    source: c"devpts",
    options: &[(c"mode", c"0620"), (c"ptmxmode", c"0666"), (c"gid", c"5")],
    attributes: NO_SUID | NO_EXEC,
};
static SHM: FileSystem = FileSystem {
    kind: c"tmpfs",
    source: c"shm",
    options: &[(c"size", c"64m"), (c"mode", c"1777")],
    attributes: QUIET,
};
static MQUEUE: FileSystem =
    FileSystem { kind: c"mqueue", source: c"mqueue", options: &[], attributes: QUIET };

/// Where something is mounted, with the mode should the image lack it.
const MOUNT_POINTS: [(&str, u32); 3] = [("proc", 0o555), ("sys", 0o555), ("dev", 0o755)];

/// Directories every sandbox has, unless something else is there.
const DIRECTORIES: [(&str, u32); 2] = [("etc", 0o755), ("tmp", 0o1777)];

/// Plan a launch. Pure; refuses what could not be launched safely.
pub(crate) fn plan(spec: &LaunchSpec) -> Result<Plan, StepError> {
    let aether = check(spec)?;
    Ok(Plan { host: host_steps(spec, aether), inside: inside_steps(spec) })
}

fn host_steps(spec: &LaunchSpec, aether: u32) -> Vec<HostStep> {
    let cgroup = |dir: &CgroupDir| HostStep::MakeCgroup {
        path: dir.path.clone(),
        writes: dir.writes.clone(),
        owner: dir.delegate.then_some(aether),
    };
    let mut steps: Vec<HostStep> = spec.cgroups.iter().map(cgroup).collect();
    steps.push(HostStep::MakeDirectory { path: spec.upper.clone() });
    steps.push(HostStep::MakeDirectory { path: spec.work.clone() });
    steps.push(HostStep::Listen { socket: spec.socket.clone() });
    steps.push(HostStep::OpenGroups {
        work_v2: spec.work_v2.clone(),
        work_v1: spec.work_v1.clone(),
    });
    if let Some(meters) = &spec.meters {
        let paths = meters.paths().map(String::clone).to_vec();
        steps.push(HostStep::OpenMeters { paths });
    }
    let network = spec.network.as_ref().map(|network| network.namespace.clone());
    steps.push(HostStep::Clone { aether, agent_v2: spec.agent_v2.clone(), network });
    steps.push(HostStep::MapIds { base: spec.uid_base });
    steps.extend(spec.layers.iter().map(|path| HostStep::CopyLayer { path: path.clone() }));
    let (parent, upper, work) = common_parent(&spec.upper, &spec.work);
    steps.push(HostStep::CopyUpper { parent, upper, work });
    steps.push(HostStep::MountOverlay { layers: spec.layers.len() });
    steps.extend([HostStep::MapDevices, HostStep::SendMounts, HostStep::AwaitReady]);
    steps
}

fn inside_steps(spec: &LaunchSpec) -> Vec<InsideStep> {
    let mut steps = vec![InsideStep::AttachRoot];
    // Before anything is mounted in it: a path shall mean the sandbox's own directory.
    steps.extend(spec.mends.iter().map(mend));
    steps.extend(MOUNT_POINTS.map(|(path, mode)| InsideStep::MakeMountPoint { path, mode }));
    steps.extend(DIRECTORIES.map(|(path, mode)| InsideStep::MakeDirectory { path, mode }));
    if spec.files_change || !spec.files.is_empty() {
        steps.push(InsideStep::HideCovers);
    }
    steps.extend([
        InsideStep::Mount { what: &PROC, at: "proc" },
        match spec.network {
            None => InsideStep::Mount { what: &SYS, at: "sys" },
            Some(_) => InsideStep::AttachSystem,
        },
        InsideStep::AttachDevices,
        InsideStep::Mount { what: &PTS, at: "dev/pts" },
        InsideStep::Mount { what: &SHM, at: "dev/shm" },
        InsideStep::Mount { what: &MQUEUE, at: "dev/mqueue" },
    ]);
    // All that the profile is for.
    if spec.seccomp != "loose" {
        steps.push(InsideStep::NoUserNamespaces);
    }
    // Read-only first: a mask may lie inside, and its mount would be hidden under a later one.
    let read_only = |path: &String| InsideStep::MakeReadOnly { path: path.clone() };
    steps.extend(spec.readonly_paths.iter().map(read_only));
    steps.extend(spec.masked_paths.iter().map(|path| InsideStep::Mask { path: path.clone() }));
    steps.extend(texts(spec).into_iter().map(|(name, text)| InsideStep::WriteIfMissing {
        directory: "etc",
        name,
        text,
    }));
    if let Some(network) = &spec.network {
        let server = |address: &String| format!("nameserver {address}\n");
        let text = network.resolvers.iter().map(server).collect();
        steps.push(InsideStep::Write { directory: "etc", name: "resolv.conf", text });
    }
    if spec.meters.is_some() {
        steps.push(InsideStep::ShowTruth);
    }
    steps.push(InsideStep::EnterRoot);
    if !spec.files.is_empty() {
        steps.push(InsideStep::ApplyFileRules);
    }
    steps.push(InsideStep::SetHostname { name: spec.hostname.clone() });
    if spec.network.is_none() {
        steps.push(InsideStep::LoopbackUp);
    }
    steps.extend([
        InsideStep::StartSession,
        InsideStep::CloseDescriptors,
        InsideStep::DropCapabilities,
    ]);
    steps
}

/// An id no sandbox has is seen inside as the last that one has.
fn mend((path, mode, uid, gid): &Mend) -> InsideStep {
    let inside = |id: &u32| (*id).min(IDS_INSIDE - 1);
    let (uid, gid) = (inside(uid), inside(gid));
    InsideStep::Mend { path: path.clone(), mode: mode & 0o7777, uid, gid }
}

fn texts(spec: &LaunchSpec) -> Vec<(&'static str, String)> {
    let name = &spec.hostname;
    let mut texts = vec![
        ("hostname", format!("{name}\n")),
        ("hosts", format!("127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\t{name}\n")),
    ];
    if spec.network.is_none() {
        // What the C library assumes without the file; there are programs that insist on it.
        texts.push(("resolv.conf", "nameserver 127.0.0.1\n".to_owned()));
    }
    if !spec.machine_id.is_empty() {
        texts.push(("machine-id", format!("{}\n", spec.machine_id)));
    }
    texts
}

fn refuse(path: &str, why: &str) -> StepError {
    StepError::new("check", path, io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// Answers with aether's own id.
fn check(spec: &LaunchSpec) -> Result<u32, StepError> {
    let aether = spec.uid_base.checked_add(IDS_INSIDE).filter(|id| *id != u32::MAX);
    let aether = aether.ok_or_else(|| refuse("uid_base", "too large"))?;
    if spec.uid_base <= IDS_INSIDE {
        return Err(refuse("uid_base", "would overlap the host's own ids"));
    }
    if spec.id.is_empty() {
        return Err(refuse("id", "is empty"));
    }
    if spec.hostname.is_empty() || spec.hostname.len() > 64 {
        return Err(refuse("hostname", "must have 1 to 64 bytes"));
    }
    if spec.layers.is_empty() {
        return Err(refuse("layers", "there is none"));
    }
    let network = spec.network.iter().map(|network| &network.namespace);
    let places = [&spec.upper, &spec.work, &spec.socket];
    let meters = spec.meters.iter().flat_map(Meters::paths);
    let groups = spec.cgroups.iter().map(|dir| &dir.path).chain(&spec.work_v1).chain(meters);
    let mended = spec.mends.iter().map(|(path, ..)| path);
    let ruled = spec.files.iter().map(|rule| &rule.path);
    let inside = spec.masked_paths.iter().chain(&spec.readonly_paths).chain(mended).chain(ruled);
    for path in spec.layers.iter().chain(places).chain(network).chain(groups).chain(inside) {
        let parts_fit = !path.split('/').any(|part| part == "..");
        if !path.starts_with('/') || path.contains('\0') || !parts_fit {
            return Err(refuse(path, "must be an absolute path without '..'"));
        }
    }
    Ok(aether)
}

/// The deepest directory above both, and what is left of each below it. Overlay wants upper and
/// work in one mount, and a copied mount is another mount.
fn common_parent(upper: &str, work: &str) -> (String, String, String) {
    let upper: Vec<&str> = upper.split('/').filter(|part| !part.is_empty()).collect();
    let work: Vec<&str> = work.split('/').filter(|part| !part.is_empty()).collect();
    let most = upper.len().min(work.len()).saturating_sub(1);
    let shared = upper.iter().zip(&work).take(most).take_while(|(one, other)| one == other).count();
    let (parent, upper) = upper.split_at(shared);
    let (_, work) = work.split_at(shared);
    (format!("/{}", parent.join("/")), upper.join("/"), work.join("/"))
}

impl HostStep {
    /// Short and fixed: the key of its time, the name in a failure.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::MakeCgroup { .. } => "make cgroup",
            Self::MakeDirectory { .. } => "make directory",
            Self::Listen { .. } => "listen",
            Self::OpenGroups { .. } => "open groups",
            Self::OpenMeters { .. } => "open meters",
            Self::Clone { .. } => "clone",
            Self::MapIds { .. } => "map ids",
            Self::CopyLayer { .. } => "copy layer",
            Self::CopyUpper { .. } => "copy upper",
            Self::MountOverlay { .. } => "mount overlay",
            Self::MapDevices => "map devices",
            Self::SendMounts => "send mounts",
            Self::AwaitReady => "await ready",
        }
    }

    /// The path a failure is about.
    pub(crate) fn path(&self) -> &str {
        match self {
            Self::MakeCgroup { path, .. }
            | Self::MakeDirectory { path }
            | Self::CopyLayer { path } => path,
            Self::Listen { socket } => socket,
            Self::OpenGroups { work_v2, .. } => work_v2,
            Self::OpenMeters { paths } => paths.first().map_or("", String::as_str),
            Self::Clone { agent_v2, .. } => agent_v2,
            Self::CopyUpper { parent, .. } => parent,
            Self::MountOverlay { .. } => "/",
            Self::MapDevices => "/dev",
            Self::MapIds { .. } | Self::SendMounts | Self::AwaitReady => "",
        }
    }

    /// One line for people.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::MakeCgroup { path, writes, owner } => {
                let writes: Vec<String> =
                    writes.iter().map(|(file, text)| format!(" {file}={text}")).collect();
                let owner = owner.map_or(String::new(), |id| format!(", owned by {id}"));
                format!("make cgroup {path}{}{owner}", writes.concat())
            }
            Self::MakeDirectory { path } => format!("make directory {path} if missing"),
            Self::Listen { socket } => format!("listen on {socket}"),
            Self::OpenGroups { work_v2, work_v1 } => {
                format!("open groups of commands: v2 {work_v2:?}, v1 {work_v1:?}")
            }
            Self::OpenMeters { paths } => format!("open meters {}", paths.join(" ")),
            Self::Clone { aether, agent_v2, network: None } => format!(
                "clone as {aether} into cgroup {agent_v2:?}: new user, mount, pid, ipc, uts, net"
            ),
            Self::Clone { aether, agent_v2, network: Some(network) } => format!(
                "clone as {aether} into cgroup {agent_v2:?}: new user, mount, pid, ipc, uts; in {network}"
            ),
            Self::MapIds { base } => format!("map ids 0-{} to {base}-", IDS_INSIDE - 1),
            Self::CopyLayer { path } => format!("copy layer {path}, read-only, owners mapped"),
            Self::CopyUpper { parent, upper, work } => {
                format!("copy {parent}, owners mapped; upper {upper}, work {work}")
            }
            Self::MountOverlay { layers } => format!("mount overlay of {layers} layers"),
            Self::MapDevices => "map owners of the shared /dev".to_owned(),
            Self::SendMounts => "send mounts to the child".to_owned(),
            Self::AwaitReady => "wait until the child is ready".to_owned(),
        }
    }
}

impl InsideStep {
    /// Short and fixed: the key of its time, the name in a failure.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AttachRoot => "attach root",
            Self::Mend { .. } => "mend directory",
            Self::MakeMountPoint { .. } => "make mount point",
            Self::MakeDirectory { .. } => "make missing directory",
            Self::Mount { what, .. } => match what.kind.to_bytes() {
                b"proc" => "mount proc",
                b"sysfs" => "mount sysfs",
                b"devpts" => "mount devpts",
                b"mqueue" => "mount mqueue",
                _ => "mount shm",
            },
            Self::HideCovers => "hide covers",
            Self::ApplyFileRules => "apply file rules",
            Self::AttachSystem => "attach sysfs",
            Self::AttachDevices => "attach devices",
            Self::NoUserNamespaces => "forbid user namespaces",
            Self::Mask { .. } => "mask",
            Self::MakeReadOnly { .. } => "make read-only",
            Self::WriteIfMissing { .. } => "write if missing",
            Self::Write { .. } => "write",
            Self::ShowTruth => "show truth",
            Self::EnterRoot => "enter root",
            Self::SetHostname { .. } => "set hostname",
            Self::LoopbackUp => "loopback up",
            Self::StartSession => "start session",
            Self::CloseDescriptors => "close descriptors",
            Self::DropCapabilities => "drop capabilities",
        }
    }

    /// The path a failure is about, as seen inside.
    pub(crate) fn path(&self) -> String {
        match self {
            Self::MakeMountPoint { path, .. } | Self::MakeDirectory { path, .. } => {
                format!("/{path}")
            }
            Self::Mount { at, .. } => format!("/{at}"),
            Self::AttachSystem => "/sys".to_owned(),
            Self::AttachDevices => "/dev".to_owned(),
            Self::NoUserNamespaces => format!("/{USER_NAMESPACES}"),
            Self::Mask { path } | Self::MakeReadOnly { path } | Self::Mend { path, .. } => {
                path.clone()
            }
            Self::WriteIfMissing { directory, name, .. } | Self::Write { directory, name, .. } => {
                format!("/{directory}/{name}")
            }
            Self::SetHostname { name } => name.clone(),
            _ => "/".to_owned(),
        }
    }

    /// One line for people.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Mount { what, at } => {
                let text = |text: &CStr| text.to_string_lossy().into_owned();
                let options: Vec<String> = what
                    .options
                    .iter()
                    .map(|(key, value)| format!(" {}={}", text(key), text(value)))
                    .collect();
                format!("mount {} on /{at}{}", text(what.kind), options.concat())
            }
            Self::Mend { path, mode, uid, gid } => {
                format!("mend directory {path} ({mode:o}, {uid}:{gid}) if there")
            }
            Self::MakeMountPoint { path, mode } => {
                format!("make /{path} ({mode:o}) if it is no directory")
            }
            Self::MakeDirectory { path, mode } => format!("make /{path} ({mode:o}) if missing"),
            Self::Write { directory, name, text } => format!("write /{directory}/{name}: {text:?}"),
            Self::WriteIfMissing { directory, name, text } => {
                format!("write /{directory}/{name} if missing or empty: {text:?}")
            }
            other => format!("{} {}", other.name(), other.path()),
        }
    }
}

/// Where a user namespace's own limit of user namespaces is set.
pub(crate) const USER_NAMESPACES: &str = "proc/sys/user/max_user_namespaces";

/// The plan as text, a line per step.
pub(crate) fn describe(plan: &Plan) -> Vec<String> {
    let host = plan.host.iter().map(|step| format!("host    {}", step.describe()));
    let inside = plan.inside.iter().map(|step| format!("inside  {}", step.describe()));
    host.chain(inside).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> LaunchSpec {
        LaunchSpec {
            id: "sbx_1".into(),
            hostname: "box".into(),
            machine_id: "0123456789abcdef0123456789abcdef".into(),
            uid_base: 0x20_0000,
            layers: vec!["/layers/top".into(), "/layers/base".into()],
            mends: vec![("/tmp".into(), 0o1777, 0, 100_000)],
            upper: "/boxes/1/upper".into(),
            work: "/boxes/1/work".into(),
            socket: "/boxes/1/socket".into(),
            cgroups: vec![CgroupDir {
                path: "/cg/1".into(),
                writes: vec![("pids.max".into(), "9".into())],
                delegate: true,
            }],
            agent_v2: "/cg/1".into(),
            work_v2: "/cg/1".into(),
            work_v1: Vec::new(),
            network: None,
            masked_paths: vec!["/proc/kcore".into()],
            readonly_paths: vec!["/proc/sys".into()],
            files: Vec::new(),
            files_change: false,
            capabilities: Vec::new(),
            seccomp: "default".into(),
            seccomp_allow: Vec::new(),
            no_new_privs: false,
            rlimits: std::collections::BTreeMap::new(),
            env: std::collections::BTreeMap::new(),
            workdir: "/".into(),
            user: "root".into(),
            only_user: false,
            meters: None,
            default_timeout_s: 1.0,
            max_timeout_s: 1.0,
            output_limit_bytes: 1,
            max_running_commands: 1,
        }
    }

    fn place_of(lines: &[String], start: &str) -> Option<usize> {
        lines.iter().position(|line| line.contains(start))
    }

    fn lines(spec: &LaunchSpec) -> Vec<String> {
        plan(spec).map(|plan| describe(&plan)).unwrap_or_default()
    }

    #[test]
    fn steps_come_in_the_order_the_kernel_wants() {
        let lines = lines(&spec());
        let order = [
            "make cgroup /cg/1 pids.max=9, owned by 2162687",
            "listen on /boxes/1/socket",
            "clone as 2162687 into cgroup \"/cg/1\"",
            "map ids 0-65534 to 2097152-",
            "copy layer /layers/top",
            "copy layer /layers/base",
            "copy /boxes/1, owners mapped; upper upper, work work",
            "attach root",
            "mend directory /tmp (1777, 0:65534) if there",
            "make /proc",
            "mount proc on /proc",
            "forbid user namespaces",
            "make read-only /proc/sys",
            "mask /proc/kcore",
            "enter root",
            "close descriptors",
            "drop capabilities",
        ];
        let places: Vec<_> = order.iter().map(|start| place_of(&lines, start)).collect();
        assert!(places.iter().all(Option::is_some), "{places:?} in {lines:#?}");
        assert!(places.is_sorted(), "{places:?} in {lines:#?}");
    }

    #[test]
    fn user_namespaces_are_for_the_loose_alone() {
        let forbids =
            |spec: &LaunchSpec| place_of(&lines(spec), "forbid user namespaces").is_some();
        assert!(forbids(&spec()));
        assert!(forbids(&LaunchSpec { seccomp: "none".into(), ..spec() }));
        assert!(!forbids(&LaunchSpec { seccomp: "loose".into(), ..spec() }));
    }

    #[test]
    fn what_needs_no_mending_costs_no_step() {
        let mut spec = spec();
        spec.mends.clear();
        assert_eq!(place_of(&lines(&spec), "mend"), None);
    }

    #[test]
    fn what_cannot_be_launched_safely_is_refused() {
        let refused = |change: fn(&mut LaunchSpec)| {
            let mut spec = spec();
            change(&mut spec);
            plan(&spec).is_err()
        };
        assert!(!refused(|_| ()));
        assert!(refused(|spec| spec.uid_base = 0));
        assert!(refused(|spec| spec.uid_base = u32::MAX - IDS_INSIDE));
        assert!(refused(|spec| spec.layers.clear()));
        assert!(refused(|spec| spec.hostname = "x".repeat(65)));
        assert!(refused(|spec| spec.upper = "boxes/upper".into()));
        assert!(refused(|spec| spec.masked_paths = vec!["/proc/../etc".into()]));
        assert!(refused(|spec| spec.mends = vec![("tmp".into(), 0o755, 0, 0)]));
        assert!(refused(|spec| spec.mends = vec![("/a/../b".into(), 0o755, 0, 0)]));
    }

    #[test]
    fn upper_and_work_share_their_deepest_parent() {
        let parts = |upper, work| common_parent(upper, work);
        let whole = |parent: &str, upper: &str, work: &str| {
            (parent.to_owned(), upper.to_owned(), work.to_owned())
        };
        assert_eq!(parts("/a/b/upper", "/a/b/work"), whole("/a/b", "upper", "work"));
        assert_eq!(parts("/a/u/1", "/a/w/1"), whole("/a", "u/1", "w/1"));
        assert_eq!(parts("/u", "/w"), whole("/", "u", "w"));
    }
}
