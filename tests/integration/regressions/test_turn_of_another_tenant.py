"""A session's digest that comes with another tenant is another session's turn, not a failure in the middle of one."""

from tierkv.sessions import SessionBook, SessionLimits


def test_a_turn_with_another_tenant_takes_nothing_of_the_first_one() -> None:
    book = SessionBook(SessionLimits(nbytes=1000, tenant_nbytes=500, tenant_sessions=10, retain_s=60))
    session = b"a" * 16
    book.note(session, b"1" * 16, b"", b"k" * 32, 4, 10, now=0.0, retain_s=30)
    known, _ = book.note(session, b"2" * 16, b"", b"k" * 64, 2, 10, now=1.0, retain_s=30)
    assert known.tenant == b"2" * 16 and book.held_nbytes == 20 and len(book) == 1
    assert book._tenants.keys() == {b"2" * 16}
