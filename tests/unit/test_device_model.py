from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from repro.device.model import DeviceModel, Quantity, load_model, model_path, transfer_ns
from repro.errors import InputError, UsageError


@pytest.fixture
def text() -> str:
    return model_path("b200").read_text()


def load_text(tmp_path: Path, text: str) -> DeviceModel:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_model(path)


def test_b200_matmuls_take_what_the_card_says() -> None:
    model = load_model("b200")
    assert 9 * model.matmul_ns(2048, 8192) == pytest.approx(39e6, abs=9)
    assert model.matmul_ns(1024, 8192) == pytest.approx(model.matmul_ns(2048, 8192) / 2, abs=1)
    assert model.matmul_ns(2048, 4096) == pytest.approx(model.matmul_ns(2048, 8192) / 4, abs=1)


def test_64_mib_at_the_cards_rate_take_7_9_ms() -> None:
    assert load_model("b200").copy_ns(64 << 20, to_device=True, pinned=False) == 7_895_160
    assert transfer_ns(0, 8.5) == 1


def test_each_direction_and_kind_of_memory_has_its_rate() -> None:
    rates = {"pageable_h2d": 1, "pageable_d2h": 2, "pinned_h2d": 4, "pinned_d2h": 8}
    quantities = {f"{name}_gb_per_s": Quantity(value=rate, source="test") for name, rate in rates.items()}
    model = load_model("b200").model_copy(update=quantities)
    times_ns = [model.copy_ns(800, to_device=h2d, pinned=pinned) for pinned in (False, True) for h2d in (True, False)]
    assert times_ns == [800, 400, 200, 100]


def test_values_that_no_published_figure_gives_are_marked() -> None:
    values = load_model("b200").model_dump(exclude={"schema_", "name"})
    assert {key for key, value in values.items() if value["assumption"]} == {
        "pageable_d2h_gb_per_s",
        "pinned_h2d_gb_per_s",
        "pinned_d2h_gb_per_s",
        "host_copy_gb_per_s",
        "pin_gb_per_s",
        "pin_latency_us",
        "launch_overhead_us",
    }


def test_pickles_and_compares() -> None:
    model = load_model("b200")
    assert pickle.loads(pickle.dumps(model)) == model


def test_loads_ones_own_file(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, text.replace("NVIDIA B200", "mine", 2)).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[sm_count]", "[sm_cuont]", "sm_count: Field required"),
        ("[matmul_count]\nvalue = 9", "[matmul_count]\nvalue = 0", "matmul_count.value"),
        ("value = 39.0", "value = nan", "matmul_total_ms.value"),
        ("value = 39.0", 'value = "fast"', "matmul_total_ms.value"),
        ('source = "the card: 9 matmuls, about 39 ms together"', "", "matmul_total_ms.source: Field required"),
        ("[sm_count]", "[extra]\nvalue = 1\nsource = 'x'\n[sm_count]", "extra: Extra inputs"),
        ("repro.device-model/1", "repro.device-model/2", "schema"),
        ("[sm_count]", "[sm_count", "cannot be read"),
    ],
)
def test_refuses_a_wrong_file_naming_file_and_key(tmp_path: Path, text: str, old: str, new: str, says: str) -> None:
    assert old in text
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, text.replace(old, new))
    assert "mine.toml" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["b300", "no/such/file.toml", "nofile.toml", "../models/b200"])
def test_refuses_an_unknown_model(name: str) -> None:
    with pytest.raises(UsageError):
        load_model(name)
