"""Every op rule, split at random, against plain torch: at least 2,000 configurations in all.

More: `python -m tests.contract --count 20000 --seed 1`.
"""

import pytest

from tests.contract import RULES, rules, run

CONFIGURATIONS = 2000
CHOSEN = rules()
EACH = -(-CONFIGURATIONS // len(CHOSEN))


@pytest.mark.parametrize("op", CHOSEN)
def test_rule_keeps_the_contract(op: str) -> None:
    for seed in range(EACH):
        run(op, RULES[op], seed)
