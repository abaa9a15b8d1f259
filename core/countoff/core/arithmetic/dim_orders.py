"""The orders in which the frameworks lay out their dims over the ranks, and the dims along which they read data.

Outermost first, as ``RankMap`` and torch's DeviceMesh have them. Each was read off the framework's own code: the names
of dims are its names there.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

__all__ = ["ORDERS", "Order", "order_of_text"]


@dataclass(frozen=True)
class Order:
    """The dims of a framework.

    Attributes:
        names: The dims, outermost first.
        data_dims: Those along which different data is read.
        inferred: The dim that takes the ranks which the others leave over, where nobody says otherwise.
    """

    names: tuple[str, ...]
    data_dims: tuple[str, ...]
    inferred: str


_HSDP = ("dp_replicate", "dp_shard")

ORDERS: dict[str, Order] = {
    "torchtitan": Order(("pp", *_HSDP, "cp", "tp"), _HSDP, "dp_shard"),
    # lingua fills up the replicas, and drops dp_shard and tp from its mesh where they are 1.
    "lingua": Order((*_HSDP, "tp"), _HSDP, "dp_replicate"),
    "accelerate": Order((*_HSDP, "cp", "sp", "tp"), _HSDP, "dp_shard"),
    "composer": Order(
        ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel"),
        ("data_parallel_replicate", "data_parallel_shard"),
        "data_parallel_shard",
    ),
    "lightning": Order(("data_parallel", "tensor_parallel"), ("data_parallel",), "data_parallel"),
    # Expert parallel borrows data ranks, so it is no dim of its own in what a rank reads.
    "megatron": Order(("pp", "dp", "cp", "tp"), ("dp",), "dp"),
    "deepspeed": Order(("pipe", "data", "model"), ("data",), "data"),
}


def order_of_text(order: str) -> Order:
    """Returns an order by its framework's name, or from Megatron's notation, which names the fastest dim first.

    In that notation ``ep`` is left out of the dims: its ranks are data ranks, counted in ``dp``.

    Raises:
        ValueError: If it is neither, or a notation without ``dp`` or with a dim twice.

    Example:
        >>> order_of_text("tp-cp-ep-dp-pp").names
        ('pp', 'dp', 'cp', 'tp')
    """
    if order in ORDERS:
        return ORDERS[order]
    fastest_first = [name for name in order.split("-") if name != "ep"]
    if "-" not in order:
        near = difflib.get_close_matches(order, ORDERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown order of dims {order!r}{hint} Known: {', '.join(ORDERS)}, or tp-cp-ep-dp-pp")
    if not set(fastest_first) <= {"tp", "cp", "dp", "pp"} or len(set(fastest_first)) != len(fastest_first):
        raise ValueError(f"an order in Megatron's notation has each of tp, cp, ep, dp, pp at most once, got {order!r}")
    if "dp" not in fastest_first:
        raise ValueError(f"an order in Megatron's notation needs dp, got {order!r}")
    return Order(tuple(reversed(fastest_first)), ("dp",), "dp")
