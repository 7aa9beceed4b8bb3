"""CosmoFlow: a 3-D CNN that reads cosmological parameters off a matter density, after Mathuriya et al. (2018).

The shape is that of the MLPerf HPC benchmark: blocks of a 3x3x3 convolution, leaky ReLU and 2x2x2 max pooling, each
with twice the channels of the one before, then three dense layers. Dropout is left out.
"""

from torch import Tensor, nn

from halocline.models.mesh_tangling import check_size, scaled

PARAMETERS = 4


def cosmoflow(size: int = 128, channels: int = 4, blocks: int = 5, width: float = 1.0) -> "CosmoFlow":
    """CosmoFlow: `[N, channels, size, size, size]` to four numbers per sample, `[N, 4]`, each within -1.2 to 1.2.

    The first dense layer fits this `size` only. Raises `ValueError` if `size` is not a multiple of `2**blocks`.
    """
    check_size("cosmoflow", size, 2**blocks)
    features = [scaled(32 * 2**b, width) for b in range(blocks)]
    return CosmoFlow(size // 2**blocks, channels, features, scaled(128, width), scaled(64, width))


class CosmoFlow(nn.Module):
    """`convs` down to `extent` voxels per side with `features[-1]` channels, then the dense layers of `head`."""

    def __init__(self, extent: int, channels: int, features: list[int], c_dense1: int, c_dense2: int) -> None:
        super().__init__()
        convs: list[nn.Module] = []
        for c_in, c_out in zip([channels, *features[:-1]], features, strict=True):
            convs += [nn.Conv3d(c_in, c_out, 3, padding=1), nn.LeakyReLU(0.3), nn.MaxPool3d(2)]
        self.convs = nn.Sequential(*convs)
        self.head = nn.Sequential(
            nn.Linear(features[-1] * extent**3, c_dense1),
            nn.LeakyReLU(0.3),
            nn.Linear(c_dense1, c_dense2),
            nn.LeakyReLU(0.3),
            nn.Linear(c_dense2, PARAMETERS),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.convs(x).flatten(1)) * 1.2
        return y
