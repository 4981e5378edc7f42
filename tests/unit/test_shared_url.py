"""URLs of the shared tier: what each form means, and that nothing secret is ever shown."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config import check_shared_url
from tierkv.errors import ConfigError
from tierkv.urls import SharedUrl, parse_shared_url, redact_url, url_secrets

word_st = st.text("abcXYZ019-_.", min_size=1, max_size=12)


@pytest.mark.parametrize(
    "url, expected",
    [
        ("redis://h", SharedUrl("single", False, (("h", 6379),))),
        ("redis://h:1/2", SharedUrl("single", False, (("h", 1),), db=2)),
        ("redis://h?db=3", SharedUrl("single", False, (("h", 6379),), db=3)),
        ("rediss://u:p%40w@h:1", SharedUrl("single", True, (("h", 1),), username="u", password="p@w")),
        ("redis://:pw@[::1]:7/0", SharedUrl("single", False, (("::1", 7),), password="pw")),
        ("unix:///run/r.sock?db=1&password=pw", SharedUrl("unix", False, path="/run/r.sock", db=1, password="pw")),
        (
            "redis+sentinel://:pw@a:1,b/svc/2?client_name=x",
            SharedUrl("sentinel", False, (("a", 1), ("b", 26379)), service="svc", db=2, password="pw",
                      options=(("client_name", "x"),)),
        ),
        ("rediss+sentinel://a/svc", SharedUrl("sentinel", True, (("a", 26379),), service="svc")),
        ("redis+cluster://a:1,[fe80::1]:2,c", SharedUrl("cluster", False, (("a", 1), ("fe80::1", 2), ("c", 6379)))),
        ("rediss+cluster://a/0", SharedUrl("cluster", True, (("a", 6379),))),
    ],
)  # fmt: skip
def test_what_a_url_means(url: str, expected: SharedUrl) -> None:
    assert parse_shared_url(url) == expected
    assert check_shared_url(url) == url


@pytest.mark.parametrize(
    "url, reason",
    [
        ("redis:/h", "scheme"),
        ("redis+foo://h", "scheme 'redis+foo'"),
        ("http://h", "scheme 'http'"),
        ("redis://", "names no host"),
        ("redis+cluster://a,,b", "names no host"),
        ("redis+cluster://a:x,b", "port 'x'"),
        ("redis+cluster://a:70000", "port '70000'"),
        ("redis+cluster://a/1", "a Cluster has 0 only"),
        ("redis+sentinel://a", "names no service"),
        ("redis+sentinel://a/svc/x", "the database 'x' is not a number"),
        ("redis://a,b", "several hosts"),
        ("redis://u:p@ss/w:rd@host/0", "%2F"),
        ("redis://:pa/ss@host", "%2F"),
        ("unix://", "names no socket"),
    ],
)
def test_what_is_no_url_says_why(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_shared_url(url)
    assert reason in str(raised.value)
    assert "redis+sentinel://host:port,host:port/service/db" in str(raised.value), "it says the forms"
    assert "w:rd" not in str(raised.value) and "ss@" not in str(raised.value)


@given(
    st.sampled_from(["redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"]),
    word_st,
    st.text("pqrs@:%/?#+ é", min_size=4, max_size=12),
    st.lists(word_st, min_size=1, max_size=3),
)
def test_no_password_is_shown(scheme: str, user: str, secret: str, hosts: list[str]) -> None:
    password = f"hunter2{secret}"
    places = ",".join(hosts if "+" in scheme else hosts[:1])
    url = f"{scheme}://{user}:{quote(password, safe='')}@{places}/{'svc/0' if 'sentinel' in scheme else '0'}"
    assert parse_shared_url(url).password == password
    assert "hunter2" not in redact_url(url) and f"{scheme}://{user}:***@" in redact_url(url)
    assert password in url_secrets(url)
    query = f"{scheme}://{places}/{'svc' if 'sentinel' in scheme else ''}?sentinel_password={quote(password, safe='')}"
    assert "hunter2" not in redact_url(query) and password in url_secrets(query)


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_a_sentence(text: str) -> None:
    for url in (text, f"redis://{text}", f"redis+sentinel://{text}", f"redis+cluster://{text}"):
        try:
            assert check_shared_url(url) == url
        except ConfigError as error:
            assert "write it as" in str(error)
