"""countoff for Lightning Fabric: ``for batch in countoff.train(train_loader)``, after ``fabric.setup_dataloaders()``.

It serves ``lightning.fabric`` and ``lightning_fabric`` and imports neither.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("Lightning Fabric", facade="countoff.fabric", install="'countoff[lightning]'"):
    if not (find_spec("lightning") or find_spec("lightning_fabric")):
        raise ModuleNotFoundError("neither lightning nor lightning_fabric is installed")
    from countoff._adapter.even_loaders import even_inside
    from countoff._adapter.torch_loop import TorchLoop
from countoff._adapter.mesh_position import mesh_of
from countoff._adapter.options import own_arguments
from countoff._fabric.messages import MESSAGES
from countoff.core import Settings
from countoff.core.data.plain import attributes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Countoff"]


class Countoff(TorchLoop):
    """Counts what a loop with Fabric does. Make it on every rank, after `fabric.setup()`.

    Use it once per fit, in each loop over a loader::

        countoff = Countoff(fabric, model=model, optimizer=optimizer)
        for epoch in range(epochs):
            for batch in countoff.train(train_loader):
                ...
            for batch in countoff.eval(eval_loader):
                ...

    The first batch waits for the other ranks at most `deadline_seconds`; nothing later waits for one longer than 50 ms,
    but for the next batch where `uneven_train` or `uneven_eval` makes ranks take the same number. What is the user's is
    held weakly. It may be used as a context manager, which ends the fit.

    Args:
        fabric: The Fabric. Its device mesh tells which ranks share their data.
        optimizer: The optimizer that `fabric.setup` returned, or a list of them; as for `countoff.torch.Countoff`, and
            so are the others.
        scheduler: The learning-rate scheduler, or a list of them.
        model: The model that `fabric.setup` returned, or a list of such.
        epochs: Epochs of the whole run, at least 0, if known.
        max_steps: Optimizer steps after which the whole run ends, at least 0, if there is such a limit.
        gradient_accumulation_steps: Batches of one rank per optimizer step, at least 1.
        batch_size: Samples of one rank per batch; None: what the loader shows.
        start_step: Optimizer steps that were applied before the checkpoint from which the run resumes, at least 0.
        data_dims: Names of the mesh's dims along which different data is read; None: those whose names frameworks use
            for data.
        options: Those of `countoff.core.Settings`.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value, or `weights_every` has no `model`.
        TypeError: If a model is no module, or an optimizer has no parameter groups.
        ValueError: If a number is too small, or if the mesh does not show which ranks share their data.
    """

    def __init__(
        self,
        fabric: Any,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        model: Any = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        batch_size: int | None = None,
        start_step: int = 0,
        data_dims: Sequence[str] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        super().__init__(
            Settings.resolve(*own_arguments(Countoff), **options),
            MESSAGES,
            ("lightning", "lightning-fabric"),
            optimizer=optimizer,
            scheduler=scheduler,
            model=model,
            epochs=epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            batch_size=batch_size,
            start_step=start_step,
            group=None,
            mesh=mesh_of(fabric.strategy),
            data_dims=data_dims,
        )

    def _source(self, loader: Any) -> Any:
        return attributes_of(loader).get(_INNER, loader)

    def _ways(self, loader: Any, name: str | None, position: int) -> dict[str, Any]:
        source = self._source(loader)
        if source is loader:
            return super()._ways(loader, name, position)
        # Made even inside of Fabric's loader, which moves each batch to the device.
        even = functools.partial(even_inside, owner=loader, name=_INNER, ahead=False, proven=self._proves(loader, name))
        return {"loader": source, "position": position, "even": even}


_INNER = "_dataloader"
"""The attribute of Fabric's loaders that holds the user's own."""
