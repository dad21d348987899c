"""An adapter on disk: whole again bit for bit, and never trusted."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from object_server import ObjectServer, denied
from small_models import (
    Sum,
    cnn,
    rand,
)
from sufficit import Classifier, Lax, UserError, explain
from sufficit.errors import GoneError
from sufficit.explainers.lax import name_of
from sufficit.explainers.words import methods_from

TRAINED = {"recipe": {"keep": 1.0}, "seed": 3, "history": [{"epoch": 1, "msi": 0.25}]}


def adapter(**options: Any) -> Lax:
    torch.manual_seed(5)
    lax = Lax(9, **{"widths": (7, 5), "trained": TRAINED} | options)
    lax.belong_to(Classifier(cnn()), "4")
    return lax.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    adapter().save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(folder: Path, **values: object) -> None:
    """Write other values into config.json; a value that is ... leaves the key out."""
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def assert_same(one: Lax, other: Lax) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert value.dtype == other.state_dict()[name].dtype
        assert torch.equal(value, other.state_dict()[name]), name
    assert one.config == other.config
    assert one.fingerprint == other.fingerprint


# There and back


@pytest.mark.parametrize("options", [{}, {"upsample": 3}, {"widths": (4,), "trained": None}])
def test_a_saved_adapter_is_loaded_bit_for_bit(tmp_path: Path, options) -> None:
    lax = adapter(**options)
    assert lax.save_pretrained(tmp_path) is None
    found = Lax.from_pretrained(tmp_path)
    assert_same(found, lax)
    assert not found.training
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    classifier, images = Classifier(cnn()), rand(2, 3, 32, 32)
    one, other = (explain(classifier, images, method=method) for method in (lax, found))
    assert torch.equal(one, other)


def test_odd_weights_are_loaded_bit_for_bit_too(tmp_path: Path) -> None:
    lax = adapter()
    with torch.no_grad():
        values = torch.tensor([-0.0, 1e-45, 3e38, float("inf"), 0.1, -1e-30, 7.0])
        lax.net[0].bias.copy_(values)
    lax.save_pretrained(tmp_path)
    found = Lax.from_pretrained(tmp_path).net[0].bias
    assert found.view(torch.int32).tolist() == lax.net[0].bias.view(torch.int32).tolist()


def test_the_calls_of_the_hub_work(tmp_path: Path) -> None:
    lax = adapter()
    assert isinstance(lax, PyTorchModelHubMixin)
    lax.save_pretrained(
        str(tmp_path), config={"ignored": 1}, model_card_kwargs={}, push_to_hub=False
    )
    found = Lax.from_pretrained(
        pretrained_model_name_or_path=str(tmp_path), revision=None, local_files_only=True
    )
    assert_same(found, lax)


def test_a_place_without_adapter_is_a_clear_error(tmp_path: Path) -> None:
    for place in (tmp_path / "nothing", str(tmp_path / "nothing"), "nothing", "a/b/c"):
        with pytest.raises(UserError, match="no adapter at"):
            Lax.from_pretrained(place)
    with pytest.raises(UserError, match="none on the hub"):
        Lax.from_pretrained("no-such-owner/no-such-adapter", local_files_only=True)


def test_saving_over_an_adapter_leaves_the_new_one_complete(folder: Path) -> None:
    torch.manual_seed(9)
    lax = Lax(3, widths=(2,))
    lax.save_pretrained(folder)
    assert_same(Lax.from_pretrained(folder), lax.eval())


def own_net() -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(9, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    nn.init.normal_(net[1].running_mean)  # type: ignore[arg-type]
    return net


def test_the_weights_of_a_users_net_are_loaded_into_another_one(tmp_path: Path) -> None:
    lax = adapter(net=own_net(), upsample=2)
    lax.save_pretrained(tmp_path)
    empty = nn.Sequential(nn.Conv2d(9, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    found = Lax.from_pretrained(tmp_path, net=empty)
    assert_same(found, lax)
    assert torch.equal(found(rand(2, 9, 3, 3)), lax(rand(2, 9, 3, 3)))


def test_an_own_net_must_be_given_again_and_no_other(tmp_path: Path, folder: Path) -> None:
    adapter(net=own_net()).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="net=, a Sequential"):
        Lax.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not fit"):
        Lax.from_pretrained(tmp_path, net=Sum(axis=True))
    with pytest.raises(UserError, match="no net="):
        Lax.from_pretrained(folder, net=own_net())


# Broken and hostile files


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_in_place_of_a_file_is_not_run(folder: Path, name: str, kind: str) -> None:
    fired = folder / "fired"
    if kind == "pickle":
        (folder / name).write_bytes(pickle.dumps(Bomb(fired)))
    else:
        torch.save({"net.0.weight": Bomb(fired)}, folder / name)
    with pytest.raises(UserError, match=name):
        Lax.from_pretrained(folder)
    assert not fired.exists()


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
def test_truncated_weights_are_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors could not be read"):
        Lax.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", '"words"', "3", "\x00\xff", "[" * 100_000, '{"channels": 9', "NaN"],
    ids=str.__len__,
)
def test_a_config_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.json"):
        Lax.from_pretrained(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"channels": ...},
        {"channels": "9"},
        {"channels": 9.0},
        {"channels": True},
        {"channels": None},
        {"channels": 0},
        {"channels": -9},
        {"channels": 10**12},
        {"channels": 10**400},
        {"channels": [9]},
        {"widths": 7},
        {"widths": []},
        {"widths": {}},
        {"widths": "75"},
        {"widths": [7, 5.5]},
        {"widths": [7, [5]]},
        {"widths": [65536] * 3},
        {"widths": [1] * 100_000},
        {"upsample": 0},
        {"upsample": 10**9},
        {"upsample": "2"},
        {"upsample": 1.5},
        {"upsample": None},
        {"bias": "x"},
        {"bias": [1]},
        {"layer": 4},
        {"layer": ["4", 5]},
        {"channels": []},
        {"channels": [3] * 9},
        {"classes": 10},
        {"answers": 2},
        {"steps": -1},
        {"trained": "yes"},
        {"trained": 5},
        {"trained": [1]},
        {"own_net": "Sequential"},
        {"net": "torch.nn.Identity"},
        {"self": 1},
        {"surprise": 1},
        {"fingerprint": 5},
        {"fingerprint": []},
        {"fingerprint": {}},
        {"fingerprint": "abc"},
        {"fingerprint": {"architecture": "a"}},
        {"fingerprint": {"architecture": "a", "sketch": 5}},
        {"fingerprint": {"architecture": "a", "sketch": ["x"]}},
        {"fingerprint": {"architecture": "a", "sketch": [[1.0]]}},
        {"fingerprint": {"architecture": "a", "sketch": [0.1, float("nan")]}},
        {"fingerprint": {"architecture": "a", "sketch": [float("inf")]}},
        {"fingerprint": {"architecture": "a", "sketch": [10**400]}},
    ],
    ids=lambda values: str(values)[:40],
)
def test_a_config_with_a_wrong_value_is_refused(folder: Path, values) -> None:
    change(folder, **values)
    with pytest.raises(UserError) as caught:
        Lax.from_pretrained(folder)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"channels": 8}, "1 of another shape"),
        ({"widths": [7]}, "2 unknown"),
        ({"widths": [7, 5, 5]}, "2 missing"),
    ],
)
def test_weights_of_another_adapter_are_refused(folder: Path, values, words: str) -> None:
    change(folder, **values)
    with pytest.raises(UserError, match=words):
        Lax.from_pretrained(folder)


@pytest.mark.parametrize("which", ["missing", "extra", "shape"])
def test_weights_that_do_not_fit_are_refused(folder: Path, which: str) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    if which == "missing":
        del state["net.0.bias"]
    else:
        state["net.0.bias" if which == "shape" else "net.99.bias"] = torch.zeros(3)
    save_file(state, path)
    with pytest.raises(UserError, match="does not fit"):
        Lax.from_pretrained(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_missing_or_a_folder_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=r"weights|adapter"):
        Lax.from_pretrained(folder)
    (folder / name).mkdir()
    with pytest.raises(UserError, match=r"weights|adapter"):
        Lax.from_pretrained(folder)


def test_an_unknown_fingerprint_loads_but_fits_no_classifier(folder: Path) -> None:
    change(folder, fingerprint={"architecture": "a", "sketch": [0.5]})
    with pytest.raises(UserError, match="another classifier"):
        explain(Classifier(cnn()), rand(1, 3, 32, 32), method=Lax.from_pretrained(folder))


def test_a_layer_that_the_classifier_lacks_is_refused(folder: Path) -> None:
    change(folder, layer="layer9")
    with pytest.raises(UserError, match=r"layer 'layer9'"):
        explain(Classifier(cnn()), rand(1, 3, 32, 32), method=Lax.from_pretrained(folder))


WORDS = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)
KEYS = (
    st.sampled_from(
        [
            "channels",
            "upsample",
            "widths",
            "own_net",
            "layer",
            "fingerprint",
            "trained",
            "bias",
            "net",
        ]
    )
    | WORDS
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(values=st.dictionaries(KEYS, JSON, min_size=1, max_size=3))
def test_any_config_loads_or_is_refused(folder: Path, values) -> None:
    adapter().save_pretrained(folder)
    change(folder, **values)
    try:
        found = Lax.from_pretrained(folder)
    except UserError:
        return
    assert found(rand(1, 9, 2, 2)).shape[0] == 1
    with torch.no_grad():
        wanted = adapter()
    if found.upsample == 1:
        assert torch.equal(found(rand(1, 9, 2, 2)), wanted(rand(1, 9, 2, 2)))


# On object storage


@pytest.mark.processes
def test_an_adapter_on_object_storage_is_loaded_bit_for_bit(
    bucket: str, object_server: ObjectServer, folder: Path
) -> None:
    object_server.upload(folder, f"{bucket}/birds-lax")
    assert_same(Lax.from_pretrained(f"{bucket}/birds-lax"), adapter())
    assert name_of(f"{bucket}/birds-lax/") == "birds-lax"
    found = methods_from(f"{bucket}/birds-lax, mine={bucket}/birds-lax")
    assert list(found) == ["birds-lax", "mine"]
    assert_same(found["mine"], adapter())


@pytest.mark.processes
def test_an_adapter_on_object_storage_is_not_trusted(
    bucket: str, object_server: ObjectServer, folder: Path
) -> None:
    place = f"{bucket}/adapter"
    with pytest.raises(UserError, match=f"no adapter at {place}: give the folder"):
        Lax.from_pretrained(place)
    change(folder, widths=[2**10, 2**9])
    object_server.upload(folder, place)
    with pytest.raises(UserError, match=f"{place}/config.json .*a larger model than the file"):
        Lax.from_pretrained(place)
    change(folder, widths=[7, 5])
    (folder / "model.safetensors").write_bytes(pickle.dumps({"weight": 1}))
    object_server.upload(folder, place)
    with pytest.raises(UserError, match=f"{place}/model.safetensors could not be read"):
        Lax.from_pretrained(place)
    adapter().save_pretrained(folder)
    object_server.upload(folder, place)
    for name in ("config.json", "model.safetensors"):
        object_server.faults[:] = [denied("GET", name)]
        with pytest.raises(GoneError, match=f"{place}/{name} can't be reached"):
            Lax.from_pretrained(place)
    with pytest.raises(UserError, match=f"cannot write to {bucket}/other: give a local folder"):
        adapter().save_pretrained(f"{bucket}/other")
