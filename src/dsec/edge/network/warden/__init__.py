"""Names and inspected connections of a node's sandboxes: a process of its own beside the edge.

`python -m dsec.edge.network.warden --control FD`, started by `client`, told by `messages` who may
reach what, gone when its control socket ends. It listens in the router's namespace and asks and
connects from the host's. A sandbox is known by its source address, which the filter guarantees.
Everything a sandbox can make it hold is bounded by `settings.Limits`.

    client         the edge's side: starts it, tells it, starts it again
    messages       what the two say to each other; `connection` is the edge's end of it
    control        the process at work; `places` is its sockets
    guests         the sandboxes it knows; what is cut when rules narrow
    reach          whether a name, an address, a port may be reached; pure
    resolver       the decision on a question; `dns_server` is its sockets
    lookups        the cache, and `upstream`: the node's resolvers
    rates          how much may be asked, and what looks like smuggling; pure
    client_hello   which server a TLS client asks for; pure
    given          the addresses a sandbox was given for names
    proxy          connections: transparent ones, and those to the explicit proxy
    authority      which host an HTTP request is for; pure
    http_relay     HTTP/1.1 with every request's host checked, credentials set
    dialing        connections to servers; `streams` joins them
    denials        what was denied, counted and told in small portions
    survival       nothing one sandbox sends ends it for all

A credential's value is set on requests that this process itself sends over verified TLS (or in
plain, if its scheme says so). It is never in a log, an event or an error. What a server says back,
it says to the sandbox: a host that echoes its request headers hands the value over, so credentials
belong to hosts that do not.

What is not claimed: the name hidden in an encrypted client hello is not seen, its outer name is
checked; on ports other than 80 and 443 the address alone decides; the cache is shared, so that a
sandbox can tell by time whether a name it may ask was asked before. After its death the next one
does not know what was given for names: connections to these go on, until the sandbox's rules change,
or it asks again.

Start reading with `resolver`, then `proxy`.
"""
