"""`--attackers`: attackers on Ray that generate the twins of a run ahead; ranks share them out."""

from __future__ import annotations

import signal
from copy import deepcopy
from functools import partial

import torch
from torch import nn

from conadv.core.roles import Role
from conadv.ranks.layout import Layout
from conadv.ray import Pool


def check_attackers(text: str | None, duties: Role, delay: int, layout: Layout, compiles: bool) -> None:
    """Raise a ValueError if a run cannot use attackers.

    Args:
        text: how many, or the address of a cluster; None: there are none.
        duties: of the method.
        delay: of the twins, in steps.
        layout: of the ranks.
        compiles: whether passes are compiled.
    """
    if text is None:
        return
    parsed(text)
    if Role.ATTACK not in duties or not delay:
        raise ValueError(
            "attackers generate twins ahead, which only conadv with a delay of 1 or more has: drop --attackers"
        )
    if len(layout.roles) > 1:
        raise ValueError(
            f"attackers and the roles of layout {str(layout)!r} exclude each other: drop --layout or --attackers"
        )
    if compiles:
        raise ValueError("attackers do not compile, and would round differently: drop --compile or --attackers")


def parsed(text: str) -> tuple[int | None, str | None]:
    """How many attackers (None: as many as the cluster has room for), and the address (None: this machine)."""
    if text.isdecimal():
        return int(text), None
    count, at, address = text.rpartition("@")
    if (at and not count.isdecimal()) or not (":" in address or address == "auto"):
        raise ValueError(
            f"attackers {text!r}: give a number, or a Ray cluster such as ray://head:10001 or, with a number, "
            "8@ray://head:10001"
        )
    return int(count) if at else None, address


def build_pool(text: str, model: nn.Module, device: torch.device, rank: int, size: int) -> Pool:
    """Start attackers in the background, or on a cluster; every rank must call it."""
    count, address = parsed(text)
    kind = "GPU" if device.type == "cuda" else "CPU"
    make_model = partial(deepcopy, deepcopy(model).cpu())
    heard = signal.getsignal(signal.SIGTERM)
    try:
        pool = Pool(make_model, count or 0, {"num_gpus": 1} if kind == "GPU" else None, address)
    except (ImportError, ConnectionError) as error:
        raise ValueError(f"attackers {text}: {str(error).splitlines()[0]}") from None
    finally:
        signal.signal(signal.SIGTERM, heard)  # Ray has set its own, which ends the process at once
    if count is None:
        room = int(pool._ray.cluster_resources().get(kind, 1))
        pool.add(room // size + (rank < room % size))
    return pool
