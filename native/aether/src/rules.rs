//! File rules: paths of a sandbox that hold for root inside, by mounts that nobody inside may undo.
//!
//! A denied path is covered by what only the host's root could open; one that is read-only or whose
//! programs must not run is covered by a copy of its own mount with that attribute. Every directory
//! above is covered by itself, for a mount point can be neither renamed nor removed: what a path
//! means stays what it meant. Nothing else runs in the sandbox while this is done.

use crate::error::{AtStep, StepError};
use crate::spec::{Access, FileRule};
use crate::sys::beneath::{self, Kind, Purpose};
use crate::sys::mount::{self, NO_EXEC, READ_ONLY};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// In the template: what denied paths are covered with. Its two names belong to the host's root and
/// let nobody do anything; an owner who is not mapped inside is beyond the powers of root inside.
pub(crate) const COVERS: &str = "covers";
pub(crate) const FILE: &CStr = c"file";
pub(crate) const DIRECTORY: &CStr = c"directory";

/// Names below a denied directory that are looked at for other names of the same files.
const MOST_NAMES: usize = 200_000;

/// What is in force.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    /// Where covers are copied from: attached, but hidden under /proc.
    covers: Option<OwnedFd>,
    /// What was mounted, in this order.
    mounted: Vec<OwnedFd>,
    /// Empty files in place of denied paths that did not exist.
    placed: Vec<String>,
    /// Something may have run in the sandbox before: its files may have names of its making.
    touched: bool,
}

impl Rules {
    pub(crate) fn new(covers: Option<OwnedFd>) -> Self {
        Self { covers, ..Self::default() }
    }

    pub(crate) fn any(&self) -> bool {
        !self.mounted.is_empty()
    }

    /// What must stay open.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.covers.iter().chain(&self.mounted).map(AsFd::as_fd)
    }

    fn covers(&self) -> Option<BorrowedFd<'_>> {
        self.covers.as_ref().map(AsFd::as_fd)
    }

    /// Have these hold in place of those before; if one of them cannot, those before hold again.
    pub(crate) fn switch(
        &mut self,
        before: &[FileRule],
        wanted: &[FileRule],
    ) -> Result<(), StepError> {
        self.touched = true;
        self.lift()?;
        self.apply(wanted).inspect_err(|_| {
            let _ = self.apply(before);
        })
    }

    /// Have rules hold where none does: all or none.
    pub(crate) fn apply(&mut self, rules: &[FileRule]) -> Result<(), StepError> {
        check_there(rules)?;
        let done = places(rules).iter().try_for_each(|(path, accesses)| {
            accesses.iter().try_for_each(|access| {
                self.cover(path, *access).map_err(|error| told(error, *access, path))
            })
        });
        if done.is_err() {
            self.lift()?;
        }
        done
    }

    fn lift(&mut self) -> Result<(), StepError> {
        while let Some(last) = self.mounted.last() {
            mount::detach(last).at("lift file rule", "")?;
            self.mounted.pop();
        }
        for path in std::mem::take(&mut self.placed) {
            remove_empty(&path).at("lift file rule", path)?;
        }
        Ok(())
    }

    fn cover(&mut self, path: &str, access: Option<Access>) -> io::Result<()> {
        let root = File::open("/")?;
        let Some(place) = self.place(&root, path, access)? else { return Ok(()) };
        if access.is_some_and(|access| self.must_have_one_name(access)) {
            check_names(&place)?;
        }
        let cover = match access {
            Some(Access::Deny) => self.closed(&place)?,
            _ => mount::copy(Some(place.as_fd()), c"")?,
        };
        match access {
            Some(Access::ReadOnly) => mount::restrict(&cover, READ_ONLY, None)?,
            Some(Access::NoExec) => mount::restrict(&cover, NO_EXEC, None)?,
            Some(Access::Deny) | None => {}
        }
        mount::attach(&cover, place)?;
        self.mounted.push(cover);
        Ok(())
    }

    /// Writing to a file of a layer gives it a name of its own; to one written here it does not.
    fn must_have_one_name(&self, access: Access) -> bool {
        match access {
            Access::Deny => true,
            Access::ReadOnly => self.touched,
            Access::NoExec => false,
        }
    }

    /// Where a path is; what is denied and missing is made, so that nobody can make it later.
    /// `None`: it is missing where nothing can be made.
    fn place(
        &mut self,
        root: &File,
        path: &str,
        access: Option<Access>,
    ) -> io::Result<Option<OwnedFd>> {
        let missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        match beneath::open(root, path, Purpose::Place) {
            // Above a path that is denied: others are there.
            Err(error) if missing(&error) && access.is_none() => {
                match beneath::make_directory(root, beneath::relative(path), 0o755) {
                    Err(error) if never_there(&error) => return Ok(None),
                    made => made?,
                }
            }
            Err(error) if missing(&error) && access == Some(Access::Deny) => {
                match beneath::create(root, beneath::relative(path), 0o600) {
                    Err(error) if never_there(&error) => return Ok(None),
                    made => drop(made?),
                }
                self.placed.push(path.to_owned());
            }
            opened => return opened.map(Some),
        }
        beneath::open(root, path, Purpose::Place).map(Some)
    }

    fn closed(&self, place: &OwnedFd) -> io::Result<OwnedFd> {
        let covers = self.covers().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        let name = if beneath::look_at(place)? == Kind::Directory { DIRECTORY } else { FILE };
        mount::copy(Some(covers), name)
    }
}

type Places = BTreeMap<String, BTreeSet<Option<Access>>>;

/// Everything to cover, each after what it lies in; `None` only keeps it where it is.
fn places(rules: &[FileRule]) -> Places {
    let mut places = Places::new();
    for FileRule { path, access } in rules {
        let path = path.trim_end_matches('/');
        for (end, _) in path.match_indices('/').filter(|(end, _)| *end > 0) {
            places.entry(path.get(..end).unwrap_or_default().to_owned()).or_default().insert(None);
        }
        places.entry(path.to_owned()).or_default().insert(Some(*access));
    }
    for accesses in places.values_mut().filter(|accesses| accesses.len() > 1) {
        accesses.remove(&None);
    }
    places
}

/// Nothing is made for the sake of a rule that would have nothing to keep.
fn check_there(rules: &[FileRule]) -> Result<(), StepError> {
    for FileRule { path, access } in rules.iter().filter(|rule| rule.access != Access::Deny) {
        let told = |error| told(error, Some(*access), path);
        let root = File::open("/").map_err(told)?;
        beneath::open(root, path, Purpose::Place).map_err(told)?;
    }
    Ok(())
}

/// Missing, and it stays so: above it is something read-only, or closed.
fn never_there(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EROFS | libc::ENOENT))
}

fn told(error: io::Error, access: Option<Access>, path: &str) -> StepError {
    let step = match access {
        Some(Access::Deny) => "deny",
        Some(Access::ReadOnly) => "make read-only",
        Some(Access::NoExec) => "forbid programs",
        None => "keep in place",
    };
    let error = match error.raw_os_error() {
        Some(libc::ELOOP) => refusal("it lies behind a symbolic link: name where that leads"),
        Some(libc::ENOTDIR) => refusal("something above it is no directory"),
        Some(libc::ENOENT) => refusal("there is nothing of that name to keep"),
        _ => error,
    };
    StepError::new(step, path, error)
}

fn refusal(words: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, words.into())
}

/// A file with another name could be reached by it.
fn check_names(place: &OwnedFd) -> io::Result<()> {
    let mut found = Names::default();
    let path = format!("/proc/self/fd/{}", place.as_raw_fd());
    found.add("", &fs::metadata(&path)?);
    if beneath::look_at(place)? == Kind::Directory {
        found.look_through(&path)?;
    }
    let elsewhere = found.0.into_iter().find(|(_, names)| names.found < names.all);
    elsewhere.map_or(Ok(()), |(_, names)| {
        let which = if names.first.is_empty() { "it" } else { &names.first };
        Err(refusal(format!("{which} has other names (hard links) by which it would be reached")))
    })
}

#[derive(Debug)]
struct Named {
    first: String,
    found: u64,
    all: u64,
}

/// Files with several names, by device and number.
#[derive(Debug, Default)]
struct Names(HashMap<(u64, u64), Named>);

impl Names {
    fn add(&mut self, path: &str, about: &fs::Metadata) {
        if about.is_dir() || about.nlink() < 2 {
            return;
        }
        let fresh = || Named { first: path.to_owned(), found: 0, all: about.nlink() };
        self.0.entry((about.dev(), about.ino())).or_insert_with(fresh).found += 1;
    }

    fn look_through(&mut self, top: &str) -> io::Result<()> {
        let (mut seen, mut below) = (0, vec![String::new()]);
        while let Some(directory) = below.pop() {
            for entry in fs::read_dir(format!("{top}/{directory}"))? {
                let entry = entry?;
                let path = format!("{directory}/{}", entry.file_name().to_string_lossy());
                let about = entry.metadata()?;
                self.add(&path, &about);
                if about.is_dir() {
                    below.push(path);
                }
                seen += 1;
                if seen > MOST_NAMES {
                    return Err(refusal(format!("there are more than {MOST_NAMES} names in it")));
                }
            }
        }
        Ok(())
    }
}

/// What was put there, unless it has become something.
fn remove_empty(path: &str) -> io::Result<()> {
    let root = File::open("/")?;
    match beneath::look(&root, beneath::relative(path)) {
        Ok(Some(Kind::File { empty: true })) => beneath::unlink(&root, beneath::relative(path)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(path: &str, access: Access) -> FileRule {
        FileRule { path: path.to_owned(), access }
    }

    #[test]
    fn what_lies_in_something_comes_after_it() {
        let rules = [
            rule("/a/b/c", Access::Deny),
            rule("/a/b", Access::ReadOnly),
            rule("/a/x/", Access::NoExec),
            rule("/a/x", Access::ReadOnly),
        ];
        let found: Vec<_> = places(&rules).into_iter().collect();
        let accesses = |of: &[Option<Access>]| of.iter().copied().collect::<BTreeSet<_>>();
        let wanted = [
            ("/a", accesses(&[None])),
            ("/a/b", accesses(&[Some(Access::ReadOnly)])),
            ("/a/b/c", accesses(&[Some(Access::Deny)])),
            ("/a/x", accesses(&[Some(Access::ReadOnly), Some(Access::NoExec)])),
        ];
        assert_eq!(found, wanted.map(|(path, of)| (path.to_owned(), of)));
    }
}
