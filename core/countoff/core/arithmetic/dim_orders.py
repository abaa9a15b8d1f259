"""The order of each framework's mesh dims over the ranks, and the dims along which it reads different data.

Dims are listed outermost first, as in ``RankMap`` and torch's DeviceMesh. Orders and names come from the code of each
framework.
"""

from __future__ import annotations

from dataclasses import dataclass

from countoff.core.messages import nearest

__all__ = ["ORDERS", "Order", "order_of_text"]


@dataclass(frozen=True)
class Order:
    """The dims of a framework.

    Attributes:
        names: The dims, outermost first.
        data_dims: The dims along which different data is read.
        inferred: The dim that by default takes the ranks that the others leave over.
    """

    names: tuple[str, ...]
    data_dims: tuple[str, ...]
    inferred: str


_HSDP = ("dp_replicate", "dp_shard")

ORDERS: dict[str, Order] = {
    "torchtitan": Order(("pp", *_HSDP, "cp", "tp"), _HSDP, "dp_shard"),
    # lingua infers dp_replicate, and leaves dp_shard and tp out of its mesh where they are 1.
    "lingua": Order((*_HSDP, "tp"), _HSDP, "dp_replicate"),
    "accelerate": Order((*_HSDP, "cp", "sp", "tp"), _HSDP, "dp_shard"),
    "composer": Order(
        ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel"),
        ("data_parallel_replicate", "data_parallel_shard"),
        "data_parallel_shard",
    ),
    "lightning": Order(("data_parallel", "tensor_parallel"), ("data_parallel",), "data_parallel"),
    # Expert parallel uses the ranks of dp, so it is not a dim of what a rank reads.
    "megatron": Order(("pp", "dp", "cp", "tp"), ("dp",), "dp"),
    "deepspeed": Order(("pipe", "data", "model"), ("data",), "data"),
}


def order_of_text(order: str) -> Order:
    """Returns the order of a framework, by name, or an order in Megatron's notation, which lists the fastest dim first.

    In Megatron's notation ``ep`` is not a dim here: its ranks are counted in ``dp``.

    Raises:
        ValueError: If the text is neither, or is a notation without ``dp`` or with a dim twice.

    Example:
        >>> order_of_text("tp-cp-ep-dp-pp").names
        ('pp', 'dp', 'cp', 'tp')
    """
    if order in ORDERS:
        return ORDERS[order]
    fastest_first = [name for name in order.split("-") if name != "ep"]
    if "-" not in order:
        raise ValueError(
            f"unknown order of dims {order!r}{nearest(order, ORDERS)}; known: {', '.join(ORDERS)}, or tp-cp-ep-dp-pp"
        )
    if not set(fastest_first) <= {"tp", "cp", "dp", "pp"} or len(set(fastest_first)) != len(fastest_first):
        raise ValueError(f"an order in Megatron's notation has each of tp, cp, ep, dp, pp at most once, got {order!r}")
    if "dp" not in fastest_first:
        raise ValueError(f"an order in Megatron's notation needs dp, got {order!r}")
    return Order(tuple(reversed(fastest_first)), ("dp",), "dp")
