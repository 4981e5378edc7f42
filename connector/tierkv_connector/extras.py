"""What besides token ids decides the KV of a prompt: images, clips and sounds, and embeddings in place of tokens.

Theory of operation. vLLM tells items apart by identifiers, which are digests of what the user sent, or what the user
called it: nothing shows which. So an item is named here by the bytes that the model's encoder is given, and rows of
embeddings by theirs. Few bytes are hashed at once, more on a thread; until then vLLM is told to ask again, as for a
plan, up to the request's deadline.

vLLM keeps what it has computed under its own names, on the GPU and in its encoder cache, and computes on top of that.
Two items that came under one name would so end up as KV of the one under the key of the other. So every item that this
engine has been given is remembered under its name, and a name that came with two contents, or with one that is not
known, is trusted no more: its requests keep to vLLM's own cache, those that are under way too.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tierkv.keys import Extra, Part, chain_keys
from tierkv.threads import leave_compute_core
from tierkv_connector.digests import (
    UnknownContentError,
    content_digest,
    content_nbytes,
    place_digest,
    rows_digest,
    zero_rows,
)

logger = logging.getLogger("tierkv")

#: Hashed on the scheduler thread: some 0.2 ms.
INLINE_NBYTES = 256 << 10
#: Bytes that may wait for the hashing thread; requests beyond keep to vLLM's own cache.
QUEUE_NBYTES = 2 << 30
#: Names of items that are remembered, those used last. vLLM's caches hold fewer.
MAX_NAMES = 65536


class _Name:
    """What is known of one of vLLM's names.

    Attributes:
        digest: of the content that came under it; None until it is known.
        source: the very object that was hashed.
        trusted: nothing else has come under it.
    """

    __slots__ = ("__weakref__", "digest", "source", "trusted")

    _lock = threading.Lock()

    def __init__(self) -> None:
        self.digest: bytes | None = None
        self.source: weakref.ref[Any] | None = None
        self.trusted = True

    def means(self, data: Any) -> bool:
        """Return whether ``data`` is the object that was hashed."""
        return self.digest is not None and self.source is not None and self.source() is data

    def came_with(self, digest: bytes, data: Any) -> None:
        """Take note of a content that came under this name."""
        with self._lock:
            if self.digest is None:
                self.digest = digest
            if self.digest == digest:
                self.source = weakref.ref(data)
            else:
                self.trusted = False


class _Special(NamedTuple):
    """What stands for more than one item.

    Attributes:
        items: every item; not trusted once some may have come that were not seen.
        dtype: of embeddings, which vLLM tells apart by their bytes alone.
        zeros: rows of zeros, which vLLM takes for the places of tokens among embeddings, and these for them.
    """

    items: _Name
    dtype: _Name
    zeros: _Name


class Content:
    """What besides token ids decides the KV of one request.

    Attributes:
        extras: of each chunk that has some; None until they are known.
        failed: they cannot be known, or were not in time.
        nbytes: to be hashed.
        deadline: monotonic time until which its request waits for it.
    """

    __slots__ = (
        "_chunk_tokens",
        "_embedded",
        "_items",
        "_keys",
        "_mixed",
        "_names",
        "_prompt",
        "_root",
        "_rows",
        "_special",
        "_tokens",
        "deadline",
        "extras",
        "failed",
        "nbytes",
    )

    def __init__(
        self,
        request: Any,
        root: bytes | None,
        chunk_tokens: int,
        items: Sequence[tuple[Any, _Name]],
        special: _Special,
    ) -> None:
        self._root = root
        self._chunk_tokens = chunk_tokens
        self._items = items
        self._special = special
        self._rows: torch.Tensor | None = getattr(request, "prompt_embeds", None)
        self._prompt = request.prompt_token_ids, getattr(request, "prompt_is_token_ids", None)
        self._tokens: list[int] = []
        self._embedded: list[tuple[int, int]] = []
        self._keys: list[bytes] = []
        self._names = [name for _, name in items]
        self._names += [special.items] * bool(items)
        tokens, mask = self._prompt
        self._mixed = self._rows is not None and tokens is not None and (mask is None or any(mask))
        if self._rows is not None:
            self._names += [special.dtype] + [special.zeros] * self._mixed
            special.dtype.came_with(str(self._rows.dtype).encode(), self._rows)
        self.extras: dict[int, list[Extra]] | None = None
        self.failed = False
        self.deadline = 0.0
        self.nbytes = sum(content_nbytes(_fields(f.data)) for f, name in items if not name.means(f.data))
        self.nbytes += self._rows.nbytes if self._rows is not None else 0

    @property
    def known(self) -> bool:
        """Whether the request may be stored and loaded: all is known, and none of its names was used for anything else.

        It may become false at any time.
        """
        return self.extras is not None and not self.failed and all(name.trusted for name in self._names)

    @property
    def awaited(self) -> bool:
        """Whether it is being hashed."""
        return self.extras is None and not self.failed

    @property
    def keys(self) -> list[bytes]:
        """The keys of the prompt's whole chunks; none as long as it is not known."""
        return list(self._keys) if self.known else []

    def tokens(self, all_tokens: Sequence[int], start: int, stop: int) -> list[int]:
        """Return token ids ``start`` to ``stop`` of the request as keys have them: 0 where an embedding is instead."""
        own = list(self._tokens[start:stop])
        return own + list(all_tokens[start + len(own) : stop])

    def give_up(self) -> None:
        """Take note that it cannot be known (in time), and so not what vLLM keeps under its names."""
        self.failed = True
        for feature, name in self._items:
            if not name.means(feature.data):
                name.trusted = False
        if self._rows is not None:
            self._special.zeros.trusted = False
            self._special.dtype.trusted &= not self._mixed
        self._items, self._rows = (), None

    def hash(self, settings: Mapping[str, Any]) -> None:
        """Make it known. On any thread.

        Args:
            settings: what besides an item decides what the encoder makes of it.

        Raises:
            UnknownContentError: something cannot be named by its content.
        """
        extras: dict[int, list[Extra]] = {}
        rows = self._rows
        self._tokens, self._embedded = _tokens_and_embedded(*self._prompt, 0 if rows is None else len(rows))
        for feature, name in self._items:
            if not name.means(feature.data):
                name.came_with(content_digest(feature.modality, _fields(feature.data), settings), feature.data)
            assert name.digest is not None
            place = feature.mm_position
            begin, end = place.offset, place.offset + place.length
            data = place_digest(name.digest, self._tokens[begin:end], getattr(place, "is_embed", None))
            for chunk, _, _ in self._pieces([(begin, end)]):
                extras.setdefault(chunk, []).append(Extra(Part.MULTIMODAL, data, begin - chunk * self._chunk_tokens))
        if rows is not None:
            self._look_for_zeros(rows)
            for chunk, first, last in self._pieces(self._embedded):
                offset = first - chunk * self._chunk_tokens
                extras.setdefault(chunk, []).append(Extra(Part.PROMPT_EMBEDS, rows_digest(rows[first:last]), offset))
        if self._root is not None:
            self._keys = chain_keys(self._root, self._tokens, self._chunk_tokens, extras)
        self.extras = extras
        self._items, self._rows = (), None

    def _look_for_zeros(self, rows: torch.Tensor) -> None:
        """See whether vLLM may take an embedding of this prompt for a token, or a token for an embedding."""
        if any(zero_rows(rows[first:last]) for _, first, last in self._pieces(self._embedded)):
            self._special.zeros.trusted = False
            self._names = [*self._names, self._special.zeros]
        ends = [0, *(end for _, end in self._embedded)]
        begins = [*(begin for begin, _ in self._embedded), len(rows)]
        gaps = self._pieces([(a, b) for a, b in zip(ends, begins, strict=True) if a < b])
        if any(zero_rows(rows[first:last]) < last - first for _, first, last in gaps):
            self._special.dtype.trusted = False

    def _pieces(self, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield (chunk, first token, last token + 1) of each chunk's part of each run."""
        size = self._chunk_tokens
        for begin, end in runs:
            for chunk in range(begin // size, -(-end // size)):
                if self.failed:
                    raise UnknownContentError("nobody waits for it any more")
                yield chunk, max(begin, chunk * size), min(end, (chunk + 1) * size)


class Contents:
    """The contents of one engine's requests.

    Args:
        chunk_tokens: tokens a chunk.
        settings: what besides an item decides what the encoder makes of it; a text that says why requests with items
            are passed by; None for a model that takes none.
    """

    def __init__(self, chunk_tokens: int, settings: Mapping[str, Any] | str | None) -> None:
        self._chunk_tokens = chunk_tokens
        self._settings = settings
        self._names: OrderedDict[str, _Name] = OrderedDict()
        self._special = _Special(_Name(), _Name(), _Name())
        self._queue: deque[Content] = deque()
        self._queued_nbytes = 0
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._said: set[str] = set()

    def of(self, request: Any, root: bytes | None) -> Content | None:
        """Return what besides token ids decides a request's KV; None where nothing does.

        Args:
            request: vLLM's.
            root: of the chain of its keys; None: it gets no keys and so does not wait, and what it brings is hashed
                at once.
        """
        if getattr(request, "resumable", False):
            self._special.items.trusted = False  # items may be added to it later, which nobody shows us
        features = getattr(request, "mm_features", None) or ()
        embeds, mask = getattr(request, "prompt_embeds", None), getattr(request, "prompt_is_token_ids", None)
        if not features and embeds is None and mask is None and request.prompt_token_ids is not None:
            return None
        items = [(feature, self._name(feature.identifier)) for feature in features]
        content = Content(request, root, self._chunk_tokens, items, self._special)
        reason = self._refusal(request, features)
        if reason:
            self._pass_by(content, reason)
        elif root is None or content.nbytes <= INLINE_NBYTES:
            self._hash(content)
        elif not self._hash_later(content):
            self._pass_by(content, f"{self._queued_nbytes} bytes of contents wait for being hashed")
        return content

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to be hashed, and return whether that is so. For tests."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queued_nbytes, timeout_s)

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _name(self, identifier: str) -> _Name:
        name = self._names.get(identifier)
        if name is None:
            name = self._names[identifier] = _Name()
            if len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)
        else:
            self._names.move_to_end(identifier)
        return name

    def _refusal(self, request: Any, features: Sequence[Any]) -> str:
        """Return why a request's content cannot be known; empty where it can."""
        embeds, tokens = getattr(request, "prompt_embeds", None), request.prompt_token_ids
        mask = getattr(request, "prompt_is_token_ids", None)
        if features and not isinstance(self._settings, Mapping):
            return self._settings or "this model is not known to take any"
        if any(not isinstance(feature.data, Mapping) for feature in features):
            return "the items themselves do not come to vLLM's scheduler"
        if embeds is None:
            return "" if features else "there are neither token ids nor embeddings"
        if embeds.dim() != 2 or (tokens is not None and (mask is None or not len(mask) == len(tokens) == len(embeds))):
            return "it is not said which tokens have embeddings"  # vLLM then computes from the token ids alone
        return ""

    def _pass_by(self, content: Content, reason: str) -> None:
        content.give_up()
        if reason not in self._said and len(self._said) < 16:
            self._said.add(reason)
            logger.warning(
                "KV of some prompts with images, sounds or embeddings is cached on the GPU alone: %s", reason
            )

    def _hash(self, content: Content) -> None:
        try:
            content.hash(self._settings if isinstance(self._settings, Mapping) else {})
        except UnknownContentError as error:
            if not content.failed:
                self._pass_by(content, str(error))
        except Exception as error:  # of many kinds: what an item is made of is the model's affair
            self._pass_by(content, f"{type(error).__name__}: {error}"[:200])

    def _hash_later(self, content: Content) -> bool:
        with self._wake:
            if self._closed or self._queued_nbytes + content.nbytes > QUEUE_NBYTES:
                return False
            self._queue.append(content)
            self._queued_nbytes += content.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tierkv-contents", daemon=True)
                self._thread.start()
            self._wake.notify_all()
        return True

    def _run(self) -> None:
        leave_compute_core()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                content = self._queue.popleft()
            self._hash(content)
            with self._wake:
                self._queued_nbytes -= content.nbytes
                self._wake.notify_all()


def _fields(data: Any) -> dict[str, Any]:
    """Return the values of an item's fields, which vLLM wraps."""
    return {str(name): each.data for name, each in data.items()} if isinstance(data, Mapping) else {}


def _tokens_and_embedded(
    tokens: Sequence[int] | None, mask: Sequence[bool] | None, num_rows: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a prompt's token ids, 0 where an embedding is instead, and the runs of embeddings: (begin, end) each."""
    if tokens is None:
        return [0] * num_rows, [(0, num_rows)]
    if mask is None or not num_rows:
        return list(tokens), []
    runs: list[tuple[int, int]] = []
    for i, is_token in enumerate(mask):
        if is_token:
            continue
        if runs and runs[-1][1] == i:
            runs[-1] = runs[-1][0], i + 1
        else:
            runs.append((i, i + 1))
    return [token if is_token else 0 for token, is_token in zip(tokens, mask, strict=True)], runs
