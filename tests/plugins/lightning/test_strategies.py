"""What Lightning's strategies say of how data is shared."""

from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from countoff._lightning.trainer import _shares_data_among


class Own(DDPStrategy):
    """As those of Ray, which tell it in their own way."""

    told: Any = None

    @property
    def distributed_sampler_kwargs(self) -> Any:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


@pytest.mark.parametrize(
    ("told", "shares"),
    [
        ({"num_replicas": 4, "rank": 0}, True),
        ({"num_replicas": 2}, False),
        (None, True),
        (NotImplementedError(), False),
    ],
)
def test_data_is_compared_where_a_strategy_shares_it_as_the_plan_says(told: Any, shares: bool) -> None:
    strategy = Own()
    strategy.told = told
    assert _shares_data_among(4, strategy) is shares
