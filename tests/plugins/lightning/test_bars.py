"""When a bar of Lightning's is looked for, as long as there is none."""

import pytest

pytest.importorskip("lightning")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from countoff._lightning import bars


@pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_disabled_bar_is_not_looked_for(kind: type, enabled: bool) -> None:
    """As on all ranks but one, where there is none at any batch. One that is shown may begin later."""
    bar = kind()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[bar])
    if not enabled:
        bar.disable()
    assert bars.show(trainer, "train", 8) is not enabled
    bars.give_back(trainer, "train", 8)
