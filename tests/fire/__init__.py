"""Under fire: real engines serve while everything around them fails, again and again, and every byte is compared.

``kind.py`` says what a kind of fault is and holds the registry; ``kinds_*.py`` are the kinds; ``stage.py`` is what they
strike (engines, store server, Redis, networks); ``store.py`` is the store server under test, whose operations have
points at which it stops or dies; ``harness.py`` strikes and checks. ``scripts/test-faults`` runs it all.
"""
