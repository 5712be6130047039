"""``init``: a recipe that trains as it is, whose values follow from the model, the device and the rows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo.make_checkpoint import Shape, write_checkpoint
from disco_accel.cli.main import main
from disco_accel.config.strict_yaml import parse_yaml
from disco_accel.graph.spaces import TO_DEVICE
from disco_accel.recipes.base_sizes import base_sizes
from disco_accel.recipes.first_recipe import (
    BaseSizes,
    DataFacts,
    Line,
    Target,
    choose,
    choose_fewer,
    recipe_text,
)
from disco_accel.recipes.model_names import find_model, name_on_hub
from disco_accel.recipes.settings import read_recipe
from disco_accel.simulate.gpus import gpu_named
from disco_accel.sizes import parse_size
from tests.cli.test_cli_recipe import CONFIG

TEXT = "A first recipe is there to be run, and then to be changed. " * 60
GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    (folder / "corpus.txt").write_text(TEXT)
    shape = Shape(64, 2, 128, num_attention_heads=4, num_key_value_heads=2, vocab_size=320, max_position_embeddings=64)
    write_checkpoint(folder / "tiny", shape, corpus=folder / "corpus.txt")
    return folder / "tiny"


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A folder that has a config alone."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISCO_PLAN_CACHE", "null")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_the_recipe_trains_as_it_is(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU it is for the host device; the user's rows give length and steps, and each value has a reason."""
    records = [{"prompt": "What is this?", "completion": f" {TEXT[: 40 + n % 7]}"} for n in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["init", str(checkpoint), "--data", "rows.jsonl", "--budget", "64MiB"]) == 0
    told = capsys.readouterr().out
    assert "no GPU is here" in told and "next: disco-accel train recipe.yaml" in told and "missing" not in told
    lines = Path("recipe.yaml").read_text().splitlines()
    assert all(line.partition("  # ")[2] for line in lines if line and not line.startswith("#"))
    recipe = read_recipe("recipe.yaml")
    assert recipe.disco_config == {"memory_budget": "64MiB"} and recipe.dataset == "rows.jsonl"
    assert recipe.max_length == 64 and not recipe.load_in_4bit
    assert main(["train", "recipe.yaml", "--max_steps", "2"]) == 0
    metrics = json.loads((Path(recipe.output_dir) / "metrics.json").read_text())
    assert len(metrics["steps"]) == 2 and metrics["disco"]["steps_compiled"] == 2
    assert (Path(recipe.output_dir) / "adapter_model.safetensors").is_file()


def test_a_gpu_that_is_not_here_and_a_model_without_weights(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is for that GPU's memory, ``plan`` agrees that it fits, and what the folder lacks is told."""
    assert main(["init", bare, "--gpu", "rtx4090", "-o", "gpu.yaml"]) == 0
    told = capsys.readouterr().out
    assert "has neither model.safetensors" in told and "has no tokenizer" in told
    assert "next: disco-accel plan gpu.yaml --gpu rtx4090" in told
    text = Path("gpu.yaml").read_text()
    assert "# LoRA of " in text and "RTX 4090" in text and "nine tenths of 24GiB" in text
    recipe = read_recipe("gpu.yaml")
    assert recipe.disco_config == {"memory_budget": "21.60GiB"} and recipe.dtype == "bfloat16"
    assert Path(recipe.dataset).name == "persuasion.txt" and recipe.max_length == CONFIG["max_position_embeddings"]
    assert main(["plan", "gpu.yaml", "--gpu", "rtx4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_a_batch_that_does_not_fit_is_made_smaller(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule says how many tokens fit, a plan says whether they do: a budget between two batches takes the smaller
    one, and one below any is refused with the smallest that works."""
    assert main(["init", bare, "--gpu", "rtx4090", "--budget", "2MiB", "--force"]) == 0
    small = read_recipe("recipe.yaml")
    assert main(["init", bare, "--gpu", "rtx4090", "--budget", "64MiB", "--force"]) == 0
    assert small.per_device_train_batch_size < read_recipe("recipe.yaml").per_device_train_batch_size
    assert small.per_device_train_batch_size * small.gradient_accumulation_steps == 16
    capsys.readouterr()
    assert main(["init", bare, "--gpu", "rtx4090", "--budget", "100KiB", "-o", "no.yaml"]) == 1
    assert "needs at least" in capsys.readouterr().err and not Path("no.yaml").exists()


def test_a_host_without_room_and_without_the_library_is_told(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is here")
    assert main(["init", bare, "--gpu", "l4", "--host-memory", "64KiB"]) == 2
    told = capsys.readouterr().err
    assert (
        "pip install bitsandbytes" in told
        and "host_memory: 64KiB is too small" in told
        and not Path("recipe.yaml").exists()
    )


SMALL = BaseSizes(8 * 10**9, 7 * 10**9, 15 * GIB, 5 * GIB, adapter=2_600_000, vocabulary=128_000, dtype="bfloat16")
ROWS = DataFacts("rows.jsonl", tokens=10**7, typical=900)


def target(budget: int, **changes: Any) -> Target:
    given = {"what": "a GPU", "half": 1e14, "link": 2.5e10, "budget": budget, "budget_key": f"{budget}", "why": "why"}
    return Target(**{**given, **changes})


def test_weights_stay_as_they_are_where_kernels_hide_their_loads() -> None:
    ample, tight = choose(SMALL, target(40 * GIB), ROWS), choose(SMALL, target(12 * GIB), ROWS)
    assert not ample.packed and ample.loaded == 0 and "15GiB fit beside a step" in ample.form
    assert (ample.rows, ample.length, ample.accumulation) == (4, 1024, 4)
    assert ample.steps == 3 * (10**7 // 1024) // 16, "three passes"
    assert not tight.packed and 0 < tight.link_seconds <= tight.kernel_seconds and "a step loads" in tight.form


def test_a_link_that_cannot_be_hidden_has_linear_layers_packed() -> None:
    """Or the file says how to get the library, or that packing is of no use."""
    slow = {"half": 1e15, "link": 5e9}
    packed = choose(SMALL, target(12 * GIB, **slow), ROWS)
    assert packed.packed and "5GiB in NF4" in packed.form and "kernels take" in packed.form
    assert packed.loaded == 0, "packed weights stay"
    text = recipe_text("", "m", "out", SMALL, target(12 * GIB, **slow), ROWS, packed, "sdpa")
    assert "load_in_4bit: true" in text and "5GiB in NF4" in text
    without = choose(SMALL, target(12 * GIB, lacking="bitsandbytes", **slow), ROWS)
    assert not without.packed and "pip install bitsandbytes" in without.form
    mixture = choose(SMALL._replace(packed=14 * GIB), target(12 * GIB, **slow), ROWS)
    assert not mixture.packed and "few of" in mixture.form
    stored = choose(SMALL._replace(stored="nf4"), target(12 * GIB, **slow), ROWS)
    assert not stored.packed and stored.loaded == 0 and "as nf4" in stored.form


def test_weights_that_the_host_has_no_room_for_are_packed() -> None:
    assert not choose(SMALL, target(40 * GIB, host=32 * GIB), ROWS).packed
    choice = choose(SMALL, target(40 * GIB, host=16 * GIB), ROWS)
    assert choice.packed and "15GiB of host memory, of 16GiB" in choice.form


@pytest.mark.parametrize(
    ("rows", "positions", "length"),
    [
        (ROWS, None, 1024),
        (ROWS._replace(typical=40), None, 128),
        (ROWS._replace(typical=100_000), None, 4096),
        (ROWS._replace(typical=0), None, 1024),
        (ROWS, 1000, 1000),
        (ROWS._replace(tokens=300), None, 128),
    ],
)
def test_a_row_is_as_long_as_records_are(rows: DataFacts, positions: int | None, length: int) -> None:
    choice = choose(SMALL._replace(positions=positions), target(40 * GIB), rows)
    assert choice.length == length
    assert choice.rows * choice.accumulation <= max(1, rows.tokens // length), "an update has no row twice"


def test_fewer_tokens_until_there_are_none() -> None:
    """By as many as take the bytes that are missing, or half; then there is no choice."""
    given = SMALL, target(40 * GIB), ROWS
    choice = choose(*given)
    found = [choice.tokens]
    while (fewer := choose_fewer(*given, choice, over=1)) is not None:
        choice = fewer
        found.append(choice.tokens)
    assert found == [4096, 2048, 1024, 512, 256, 128]
    least = choose_fewer(*given, choose(*given), over=40 * GIB)
    assert least is not None and least.tokens == 128


@pytest.mark.parametrize("name", ["yes", "3e5", "a: b #c", "it's", 'say "no"', "null", "-", "~", "größe", "m/x-1.5"])
def test_names_are_read_back_as_they_were(name: str) -> None:
    assert parse_yaml(str(Line("key", name, "why")), "test") == {"key": name}


def test_the_page_shows_what_is_written() -> None:
    """All lines but the first two, which have figures of a plan."""
    found = find_model(name_on_hub("llama-3.1-8b"))
    base, attention = base_sizes(found, on_host=False)
    assert base.numbers == 8_030_261_248 and base.bytes == 2 * base.numbers
    gpu = gpu_named("rtx4090")
    rates = {"half": gpu.speed.half, "link": gpu.speed.machine.link(TO_DEVICE).bandwidth}
    why = "nine tenths of 24GiB: all that training holds on the device"
    card = Target("a GPU", **rates, budget=parse_size("21.60GiB"), budget_key="21.60GiB", why=why)
    rows = DataFacts("train.jsonl", tokens=1_640_000, typical=870)
    text = recipe_text("", found.name, "out/Llama-3.1-8B-lora", base, card, rows, choose(base, card, rows), attention)
    page = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()
    assert text in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["empty"], "MODEL: empty: has no config that can be read: it has no config.json"),
        (["odd"], "nonesuch"),
        (["no/such/model"], "MODEL: no/such/model: has no config that can be read"),
        (["bare", "--gpu", "rtx9090"], "--gpu: 'rtx9090' is not known; did you mean rtx5090"),
        (["bare", "--gpu", "this"], "no GPU is here"),
        (["bare", "--budget", "much"], "--budget: 'much' is not a size"),
        (["bare", "--gpu", "l4", "--budget", "25GiB"], "--budget: 25GiB is more than the 24GiB of an L4"),
        (["bare", "--host-memory", "0"], "--host-memory: '0' is not a usable size"),
        (["bare", "--data", "rows.jsonl"], "--data: rows.jsonl: line 2: not JSON"),
        (["bare", "--data", "none.txt"], "--data: none.txt: no such file"),
        (["bare", "--data", "short.txt"], "--data: short.txt: has 1 tokens"),
        (["packed"], "MODEL: packed: its weights are packed by mxfp4"),
        (["bare", "-o", "there.yaml"], "-o: there.yaml: is there already; give --force"),
        (["bare", "-o", "no/such/recipe.yaml"], "-o: no/such/recipe.yaml: cannot be written"),
        (["bare", "-o", "bare"], "-o: bare: is a folder"),
    ],
)
def test_wrong_words_are_status_2(
    words: list[str], message: str, bare: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the option, and no file."""
    for name, changes in (
        ("odd", {"model_type": "nonesuch"}),
        ("packed", {"quantization_config": {"quant_method": "mxfp4"}}),
    ):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    Path("empty").mkdir()
    Path("rows.jsonl").write_text('{"text": "good"}\n{"text": \n')
    Path("short.txt").write_text("so")
    Path("there.yaml").write_text("kept")
    before = sorted(Path().iterdir())
    assert main(["init", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert sorted(Path().iterdir()) == before and Path("there.yaml").read_text() == "kept"


def test_the_budget_of_a_share_is_read_as_no_more_than_it(bare: str) -> None:
    assert main(["init", bare, "--gpu", "h200"]) == 0
    recipe = read_recipe("recipe.yaml")
    assert recipe.disco_config is not None
    assert parse_size(recipe.disco_config["memory_budget"]) <= 0.9 * 141 * GIB
