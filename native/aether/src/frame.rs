//! Frames on the channel to the edge; words in spec/frames.md, the twin of `dsec.wire.frames`.

pub(crate) const VERSION: u8 = 1;
pub(crate) const HEADER: usize = 12;
pub(crate) const MAX_PAYLOAD: usize = 1 << 20;
/// Bytes of DATA a side may send on a fresh stream, per direction, before any CREDIT.
pub(crate) const INITIAL_CREDIT: u64 = 256 * 1024;

pub(crate) const MAIN: u16 = 0;
pub(crate) const STDOUT: u16 = 1;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Open,
    Data,
    End,
    Event,
    Result,
    Error,
    Credit,
    Cancel,
    Ping,
    Pong,
}

const KINDS: [Kind; 10] = [
    Kind::Open,
    Kind::Data,
    Kind::End,
    Kind::Event,
    Kind::Result,
    Kind::Error,
    Kind::Credit,
    Kind::Cancel,
    Kind::Ping,
    Kind::Pong,
];

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        KINDS.get(usize::from(byte).checked_sub(1)?).copied()
    }

    fn byte(self) -> u8 {
        match self {
            Self::Open => 1,
            Self::Data => 2,
            Self::End => 3,
            Self::Event => 4,
            Self::Result => 5,
            Self::Error => 6,
            Self::Credit => 7,
            Self::Cancel => 8,
            Self::Ping => 9,
            Self::Pong => 10,
        }
    }
}

/// The twelve bytes before a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) size: usize,
    pub(crate) stream: u32,
    pub(crate) kind: Kind,
    pub(crate) channel: u16,
}

/// The bytes are not frames; the peer cannot be trusted any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken;

/// The header at the start of `bytes`; None when more bytes are needed.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<Header>, Broken> {
    let Some((header, _)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
    let &[s0, s1, s2, s3, i0, i1, i2, i3, version, kind, c0, c1] = header;
    let size = usize::try_from(u32::from_be_bytes([s0, s1, s2, s3])).map_err(|_| Broken)?;
    let kind = Kind::from_byte(kind).ok_or(Broken)?;
    if version != VERSION || size > MAX_PAYLOAD {
        return Err(Broken);
    }
    let stream = u32::from_be_bytes([i0, i1, i2, i3]);
    Ok(Some(Header { size, stream, kind, channel: u16::from_be_bytes([c0, c1]) }))
}

/// A header for a payload that follows. A payload over the maximum is a bug of the caller's.
pub(crate) fn header(kind: Kind, stream: u32, channel: u16, size: usize) -> [u8; HEADER] {
    let [s0, s1, s2, s3] = u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes();
    let [i0, i1, i2, i3] = stream.to_be_bytes();
    let [c0, c1] = channel.to_be_bytes();
    [s0, s1, s2, s3, i0, i1, i2, i3, VERSION, kind.byte(), c0, c1]
}

/// Append one frame.
pub(crate) fn push(out: &mut Vec<u8>, kind: Kind, stream: u32, channel: u16, payload: &[u8]) {
    out.extend_from_slice(&header(kind, stream, channel, payload.len()));
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unhex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text
            .bytes()
            .filter_map(|b| char::from(b).to_digit(16))
            .map(|d| d.to_le_bytes()[0])
            .collect();
        digits.chunks(2).map(|pair| pair[0] * 16 + pair[1]).collect()
    }

    /// One `"key": "value"` or `"key": number` of a line of the vectors' file.
    fn field<'a>(line: &'a str, key: &str) -> &'a str {
        let (_, rest) = line.split_once(&format!("\"{key}\": ")).unwrap_or(("", ""));
        rest.split([',', '}']).next().unwrap_or("").trim().trim_matches('"')
    }

    #[test]
    fn agrees_with_the_vectors() {
        let text = include_str!("../../../spec/vectors/frames.json");
        let mut seen = 0;
        for line in text.lines().filter(|line| line.contains("\"bytes\"")) {
            let bytes = unhex(field(line, "bytes"));
            let parsed = parse(&bytes);
            if field(line, "valid") == "false" {
                assert_eq!(parsed, Err(Broken), "{line}");
            } else {
                let payload = unhex(field(line, "payload"));
                let head = parsed.ok().flatten();
                let Some(head) = head else { unreachable!("{line}") };
                assert_eq!(head.stream.to_string(), field(line, "stream"));
                assert_eq!(head.kind.byte().to_string(), field(line, "kind"));
                assert_eq!(head.channel.to_string(), field(line, "channel"));
                let mut out = Vec::new();
                push(&mut out, head.kind, head.stream, head.channel, &payload);
                assert_eq!(out, bytes, "{line}");
            }
            seen += 1;
        }
        assert!(seen >= 12);
    }

    #[test]
    fn asks_for_more() {
        assert_eq!(parse(&[0; 11]), Ok(None));
    }
}
