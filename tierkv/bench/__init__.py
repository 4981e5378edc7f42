"""Measuring a running store server: clients that store, match and fetch in a namespace of their own.

:mod:`~tierkv.bench.figures` is the arithmetic, :mod:`~tierkv.bench.client` one client (a process),
:mod:`~tierkv.bench.run` steers them. ``tierkv bench`` is the command line.
"""
