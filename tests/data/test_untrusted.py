"""Files of strangers: parsed without running them, and no larger than they are."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as as_safetensors
from sufficit.comparing.finished import read_finished
from sufficit.comparing.jobs import make_job
from sufficit.comparing.settings import Settings, read_run, settings_from, write_run

from sufficit import Classifier, Lax, UserError, train_lax
from sufficit.classifier import loading as sources
from sufficit.data.heatmap_files import HeatmapError, HeatmapFile, write_heatmaps
from sufficit.data.images import open_images
from sufficit.data.splits import Split
from sufficit.errors import unknown
from sufficit.files import safe_name
from sufficit.reproduce.outcome import read_outcome
from sufficit.reproduce.plans import make_plan, read_plan
from sufficit.reproduce.scoring import write_the_test_folder
from sufficit.results import save_json

FUZZ = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DEEP = 100_000
DEEP_JSON = "[" * DEEP + "]" * DEEP
HUGE = "9" * 5000


def npy(shape: str, dtype: str = "<f4", content: bytes = b"\0" * 16) -> bytes:
    """An array whose header says what it likes."""
    words = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words + content


def npz(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
    return path


def read_maps(path: Path) -> dict[str, torch.Tensor]:
    with HeatmapFile(path) as maps:
        return {key: maps.read(key) for key in maps.keys}  # a list it has


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy("(1000000, 1000000)"), "too large"),
        (npy("(1000000000000,)"), r"must be \[h,w\]"),
        (npy("(8000, 8000)"), "256000000 bytes announced, but"),
        (npy("(-2, -2)"), "no array has the shape"),
        (npy("(2, 1)"), "more or fewer"),
        (npy("(2, 2)", "|O"), "pickle"),
        (npy("(2, 2)", "<c8"), "expected numbers"),
        (npy("(2, 2)", "<U4"), "expected numbers"),
        (npy("(2, 2, )" + " " * 20_000), "could not be read"),
        (npy("(" * 200 + ")" * 200), "could not be read"),
        (b"\x93NUMPY\x09\x00", "version"),
        (b"no array", "could not be read"),
    ],
)
def test_an_array_is_no_larger_than_its_file(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(HeatmapError, match=words):
        read_maps(npz(tmp_path / "m.npz", content))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f8", "|u1", "<i8", "|b1"])
def test_arrays_of_all_numbers_are_read_as_numpy_reads_them(
    tmp_path: Path, dtype: str, order: str
) -> None:
    values = np.array([[0, 1, 1], [1, 0, 0]]).astype(dtype).copy(order=order)
    np.savez(tmp_path / "m.npz", a=values)
    read = read_maps(tmp_path / "m.npz")["a"]
    assert read.dtype == torch.float32
    assert np.array_equal(read.numpy(), values.astype(np.float32))


def test_values_too_large_for_a_float_are_infinite(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", a=np.array([[1e300, 0]]))
    assert read_maps(tmp_path / "m.npz")["a"].tolist() == [[float("inf"), 0]]


def test_a_header_of_gigabytes_is_refused(tmp_path: Path) -> None:
    for size in (2**33, 2**63, 90):
        path = tmp_path / "m.safetensors"
        path.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(UserError, match="could not be read as heatmaps"):
            HeatmapFile(path)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    Lax(4, widths=(4, 2)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Classifier.load("sufficit:digits").save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "text", [DEEP_JSON, '{"channels": ' + HUGE + "}", " " * (2**24 + 1) + "{}", "\udcff", ""]
)
def test_json_that_is_no_description_is_one_line(adapter: Path, saved: Path, text: str) -> None:
    for path, load in (
        (adapter / "config.json", Lax.from_pretrained),
        (saved / "classifier.json", Classifier.load),
    ):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match=rf"{path.name} could not be read") as told:
            load(path.parent)
        assert len(str(told.value)) < 500


def test_an_adapter_larger_than_its_weights_is_never_made(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    usual = torch.nn.init.kaiming_uniform_
    monkeypatch.setattr(
        "torch.nn.init.kaiming_uniform_", lambda t, **k: made.append(t.numel()) or usual(t, **k)
    )
    config = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(config | {"channels": 60_000, "widths": [200]}))
    with pytest.raises(UserError, match="a larger model is described than it fills"):
        Lax.from_pretrained(adapter)
    assert made == []


def described(saved: Path, **changes: object) -> None:
    path = saved / "classifier.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def resnet(**options: object) -> dict[str, object]:
    return {"source": "torchvision:resnet18", "options": options}


VIEW = {"crop": [64, 64], "resize": None, "channels": 3, "stretch": False}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": resnet(num_classes=10**8)}, "a larger model is described"),
        ({"recipe": resnet(num_classes=10**15)}, "a larger model is described"),
        ({"recipe": resnet(num_classes=-1)}, "could not be read"),
        ({"recipe": {"source": "sufficit:digits", "options": {"num_classes": -1}}}, "damaged"),
        ({"recipe": {"source": "sufficit:digits", "options": {"width": 10**5}}}, "larger"),
        ({"recipe": "python:evil.py:run"}, "damaged"),
        ({"recipe": {"source": "python:evil.py:run", "options": {}}}, "names code to run"),
        ({"view": VIEW | {"interpolation": "magic"}}, "damaged"),
        ({"view": VIEW | {"interpolation": "bilinear", "crop": [10**6, 10**6]}}, "1..16384 pixels"),
        ({"view": VIEW | {"interpolation": "bilinear", "crop": [64]}}, "damaged"),
        ({"mean": ["a", "b", "c"]}, "damaged"),
        ({"classes": 7}, "damaged"),
    ],
)
def test_a_saved_classifier_is_what_it_says_or_one_line(
    saved: Path, changes: dict[str, object], words: str
) -> None:
    described(saved, **changes)
    with pytest.raises(UserError, match=words):
        Classifier.load(saved)


@pytest.mark.parametrize(
    ("source", "option", "value"),
    [
        ("timm:resnet18", "checkpoint_path", "/elsewhere/weights.pth"),
        ("timm:resnet18", "pretrained", True),
        ("timm:resnet18", "pretrained_cfg", {"file": "/elsewhere/weights.pth"}),
        ("timm:resnet18", "pretrained_cfg_overlay", {"hf_hub_id": "a/b"}),
        ("timm:resnet18", "cache_dir", "/elsewhere"),
        ("torchvision:resnet18", "weights", "DEFAULT"),
        ("torchvision:resnet18", "pretrained", True),
        ("torchvision:resnet18", "norm_layer", "x"),
        ("transformers:a/b", "cache_dir", "/elsewhere"),
        ("transformers:a/b", "revision", "other"),
        ("transformers:a/b", "proxies", {"https": "evil"}),
        ("transformers:a/b", "token", True),
        ("sufficit:digits", "weights", "/elsewhere/weights.pth"),
    ],
)
def test_a_saved_classifier_makes_no_library_read_other_files(
    saved: Path, monkeypatch: pytest.MonkeyPatch, source: str, option: str, value: object
) -> None:
    asked = list[object]()
    scheme = source.partition(":")[0]
    monkeypatch.setitem(sources.SOURCES, scheme, lambda *given: asked.append(given))
    described(saved, recipe={"source": source, "options": {"num_classes": 10, option: value}})
    with pytest.raises(UserError, match=f"has the option '{option}', which no saved classifier"):
        Classifier.load(saved)
    assert asked == []


def test_a_saved_classifier_keeps_the_options_of_its_shape(tmp_path: Path) -> None:
    options = {"num_classes": 4, "drop_rate": 0.5, "global_pool": "max"}
    whole = Classifier.load("timm:resnet10t", weights=None, **options)
    again = Classifier.load(whole.save(tmp_path / "saved"))
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(again(images), whole(images))


BASE = {"model": "m", "data": "d"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods = " + "[" * DEEP + "]" * DEEP, "is not TOML"),
        ("seed = " + HUGE, "is not TOML"),
        ("seed = 0x" + "F" * 9000, "seed must be a whole number, got what is too large"),
        ("seed = 9223372036854775808", "seed must be 9223372036854775807 or less"),
        ("donors = 1_000_000_000", "donors must be 1000000 or less"),
        ("alpha_min = 0x" + "F" * 9000, "alpha_min must be"),
        ("seed." + ".".join("a" * 3000) + " = 1", "seed must be a whole number"),
        ("x" * 100_000 + " = 1", r"Unknown setting in RUN.toml 'x+'\.\.\."),
        ("# " + "x" * 2**20, "more than 1048576 bytes"),
        ("model = 'a'\0", "is not TOML"),
        ('model = "\udcff"', "is not TOML"),
    ],
)
def test_a_run_file_of_a_stranger_is_one_short_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "RUN.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words) as told:
        read_run(tmp_path / "RUN.toml")
    assert len(str(told.value)) < 1500


def test_no_reader_waits_for_a_pipe(tmp_path: Path, adapter: Path, saved: Path) -> None:
    for path in (tmp_path / "RUN.toml", adapter / "config.json", saved / "classifier.json"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    for read, path in (
        (read_run, tmp_path / "RUN.toml"),
        (Lax.from_pretrained, adapter),
        (Classifier.load, saved),
    ):
        with pytest.raises(UserError):
            read(path)


def test_a_long_name_is_told_in_short() -> None:
    assert str(unknown("fill", "x" * 10**6, ["black"])).startswith(f"Unknown fill '{'x' * 100}'...")


@pytest.mark.parametrize(
    "changes",
    [
        {"recipes": ["../../elsewhere"]},
        {"seeds": 10**12},
        {"seeds": "many"},
        {"side": "wide"},
        {"model": "/etc/passwd"},
        {"table": ["a"]},
        {"seed": -1},
        {"step": None},
    ],
)
def test_a_plan_of_a_stranger_is_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    plan = vars(make_plan("synthetic-mnist", {}, quick=True, cuda=False))
    save_json(_made(tmp_path / "numbers") / "plan.json", plan | changes)
    with pytest.raises(UserError, match=r"plan\.json can't be read"):
        read_plan(tmp_path)
    save_json(tmp_path / "numbers" / "plan.json", plan)
    assert vars(read_plan(tmp_path)) == plan


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


FACTS = {"names": ["a"], "targets": [0], "methods": ["gradcam"], "classifier": {}}


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"clean": torch.ones(1)}, {}),
        ({"clean": torch.ones(1)}, FACTS | {"methods": 3}),
        ({"clean": torch.ones(1), "other/msi": torch.ones(1)}, FACTS),
        ({"clean": torch.ones(1), "gradcam/msi": torch.ones(2)}, FACTS),
        ({}, FACTS),
    ],
)
def test_numbers_of_a_stranger_are_one_line(
    tmp_path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, object]
) -> None:
    numbers = _made(tmp_path / "numbers")
    save_json(numbers / "plan.json", vars(make_plan("synthetic-mnist", {}, quick=True, cuda=False)))
    content = as_safetensors(tensors, metadata={"facts": json.dumps(facts)})
    (numbers / "scores.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="numbers is damaged"):
        read_outcome(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b"])
def test_names_lead_to_no_other_place(name: str) -> None:
    with pytest.raises(UserError, match="can't be the name"):
        safe_name(name)


@pytest.mark.parametrize("methods", [["../../x"], ["/etc"], [3], 7])
def test_the_methods_of_a_finished_run_lie_inside_it(tmp_path: Path, methods: object) -> None:
    save_json(tmp_path / "run.json", {"methods": methods})
    save_json(tmp_path / "summary.json", {})
    write_run(tmp_path / "RUN.toml", Settings(model="m", data="d"))
    outside = isinstance(methods, list) and isinstance(methods[0], str)
    with pytest.raises(UserError, match="can't be the name" if outside else "not whole"):
        read_finished(tmp_path)
    (tmp_path / "run.json").write_text(DEEP_JSON)
    with pytest.raises(UserError, match=r"run\.json could not be read"):
        read_finished(tmp_path)


@pytest.mark.parametrize("name", ["parts", "run.json", "RUN.toml", "report.html", "summary.json"])
def test_no_adapter_takes_the_place_of_a_result(tmp_path: Path, adapter: Path, name: str) -> None:
    from PIL import Image

    (tmp_path / "data").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "data" / "a.png")
    shutil.copytree(adapter, tmp_path / name)
    asked = settings_from(
        {"model": "sufficit:digits", "data": str(tmp_path / "data"), "lax": [str(tmp_path / name)]}
    )
    pictures = open_images(tmp_path / "data")
    with pytest.raises(UserError, match="no method can be called"):
        make_job(asked, Classifier.load("sufficit:digits"), pictures, 4, False)


def bent(content: bytes, changes: list[tuple[int, int]], cut: int | None) -> bytes:
    """Some bytes changed, and the end cut off."""
    found = bytearray(content)
    for place, value in changes:
        found[place % len(found)] = value
    return bytes(found if cut is None else found[: cut % len(found)])


CHANGES = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6)
CUT = st.none() | st.integers(0, 2**16)


def reads(read: Callable[[], object]) -> None:
    """It is read, or told in words; nothing else may come out."""
    with contextlib.suppress(UserError):
        read()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_heatmap_files_with_any_bytes_are_read_or_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    maps = {"a": torch.rand(3, 4), "b": torch.rand(2, 2)}
    if suffix == ".npz":
        write_heatmaps(path, maps)
    else:
        path.write_bytes(as_safetensors(maps))
    whole = path.read_bytes()

    @FUZZ
    @given(CHANGES, CUT)
    def bend(changes: list[tuple[int, int]], cut: int | None) -> None:
        path.write_bytes(bent(whole, changes, cut))
        reads(lambda: read_maps(path))

    bend()


@FUZZ
@given(
    shape=st.recursive(st.integers() | st.text(max_size=3), st.tuples, max_leaves=4),
    dtype=st.sampled_from(["<f4", "|O", "<f8", "V8", "<M8[s]", "f4, f4", "?", ">u2", "junk", ""]),
    content=st.binary(max_size=40),
)
def test_arrays_with_any_header_are_read_or_told(
    tmp_path: Path, shape: object, dtype: str, content: bytes
) -> None:
    reads(lambda: read_maps(npz(tmp_path / "m.npz", npy(repr(shape), dtype, content))))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_adapters_with_any_bytes_are_read_or_told(adapter: Path, name: str) -> None:
    whole = (adapter / name).read_bytes()

    @FUZZ
    @given(CHANGES, CUT)
    def bend(changes: list[tuple[int, int]], cut: int | None) -> None:
        (adapter / name).write_bytes(bent(whole, changes, cut))
        reads(lambda: Lax.from_pretrained(adapter))

    bend()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def test_descriptions_with_anything_in_a_place_are_read_or_told(saved: Path) -> None:
    whole = json.loads((saved / "classifier.json").read_text())

    @FUZZ
    @given(st.sampled_from(sorted(whole)), ANY)
    def bend(key: str, value: object) -> None:
        (saved / "classifier.json").write_text(json.dumps(whole | {key: value}))
        reads(lambda: Classifier.load(saved))

    bend()


def test_run_files_with_any_bytes_are_read_or_told(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    write_run(path, Settings(model="m", data="d", lax=("a", "b"), size="64", batch_size=3))
    whole = path.read_bytes()

    @FUZZ
    @given(CHANGES, CUT)
    def bend(changes: list[tuple[int, int]], cut: int | None) -> None:
        path.write_bytes(bent(whole, changes, cut))
        reads(lambda: settings_from(read_run(path)))

    bend()


@FUZZ
@given(st.sampled_from([*vars(Settings(model="m", data="d")), "x"]), ANY)
def test_settings_with_anything_in_a_place_are_taken_or_told(name: str, value: object) -> None:
    reads(lambda: settings_from(BASE | {name: value}))


def test_all_of_it_stays_within_little_memory(tmp_path: Path, adapter: Path, saved: Path) -> None:
    npz(tmp_path / "large.npz", npy("(8000, 16000)"))
    npz(tmp_path / "bomb.npz", npy("(2, 2)", content=bytes(2**26)))
    (tmp_path / "RUN.toml").write_text("methods = " + "[" * DEEP)
    config = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(config | {"channels": 60_000, "widths": [200]}))
    described(saved, recipe=resnet(num_classes=10**6))
    script = """
        import resource
        from pathlib import Path
        from sufficit import Classifier, Lax, UserError
        from sufficit.comparing.settings import read_run
        from sufficit.data.heatmap_files import HeatmapFile
        import torchvision.models

        def read_maps(path):
            with HeatmapFile(path) as maps:
                return maps.read("a")

        def used(what):
            line = next(l for l in Path("/proc/self/status").open() if l.startswith(what))
            return int(line.split()[1]) * 1024

        limit = used("VmSize") + 40 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for read, path in (
            (read_maps, "large.npz"), (read_maps, "bomb.npz"), (read_run, "RUN.toml"),
            (Lax.from_pretrained, "adapter"), (Classifier.load, "saved"),
        ):
            try:
                read(Path(path))
            except UserError as error:
                print(path, len(str(error)) < 500)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = ["large.npz", "bomb.npz", "RUN.toml", "adapter", "saved"]
    assert done.stdout.split() == [word for name in told for word in (name, "True")], done.stderr


def test_a_checkpoint_of_another_adapter_is_one_line(tmp_path: Path) -> None:
    classifier = Classifier.load("sufficit:digits")
    batches = [(torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 2, 3]))]
    asked = {"out": tmp_path, "epochs": 1, "validation_images": 4, "progress": False}
    train_lax(classifier, batches, **asked)
    whole = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    first = next(iter(whole["lax"]))
    for changes in (
        {"lax": {**whole["lax"], first: torch.zeros(1)}},
        {"lax": 3},
        {"optimizer": {}},
        {"state": whole["state"] | {"best": {first: torch.zeros(1)}}},
    ):
        torch.save(whole | changes, tmp_path / "checkpoint.pt")
        with pytest.raises(UserError, match=r"checkpoint\.pt in .* does not fit"):
            train_lax(classifier, batches, **asked)
    torch.save(whole, tmp_path / "checkpoint.pt")
    assert len(train_lax(classifier, batches, **asked).trained["history"]) == 1


def test_a_class_of_a_data_set_makes_no_folder_elsewhere(tmp_path: Path) -> None:
    split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), 8)
    work = SimpleNamespace(
        out=tmp_path / "out",
        sets=SimpleNamespace(test=split, classes=("a", "../../../escaped")),
        plan=SimpleNamespace(images=4, seed=0, side=8),
        clock=lambda stage: contextlib.nullcontext(),
    )
    with pytest.raises(UserError, match=r"'../../../escaped' can't be the name"):
        write_the_test_folder(work)
    assert not list(tmp_path.rglob("escaped"))
