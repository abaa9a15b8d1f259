"""Plain PyTorch training loops on a mesh whose tensor-parallel ranks share their data."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff.core import DivergenceError
from countoff.mesh import dp_position
from countoff.torch import Countoff
from integration_tests.constants import put


def loop_on(mesh: Any, dataset: Any, replicas: int, share: int, **options: Any) -> dict[str, Any]:
    """A plain loop over one share of a dataset, its gradients averaged over the data dim alone; what this rank read."""
    torch.manual_seed(7)
    layer = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, num_replicas=replicas, rank=share))
    group = mesh.get_group("dp")
    seen: list[int] = []
    put(GRACE_SECONDS=900)  # the job goes on after a verdict, and must not be ended for it on a slow machine
    with Countoff(optimizer=optimizer, mesh=mesh, **options) as countoff:
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            for images, labels, numbers in countoff.train(loader):
                seen += numbers.tolist()
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(layer(images), labels).backward()
                for parameter in layer.parameters():
                    dist.all_reduce(parameter.grad, group=group)
                optimizer.step()
    return {"seen": seen, "notices": countoff.guard.notices, **countoff.progress()}


def loop_over_shares() -> dict[str, Any]:
    """What plain loops on a mesh of two data ranks and two tensor ranks find, or what they raise."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own_names = init_device_mesh("cpu", (2, 2), mesh_dim_names=("galaxy", "dp"))
    share, shares = dp_position(mesh) or (0, 0)
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(30, 64), torch.arange(30) % 10, torch.arange(30))
    loops: dict[str, Callable[[], Any]] = {
        "by the mesh": lambda: loop_on(mesh, data, shares, share),
        "by the world": lambda: loop_on(mesh, data, 4, rank),
        "by the node": lambda: loop_on(mesh, data, 1, 0),
        "by a wrong formula": lambda: loop_on(mesh, data, 2, rank % 2),
        "unknown dims": lambda: loop_on(own_names, data, 2, rank // 2),
        "said dims": lambda: loop_on(own_names, data, 2, rank % 2, data_dims=("dp",)),
    }
    found: dict[str, Any] = {}
    for name, loop in loops.items():
        try:
            found[name] = loop()
        except (DivergenceError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    dist.destroy_process_group()
    return found
