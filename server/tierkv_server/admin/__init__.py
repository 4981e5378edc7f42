"""The admin HTTP server: health, metrics, a JSON API and a dashboard, for people and their tools.

It lives in the store server's process and beside its work: an event loop in a thread of its own, four threads that call
the tiers, bounded in everything that a client decides. It holds no lock of the service while it waits, so a client that
is slow or many cost engines nothing but processor time. ``docs/http.md`` describes it for users.
"""
