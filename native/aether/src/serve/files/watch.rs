//! `watch`: what changes at a path or below it.

use super::{gone, Answer, Channel, Request, Stop};
use crate::serve::proto::{pack, Refusal};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use serde::Serialize;
use serde_bytes::{ByteBuf, Bytes};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

#[derive(Debug, Serialize)]
struct Watching {
    watching: bool,
}

#[derive(Debug, Serialize)]
struct Change<'a> {
    path: &'a Bytes,
    event: &'static str,
}

struct Watcher<'a> {
    notify: OwnedFd,
    root: PathBuf,
    recursive: bool,
    /// Below the root, by watch.
    places: HashMap<i32, PathBuf>,
    channel: &'a Channel,
}

const WANTED: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF);

impl Watcher<'_> {
    fn add(&mut self, place: &Path) -> Result<(), std::io::Error> {
        // Joining nothing would put a slash behind a file's name.
        let path =
            if place.as_os_str().is_empty() { self.root.clone() } else { self.root.join(place) };
        let mut flags = WANTED;
        if !place.as_os_str().is_empty() {
            flags |= WatchFlags::DONT_FOLLOW | WatchFlags::ONLYDIR;
        }
        let watch = inotify::add_watch(&self.notify, &path, flags)?;
        self.places.insert(watch, place.to_path_buf());
        Ok(())
    }

    fn tell(&self, path: &Path, event: &'static str) -> Result<(), Stop> {
        let path = Bytes::new(path.as_os_str().as_bytes());
        self.channel.queue(&Change { path, event }).map_err(gone)
    }

    /// Watch all directories below `place`. With `tell`, entries that are there already were made
    /// before the watch was: they are reported as created.
    fn add_below(&mut self, place: &Path, tell: bool) -> Result<(), Stop> {
        let mut open = vec![place.to_path_buf()];
        while let Some(place) = open.pop() {
            let path = if place.as_os_str().is_empty() {
                self.root.clone()
            } else {
                self.root.join(&place)
            };
            let Ok(entries) = fs::read_dir(path) else { continue };
            for entry in entries.flatten() {
                let below = place.join(entry.file_name());
                if tell {
                    self.tell(&below, "create")?;
                }
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    match self.add(&below) {
                        Ok(()) => open.push(below),
                        // The limit on watches: said, since it means that changes go unseen.
                        Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => {
                            return self.tell(Path::new(""), "overflow");
                        }
                        Err(_) => {}
                    }
                }
            }
        }
        Ok(())
    }

    fn change(&mut self, watch: i32, flags: ReadFlags, name: Option<&[u8]>) -> Result<(), Stop> {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.tell(Path::new(""), "overflow")?;
            return if self.recursive { self.add_below(Path::new(""), false) } else { Ok(()) };
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.places.remove(&watch);
            return Ok(());
        }
        let Some(place) = self.places.get(&watch) else { return Ok(()) };
        let is_root = place.as_os_str().is_empty();
        let path = name.map_or_else(|| place.clone(), |name| place.join(OsStr::from_bytes(name)));
        let own = flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF);
        if own && !is_root {
            // Its parent tells.
            return Ok(());
        }
        let known = [
            (ReadFlags::CREATE | ReadFlags::MOVED_TO, "create"),
            (ReadFlags::MODIFY, "write"),
            (ReadFlags::DELETE | ReadFlags::DELETE_SELF, "remove"),
            (ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF, "rename"),
            (ReadFlags::ATTRIB, "chmod"),
        ];
        // A directory's own attributes are told by its parent as well.
        let twice = name.is_none() && !is_root;
        if let (Some((_, event)), false) = (known.iter().find(|(f, _)| flags.intersects(*f)), twice)
        {
            self.tell(&path, event)?;
        }
        let new = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        if self.recursive && new && flags.contains(ReadFlags::ISDIR) && self.add(&path).is_ok() {
            self.add_below(&path, true)?;
        }
        Ok(())
    }
}

pub(super) fn watch(request: &Request, channel: &Channel) -> Answer {
    let root = request.path();
    let shown = root.as_os_str().as_bytes().to_vec();
    let fail = |e: std::io::Error| Refusal::file("watch", &shown, &e);
    let notify =
        inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(|e| fail(e.into()))?;
    let recursive = request.args.recursive.unwrap_or(false);
    let mut watcher = Watcher { notify, root, recursive, places: HashMap::new(), channel };
    watcher.add(Path::new("")).map_err(fail)?;
    if recursive {
        watcher.add_below(Path::new(""), false)?;
    }
    channel.event(&Watching { watching: true }).map_err(gone)?;
    loop {
        let changes = next_changes(&watcher.notify, channel)?;
        for (watch, flags, name) in changes {
            watcher.change(watch, flags, name.as_ref().map(|n| n.as_slice()))?;
        }
        channel.flush().map_err(gone)?;
        if watcher.places.is_empty() {
            // What was watched is gone.
            return Ok(pack(&()));
        }
    }
}

type Changes = Vec<(i32, ReadFlags, Option<ByteBuf>)>;

/// Wait for changes; the channel closing ends the wait for good.
fn next_changes(notify: &OwnedFd, channel: &Channel) -> Result<Changes, Stop> {
    let channel_fd = channel.fd();
    let mut waits = [
        PollFd::new(notify, PollFlags::IN),
        PollFd::from_borrowed_fd(channel_fd, PollFlags::IN | PollFlags::RDHUP),
    ];
    loop {
        match rustix::event::poll(&mut waits, None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Refusal::broken("poll", &errno.into()).into()),
        }
    }
    if waits[1].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP) {
        return Err(Stop::Abandoned);
    }
    let mut buffer = [const { MaybeUninit::uninit() }; 16 * 1024];
    let mut reader = inotify::Reader::new(notify, &mut buffer);
    let mut changes = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => {
                let name = event.file_name().map(|n| ByteBuf::from(n.to_bytes()));
                changes.push((event.wd(), event.events(), name));
                if reader.is_buffer_empty() {
                    return Ok(changes);
                }
            }
            Err(rustix::io::Errno::AGAIN) => return Ok(changes),
            Err(errno) => return Err(Refusal::broken("inotify", &errno.into()).into()),
        }
    }
}
