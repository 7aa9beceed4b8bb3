"""Collections stay off where asked, and come back."""

import gc

import pytest

from halocline.garbage import not_collected


def test_it_nests_and_ends_with_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), not_collected():
        with not_collected():
            pass
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_who_had_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        not_collected()(lambda: None)()
        assert not gc.isenabled()
    finally:
        gc.enable()
