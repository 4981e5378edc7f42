"""What Redis answers when it cannot do what was asked: what it means for the tier, and a sentence that says so."""

from __future__ import annotations

import redis
from redis.exceptions import RedisClusterException
from redis.sentinel import MasterNotFoundError

from tierkv.errors import ProtocolError
from tierkv.resp import Error

#: What talking to a Redis raises when that Redis, or the way to it, has failed.
FAILURES = (redis.RedisError, RedisClusterException, OSError, ValueError, ProtocolError)

#: Another node has the key; or the Cluster is changing, and the answer may be another in a moment.
REDIRECTS = frozenset({"MOVED", "ASK"})
UNSETTLED = frozenset({"CLUSTERDOWN", "TRYAGAIN"})
#: The node can do nothing for us now.
NODE_OUT = REDIRECTS | {"CLUSTERDOWN", "LOADING", "BUSY", "NOAUTH", "WRONGPASS", "MASTERDOWN"}
#: Nothing can be written now.
WRITES_OUT = frozenset({"READONLY", "OOM", "MISCONF", "NOREPLICAS"})

_SENTENCES = {
    "LOADING": "Redis is loading its data and answers when it has",
    "BUSY": "a script of somebody else's blocks Redis; end it with SCRIPT KILL, or wait",
    "NOAUTH": "Redis wants a password; name it in password_file or in the URL",
    "WRONGPASS": "Redis does not accept this user and password; correct password_file, username or the URL",
    "NOPERM": "Redis denies the user the permission for a command or key; docs/formats.md has the ACL it needs",
    "MASTERDOWN": "this replica has lost its primary and serves nothing until it is back",
    "CLUSTERDOWN": "the Cluster does not serve these keys; see redis-cli --cluster check",
    "MOVED": "this Redis is a node of a Cluster, or its Cluster never settles; write the URL as redis+cluster://",
    "ASK": "this Redis is a node of a Cluster, or its Cluster never settles; write the URL as redis+cluster://",
    "TRYAGAIN": "the Cluster is moving these keys",
    "READONLY": "this Redis is a read-only replica; name its primary, or use redis+sentinel://",
    "OOM": "Redis is full and evicts nothing; raise its maxmemory, or set a maxmemory-policy that evicts",
    "MISCONF": "Redis cannot write its snapshots and refuses writes until it can",
    "NOREPLICAS": "Redis has too few replicas to take writes",
}


class RefusedError(Exception):
    """Redis answered with an error that says that it can do nothing for us now."""


def code_of(reply: object) -> str:
    """Return the code of an error reply, ``""`` for every other reply."""
    return reply.split(" ", 1)[0] if isinstance(reply, Error) else ""


def explain(error: object) -> str:
    """Return a failure or an error reply as a sentence; what Redis said itself stands behind it in brackets."""
    code = code_of(error)
    if isinstance(error, MasterNotFoundError):
        return "no Sentinel that answers knows a primary of that name that is up; check the service and the Sentinels"
    if isinstance(error, redis.AuthenticationError) and "password_file" not in str(error):
        code = "WRONGPASS"
    elif isinstance(error, redis.exceptions.BusyLoadingError):
        code = "LOADING"
    text = "it did not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return f"{_SENTENCES[code]} ({text})" if code in _SENTENCES else text
