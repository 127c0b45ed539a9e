//! Users as the image's own files have them. The files are hostile: bounded, never waited for.

use crate::serve::proto::{self, Refusal, NOT_FOUND};
use crate::sys::process::Ids;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

const FILE_LIMIT: usize = 1 << 20;
const MAX_GROUPS: usize = 1024;
/// The highest id that exists inside.
const MAX_ID: u32 = 65534;

/// A user resolved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: Vec<u8>,
    pub(crate) home: Vec<u8>,
    pub(crate) shell: Vec<u8>,
    pub(crate) ids: Ids,
}

/// The image's account files, as bytes.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

/// With file rules, what is mounted on the way is ours, if it is reached without links.
fn read_account_file(path: &str, ruled: bool) -> Vec<u8> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    // No other mount: a file system somebody put there could make PID 1 wait for ever.
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    let open = |resolve| rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve);
    let opened = match open(resolve) {
        Err(Errno::XDEV) if ruled => open(ResolveFlags::NO_SYMLINKS),
        opened => opened,
    };
    let Ok(fd) = opened else { return Vec::new() };
    let Some(stat) =
        rustix::fs::fstat(&fd).ok().filter(|s| FileType::from_raw_mode(s.st_mode).is_file())
    else {
        return Vec::new();
    };
    // One read for all of it; a file that grows meanwhile is read as it was.
    let size = usize::try_from(stat.st_size).unwrap_or(0).min(FILE_LIMIT);
    let mut text = Vec::with_capacity(size);
    while text.len() < size {
        match rustix::io::read(&fd, rustix::buffer::spare_capacity(&mut text)) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break,
        }
    }
    text
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n')
}

fn number(text: &[u8]) -> Option<u32> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

struct Entry<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
    shell: &'a [u8],
}

fn entry(line: &[u8]) -> Option<Entry<'_>> {
    let mut fields = line.split(|b| *b == b':');
    let name = fields.next().filter(|n| !n.is_empty())?;
    let _password = fields.next()?;
    let uid = number(fields.next()?)?;
    let gid = number(fields.next()?)?;
    let _gecos = fields.next();
    let home = fields.next().unwrap_or(b"");
    Some(Entry { name, uid, gid, home, shell: fields.next().unwrap_or(b"") })
}

fn no_user(text: &str) -> Refusal {
    Refusal::new(NOT_FOUND, format!("no user {text}")).kind("user")
}

impl Accounts {
    /// As the sandbox has them now; `ruled`: whether file rules are in force.
    pub(crate) fn read(ruled: bool) -> Self {
        let read = |path| read_account_file(path, ruled);
        Self { passwd: read("/etc/passwd"), group: read("/etc/group") }
    }

    #[cfg(test)]
    fn from_text(passwd: &str, group: &str) -> Self {
        Self { passwd: passwd.as_bytes().to_vec(), group: group.as_bytes().to_vec() }
    }

    fn find(&self, wanted: impl Fn(&Entry<'_>) -> bool) -> Option<Entry<'_>> {
        lines(&self.passwd).filter_map(entry).find(wanted)
    }

    /// (name, gid, members) of every group.
    fn groups(&self) -> impl Iterator<Item = (&[u8], u32, &[u8])> {
        lines(&self.group).filter_map(|line| {
            let mut fields = line.split(|b| *b == b':');
            let name = fields.next()?;
            let _password = fields.next()?;
            let gid = number(fields.next()?)?;
            Some((name, gid, fields.next().unwrap_or(b"")))
        })
    }

    /// The one user of a phase. Its account file may have been rewritten by whoever was root before:
    /// nobody is root by another name.
    pub(crate) fn only(&self, text: &str) -> Result<User, Refusal> {
        let user = self.resolve(text)?;
        let name = text.split_once(':').map_or(text, |(name, _)| name);
        if user.ids.uid == 0 && !matches!(name, "root" | "0") {
            let words = format!("user {text}: the accounts of this sandbox make it root");
            return Err(Refusal::new(proto::DENIED, words).kind("user"));
        }
        Ok(user)
    }

    /// `name`, `name:group`, or numbers instead of names.
    pub(crate) fn resolve(&self, text: &str) -> Result<User, Refusal> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let mut user = self.user(name).ok_or_else(|| no_user(text))?;
        if let Some(group) = group {
            user.ids.gid = number(group.as_bytes())
                .or_else(|| self.groups().find(|(n, ..)| *n == group.as_bytes()).map(|g| g.1))
                .ok_or_else(|| no_user(text))?;
        }
        if user.ids.uid > MAX_ID || user.ids.gid > MAX_ID {
            return Err(no_user(text));
        }
        user.ids.groups = vec![user.ids.gid];
        for (_, gid, members) in self.groups() {
            let listed = members.split(|b| *b == b',').any(|m| m == user.name && !m.is_empty());
            if listed && gid <= MAX_ID && !user.ids.groups.contains(&gid) {
                user.ids.groups.push(gid);
            }
            if user.ids.groups.len() >= MAX_GROUPS {
                break;
            }
        }
        Ok(user)
    }

    fn user(&self, name: &str) -> Option<User> {
        let id = number(name.as_bytes());
        let found = self
            .find(|e| e.name == name.as_bytes())
            .or_else(|| id.and_then(|id| self.find(|e| e.uid == id)));
        if let Some(found) = found {
            return Some(User {
                name: found.name.to_vec(),
                home: if found.home.is_empty() { b"/".to_vec() } else { found.home.to_vec() },
                shell: if found.shell.is_empty() {
                    b"/bin/sh".to_vec()
                } else {
                    found.shell.to_vec()
                },
                ids: Ids { uid: found.uid, gid: found.gid, groups: Vec::new() },
            });
        }
        // What other runtimes do with a number nobody has: group 0, no home.
        let uid = if name == "root" { 0 } else { id? };
        Some(User {
            name: if uid == 0 { b"root".to_vec() } else { uid.to_string().into_bytes() },
            home: if uid == 0 { b"/root".to_vec() } else { b"/".to_vec() },
            shell: b"/bin/sh".to_vec(),
            ids: Ids { uid, gid: 0, groups: Vec::new() },
        })
    }

    pub(crate) fn user_name(&self, uid: u32) -> String {
        self.find(|e| e.uid == uid)
            .map_or_else(String::new, |e| String::from_utf8_lossy(e.name).into())
    }

    pub(crate) fn group_name(&self, gid: u32) -> String {
        let found = self.groups().find(|(_, id, _)| *id == gid);
        found.map_or_else(String::new, |(name, ..)| String::from_utf8_lossy(name).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken\n:x:1:1::/:\nbad:x:-1:0::/:\n\
        big:x:4294967296:0::/:\nann:x:1000:1000:,,,:/home/ann:/bin/sh\nbare:x:7:8\n\
        far:x:70000:0::/:\n";
    const GROUP: &str =
        "root:x:0:\nann:x:1000:\ndocker:x:50:bob,ann\nvideo:x:44:ann\nbad\nx:y:z:ann\n";

    fn ids(text: &str) -> Option<(u32, u32, Vec<u32>)> {
        let user = Accounts::from_text(PASSWD, GROUP).resolve(text).ok()?;
        Some((user.ids.uid, user.ids.gid, user.ids.groups))
    }

    #[test]
    fn finds_users() {
        assert_eq!(ids("root"), Some((0, 0, vec![0])));
        assert_eq!(ids("ann"), Some((1000, 1000, vec![1000, 50, 44])));
        assert_eq!(ids("1000"), ids("ann"));
        assert_eq!(ids("ann:video"), Some((1000, 44, vec![44, 50])));
        assert_eq!(ids("ann:0"), Some((1000, 0, vec![0, 50, 44])));
        assert_eq!(ids("1234"), Some((1234, 0, vec![0])));
        assert_eq!(ids("bare"), Some((7, 8, vec![8])));
    }

    #[test]
    fn refuses_what_is_not_there() {
        for text in
            ["", "nobody-here", "ann:", "ann:nope", "bad", "big", "far", "70000", "-1", "broken"]
        {
            assert_eq!(ids(text), None, "{text}");
        }
    }

    #[test]
    fn root_needs_no_file() {
        let user = Accounts::default().resolve("root");
        assert_eq!(user.map(|u| u.home).ok(), Some(b"/root".to_vec()));
    }
}
