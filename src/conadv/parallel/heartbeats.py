"""What ranks leave for each other in the store, outside of any exchange: signs of life, and who has spoken."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """What we need of PyTorch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...


class Heartbeats:
    """A view of the store of a run, which any thread may use; when the store is gone, its errors are RuntimeErrors."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def beat(self, rank: int, awaits: bool) -> None:
        """A sign of life, and whether the rank waits for others."""
        self._store.set(f"conadv/awaits/{rank}", "yes" if awaits else "no")
        self._store.add(f"conadv/beats/{rank}", 1)

    def beats(self, rank: int) -> int:
        """How often a rank has given a sign of life."""
        return self._store.add(f"conadv/beats/{rank}", 0)

    def awaits(self, rank: int) -> bool:
        """Whether a rank that has given a sign of life waited for others then."""
        return self._store.get(f"conadv/awaits/{rank}") == b"yes"

    def has_report(self) -> bool:
        """Whether some rank has said why the run ends."""
        return self._store.add("conadv/spoken", 0) > 0

    def claim_report(self) -> bool:
        """Whether it is on the one who asks to say why the run ends, being the first."""
        try:
            return self._store.add("conadv/spoken", 1) == 1
        except RuntimeError:  # without the store, better twice than never
            return True
