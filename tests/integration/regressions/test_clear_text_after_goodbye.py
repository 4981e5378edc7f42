"""What is sent on a TLS connection that has said goodbye fails: it never goes out in clear."""

import contextlib
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from servers import make_certificates
from tierkv_server.stream import TlsStream


def test_nothing_is_sent_in_clear_after_the_end_of_tls(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    listener = socket.create_server(("127.0.0.1", 0))
    raw = socket.create_connection(listener.getsockname())
    sock, _ = listener.accept()
    stream = TlsStream(sock, server)
    shaking = threading.Thread(target=lambda: stream.handshake(time.monotonic() + 10))
    shaking.start()
    tls = client.wrap_socket(raw)
    shaking.join()
    with contextlib.suppress(OSError):
        tls.settimeout(0.2)
        tls.unwrap()  # the client says goodbye
    assert stream.recv(10) == b""
    stream._say_goodbye()  # the connection's own thread is about to close it
    with pytest.raises((OSError, ValueError)):
        stream.send(b"a push with keys")  # and another one pushes
    stream.close()
    listener.close()
    tls.close()
