"""The new kinds keep the leaf contract."""

import leaf_kinds
import pytest
from kvleaf.testing import check_leaf


@pytest.mark.parametrize("index", range(len(leaf_kinds.new_kinds())))
def test_a_new_kind_keeps_the_contract(index):
    assert check_leaf(lambda: leaf_kinds.new_kinds()[index]) == []
