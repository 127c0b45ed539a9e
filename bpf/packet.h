/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What passes by a slot's filter, taken apart. */
#ifndef PACKET_H
#define PACKET_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "filter_tc.h"

#define inline static __always_inline
#define IP_OFFSET 0x1fff
#define IP_MORE_OR_OFFSET 0x3fff
#define IP_DONT 0x4000
#define IP_RESERVED 0x8000
#define ECHO_REPLY4 0
#define ECHO4 8
#define ECHO6 128
#define ECHO_REPLY6 129
#define ICMP_BYTES 8

const volatile struct settings settings SEC(".rodata.settings");

/* A packet, seen from its sandbox. */
struct packet {
	struct address own;
	struct address away;
	struct tcphdr tcp;
	__u32 payload_bytes; /* of TCP */
	__u16 port;	     /* of the other side; 0 of ICMP */
	__u8 protocol;	     /* as spans have it */
	__u8 on_wire;	     /* as the packet has it */
	bool six;
	bool inbound;
	bool opens; /* needs a name that has not expired */
	bool error; /* of ICMP */
};

inline bool same(const struct address *a, const volatile struct address *b)
{
	return a->words[0] == b->words[0] && a->words[1] == b->words[1] &&
	       a->words[2] == b->words[2] && a->words[3] == b->words[3];
}

inline void map4(struct address *address, __be32 four)
{
	address->words[0] = 0;
	address->words[1] = 0;
	address->words[2] = bpf_htonl(0xffff);
	address->words[3] = four;
}

inline bool is_mapped(const struct address *a)
{
	return !a->words[0] && !a->words[1] && a->words[2] == bpf_htonl(0xffff);
}

inline bool is_multicast(const struct packet *p)
{
	__u8 first = p->six ? bpf_ntohl(p->away.words[0]) >> 24 : bpf_ntohl(p->away.words[3]) >> 24;

	return p->six ? first == 0xff : first >= 224;
}

/* Parsing. Everything is copied out: hostile packets lie in pieces. */

inline int parse_tcp(struct __sk_buff *skb, struct packet *p, __u32 at, __u32 bytes)
{
	__u32 header;

	if (bytes < sizeof(p->tcp) || bpf_skb_load_bytes(skb, at, &p->tcp, sizeof(p->tcp)))
		return MALFORMED;
	header = p->tcp.doff * 4;
	if (header < sizeof(p->tcp) || header > bytes || !p->tcp.source || !p->tcp.dest)
		return MALFORMED;
	p->payload_bytes = bytes - header;
	p->port = bpf_ntohs(p->inbound ? p->tcp.source : p->tcp.dest);
	p->opens = p->tcp.syn && !p->tcp.ack;
	return PASS;
}

inline int parse_udp(struct __sk_buff *skb, struct packet *p, __u32 at, __u32 bytes)
{
	struct udphdr udp;
	__u32 length;

	if (bytes < sizeof(udp) || bpf_skb_load_bytes(skb, at, &udp, sizeof(udp)))
		return MALFORMED;
	length = bpf_ntohs(udp.len);
	if (length < sizeof(udp) || length > bytes || !udp.source || !udp.dest)
		return MALFORMED;
	p->port = bpf_ntohs(p->inbound ? udp.source : udp.dest);
	return PASS;
}

inline bool is_icmp_error(bool six, __u8 type)
{
	return six ? type >= 1 && type <= 4 : type == 3 || type == 11 || type == 12;
}

/* An error is about what its sandbox sent: from now on the packet is the quoted one. */
inline int parse_quoted(struct __sk_buff *skb, struct packet *p, __u32 at)
{
	struct address sender;
	__be16 ports[2];

	if (p->six) {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)) || ip.version != 6)
			return MALFORMED;
		p->protocol = ip.nexthdr == IPPROTO_ICMPV6 ? IPPROTO_ICMP : ip.nexthdr;
		__builtin_memcpy(&sender, &ip.saddr, sizeof(sender));
		__builtin_memcpy(&p->away, &ip.daddr, sizeof(p->away));
		at += sizeof(ip);
	} else {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl != 5)
			return MALFORMED;
		if (ip.frag_off & bpf_htons(IP_OFFSET))
			return FRAGMENT; /* made on its way: its ports are elsewhere */
		p->protocol = ip.protocol;
		map4(&sender, ip.saddr);
		map4(&p->away, ip.daddr);
		at += sizeof(ip);
	}
	if (!same(&sender, &p->own))
		return SPOOFED;
	if (p->protocol == IPPROTO_ICMP)
		return PASS;
	if (bpf_skb_load_bytes(skb, at, ports, sizeof(ports)))
		return MALFORMED;
	p->port = bpf_ntohs(ports[1]);
	return PASS;
}

inline int parse_icmp(struct __sk_buff *skb, struct packet *p, __u32 at, __u32 bytes)
{
	__u8 echo = p->inbound ? (p->six ? ECHO_REPLY6 : ECHO_REPLY4) : (p->six ? ECHO6 : ECHO4);
	__u8 type;

	if (bytes < ICMP_BYTES || bpf_skb_load_bytes(skb, at, &type, sizeof(type)))
		return MALFORMED;
	p->protocol = IPPROTO_ICMP;
	p->error = is_icmp_error(p->six, type);
	if (p->error && p->inbound)
		return parse_quoted(skb, p, at + ICMP_BYTES);
	return p->error || type == echo ? PASS : MALFORMED;
}

inline int parse_above(struct __sk_buff *skb, struct packet *p, __u32 at, __u32 bytes)
{
	switch (p->on_wire) {
	case IPPROTO_TCP:
		return parse_tcp(skb, p, at, bytes);
	case IPPROTO_UDP:
		return parse_udp(skb, p, at, bytes);
	}
	if (p->on_wire == (p->six ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return parse_icmp(skb, p, at, bytes);
	return PROTOCOL;
}

inline int parse4(struct __sk_buff *skb, struct packet *p)
{
	__u32 there = skb->len - ETH_HLEN, bytes;
	__u16 fragment;
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return MALFORMED;
	p->protocol = p->on_wire = ip.protocol;
	map4(&p->own, p->inbound ? ip.daddr : ip.saddr);
	map4(&p->away, p->inbound ? ip.saddr : ip.daddr);
	bytes = bpf_ntohs(ip.tot_len);
	fragment = bpf_ntohs(ip.frag_off);
	if (ip.version != 4 || ip.ihl != 5 || bytes < sizeof(ip) || bytes > there)
		return MALFORMED;
	if (!same(&p->own, &settings.own[0]))
		return SPOOFED;
	if (fragment & IP_MORE_OR_OFFSET)
		return FRAGMENT;
	if (fragment & IP_RESERVED)
		return MALFORMED;
	return parse_above(skb, p, ETH_HLEN + sizeof(ip), bytes - sizeof(ip));
}

inline bool has_six(void)
{
	return settings.own[1].words[0] || settings.own[1].words[3];
}

inline int parse6(struct __sk_buff *skb, struct packet *p)
{
	__u32 there = skb->len - ETH_HLEN, bytes;
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return MALFORMED;
	p->six = true;
	p->protocol = p->on_wire = ip.nexthdr;
	__builtin_memcpy(&p->own, p->inbound ? &ip.daddr : &ip.saddr, sizeof(p->own));
	__builtin_memcpy(&p->away, p->inbound ? &ip.saddr : &ip.daddr, sizeof(p->away));
	bytes = bpf_ntohs(ip.payload_len);
	if (!p->inbound && (p->away.words[0] & bpf_htonl(0xffff0000)) == bpf_htonl(0xff020000))
		return CHATTER;
	if (ip.version != 6 || bytes > there - sizeof(ip))
		return MALFORMED;
	if (!has_six() || !same(&p->own, &settings.own[1]))
		return SPOOFED;
	switch (ip.nexthdr) {
	case IPPROTO_FRAGMENT:
		return FRAGMENT;
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_DSTOPTS:
		return MALFORMED;
	}
	return parse_above(skb, p, ETH_HLEN + sizeof(ip), bytes);
}

__noinline int parse(struct __sk_buff *skb, struct packet *p)
{
	if (!p)
		return MALFORMED;
	if (skb->vlan_present || (!p->inbound && skb->pkt_type != PACKET_HOST))
		return MALFORMED;
	switch (skb->protocol) {
	case bpf_htons(ETH_P_IP):
		return parse4(skb, p);
	case bpf_htons(ETH_P_IPV6):
		return parse6(skb, p);
	case bpf_htons(ETH_P_ARP):
		return CHATTER;
	}
	return PROTOCOL;
}

#endif
