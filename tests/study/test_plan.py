"""The plan: closed forms, conservation of devices, what must be monotone, and its JSON."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conadv.core.catalog import METHODS
from conadv.parallel.buckets import bucket_bytes, grouped
from conadv.study.plan.devices import MODELS, ModelSize, PassTimes
from conadv.study.plan.measured import times_in
from conadv.study.plan.network import Link, Machine, all_reduce_seconds
from conadv.study.plan.planner import Plan, plan
from conadv.study.plan.request import PlanRequest
from conadv.study.plan.row import evaluate
from conadv.task.models import build_model
from study.plans import FREE, link, machine, passes, request

PASSES = ("forward", "input_backward", "weight_backward")


def times_by_place(answer: Plan) -> dict[tuple[str, str], float]:
    return {(row.method, row.layout): row.step_seconds for row in answer.rows}


def test_one_device_takes_all_the_work_one_after_the_other() -> None:
    answer = plan(request(**machine(1, 1, link(9.0, 1.0), link(9.0, 1.0))))
    assert times_by_place(answer) == {
        ("vanilla", "clean"): 96 * 3,
        ("disadv", "clean+adv+attack"): 96 * 8,
        ("conadv", "clean+adv+attack"): 96 * 8,
        ("recycled", "clean+adv"): 96 * 6,
    }
    assert {(entry.method, entry.layout) for entry in answer.left_out} == {
        ("disadv", "clean | adv+attack"),
        ("disadv", "clean+adv | attack"),
        ("disadv", "clean | adv | attack"),
        ("conadv", "clean | adv+attack"),
        ("conadv", "clean+adv | attack"),
        ("conadv", "clean | adv | attack"),
        ("recycled", "clean | adv"),
    }


def test_a_free_network_and_devices_for_every_role_give_the_paths_of_the_paper() -> None:
    # 24 chunks of 4 images: 72 devices hold a lane of three ranks for each.
    answer = plan(request(**machine(8, 9, FREE, FREE)))
    assert times_by_place(answer) == {
        ("vanilla", "clean"): 4 * 3,
        ("disadv", "clean+adv+attack"): 4 * 8,
        ("disadv", "clean | adv+attack"): 4 * 5,
        ("disadv", "clean+adv | attack"): 4 * 8,
        ("disadv", "clean | adv | attack"): 4 * 5,
        ("conadv", "clean+adv+attack"): 4 * 8,
        ("conadv", "clean | adv+attack"): 4 * 5,
        ("conadv", "clean+adv | attack"): 4 * 6,
        ("conadv", "clean | adv | attack"): 4 * 3,
        ("recycled", "clean+adv"): 4 * 6,
        ("recycled", "clean | adv"): 4 * 3,
    }
    best = {row.method: row for row in answer.rows if row.best}
    assert {method: row.ranks for method, row in best.items()} == {
        "vanilla": 24,
        "disadv": 48,
        "conadv": 72,
        "recycled": 48,
    }
    assert best["conadv"].time_ratio == 1 and best["conadv"].cost_ratio == pytest.approx(3)
    assert best["disadv"].layout == "clean | adv+attack", "of two that are equally fast the one with fewer ranks"


def test_two_ranks_add_what_shows_of_the_ring() -> None:
    asked = request(
        **machine(2, 1, link(0.25, 1000.0), FREE),
        **{"batch_size": 8, "algorithm": "ring", "overlap": 0.25, "methods": ("vanilla",), "bucket_mib": 2000 / 2**20},
    )
    (row,) = plan(asked).rows
    rings = 2 * 2 * (0.25 + 2000 / 2 / 1000)  # 1000 parameters of 4 bytes, in two buckets
    assert row.step_seconds == 4 * 3 + 0.75 * rings
    assert (row.compute_seconds, row.reduction_seconds) == (12, 0.75 * rings)


@pytest.mark.parametrize(("bytes_per_bucket", "buckets"), [(4000, 1), (3999, 2), (2000, 2), (1999, 3), (1100, 4)])
def test_each_bucket_has_its_latency_and_the_last_one_never_overlaps(bytes_per_bucket: int, buckets: int) -> None:
    asked = request(
        **machine(2, 1, link(0.5, 1e18), FREE),
        **{"batch_size": 8, "algorithm": "ring", "overlap": 1.0, "methods": ("vanilla",)},
        bucket_mib=bytes_per_bucket / 2**20,
    )
    row = evaluate(asked, "vanilla", "clean", lanes=2)
    assert asked.buckets == buckets
    assert row.reduction_seconds == pytest.approx(1.0)  # 2 × 0.5 s, of the last bucket


def test_buckets_are_those_of_the_trainer() -> None:
    assert PlanRequest().bucket_mib * 2**20 == bucket_bytes(torch.device("cuda"))
    cpu = times_in({"machine": {"gpu": None}, "results": [{"name": name, "seconds_per_image": 1.0} for name in PASSES]})
    assert cpu["bucket_mib"] * 2**20 == bucket_bytes(torch.device("cpu"))
    gpu = times_in({"machine": {"gpu": "A"}, "results": [{"name": name, "seconds_per_image": 1.0} for name in PASSES]})
    assert "bucket_mib" not in gpu
    with torch.device("meta"):
        parameters = list(build_model("resnet50", 1000, 3, None).parameters())
    assert sum(one.numel() for one in parameters) == PlanRequest().network.parameters
    assert len(grouped(parameters[::-1], bucket_bytes(torch.device("cuda")))) - PlanRequest().buckets in (0, 1)


def test_a_reduction_longer_than_the_backward_pass_shows_beyond_it() -> None:
    buckets = {"bucket_mib": 2000 / 2**20, "overlap": 1.0}
    asked = request(**machine(2, 1, link(100.0, 1e18), FREE), **buckets, batch_size=8, methods=("vanilla",))
    row = evaluate(asked, "vanilla", "clean", lanes=2)
    assert row.reduction_seconds == 2 * 200 - 4 * 2
    (alone,) = plan(asked).rows
    assert (alone.ranks, alone.idle) == (1, 1), "then one device is faster than two"


def test_hours_and_device_hours_follow_from_the_step() -> None:
    row = next(row for row in plan(request()).rows if (row.method, row.layout) == ("recycled", "clean | adv"))
    # 12 lanes of two chunks, 10 whole batches an epoch, two epochs.
    assert (row.lanes, row.chunks_per_lane, row.step_seconds, row.steps) == (12, 2, 24, 20)
    assert row.images_per_second == 96 / 24
    assert row.hours == pytest.approx(20 * 24 / 3600)
    assert row.device_hours == pytest.approx(24 * 20 * 24 / 3600)
    assert row.roles == {"clean": 12, "adv": 12}
    assert row.busy == 1


def test_what_the_handoff_needs() -> None:
    # One lane of three: twins of 4 × (12 bytes + 8 of the label) = 80 bytes, or 4 × (48 + 8) = 224. The attack takes
    # 8 s of a step of 12 or a little more, and has the rest for the way, less the latency.
    asked = request(**machine(3, 1, link(2.0, 1e6), FREE), batch_size=4, overlap=1.0, gradient_bytes=1)
    row = next(row for row in plan(asked).rows if (row.method, row.layout) == ("conadv", "clean | adv | attack"))
    need = row.handoff
    assert need is not None and not need.crosses_nodes
    assert need.bytes_per_step == 80
    assert need.hides_as_bytes == pytest.approx(80 / (row.compute_seconds + row.reduction_seconds - 8 - 2))
    assert need.hides_as_floats == pytest.approx(224 / (row.compute_seconds + row.reduction_seconds - 8 - 2))
    assert need.load_as_bytes == pytest.approx(80 / row.step_seconds)
    assert need.load_as_floats == pytest.approx(224 / row.step_seconds)
    assert row.handoff_seconds == 0


def test_no_network_hides_a_handoff_that_the_step_waits_for() -> None:
    rows = plan(request(**machine(3, 1, link(0.0, 1e3), FREE), batch_size=4, gradient_bytes=1)).rows
    row = next(row for row in rows if (row.method, row.layout) == ("disadv", "clean | adv | attack"))
    assert row.handoff is not None and row.handoff.hides_as_bytes is None
    assert row.handoff_seconds == pytest.approx(80 / 1e3)


def test_the_batch_stops_paying_where_every_device_has_a_chunk() -> None:
    answer = plan(request(data_size=10_000, batch_size=128, methods=("vanilla",)))
    assert answer.stops_paying == {"vanilla": 4 * 32}
    small = plan(request(data_size=10_000, batch_size=64, sweep=(4, 8, 16, 32), methods=("vanilla",)))
    assert small.stops_paying == {"vanilla": None}, "the largest batch asked about still pays"


def test_stragglers_lengthen_a_step_by_their_closed_form() -> None:
    asked = request(jitter=0.01, samples=20_000, seed=2, batch_size=128, methods=("vanilla",))
    (row,) = plan(asked).rows
    assert row.lanes == 32
    expected = 12 * 0.01 * sum(1 / k for k in range(1, 33))
    assert row.straggler_seconds == pytest.approx(expected, rel=0.02)


def test_stragglers_of_three_roles_are_those_of_three_times_the_ranks() -> None:
    asked = request(jitter=0.01, samples=20_000, seed=4, **machine(8, 12, FREE, FREE), batch_size=128)
    row = evaluate(replace(asked, full_attack=True), "conadv", "clean | adv | attack", lanes=32)
    expected = 12 * 0.01 * sum(1 / k for k in range(1, 3 * 32 + 1))  # all 96 ranks work for 12 s
    assert row.straggler_seconds == pytest.approx(expected, rel=0.02)


seconds = st.floats(1e-5, 1e-2)
links = st.builds(link, st.floats(0, 1e-3), st.floats(1e6, 1e12))
requests = st.builds(
    PlanRequest,
    forward=seconds,
    input_backward=seconds,
    weight_backward=seconds,
    overhead=st.floats(0, 1e-2),
    update=st.floats(0, 1e-2),
    parameters=st.integers(1, 10**8),
    image_shape=st.tuples(st.just(1), st.just(1), st.integers(1, 150528)),
    devices_per_node=st.integers(1, 9),
    nodes=st.integers(1, 5),
    inside=links,
    between=links,
    batch_size=st.sampled_from([64, 192, 384, 448]),
    chunk_size=st.sampled_from([32, 64]),
    data_size=st.just(1000),
    delay=st.integers(1, 3),
    attack_steps=st.integers(1, 3),
    full_attack=st.booleans(),
    wire=st.sampled_from(["bytes", "floats"]),
    algorithm=st.sampled_from(["auto", "ring", "tree"]),
    overlap=st.floats(0, 1),
    jitter=st.sampled_from([0.0, 0.02]),
    samples=st.just(8),
    seed=st.integers(0, 9),
    sweep=st.just((64,)),
)


@settings(max_examples=40, deadline=None)
@given(requests)
def test_devices_time_and_images_are_conserved(asked) -> None:
    answer = plan(asked)
    for row in (*answer.rows, *answer.by_batch):
        assert row.ranks + row.idle == asked.machine.devices
        assert sum(row.roles.values()) == row.ranks <= row.ranks_at_most
        assert set("+".join(row.roles).split("+")) == set(row.layout.replace("|", "+").replace(" ", "").split("+"))
        assert row.lanes * row.chunks_per_lane * asked.chunk_size == row.batch_size
        parts = (row.compute_seconds, row.reduction_seconds, row.handoff_seconds, row.straggler_seconds)
        assert min(parts) >= -1e-12 * row.step_seconds
        assert sum(parts) == pytest.approx(row.step_seconds, rel=1e-12)
        assert 0 < row.busy <= 1 + 1e-12
    for method in asked.methods:
        rows = [row for row in answer.rows if row.method == method]
        assert sum(row.best for row in rows) == (1 if rows else 0)
        if rows:
            (best,) = (row for row in rows if row.best)
            assert best.step_seconds <= min(row.step_seconds for row in rows) * (1 + 1e-8)
    assert len(answer.rows) + len(answer.left_out) == sum(len(method.layouts) for method in METHODS.values())


def slowed(asked: PlanRequest) -> dict[str, PlanRequest]:
    """The same request, made worse in one way after the other."""
    inside, between = (
        link(found.latency * 2, found.bandwidth / 3) for found in (asked.machine.inside, asked.machine.between)
    )
    _, _, values = asked.image_shape
    changes = {
        "fewer nodes": {"nodes": max(1, asked.nodes - 1)},
        "slower between": {"between": between},
        "slower inside": {"inside": inside},
        "slower passes": {"forward": 2 * asked.forward},
        "slower update": {"update": asked.update + 1e-3},
        "more parameters": {"parameters": 2 * asked.parameters},
        "larger images": {"image_shape": (1, 1, 2 * values)},
        "floats": {"wire": "floats"},
        "less overlap": {"overlap": asked.overlap / 2},
        "full attack": {"full_attack": True},
        "more jitter": {"jitter": 0.05},
    }
    return {name: replace(asked, **change) for name, change in changes.items()}


@settings(max_examples=12, deadline=None)
@given(asked=requests)
def test_a_worse_machine_is_never_faster(asked) -> None:
    better = times_by_place(plan(asked))
    for name, other in slowed(asked).items():
        worse = times_by_place(plan(other))
        assert worse.keys() <= better.keys(), name
        for place, seconds in worse.items():
            assert seconds >= better[place] * (1 - 1e-8), (name, place)


@settings(max_examples=20, deadline=None)
@given(asked=requests)
def test_a_longer_delay_is_never_slower(asked) -> None:
    short, long = times_by_place(plan(asked)), times_by_place(plan(replace(asked, delay=asked.delay + 1)))
    for place, seconds in long.items():
        assert seconds <= short[place] * (1 + 1e-8)


@settings(max_examples=20, deadline=None)
@given(asked=requests)
def test_json_holds_everything_and_only_finite_numbers(asked) -> None:
    answer = plan(asked)
    document = answer.to_json()
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document
    assert plan(replace(asked)).to_json() == document


def test_the_json_of_the_inputs_shows_what_names_stand_for() -> None:
    inputs = json.loads(json.dumps(plan(request(between="2us 25GB/s")).to_json(), allow_nan=False))["inputs"]
    assert inputs["machine"]["inside"] == {"latency": 0.0, "bandwidth": None}, "JSON knows no infinite number"
    assert inputs["machine"]["between"] == pytest.approx({"latency": 2e-6, "bandwidth": 25e9})
    assert inputs["model"] == {"parameters": 1000, "image_values": 12, "forward_flops": 0.0, "pixel_flops": 0.0}
    assert inputs["times"]["forward"] == 1.0
    assert inputs["stragglers"] == {"jitter": 0.0, "samples": 1000, "seed": 0}
    assert inputs["batch_size"] == 96


def test_larger_machines_are_planned_until_the_batch_has_no_more_work() -> None:
    answer = plan(request(methods=("vanilla", "conadv")))
    devices = sorted({row.ranks + row.idle for row in answer.by_nodes})
    assert devices == [8, 16, 32, 64, 128]
    assert answer.by_nodes[-1].ranks == answer.by_nodes[-1].ranks_at_most == 72
    hours = [row.hours for row in answer.by_nodes if row.method == "conadv"]
    assert hours == sorted(hours, reverse=True)


def test_a_plan_without_vanilla_is_still_measured_by_it() -> None:
    alone = plan(request(methods=("recycled",)))
    both = plan(request(methods=("vanilla", "recycled")))
    assert alone.rows == tuple(row for row in both.rows if row.method == "recycled")


def test_recycled_takes_one_step_of_attack() -> None:
    answer = plan(request(attack_steps=2))
    assert not any(row.method == "recycled" for row in answer.rows)
    assert {entry.reason for entry in answer.left_out} == {"takes one step of attack, and 2 were asked for"}


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="needs 3 devices, and the machine has 2"):
        plan(request(methods=("conadv",), layouts=("clean | adv | attack",), **machine(2, 1, FREE, FREE)))


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 98}, "98 is not a whole number of chunks of 4"),
        ({"batch_size": 1004}, "larger than the data"),
        ({"batch_size": 2**24, "chunk_size": 1, "data_size": 2**24}, "more than 1048576 chunks"),
        ({"sweep": (6,)}, "6 is not a whole number of chunks"),
        ({"sweep": (0,)}, "sweep is 0"),
        ({"sweep": (8, -4)}, "sweep is -4"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": -4}, "chunk_size is -4"),
        ({"data_size": 0}, "data_size is 0"),
        ({"epochs": 0.0}, "epochs is 0"),
        ({"epochs": NAN}, "epochs is nan"),
        ({"delay": 0}, "delay is 0"),
        ({"attack_steps": 0}, "attack_steps is 0"),
        ({"gradient_bytes": 0}, "gradient_bytes is 0"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"overlap": NAN}, "overlap is nan"),
        ({"methods": ()}, "no methods"),
        ({"methods": ("nothing",)}, "methods is 'nothing' but must be one of vanilla"),
        ({"wire": "bits"}, "wire is 'bits' but must be one of bytes, floats"),
        ({"algorithm": "star"}, "algorithm is 'star' but must be one of auto"),
        ({"layouts": ("clean", "clean+adv")}, "no layout given fits disadv"),
        ({"layouts": ("clean", "clean+foo")}, r"layout 'clean\+foo' fits no method"),
        ({"parameters": 10, "image_shape": None}, "both --parameters and --image-shape"),
        ({"parameters": None}, "both --parameters and --image-shape"),
        ({"image_shape": (3, 8)}, "image_shape is .* must be 3 values"),
        ({"image_shape": (3, 8, 0)}, "image_shape is 0"),
        ({"forward": None}, "--flops"),
        ({"parameters": None, "image_shape": None, "model": "alexnet"}, "'alexnet' is not in the table"),
        ({"device": "abacus"}, "device is 'abacus' but must be one of v100"),
        ({"inside": "string"}, "inside 'string' is not a link: change --inside"),
        ({"between": ""}, "between is ''"),
        ({"between": "2us 0GB/s"}, "between '2us 0GB/s' is not a link"),
        ({"between": "1e9s 1GB/s"}, "at most 1e6 s"),
        ({"between": "2us 1e300GB/s"}, "at most 1e6 s"),
        ({"jitter": 2.0}, "jitter is 2"),
        ({"jitter": -0.1}, "jitter is -0.1"),
        ({"jitter": NAN}, "jitter is nan"),
        ({"samples": 0}, "samples is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"pixel_backward": 2.0}, "pixel_backward 2 is more than the 1 s of input_backward"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": 10**30}, "nodes is 1000"),
        ({"devices_per_node": -8}, "devices_per_node is -8"),
        ({"flops": 0.0}, "flops is 0"),
        *(({name: value}, f"{name} is") for name in ("forward", "input_backward", "weight_backward", "pixel_backward",
          "overhead", "update") for value in (-1.0, INF, NAN, 1e300)),
        *(({name: 0.0}, f"{name} is 0") for name in ("forward", "input_backward", "weight_backward")),
    ],
)  # fmt: skip
def test_bad_requests_get_one_line(changes, words) -> None:
    with pytest.raises(ValueError, match=words) as error:
        request(**changes)
    assert "\n" not in str(error.value)


def test_names_stand_for_their_numbers() -> None:
    asked = PlanRequest(nodes=2, devices_per_node=4, inside="1us 10GB/s", between="ethernet-100g", forward=1e-3)
    assert asked.machine == Machine(4, 2, Link(1e-6, 10e9), Link(20e-6, 12.5e9))
    assert asked.network == MODELS["resnet50"]
    assert asked.times.forward == 1e-3
    assert asked.times.input_backward == PlanRequest().times.input_backward


def test_three_times_per_image_need_no_device_and_no_operations() -> None:
    asked = PlanRequest(parameters=10, image_shape=(3, 8, 8), **passes(1.0, 2.0, 3.0))
    assert asked.times == PassTimes(1.0, 2.0, 3.0)
    assert asked.network == ModelSize(10, 192)


def test_a_model_of_your_own_with_its_operations() -> None:
    asked = PlanRequest(parameters=10, image_shape=(3, 8, 8), flops=1e9, device="v100")
    assert asked.times.forward == pytest.approx(1e9 / (125e12 * 0.25))


def test_what_is_given_twice_is_planned_once() -> None:
    twice = request(methods=("vanilla", "vanilla"), layouts=("clean", "clean", "clean|adv", "clean | adv"))
    assert len(plan(twice).rows) == 1


def test_the_gradient_is_reduced_over_all_ranks_of_the_layout() -> None:
    asked = request(**machine(4, 8, link(1e-5, 1e8), link(1e-5, 1e8)), overlap=0.0, batch_size=32, algorithm="ring")
    row = evaluate(asked, "conadv", "clean | adv | attack", lanes=8)
    assert row.reduction_seconds == pytest.approx(all_reduce_seconds(4000, 24, asked.machine, "ring"))
