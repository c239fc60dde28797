"""chunks -> keys. Pure hashing: the same input gives the same keys on every machine."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from kvboost.core import Chunk, ChunkKeys, ContentKey, Namespace, PrefixKey, prefix_key
from kvboost.tiers.epochs import owner


def namespace(
    fingerprint: bytes, tenant: str, piece_tokens: int | None, codec: str = "raw", epoch: int = 0
) -> Namespace:
    """Everything that must agree before two prompts may share K/V; its first half is the owner.

    `piece_tokens` is the piece size of deterministic prefill (None: any shape): K/V computed in
    other shapes differs in its last bits. `codec` is how K/V is stored: what was rounded must not
    pass for what was not. `epoch` counts the deletions of all that the tenant had.
    """
    digest = sha256(b"kvboost/2")
    for part in (fingerprint, str(piece_tokens).encode(), codec.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    whose = owner(tenant, epoch)
    return Namespace(whose + digest.digest()[: 32 - len(whose)])


def derive(chunks: Iterable[Chunk], space: Namespace) -> list[ChunkKeys]:
    """The prefix key of each chunk.

    Tokens are hashed as little-endian u32, never through hash() or pickle: keys are shared between
    processes and machines and must not depend on PYTHONHASHSEED or a Python version.
    """
    keys, parent = [], root(space)
    for chunk in chunks:
        prefix = prefix_key(parent, chunk.tokens)
        keys.append(ChunkKeys(parent, prefix))
        parent = prefix
    return keys


def root(space: Namespace) -> PrefixKey:
    """What the keys of all prompts of a namespace build on."""
    return PrefixKey(sha256(b"prefix" + space).digest())


def content_key(tokens: bytes, space: Namespace) -> ContentKey:
    """The key of a text by its tokens alone."""
    return ContentKey(sha256(b"content" + space + tokens).digest())
