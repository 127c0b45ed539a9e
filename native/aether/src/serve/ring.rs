//! What is kept of one output stream: its first half and its last half, by absolute offset.

use std::collections::VecDeque;

/// The producer is never held up and memory never exceeds the limit.
#[derive(Debug)]
pub(crate) struct Ring {
    head: Vec<u8>,
    head_limit: usize,
    tail: VecDeque<u8>,
    tail_limit: usize,
    total: u64,
}

/// What there is for a reader at some offset.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    Data(&'a [u8]),
    /// Bytes that are gone: go on at `offset`.
    Gap {
        offset: u64,
        dropped: u64,
    },
    /// Nothing yet.
    Nothing,
}

fn long(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

fn short(size: u64) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}

impl Ring {
    pub(crate) fn new(limit: u64) -> Self {
        let limit = short(limit);
        Self {
            head: Vec::new(),
            head_limit: limit - limit / 2,
            tail: VecDeque::new(),
            tail_limit: limit / 2,
            total: 0,
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn kept(&self) -> usize {
        self.head.len() + self.tail.len()
    }

    pub(crate) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Head and tail, each in one piece.
    pub(crate) fn halves(&mut self) -> (&[u8], &[u8]) {
        (&self.head, self.tail.make_contiguous())
    }

    fn tail_start(&self) -> u64 {
        self.total - long(self.tail.len())
    }

    /// Bytes left out between head and tail.
    pub(crate) fn dropped(&self) -> u64 {
        self.tail_start() - long(self.head.len())
    }

    pub(crate) fn push(&mut self, data: &[u8]) {
        let room = self.head_limit.saturating_sub(self.head.len());
        let at_start = self.total == long(self.head.len());
        self.total += long(data.len());
        let (first, rest) = data.split_at(if at_start { room.min(data.len()) } else { 0 });
        self.head.extend_from_slice(first);
        let rest = &rest[rest.len().saturating_sub(self.tail_limit)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(self.tail_limit);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// What a reader at `offset` gets next.
    pub(crate) fn at(&self, offset: u64) -> Piece<'_> {
        if offset >= self.total {
            return Piece::Nothing;
        }
        if let Some(data) = self.head.get(short(offset)..).filter(|d| !d.is_empty()) {
            return Piece::Data(data);
        }
        let start = self.tail_start();
        if offset < start {
            return Piece::Gap { offset: start, dropped: start - offset };
        }
        let skip = short(offset - start);
        let (front, back) = self.tail.as_slices();
        Piece::Data(match front.get(skip..).filter(|d| !d.is_empty()) {
            Some(data) => data,
            None => back.get(skip - front.len()..).unwrap_or(&[]),
        })
    }

    /// Keep nothing but the count.
    pub(crate) fn forget(&mut self) {
        self.head = Vec::new();
        self.tail = VecDeque::new();
        self.head_limit = 0;
        self.tail_limit = 0;
    }

    /// No more will come: give back what was reserved.
    pub(crate) fn settle(&mut self) {
        self.head.shrink_to_fit();
        self.tail.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(ring: &Ring, mut offset: u64) -> (Vec<u8>, Vec<(u64, u64)>) {
        let (mut data, mut gaps) = (Vec::new(), Vec::new());
        loop {
            match ring.at(offset) {
                Piece::Data(piece) => {
                    data.extend_from_slice(piece);
                    offset += long(piece.len());
                }
                Piece::Gap { offset: to, dropped } => {
                    gaps.push((offset, dropped));
                    offset = to;
                }
                Piece::Nothing => return (data, gaps),
            }
        }
    }

    #[test]
    fn keeps_all_that_fits() {
        let mut ring = Ring::new(10);
        for byte in b"0123456789" {
            ring.push(&[*byte]);
        }
        assert_eq!(read(&ring, 0), (b"0123456789".to_vec(), vec![]));
        assert_eq!(read(&ring, 7).0, b"789");
        assert_eq!((ring.dropped(), ring.kept()), (0, 10));
    }

    #[test]
    fn drops_the_middle() {
        let mut ring = Ring::new(10);
        ring.push(b"0123456789abcdef");
        ring.push(b"XY");
        assert_eq!((ring.head(), ring.dropped()), (&b"01234"[..], 8));
        assert_eq!(ring.halves().1, b"defXY");
        assert_eq!(read(&ring, 2), (b"234defXY".to_vec(), vec![(5, 8)]));
        assert_eq!(read(&ring, 6).1, vec![(6, 7)]);
        assert_eq!(ring.total(), 18);
    }

    #[test]
    fn holds_nothing_with_a_limit_of_nothing() {
        let mut ring = Ring::new(0);
        ring.push(b"abc");
        assert_eq!(read(&ring, 0), (vec![], vec![(0, 3)]));
        let mut ring = Ring::new(1);
        ring.push(b"abc");
        assert_eq!((ring.head(), ring.dropped()), (&b"a"[..], 2));
    }

    #[test]
    fn forgets() {
        let mut ring = Ring::new(8);
        ring.push(b"abc");
        ring.forget();
        assert_eq!((ring.kept(), ring.dropped(), ring.total()), (0, 3, 3));
        assert_eq!(read(&ring, 0).1, vec![(0, 3)]);
        ring.push(b"more");
        assert_eq!((ring.kept(), ring.total()), (0, 7));
    }

    #[test]
    fn never_holds_more_than_its_limit() {
        let mut ring = Ring::new(1000);
        let mut all = Vec::new();
        for size in [1_usize, 700, 333, 5, 2000, 64, 499, 501, 500] {
            let data: Vec<u8> = (0..size).map(|i| i.to_le_bytes()[0]).collect();
            ring.push(&data);
            all.extend_from_slice(&data);
            assert!(ring.kept() <= 1000);
            let (read, gaps) = read(&ring, 0);
            let missing: usize = gaps.iter().map(|(_, n)| short(*n)).sum();
            assert_eq!(read.len() + missing, all.len());
            assert!(all.ends_with(&read[read.len().min(500)..]));
        }
    }
}
