"""What an engine does with its cache: both (``kv_both``), spill only (``kv_producer``), load only (``kv_consumer``)."""

from __future__ import annotations

from typing import NamedTuple

from tierkv import __version__
from tierkv.errors import ConfigError
from tierkv_connector.hints import TIERS, Hints

ROLES = ("kv_both", "kv_producer", "kv_consumer")


class Role(NamedTuple):
    """An engine's part.

    Attributes:
        name: vLLM's ``kv_role``.
        store: what of a request is stored where it does not say: ``"none"``, ``"prompt"`` or ``"all"``.
        tiers: what requests may load from.
    """

    name: str = "kv_both"
    store: str = "prompt"
    tiers: frozenset[str] = TIERS

    @classmethod
    def of(cls, name: str, decode_blocks: bool = False) -> Role:
        """Return the role that vLLM calls ``name``.

        Args:
            decode_blocks: whole chunks of generated tokens are stored too.

        Raises:
            ConfigError: there is no such role, or it leaves ``decode_blocks`` without an effect.
        """
        if name not in ROLES:
            raise ConfigError(f"kv_role={name!r} is not served by TierKV {__version__}; set one of {', '.join(ROLES)}")
        if name == "kv_consumer":
            if decode_blocks:
                raise ConfigError(
                    "decode_blocks=True has no effect with kv_role='kv_consumer', which stores nothing; "
                    "leave it out, or set kv_role='kv_both'"
                )
            return cls(name, "none")
        return cls(name, "all" if decode_blocks else "prompt", TIERS if name == "kv_both" else frozenset())

    @property
    def stores(self) -> bool:
        return self.store != "none"

    @property
    def loads(self) -> bool:
        return bool(self.tiers)

    def describe(self) -> str:
        """Return what differs from the default, for the line at start."""
        answers = ", stores answers too" if self.store == "all" else ""
        return f", {self.name}{answers}" if self.name != "kv_both" else answers

    @property
    def hands_off(self) -> bool:
        """Whether every request is one whose chunks another engine will wait for."""
        return self.stores and not self.loads

    def fit(self, hints: Hints | None) -> Hints | None:
        """Take out of a request's hints what this engine does not do, and say so in them; in place.

        A request without hints gets some where it is to be handed off.
        """
        if hints is None:
            if not self.hands_off:
                return None
            hints = Hints(self.store)
        if not self.stores and hints.store != "none":
            hints.store = "none"
            hints.ignored["store"] = f"this engine stores nothing ({self.name})"
        if not self.loads:
            if hints.tiers != TIERS:
                hints.ignored["load"] = f"this engine loads nothing ({self.name})"
            hints.tiers = frozenset()
        if hints.handoff is None and self.hands_off and hints.store != "none":
            hints.handoff = True
        return hints


BOTH = Role()
