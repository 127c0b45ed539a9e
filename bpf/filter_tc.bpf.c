// SPDX-License-Identifier: GPL-2.0 OR MIT
/* What may pass between a sandbox and its router: on the router's end of the slot's pair, so out of
 * the sandbox's reach. Without state of flows; what is not understood in full is denied.
 *
 *   from_sandbox   ingress of the device: what the sandbox sends
 *   to_sandbox     egress of the device: what comes back, and nothing that was not asked for
 *
 * Denied TCP is answered with a reset, so that who tries knows at once, and so that connections end
 * which a new policy forbids. Which policy holds is one word.
 *
 * Functions that are not inline are verified alone, which makes loading ten times faster. */
#include <linux/pkt_cls.h>

#include "packet.h"

#define DNS_PORT 53
#define RESET_TTL 64
#define SECOND_NS 1000000000ULL

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} active SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_NETWORKS);
	__type(key, struct places);
	__type(value, struct verdict);
} networks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_NAMES);
	__type(key, struct place);
	__type(value, struct name);
} names SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct counters);
} counters SEC(".maps");

struct window {
	__u64 began_ns;
	__u32 told;
	__u32 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct window);
} telling SEC(".maps");

/* Of all slots of a node. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_NEVER);
	__type(key, struct prefix);
	__type(value, __u8);
} never SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, DENIALS_BYTES);
} denials SEC(".maps");

/* Deciding. */

/* The flags of what fits, or -1. */
__noinline int fit(const struct verdict *verdict, const struct packet *p)
{
	if (!verdict || !p)
		return -1;
	for (__u32 i = 0; i < MAX_SPANS && i < verdict->count; i++) {
		const struct span *span = &verdict->spans[i];

		if (span->protocol == p->protocol && span->low <= p->port && p->port <= span->high)
			return span->flags;
	}
	return -1;
}

inline bool expired(const struct name *name, const struct packet *p)
{
	bool tcp = p->protocol == IPPROTO_TCP;

	if (tcp && !p->opens)
		return false; /* a connection outlives the name it was made by */
	return bpf_ktime_get_boot_ns() > name->expires_boot_ns + (tcp ? 0 : GRACE_NS);
}

inline bool is_gateway(const struct packet *p)
{
	return p->six ? same(&p->away, &settings.gateway[1])
		      : same(&p->away, &settings.gateway[0]);
}

inline bool is_served(const struct packet *p)
{
	if (p->port == DNS_PORT)
		return p->protocol == IPPROTO_TCP || p->protocol == IPPROTO_UDP;
	return p->protocol == IPPROTO_TCP && p->port && p->port == settings.proxy_port;
}

inline bool is_never(const struct packet *p)
{
	struct prefix key = {.bits = 128, .address = p->away};

	return is_multicast(p) || (p->six && is_mapped(&p->away)) ||
	       bpf_map_lookup_elem(&never, &key);
}

inline int decide_by_rules(const struct packet *p, __u32 *flags)
{
	__u32 zero = 0, *policy = bpf_map_lookup_elem(&active, &zero);
	struct places key = {.bits = 32 + 128};
	struct verdict *verdict;
	struct name *name;
	int fits, reason = RULE;

	if (!policy)
		return RULE;
	key.place.policy = *policy;
	key.place.address = p->away;
	name = bpf_map_lookup_elem(&names, &key.place);
	fits = name ? fit(&name->verdict, p) : -1;
	if (fits >= 0 && expired(name, p)) {
		reason = EXPIRED;
		fits = -1;
	}
	if (fits < 0) {
		verdict = bpf_map_lookup_elem(&networks, &key);
		fits = verdict ? fit(verdict, p) : -1;
	}
	if (fits < 0)
		return reason;
	*flags = fits;
	return PASS;
}

__noinline int decide(const struct packet *p, __u32 *flags)
{
	if (!p || !flags)
		return RULE;
	if (p->inbound && p->opens)
		return RULE; /* nobody connects to a sandbox */
	if (is_gateway(p))
		return is_served(p) ? PASS : NEVER;
	if (is_never(p))
		return NEVER;
	return decide_by_rules(p, flags);
}

/* What becomes of the denied. */

inline bool may_tell(void)
{
	__u64 now = bpf_ktime_get_boot_ns();
	__u32 zero = 0;
	struct window *window = bpf_map_lookup_elem(&telling, &zero);

	if (!window)
		return false;
	if (now - window->began_ns > SECOND_NS) {
		window->began_ns = now;
		window->told = 0;
	}
	return __sync_fetch_and_add(&window->told, 1) < DENIALS_PER_S;
}

inline void tell(const struct packet *p, int reason)
{
	struct denial denial = {
		.address = p->away,
		.slot = settings.slot,
		.port = p->port,
		.reason = reason,
		.inbound = p->inbound,
		.protocol = p->on_wire,
	};
	__u32 zero = 0;
	struct counters *counted = bpf_map_lookup_elem(&counters, &zero);

	if (counted)
		counted->denied_packets++;
	if (may_tell())
		bpf_ringbuf_output(&denials, &denial, sizeof(denial), 0);
}

inline __u16 folded(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

struct pseudo {
	struct address from;
	struct address to;
	__be32 bytes;
	__be32 protocol;
};

/* Sum of the addresses, length and protocol. Those of IPv4 are words too: what maps them adds up to
 * 0xffff each, which is nothing in this arithmetic. */
inline __u32 pseudo_sum(const struct address *from, const struct address *to)
{
	struct pseudo pseudo = {
		.from = *from,
		.to = *to,
		.bytes = bpf_htonl(sizeof(struct tcphdr)),
		.protocol = bpf_htonl(IPPROTO_TCP),
	};

	return bpf_csum_diff(NULL, 0, (__be32 *)&pseudo, sizeof(pseudo), 0);
}

/* In two steps, since of a packet whose sum is still to be computed only the first is to be had. */
inline int put_tcp(struct __sk_buff *skb, struct tcphdr *tcp, __u32 at, __u32 pseudo)
{
	__u32 sum, field = at + offsetof(struct tcphdr, check);

	tcp->check = 0;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)tcp, sizeof(*tcp), 0);
	if (bpf_skb_store_bytes(skb, at, tcp, sizeof(*tcp), 0))
		return -1;
	if (bpf_l4_csum_replace(skb, field, 0, pseudo, BPF_F_PSEUDO_HDR))
		return -1;
	return bpf_l4_csum_replace(skb, field, 0, sum, 0);
}

inline int put4(struct __sk_buff *skb, __be32 from, __be32 to)
{
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(ip) + sizeof(struct tcphdr)),
		.frag_off = bpf_htons(IP_DONT),
		.ttl = RESET_TTL,
		.protocol = IPPROTO_TCP,
		.saddr = from,
		.daddr = to,
	};

	ip.check = folded(bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	return bpf_skb_store_bytes(skb, ETH_HLEN, &ip, sizeof(ip), 0);
}

inline int put6(struct __sk_buff *skb, const struct address *from, const struct address *to)
{
	struct ipv6hdr ip = {
		.version = 6,
		.payload_len = bpf_htons(sizeof(struct tcphdr)),
		.nexthdr = IPPROTO_TCP,
		.hop_limit = RESET_TTL,
	};

	__builtin_memcpy(&ip.saddr, from, sizeof(ip.saddr));
	__builtin_memcpy(&ip.daddr, to, sizeof(ip.daddr));
	return bpf_skb_store_bytes(skb, ETH_HLEN, &ip, sizeof(ip), 0);
}

/* What a host would say that has no such connection (RFC 9293, 3.5.2); or, about what came in, what
 * the other side would say to end it. Always from the other side to the sandbox. */
inline void make_reset(const struct packet *p, struct tcphdr *reset)
{
	const struct tcphdr *tcp = &p->tcp;

	reset->rst = 1;
	reset->doff = sizeof(*reset) / 4;
	reset->source = p->inbound ? tcp->source : tcp->dest;
	reset->dest = p->inbound ? tcp->dest : tcp->source;
	if (p->inbound) {
		reset->seq = tcp->seq;
		reset->ack_seq = tcp->ack_seq;
		reset->ack = tcp->ack;
	} else if (tcp->ack) {
		reset->seq = tcp->ack_seq;
	} else {
		__u32 seen = p->payload_bytes + tcp->syn + tcp->fin;

		reset->ack = 1;
		reset->ack_seq = bpf_htonl(bpf_ntohl(tcp->seq) + seen);
	}
}

/* Turn the packet into the reset; whether that went. */
inline bool become_reset(struct __sk_buff *skb, const struct packet *p)
{
	__u32 at = ETH_HLEN + (p->six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	struct tcphdr reset = {};

	if (bpf_skb_change_tail(skb, at + sizeof(reset), 0))
		return false;
	if (p->six ? put6(skb, &p->away, &p->own)
		   : put4(skb, p->away.words[3], p->own.words[3]))
		return false;
	make_reset(p, &reset);
	return !put_tcp(skb, &reset, at, pseudo_sum(&p->away, &p->own));
}

inline int send_back(struct __sk_buff *skb)
{
	__u8 macs[2 * ETH_ALEN], swapped[2 * ETH_ALEN];

	if (bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)))
		return TC_ACT_SHOT;
	__builtin_memcpy(swapped, macs + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(swapped + ETH_ALEN, macs, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, swapped, sizeof(swapped), 0))
		return TC_ACT_SHOT;
	skb->mark = ANSWER_MARK;
	return bpf_redirect(skb->ifindex, 0);
}

inline bool is_answered(const struct packet *p, int reason)
{
	return p->on_wire == IPPROTO_TCP && !p->tcp.rst && !(p->inbound && p->opens) &&
	       (reason == RULE || reason == NEVER || reason == EXPIRED);
}

__noinline int refuse(struct __sk_buff *skb, const struct packet *p, int reason)
{
	if (!p)
		return TC_ACT_SHOT;
	if (reason == CHATTER || (p->error && !p->inbound))
		return TC_ACT_SHOT;
	tell(p, reason);
	if (!is_answered(p, reason) || !become_reset(skb, p))
		return TC_ACT_SHOT;
	return p->inbound ? TC_ACT_OK : send_back(skb);
}

inline __u32 packets(const struct __sk_buff *skb)
{
	return skb->gso_segs > 1 ? skb->gso_segs : 1;
}

SEC("tc")
int from_sandbox(struct __sk_buff *skb)
{
	struct packet packet = {};
	__u32 zero = 0, flags = 0;
	struct counters *counted;
	int reason;

	reason = parse(skb, &packet);
	if (reason == PASS)
		reason = decide(&packet, &flags);
	if (reason != PASS)
		return refuse(skb, &packet, reason);
	skb->mark = flags & INSPECT ? INSPECT_MARK : 0;
	counted = bpf_map_lookup_elem(&counters, &zero);
	if (counted) {
		counted->sent_packets += packets(skb);
		counted->sent_bytes += skb->len;
	}
	return TC_ACT_OK;
}

SEC("tc")
int to_sandbox(struct __sk_buff *skb)
{
	struct packet packet = {.inbound = true};
	__u32 zero = 0, flags = 0;
	struct counters *counted;
	int reason;

	if (skb->mark == ANSWER_MARK)
		return TC_ACT_OK;
	reason = parse(skb, &packet);
	if (reason == PASS)
		reason = decide(&packet, &flags);
	if (reason != PASS)
		return refuse(skb, &packet, reason);
	counted = bpf_map_lookup_elem(&counters, &zero);
	if (counted) {
		counted->received_packets += packets(skb);
		counted->received_bytes += skb->len;
	}
	return TC_ACT_OK;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
