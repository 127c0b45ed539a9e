/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What the filter of a slot and src/dsec/linux/network_filter.py both know. All integers are the
 * host's; addresses are 16 bytes as on the wire, IPv4 as ::ffff:a.b.c.d. */
#ifndef FILTER_TC_H
#define FILTER_TC_H

#include <linux/types.h>

#define MAX_SPANS 16
#define MAX_NETWORKS 20000 /* of two policies */
#define MAX_NAMES 2048	   /* addresses that names gave, of two policies */
#define MAX_NEVER 1024
#define DENIALS_BYTES (256 * 1024)
#define DENIALS_PER_S 20 /* told of one slot; all are counted */

#define INSPECT 1	    /* flag of a span: the warden looks into the connection first */
#define INSPECT_MARK 0xD5EC /* on such packets */
#define ANSWER_MARK 0xD5ED  /* on what the filter itself sends to its sandbox */

#define GRACE_NS 60000000000ULL /* what is no TCP may be answered that long after a name expired */

/* Why a packet is not let through. The order is that of `_REASONS` over there. */
enum reason {
	PASS,
	RULE,
	NEVER,
	SPOOFED,
	FRAGMENT,
	MALFORMED,
	PROTOCOL,
	EXPIRED,
	CHATTER, /* what kernels say unasked: dropped, neither told nor counted */
};

struct address {
	__u32 words[4];
};

/* Of `never`. */
struct prefix {
	__u32 bits;
	struct address address;
};

/* Rules have the number of their policy before them: those of the next one are put beside those of
 * the one that holds, and then the number that holds is changed. */
struct place {
	__u32 policy;
	struct address address;
};

struct places {
	__u32 bits; /* 32 more than of the address */
	struct place place;
};

struct span {
	__u8 protocol; /* 6, 17 or 1; the latter for ICMPv6 too, with port 0 */
	__u8 flags;
	__u16 low;
	__u16 high;
};

struct verdict {
	__u32 count;
	struct span spans[MAX_SPANS];
};

struct name {
	__u64 expires_boot_ns;
	struct verdict verdict;
};

struct counters {
	__u64 sent_packets;
	__u64 sent_bytes;
	__u64 received_packets;
	__u64 received_bytes;
	__u64 denied_packets;
};

struct denial {
	struct address address; /* of the other side */
	__u32 slot;
	__u16 port;
	__u8 reason;
	__u8 inbound;
	__u8 protocol; /* as in the packet */
	__u8 unused[3];
};

/* Set before loading. IPv4 first; IPv6 is all zero if the slot has none. */
struct settings {
	struct address own[2];
	struct address gateway[2];
	__u32 slot;
	__u16 proxy_port; /* of the gateway; 0: none */
	__u16 unused;
};

#endif
