"""Requests between processes of one node, over a Unix socket: what ``rpc.connect`` needs on one side and ``rpc.Service.handle`` on the other.

    caller ──send──► ChannelClient ──frames──► ChannelServer ──handle──► Service ──► target
                          │  reconnects, repeats       │  answers a repeat from its memory
                          └────── request id ──────────┴──────► current_request()

Guarantees: a request is executed at most once in one life of the server, however often the connection is lost; it keeps its id over the
server's death, so a service with a journal can recognise it in its next life; every call ends by its deadline, with the answer or an error that
names it; a stranger's bytes end that stranger's connection only. No pickle: frames are msgpack arrays of fixed types.

Not covered: other nodes (their calls go through Ray), and who may serve under a name: the newest server takes it over.

    frames.py     the messages, cutting a stream into frames, holding back a sender
    sockets.py    binding and connecting below a folder of any length, modes, forked children
    sessions.py   what a server remembers of one client
    server.py     ChannelServer
    client.py     ChannelClient
    blocking.py   BlockingChannel, for threads
"""

from streamrl.protocol.channel.blocking import BlockingChannel
from streamrl.protocol.channel.client import ChannelClient
from streamrl.protocol.channel.server import ChannelServer

__all__ = ["BlockingChannel", "ChannelClient", "ChannelServer"]
