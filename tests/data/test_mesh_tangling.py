"""The mesh-tangling data: regions are bits of the whole, the fields are what they say, the meshes tangle."""

import numpy as np
import pytest
import torch

from halocline.data.flow import Flow, Shear, Swirl, advance, draw_flow, velocity
from halocline.data.mesh_tangling import CHANNELS, MeshTangling
from halocline.data.quad_quality import METRICS

NAMES = [channel.name for channel in CHANNELS]


def field(x, name):
    """The channel `name` before standardisation."""
    channel = CHANNELS[NAMES.index(name)]
    return x[NAMES.index(name)] * channel.spread + channel.centre


@pytest.mark.parametrize("size", [48, 200])
def test_a_region_equals_that_part_of_the_whole(size):
    data = MeshTangling(size, 2, seed=5)
    x, y = data[1]
    rng = np.random.default_rng(0)
    regions = [tuple(sorted(rng.integers(0, size + 1, 2))) for _ in range(12)]
    regions += [(0, 1), (size - 1, size), (7, 7)]
    for rows, cols in zip(regions, reversed(regions)):
        x_part, y_part = data.sample(1, rows, cols)
        assert torch.equal(x_part, x[:, slice(*rows), slice(*cols)]), (rows, cols)
        assert torch.equal(y_part, y[:, slice(*rows), slice(*cols)]), (rows, cols)


def test_form():
    x, y = MeshTangling(40, 1)[0]
    assert x.shape == (18, 40, 40) and y.shape == (1, 40, 40)
    assert x.dtype == y.dtype == torch.float32
    assert torch.isfinite(x).all() and set(y.unique().tolist()) == {0.0, 1.0}
    assert NAMES[:4] == ["density", "pressure", "speed", "volume fraction"] and NAMES[4:] == list(METRICS)


def test_seed_and_index_choose_the_mesh():
    x, _ = MeshTangling(32, 3, seed=1)[2]
    again, _ = MeshTangling(32, 5, seed=1)[2]
    assert torch.equal(x, again)
    assert not torch.equal(x, MeshTangling(32, 3, seed=1)[1][0])
    assert not torch.equal(x, MeshTangling(32, 3, seed=2)[2][0])


def test_some_tenths_of_the_cells_tangle_at_every_size():
    for size, count in ((64, 12), (160, 3)):
        shares = torch.stack([y.mean() for _, y in MeshTangling(size, count, seed=3)])
        assert shares.min() > 0.1 and shares.max() < 0.4, size


def test_fields_are_standardised():
    x = torch.stack([MeshTangling(64, 12, seed=9)[i][0] for i in range(12)])
    assert x.mean((0, 2, 3)).abs().max() < 0.4
    assert x.std((0, 2, 3)).min() > 0.6 and x.std((0, 2, 3)).max() < 1.4


def test_what_has_folded_already_is_in_the_target_and_more_follows():
    for x, y in MeshTangling(64, 4, seed=2):
        folded = field(x, "minimum Jacobian") < -1e-6
        assert y[0][folded].all()
        assert 0 < folded.float().mean() < 0.6 * y.mean()


def test_mass_is_conserved():
    x, _ = MeshTangling(96, 1, seed=4)[0]
    area, density = field(x, "area").double(), field(x, "density").double()
    fraction = field(x, "volume fraction").double()
    plain = (area > 0.3) & (area < 3.9) & (density < 7.9)
    assert plain.float().mean() > 0.9
    torch.testing.assert_close((area * density)[plain], (1 + fraction)[plain], rtol=1e-5, atol=1e-5)


def test_pressure_follows_the_equation_of_state():
    x, _ = MeshTangling(64, 1, seed=4)[0]
    area, pressure, fraction = (field(x, name).double() for name in ("area", "pressure", "volume fraction"))
    plain = (area > 0.4) & (area < 3.9) & (pressure < 9.9)
    expected = (1 - fraction) * area**-2 + fraction * area**-1.5
    torch.testing.assert_close(pressure[plain], expected[plain], rtol=1e-4, atol=1e-4)


def test_the_integrator_is_of_fourth_order():
    # Well within one eddy and one pulse: at the edge of a swirl the velocity is not smooth.
    eddy = Swirl(30.0, 30.0, 2.0, -1.0, 60.0, 6.0, 2.0, 5.0, 0.3)
    pulse = Swirl(25.0, 35.0, 0.0, 3.0, 70.0, 0.0, 1.0, 7.0, 1.0)
    flow = Flow((eddy,), (pulse,), (Shear(0.6, 0.8, 3.0, 20.0, 10.0),))
    ends = []
    for count in (20, 40, 80):
        x, y = np.array([20.3, 31.0]), np.array([31.7, 40.0])
        for k in range(count):
            x, y = advance(flow, k / count, 1 / count, x, y)
        ends.append(np.stack([x, y]))
    gain = np.abs(ends[0] - ends[1]).max() / np.abs(ends[1] - ends[2]).max()
    assert 12 < gain < 22  # 2**4, and what is left of higher orders


def test_eddies_carry_area_along_and_pulses_change_it():
    flow = draw_flow(np.random.default_rng(1), 64)
    h = 1e-4

    def divergence(flow, x, y):
        x, y = np.array([x - h, x + h, x, x]), np.array([y, y, y - h, y + h])
        u, v = velocity(flow, 0.3, x, y)
        return (u[1] - u[0] + v[3] - v[2]) / (2 * h)

    still = Flow(flow.eddies, (), flow.shears)
    points = np.random.default_rng(2).uniform(0, 64, (50, 2))
    assert max(abs(divergence(still, *p)) for p in points) < 1e-5
    assert max(abs(divergence(flow, *p)) for p in points) > 0.1


def test_refusals():
    data = MeshTangling(32, 2)
    with pytest.raises(IndexError, match="item 2 of a data set of 2"):
        data[2]
    with pytest.raises(IndexError, match=r"cols \[0, 33\) do not lie within \[0, 32\)"):
        data.sample(0, (0, 32), (0, 33))
    with pytest.raises(ValueError, match="size 4"):
        MeshTangling(4, 1)
