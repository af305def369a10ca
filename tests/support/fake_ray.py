"""What a pool asks of Ray, played in one process: attackers answer some polls later, or never."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest

from conadv.ranks import pool
from conadv.ranks.attacker import Attacker
from conadv.ranks.pool import Pool


class RayError(Exception):
    """As Ray raises it in place of an answer; the cause is that of a task that failed."""

    cause = None


class Reference:
    """To an answer, or to a value, which is freed with its last reference."""


class FakeRay:
    """Attackers that answer some polls later, or never; everything that they are sent is pickled."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, seed=0, slowness=0.0):
        self.random, self.slowness = random.Random(seed), slowness
        self.store, self.calls, self.done, self.killed = WeakKeyDictionary(), {}, set(), set()
        self.submitted, self.starts = [], True

    def is_initialized(self):
        return True

    def remote(self, kind):
        assert kind is Attacker
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, make_model):
        attacker = Attacker(make_model)
        actor = SimpleNamespace()
        for name in ("ready", "twin"):
            call = getattr(attacker, name)
            setattr(actor, name, SimpleNamespace(remote=lambda *words, call=call: self._call(id(actor), call, words)))
        return actor

    def _call(self, actor, call, words):
        ticket = Reference()
        self.calls[ticket] = (
            actor,
            call,
            [word if isinstance(word, Reference) else pickle.dumps(word) for word in words],
        )
        if call.__name__ == "ready":
            self.done.add(ticket)
        else:
            self.submitted.append(words[1:3])
        return ticket

    def put(self, value):
        reference = Reference()
        self.store[reference] = pickle.dumps(value)
        return reference

    def wait(self, tickets, num_returns, timeout):
        if timeout > 0 and self.slowness < 1:  # whoever waits long enough gets an answer
            self.done.add(tickets[0])
        elif num_returns == len(tickets):
            self.done.update(ticket for ticket in tickets if self.random.random() >= self.slowness)
        return [ticket for ticket in tickets if ticket in self.done], []

    def get(self, ticket):
        self.done.discard(ticket)
        actor, call, words = self.calls.pop(ticket)
        if actor in self.killed if call.__name__ == "twin" else not self.starts:
            raise RayError("The actor died.\n\nkilled")
        try:
            return call(*(pickle.loads(self.store[word] if isinstance(word, Reference) else word) for word in words))
        except ValueError as error:
            failed = RayError("failed")
            failed.cause = error
            raise failed from error

    def kill(self, actor):
        self.killed.add(id(actor))


class FakePool(Pool):
    """A pool whose Ray is played in this process; `replaces`: as on a cluster, lost attackers are started again."""

    def __init__(self, make_model, attackers, resources=None, address=None, wait=None, replaces=False, **settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "imported", lambda address: FakeRay(**settings))
            super().__init__(make_model, attackers, resources, "somewhere" if replaces else None, wait=wait)
