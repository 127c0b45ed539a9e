"""What sandboxes may reach, enforced from outside them.

A sandbox without a network has a namespace of its own with loopback alone and costs nothing here. One
with a network gets a *slot*: a ready network namespace, owned by the host and not by the sandbox's
user namespace (so root inside cannot change it, nor open raw sockets), joined by a veth pair to the
node's *router* namespace. Each slot's eBPF program, on the router's end of the pair, decides on every
packet by the slot's own maps. Names are the *warden*'s: a process that answers DNS for the slots,
fills their maps with what it answered, and looks into the first bytes of connections to addresses
that came from names.

    policy   what rules say, parsed and flattened; pure
    services named services, found in the node's own settings
    router   the router namespace and its uplink, for everybody else
    routing  making the router and taking it away
    pools    which addresses are free here, and slots' numbers; pure
    never    addresses nobody reaches; pure
    rules    what nft is told in the host's and the router's namespace; pure
    slots    ready slots, taken and given back; what survives a crash
    making   making slots and removing them
    warden/  resolver and proxy, a process of their own
    network  all of it for a backend: take a slot, apply a policy, tell what was denied

Start reading with `policy`.
"""
