//! PAX headers of an archive that comes in, in words the `tar` crate understands.
//!
//! The crate cuts a PAX header at newlines, though the records in it go by their length and a name may
//! well hold a newline. So what a header says is read here, and goes on in GNU's way: names as long
//! names, of the other records those the crate heeds.

use std::io::{self, Read};
use tar::{EntryType, Header};

const BLOCK: usize = 512;
/// A header holds two names and perhaps some attributes; the kernel's limits on those are far below.
const MAX_HEADER: u64 = 1 << 20;

/// An archive that is read through this never shows a newline in a PAX record.
pub(super) struct PlainHeaders<R> {
    inner: R,
    /// Headers on their way out, from `at` on.
    ready: Vec<u8>,
    at: usize,
    /// Contents to hand on as they are before the next header.
    contents: u64,
    /// What PAX says about the size of the next entry.
    size: Option<u64>,
}

impl<R: Read> PlainHeaders<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, ready: Vec::new(), at: 0, contents: 0, size: None }
    }

    /// Read a block into `ready`; what an archive that is cut off still has is handed on.
    fn block(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        let begin = self.ready.len();
        let limit = u64::try_from(BLOCK).unwrap_or(0);
        self.inner.by_ref().take(limit).read_to_end(&mut self.ready)?;
        Ok(self.ready.get(begin..).and_then(|block| block.try_into().ok()))
    }

    /// Make the next header ready; false at the end.
    fn next_header(&mut self) -> io::Result<bool> {
        self.ready.clear();
        self.at = 0;
        let Some(block) = self.block()? else { return Ok(!self.ready.is_empty()) };
        let header = Header::from_byte_slice(&block);
        // What is no header at all is for the crate to refuse.
        let Some(size) = header.entry_size().ok().filter(|_| is_sound(header)) else {
            return Ok(true);
        };
        let kind = header.entry_type();
        if kind == EntryType::XHeader {
            self.rewrite(size)?;
            return Ok(true);
        }
        let mut more = header.as_gnu().is_some_and(|gnu| kind.is_gnu_sparse() && gnu.is_extended());
        while more {
            // Each block of a sparse file's map says near its end whether another follows.
            more = self.block()?.is_some_and(|block| block.get(504) == Some(&1));
        }
        let extends = matches!(
            kind,
            EntryType::GNULongName | EntryType::GNULongLink | EntryType::XGlobalHeader
        );
        let size = if extends { size } else { self.size.take().unwrap_or(size) };
        self.contents = padded(size).ok_or_else(|| bad("a size no file has"))?;
        Ok(true)
    }

    /// Put in place of a PAX header, whose first block is taken, the same in GNU's words.
    fn rewrite(&mut self, size: u64) -> io::Result<()> {
        let whole = padded(size).filter(|_| size <= MAX_HEADER);
        let whole = whole.ok_or_else(|| bad("a PAX header is too large"))?;
        let mut text = Vec::new();
        self.inner.by_ref().take(whole).read_to_end(&mut text)?;
        let text = usize::try_from(size).ok().and_then(|size| text.get(..size));
        let records = records(text.ok_or(io::ErrorKind::UnexpectedEof)?)?;
        self.ready.clear();
        let mut rest = Vec::new();
        for (key, value) in records {
            match key {
                b"path" => push(&mut self.ready, EntryType::GNULongName, &[value, b"\0"].concat()),
                b"linkpath" => {
                    push(&mut self.ready, EntryType::GNULongLink, &[value, b"\0"].concat());
                }
                b"size" | b"uid" | b"gid" => {
                    let number =
                        std::str::from_utf8(value).ok().and_then(|text| text.parse::<u64>().ok());
                    let number = number.ok_or_else(|| bad("a number in a PAX header is none"))?;
                    if key == b"size" {
                        self.size = Some(number);
                    }
                    rest.extend_from_slice(&record(key, value));
                }
                _ => {}
            }
        }
        if !rest.is_empty() {
            push(&mut self.ready, EntryType::XHeader, &rest);
        }
        Ok(())
    }
}

impl<R: Read> Read for PlainHeaders<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(rest) = self.ready.get(self.at..).filter(|rest| !rest.is_empty()) {
                let size = rest.len().min(into.len());
                if let (Some(to), Some(from)) = (into.get_mut(..size), rest.get(..size)) {
                    to.copy_from_slice(from);
                }
                self.at += size;
                return Ok(size);
            }
            if self.contents > 0 {
                let limit = usize::try_from(self.contents).unwrap_or(usize::MAX).min(into.len());
                let size = self.inner.read(into.get_mut(..limit).unwrap_or(&mut []))?;
                self.contents -= u64::try_from(size).unwrap_or(0);
                return Ok(size);
            }
            // A PAX header without anything the crate heeds leaves nothing: then the one after it.
            if !self.next_header()? {
                return Ok(0);
            }
        }
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::other(what)
}

fn padded(size: u64) -> Option<u64> {
    size.checked_next_multiple_of(512)
}

/// Its checksum, taken with blanks in the checksum's own place, is right.
fn is_sound(header: &Header) -> bool {
    let bytes = header.as_bytes();
    let sum: u32 = bytes.iter().map(|b| u32::from(*b)).sum();
    let own: u32 = header.as_old().cksum.iter().map(|b| u32::from(*b)).sum();
    header.cksum().is_ok_and(|said| said == sum - own + 8 * u32::from(b' '))
}

/// Keys and values of a PAX header. Of a key that comes twice the last counts.
fn records(mut text: &[u8]) -> io::Result<Vec<(&[u8], &[u8])>> {
    let mut found: Vec<(&[u8], &[u8])> = Vec::new();
    while !text.is_empty() {
        let (key, value, rest) =
            first_record(text).ok_or_else(|| bad("a PAX header is malformed"))?;
        found.retain(|(known, _)| *known != key);
        found.push((key, value));
        text = rest;
    }
    Ok(found)
}

/// "LENGTH KEY=VALUE\n", the length that of all of it.
fn first_record(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let digits = text.iter().take(20).position(|b| *b == b' ')?;
    let length: usize = std::str::from_utf8(text.get(..digits)?).ok()?.parse().ok()?;
    let rest = text.get(length..)?;
    let record = text.get(digits + 1..length)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|b| *b == b'=')?;
    Some((record.get(..equals)?, record.get(equals + 1..)?, rest))
}

fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = [b" ", key, b"=", value, b"\n"].concat();
    let mut length = rest.len() + 1;
    while length != rest.len() + length.to_string().len() {
        length += 1;
    }
    [length.to_string().as_bytes(), &rest].concat()
}

/// An entry that says something about the next one.
fn push(into: &mut Vec<u8>, kind: EntryType, text: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(u64::try_from(text.len()).unwrap_or(0));
    header.set_cksum();
    into.extend_from_slice(header.as_bytes());
    into.extend_from_slice(text);
    into.resize(into.len().next_multiple_of(BLOCK), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: EntryType, name: &str, text: &[u8]) -> Vec<u8> {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        let _ = header.set_path(name);
        header.set_uid(0);
        header.set_size(u64::try_from(text.len()).unwrap_or(0));
        header.set_cksum();
        let mut bytes = [header.as_bytes(), text].concat();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes
    }

    type Found = Vec<(Vec<u8>, u64, Vec<u8>)>;

    /// Names, owners and contents.
    fn list(archive: &[u8]) -> io::Result<Found> {
        let mut found = Vec::new();
        for entry in tar::Archive::new(PlainHeaders::new(archive)).entries()? {
            let mut entry = entry?;
            let mut text = Vec::new();
            entry.read_to_end(&mut text)?;
            found.push((entry.path_bytes().into_owned(), entry.header().uid()?, text));
        }
        Ok(found)
    }

    #[test]
    fn records_go_by_their_length() {
        let text =
            [record(b"path", b"a\n9 uid=3\nb"), record(b"x", b""), record(b"uid", b"7")].concat();
        let found = records(&text).unwrap_or_default();
        let wanted: [(&[u8], &[u8]); 3] =
            [(b"path", b"a\n9 uid=3\nb"), (b"x", b""), (b"uid", b"7")];
        assert_eq!(found, wanted);
        assert_eq!(record(b"k", &[b'v'; 93]).get(..4), Some(&b"99 k"[..]));
        assert_eq!(record(b"k", &[b'v'; 94]).get(..5), Some(&b"101 k"[..]));
        for bad in
            ["9", "x a=b\n", "6 a=b", "8 a=b\n\n", "99 a=b\n", "6 abc\n", "0 a=b\n", "1 a=b\n"]
        {
            assert!(records(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_with_newlines_arrive() {
        let header =
            [record(b"path", b"a\nb"), record(b"path", b"sub/c\n d"), record(b"uid", b"70000")];
        let archive = [
            entry(EntryType::XGlobalHeader, "g", &record(b"comment", b"none")),
            entry(EntryType::XHeader, "x", &header.concat()),
            entry(EntryType::Regular, "short", b"text"),
            entry(EntryType::XHeader, "x", &record(b"mtime", b"1.5")),
            entry(EntryType::Regular, "plain", &[b'y'; 513]),
            vec![0; 1024],
        ];
        let found = list(&archive.concat()).unwrap_or_default();
        let names: Vec<_> = found.iter().map(|(name, _, _)| name.as_slice()).collect();
        assert_eq!(names, [&b"g"[..], b"sub/c\n d", b"plain"]);
        assert_eq!(found.get(1).map(|f| (f.1, f.2.as_slice())), Some((70000, &b"text"[..])));
        assert_eq!(found.get(2).map(|f| f.2.len()), Some(513));
    }

    #[test]
    fn a_size_in_a_record_counts() {
        let mut small = entry(EntryType::Regular, "f", b"");
        small.extend_from_slice(&[b'z'; 600]);
        small.resize(small.len().next_multiple_of(BLOCK), 0);
        let header = [record(b"path", b"\n"), record(b"size", b"600")].concat();
        let archive =
            [entry(EntryType::XHeader, "x", &header), small, entry(EntryType::Regular, "g", b"")];
        let found = list(&archive.concat()).map_err(|e| e.to_string());
        let wanted = [(b"\n".to_vec(), 0, vec![b'z'; 600]), (b"g".to_vec(), 0, Vec::new())];
        assert_eq!(found, Ok(wanted.to_vec()));
    }

    #[test]
    fn what_is_broken_is_an_error() {
        let whole =
            [entry(EntryType::XHeader, "x", b"9 uid=x\n\n"), entry(EntryType::Regular, "f", b"")]
                .concat();
        assert!(list(&whole).is_err());
        let cut = entry(EntryType::XHeader, "x", &record(b"path", b"a"));
        assert!(list(cut.get(..600).unwrap_or(&[])).is_err());
        assert!(list(&[b'x'; 512]).is_err());
    }
}
