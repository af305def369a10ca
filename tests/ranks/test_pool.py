"""What a pool does when attackers are lost, late or new, with a Ray that is played in this process: no waiting."""

from __future__ import annotations

import random
import warnings
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conadv
from conadv.ranks.pool import Pool
from support.fake_ray import FakePool


def pool(attackers, wait=1.0, replaces=False, make_model=None, **settings):
    return FakePool(make_model or network, attackers, wait=wait, replaces=replaces, **settings)


def kill_one(some):
    """Kill an attacker, which the pool does not know yet."""
    if alive := [actor for actor in some._actors.values() if id(actor) not in some._ray.killed]:
        some._ray.kill(some._ray.random.choice(alive))


def network() -> nn.Module:
    torch.manual_seed(1)
    return conadv.split_batchnorm(plain_network())


def plain_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(256, 5)
    )


def batches(number: int, as_bytes: bool = False):
    made = torch.Generator().manual_seed(5)
    images = [torch.randint(256, (8, 3, 8, 8), generator=made, dtype=torch.uint8) for _ in range(number)]
    labels = [torch.randint(5, (8,), generator=made) for _ in range(number)]
    return [(some if as_bytes else some.float() / 255, own) for some, own in zip(images, labels, strict=True)]


def made(twins=None, model=None, attack=None, **settings):
    """A model, its method and its optimizer."""
    model = network() if model is None else model
    settings = {"chunk_size": 2, "seed": 3, "delay": 1, **settings}
    method = conadv.ConAdv(model, F.cross_entropy, attack or conadv.PGD(8 / 255), twins=twins, **settings)
    return model, method, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def take(method, optimizer, data, each=lambda t: None, updates=1, leave=None):
    """Take the steps of an epoch, or leave it early, with an update after every so many of them; their metrics."""
    counts = []
    for t, (now, ahead) in enumerate(islice(method.feed(data), leave)):
        each(t)
        method(now, ahead)
        if t % updates == updates - 1:
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(method.twins, Pool):
            counts.append(method.twins.metrics())
    return counts


def train(twins=None, steps=10, each=lambda t, some, method: None, data=None, updates=1, **settings):
    """The weights after some steps, and the counts of all of them."""
    model, method, optimizer = made(twins, **settings)
    counts = take(method, optimizer, data or batches(steps), lambda t: each(t, twins, method), updates)
    return model.state_dict(), method.state_dict(), counts


def total(counts, name):
    return sum(step[f"twins_{name}"] for step in counts)


def assert_equal(one, other):
    for mine, theirs in zip(one[:2], other, strict=False):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_twins_come_from_attackers_and_nothing_changes(delay, chunk_size):
    alone = train(delay=delay, chunk_size=chunk_size)
    pooled = train(pool(2), delay=delay, chunk_size=chunk_size)
    assert_equal(pooled, alone)
    chunks = 1 if chunk_size is None else 4
    assert total(pooled[2], "pool") == (10 - delay) * chunks  # the first batches of an epoch were not seen ahead
    assert total(pooled[2], "here") == delay * chunks


@pytest.mark.parametrize("seed", range(6))
def test_killed_late_and_new_attackers_change_nothing(seed):
    chance = random.Random(seed)
    delay, some = 1 + seed % 3, pool(2, chance.choice([0.0, 0.01]), seed=seed, slowness=0.6)

    def each(t, some, method):
        if chance.random() < 0.4:
            kill_one(some)
        if chance.random() < 0.4:
            some.add()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pooled = train(some, 20, each, delay=delay)
    assert_equal(pooled, train(steps=20, delay=delay))
    assert total(pooled[2], "pool") > 0
    assert total(pooled[2], "pool") + total(pooled[2], "here") == 80


def test_chunks_of_a_killed_attacker_go_to_another():
    some = pool(2)
    with pytest.warns(UserWarning, match=r"an attacker was lost \(killed\)"):
        pooled = train(some, each=lambda t, some, method: kill_one(some) if t == 4 else None)
    assert len(some._ray.submitted) > len(set(some._ray.submitted))
    assert total(pooled[2], "here") == 4
    assert_equal(pooled, train())


@pytest.mark.parametrize("replaces", [False, True])
def test_without_attackers_the_run_goes_on_alone_and_says_so_once(replaces):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pooled = train(pool(1, replaces=replaces), each=lambda t, some, method: kill_one(some) if t == 4 else None)
    beginnings = ["an attacker was lost (killed)", "no attacker is left"]
    assert [str(each.message).split(":")[0] for each in told] == beginnings[: 1 if replaces else 2]
    assert pooled[2][-1]["attackers"] == replaces
    assert total(pooled[2], "pool") == (36 if replaces else 16)  # the new one starts at once, and gets all chunks
    assert_equal(pooled, train())


def test_one_that_never_answers_gets_nothing_more():
    some = pool(1, wait=0.0, slowness=1.0)
    pooled = train(some)
    assert len(some._ray.submitted) == 2  # one to work on, and the next
    assert [total(pooled[2], name) for name in ("pool", "late", "here")] == [0, 1, 40]
    assert_equal(pooled, train())


def test_at_most_delay_steps_are_in_flight():
    flights, stored = [], []

    def each(t, some, method):
        flights.append({t for t, _ in some._jobs})
        stored.append(len(some._ray.store))

    train(pool(3, wait=0.0, slowness=0.9), 40, each, delay=2)
    assert all(steps <= {t, t + 1} for t, steps in enumerate(flights))
    assert any(flights)
    # Weights are freed: those of two steps in flight, and of what late attackers still work on.
    assert max(stored) <= 2 + 3 * 2


def test_twins_of_bytes_come_back_as_bytes(monkeypatch):
    sizes = []
    received = Pool._answer_of

    def answer_of(self, job):
        answer = received(self, job)
        sizes.append(answer.numel() * answer.element_size())
        return answer

    monkeypatch.setattr(Pool, "_answer_of", answer_of)
    settings = {"data": batches(10, as_bytes=True), "attack": conadv.PGD(4 / 255, random_start=0.0)}
    assert_equal(train(pool(1), **settings), train(**settings))
    assert set(sizes) == {2 * 3 * 8 * 8}


def test_memory_format_survives():
    data = [(images.to(memory_format=torch.channels_last), labels) for images, labels in batches(6)]
    model = network().to(memory_format=torch.channels_last)
    pooled = train(pool(1), model=model, data=data)
    assert total(pooled[2], "pool") == 20
    assert_equal(pooled, train(model=network().to(memory_format=torch.channels_last), data=data))


def test_gradient_accumulation_takes_only_twins_of_the_right_weights():
    pooled = train(pool(1), 12, updates=2)
    assert_equal(pooled, train(steps=12, updates=2))
    assert total(pooled[2], "pool") == 5 * 4  # the first call of each update but the first


def test_a_new_attack_or_a_frozen_layer_is_not_answered_by_twins_of_the_old_one():
    def attack(method):
        method.attack = conadv.PGD(16 / 255)

    def freeze(method):
        method._step.model[1].eval()

    for change in (attack, freeze):
        each = lambda t, some, method, change=change: change(method) if t == 5 else None  # noqa: E731
        pooled = train(pool(1), each=each)
        assert_equal(pooled, train(each=each))
        assert [step["twins_here"] for step in pooled[2]] == [4, 0, 0, 0, 0, 4, 0, 0, 0, 0]


def test_another_batch_than_the_one_seen_ahead_is_noticed():
    data = batches(6)
    model, method, optimizer = made(pool(1))
    for first in (0, 3):  # leaves the loop early: the batch that was seen ahead does not come
        counts = take(method, optimizer, data[first:], leave=2)
    assert total(counts, "pool") == 4
    assert_equal((model.state_dict(),), train(data=[*data[:2], *data[3:5]]))


def test_a_model_that_changes_its_buffers_is_attacked_here():
    def spectral():
        torch.manual_seed(1)
        model = plain_network()
        model[5] = nn.utils.parametrizations.spectral_norm(model[5])
        return conadv.split_batchnorm(model)

    with pytest.warns(UserWarning, match="changes its buffers"):
        pooled = train(pool(1, make_model=spectral), model=spectral())
    assert total(pooled[2], "pool") == 0
    assert_equal(pooled, train(model=spectral()))


def test_resumes_bitwise_with_and_without_attackers():
    data = batches(10)
    model, method, optimizer = made(pool(1))
    take(method, optimizer, data[:4])
    for part, twins in ((data[4:7], None), (data[7:], pool(1))):
        _, resumed, _ = made(twins, model)
        resumed.load_state_dict(method.state_dict())
        method = resumed
        take(method, optimizer, part)
    assert_equal((model.state_dict(),), train())


def test_attackers_that_cannot_start_are_tried_a_few_times():
    some = pool(0, replaces=True)
    some._ray.starts = False
    some.add()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pooled = train(some)
    assert [str(each.message).split(":")[0] for each in told] == ["an attacker could not start", "no attacker is left"]
    assert next(some._numbers) == 5
    assert_equal(pooled, train())


def test_another_model_is_refused():
    def make_model():
        return conadv.split_batchnorm(nn.Sequential(*plain_network()[:-1], nn.Linear(256, 6)))

    with pytest.raises(ValueError, match=r"make_model makes another model than the method has .*5\.bias"):
        train(pool(1, make_model=make_model))


def test_what_cannot_use_a_pool_says_so():
    model, attack, some = network(), conadv.PGD(8 / 255), pool(0)
    with pytest.raises(ValueError, match="a pool needs delay 1 or more"):
        conadv.ConAdv(model, F.cross_entropy, attack, delay=0, twins=some)
    with pytest.raises(ValueError, match="cannot use a pool"):
        conadv.Recycled(model, F.cross_entropy, attack, twins=some)
    with pytest.raises(ValueError, match="cannot use a pool"):
        conadv.Sam(model, F.cross_entropy, twins=some)
    with pytest.raises(ValueError, match="delay= is for ConAdv: Recycled, Sam and Vanilla have no delay"):
        conadv.Sam(model, F.cross_entropy, delay=1)
    with pytest.raises(TypeError, match="unknown argument 'chunksize'"):
        conadv.Vanilla(model, F.cross_entropy, chunksize=2)
    with pytest.raises(TypeError, match=r"epsilon belongs to the attack: conadv.PGD\(epsilon=...\)"):
        conadv.ConAdv(model, F.cross_entropy, attack, epsilon=8 / 255)


def test_autocast_and_a_share_of_the_chunks():
    for settings in ({"autocast": torch.bfloat16}, {"twin_share": "1/2"}):
        pooled = train(pool(2), **settings)
        assert total(pooled[2], "pool") > 0
        assert_equal(pooled, train(**settings))
