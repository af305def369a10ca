"""Statistics of ranks with different roles are never mixed."""

from __future__ import annotations

import pytest
from torch import nn

from conadv.catalog import METHODS
from conadv.ranks.layout import Layout
from conadv.ranks.member import check_statistics
from support import tiny


def test_synchronized_batchnorm_is_refused_where_ranks_have_different_roles():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(tiny.net(10, 1))
    duties = METHODS["conadv"].duties
    check_statistics(model, Layout.fit(None, duties, 2))
    check_statistics(tiny.net(10, 1), Layout.fit("clean | adv | attack", duties, 3))
    with pytest.raises(ValueError, match="drop the layout, or use BatchNorm"):
        check_statistics(model, Layout.fit("clean | adv | attack", duties, 3))
