"""Keepalive: the kernel finds out whether another host still answers, also for a process that is busy or stopped."""

from __future__ import annotations

import math
import socket

_MOST_SECONDS = 32767  # of the kernel, as below
_MOST_PROBES = 127


def keep_alive(end: socket.socket, seconds: float) -> None:
    """Lets an idle connection break (`ETIMEDOUT`) once the other host has not answered for long enough.

    It breaks no sooner than that, and hardly later. There is no TCP_USER_TIMEOUT: it would also break a connection with
    data under way. TCP sends these again after 12.6 and 25.4 s, so an outage of 13 s would be too long for it.

    Args:
        end: This end of the connection.
        seconds: Seconds since the last answer; 2 at least. There is one in each fifteenth of that time, but not more
            often than once a second.
    """
    interval = min(max(1, int(seconds / 15)), _MOST_SECONDS)
    probes = min(max(1, math.ceil(seconds / interval) - 1), _MOST_PROBES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, probes),
    ):
        end.setsockopt(socket.IPPROTO_TCP, option, value)
