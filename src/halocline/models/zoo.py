"""The models that the command line knows by name, each with real input; and models from a user's file."""

import copy
import importlib.util
import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halocline.data.images import digits, synthetic_imagenet
from halocline.data.mesh_tangling import MeshTangling
from halocline.data.volumes import Bodies, DensityFields
from halocline.errors import HaloclineError
from halocline.models.cosmoflow import cosmoflow
from halocline.models.mesh_tangling import mesh_tangling_1k, mesh_tangling_2k, mini_mesh
from halocline.models.resnet import resnet50, resnet152, resnet_small
from halocline.models.unet import unet2d, unet3d

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """A model that can be built at a size, with a loss and input of the right form.

    `build(size, width)` makes the model for samples `size` wide, with `width` times the usual number of channels.
    `batch(size, n, seed)` makes n samples `(x, y)`; the same seed gives the same ones. `loss()` makes the loss, called
    as `loss(model(x), y)`. `size` and `batch_size` are the usual ones. An entry that `load` reads from a file has
    neither: it ignores `size`, `width`, `n` and `seed`, and has no `loss` and `batch` if its factory gives none.
    """

    name: str
    build: Callable[[int, float], nn.Module]
    batch: Callable[[int, int, int], Batch] | None
    loss: Callable[[], nn.Module] | None
    size: int | None
    batch_size: int | None
    description: str


class _Items(Sized, Protocol):
    def __getitem__(self, i: int) -> tuple[Tensor, ...]: ...


def _stack(items: _Items, n: int) -> Batch:
    chosen = [items[i % len(items)] for i in range(n)]
    return tuple(torch.stack(column) for column in zip(*chosen, strict=True))


def _meshes(size: int, n: int, seed: int) -> Batch:
    return _stack(MeshTangling(size, n, seed), n)


def _pictures(size: int, n: int, seed: int) -> Batch:
    return _stack(synthetic_imagenet(size, 1000, seed), n)


ZOO: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "mesh-tangling-1k",
            lambda size, width: mesh_tangling_1k(size, width),
            _meshes,
            nn.MSELoss,
            1024,
            1,
            "which cells of a mesh will tangle: the 31-layer net of Dryden et al. (2019)",
        ),
        Entry(
            "mesh-tangling-2k",
            lambda size, width: mesh_tangling_2k(size, width),
            _meshes,
            nn.MSELoss,
            2048,
            1,
            "the same for finer meshes: the 19-layer net of Dryden et al. (2019)",
        ),
        Entry(
            "mini-mesh",
            lambda size, width: mini_mesh(size, width=width),
            _meshes,
            nn.MSELoss,
            1024,
            1,
            "the same in small, for benchmarks: 12 conv-BN-ReLU layers",
        ),
        Entry(
            "resnet50",
            lambda size, width: resnet50("first", width=width),
            _pictures,
            nn.CrossEntropyLoss,
            224,
            32,
            "ResNet-50 with the stride on the first 1x1 convolution, as in He et al. (2016)",
        ),
        Entry(
            "resnet50-torch",
            lambda size, width: resnet50("middle", width=width),
            _pictures,
            nn.CrossEntropyLoss,
            224,
            32,
            "ResNet-50 with the stride on the 3x3 convolution, as in torchvision",
        ),
        Entry(
            "resnet152",
            lambda size, width: resnet152("first", width=width),
            _pictures,
            nn.CrossEntropyLoss,
            224,
            32,
            "ResNet-152, placed likewise",
        ),
        Entry(
            "resnet-small",
            lambda size, width: resnet_small(width=width),
            lambda size, n, seed: _stack(digits(size, seed), n),
            nn.CrossEntropyLoss,
            32,
            32,
            "a residual net of six basic blocks that reads handwritten digits",
        ),
        Entry(
            "unet2d",
            lambda size, width: unet2d(size, width=width),
            lambda size, n, seed: _stack(Bodies(size, 2, n, seed), n),
            nn.BCEWithLogitsLoss,
            256,
            4,
            "a 2-D U-Net that marks bodies in noise",
        ),
        Entry(
            "unet3d",
            lambda size, width: unet3d(size, width=width),
            lambda size, n, seed: _stack(Bodies(size, 3, n, seed), n),
            nn.BCEWithLogitsLoss,
            64,
            1,
            "a 3-D U-Net that marks bodies in noise",
        ),
        Entry(
            "cosmoflow",
            lambda size, width: cosmoflow(size, width=width),
            lambda size, n, seed: _stack(DensityFields(size, n, seed), n),
            nn.MSELoss,
            64,
            2,
            "a 3-D CNN that reads four parameters off density fields, after Mathuriya et al. (2018)",
        ),
    )
}


def load(name_or_path: str) -> Entry:
    """The entry called `name_or_path`, or one made from `path/to/file.py:factory`.

    The file is run as a module that can import its neighbours, and `factory()` is called once. It returns a model
    (`nn.Module`), or `(model, loss, batch)` with a loss that is called as `loss(model(x), y)` and a batch `(x, y)` of
    tensors. `build` of the entry returns a new copy of the model each time.

    Raises `HaloclineError` if there is no such name, file or factory, or if the factory fails or returns another thing.
    """
    if name_or_path in ZOO:
        return ZOO[name_or_path]
    path, colon, factory_name = name_or_path.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise HaloclineError(
            f"There is no model called {name_or_path!r}. Known are {', '.join(ZOO)}; "
            f"a model of your own is given as path/to/file.py:factory."
        )
    model, loss, batch = _parts(name_or_path, _call(name_or_path, Path(path), factory_name))
    return Entry(
        name=name_or_path,
        build=lambda size, width: copy.deepcopy(model),
        batch=None if batch is None else lambda size, n, seed: batch,
        loss=None if loss is None else lambda: loss,
        size=None,
        batch_size=None,
        description=f"{type(model).__name__} of {name_or_path}",
    )


def _call(asked: str, path: Path, factory_name: str) -> Any:
    if not path.is_file():
        raise HaloclineError(f"{asked}: there is no file {path} in {Path.cwd()}.")
    # Under its own name, as an import would have it: then classes defined there can be pickled.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise HaloclineError(f"{asked}: {path} cannot be imported as a Python module.")
    module = importlib.util.module_from_spec(spec)
    if str(path.resolve().parent) not in sys.path:
        sys.path.append(str(path.resolve().parent))
    registered = sys.modules.setdefault(path.stem, module) is module
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        if registered:
            del sys.modules[path.stem]
        raise HaloclineError(f"{asked}: running {path} failed with {type(e).__name__}: {e}") from e
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise HaloclineError(
            f"{asked}: {path} has no function {factory_name!r}. It has {', '.join(functions) or 'none'}."
        )
    try:
        return factory()
    except Exception as e:
        raise HaloclineError(f"{asked}: {factory_name}() failed with {type(e).__name__}: {e}") from e


def _parts(asked: str, made: Any) -> tuple[nn.Module, nn.Module | None, Batch | None]:
    if isinstance(made, nn.Module):
        return made, None, None
    if isinstance(made, tuple) and len(made) == 3:
        model, loss, batch = made
        tensors = isinstance(batch, list | tuple) and all(isinstance(t, Tensor) for t in batch)
        if isinstance(model, nn.Module) and callable(loss) and tensors:
            return model, loss, tuple(batch)
    found = f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
    raise HaloclineError(
        f"{asked}: the factory returned {found}. "
        f"It must return an nn.Module, or (model, loss, batch) with a callable loss and a tuple of tensors."
    )
