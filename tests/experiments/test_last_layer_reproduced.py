"""`tangency reproduce last-layer` runs small, goes on where it stopped, reads the official tables, and refuses."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import tangency as tg
from tangency._base import extras
from tangency.cli import main
from tangency.experiments import last_layer, sentences
from tangency.experiments.last_layer import LastTask
from tangency.experiments.table import Options


def options(out: Path | None, *cases: str) -> Options:
    return Options(out=out, quick=True, seeds=1, cases=cases, progress=False, where="cpu")


def test_it_runs_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "last-layer", "--quick", "--quiet", "--json", "--cases", "random,probe"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"].split(" +")[0] for row in rows] == ["random weights", "trained weights"]
    assert all(row["fits"] == 2 and row["test % paper"] is None for row in rows)


def test_fine_tuning_has_a_row_for_its_refit_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = last_layer.reproduce_last(options(tmp_path, "finetune"))
    assert [row["method"] for row in table.rows] == ["fine-tuning", "fine-tuning + refit"]
    before, after = (float(row["train %"].split(" ")[0]) for row in table.rows)
    assert after >= before

    def never(task: LastTask) -> None:
        raise AssertionError(task)

    monkeypatch.setattr(last_layer, "run_task", never)
    again = last_layer.reproduce_last(options(tmp_path, "finetune"))
    assert again.rows == table.rows


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(extras, "is_installed", lambda library: False)
    with pytest.raises(tg.MissingLibrary, match=r"low-rank adapter needs peft: pip install 'tangency\[lora\]'"):
        last_layer.run_task(LastTask("lora", "tweets", 0, None, "cpu"))


def test_unknown_cases_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tg.InputError, match="--cases other; needed: some of random, probe, lora, finetune"):
        last_layer.reproduce_last(options(None, "other"))
    with pytest.raises(tg.InputError, match=r"there is no file .*minilm/"):
        last_layer.reproduce_last(Options(data=tmp_path, cases=("probe",), progress=False, where="cpu"))


def test_the_official_tables_are_read(tmp_path: Path) -> None:
    (tmp_path / "sentiment140").mkdir()
    lines = ['"4","1","d","q","u","so, good"', '"2","2","d","q","u","neutral"', '"0","3","d","q","u","bad"']
    (tmp_path / "sentiment140" / sentences.TWEETS).write_text("\n".join(lines) + "\n", encoding="latin-1")
    assert sentences.read_tweets(tmp_path) == (["so, good", "bad"], [1, 0])
    for name, line in (("cola", "a sentence\t1"), ("sst2", "1\ta sentence")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dev.tsv").write_text(line + "\n\n", encoding="utf-8")
        assert sentences.read_pairs(tmp_path, name, "dev") == (["a sentence"], [1])


def test_shuffles_have_the_same_number_of_each_class() -> None:
    texts, train, test = last_layer.read_split(None, "tweets", 3)
    assert torch.bincount(texts.y[train]).tolist() == [40, 40]
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(120))
    other = last_layer.read_split(None, "tweets", 4)
    assert not torch.equal(train, other[1])


def test_embeddings_do_not_depend_on_padding_and_order() -> None:
    model = sentences.sentences(None, seed=0)
    ids = torch.randint(2, 64, (9, 6), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6) < torch.tensor([6, 2, 4, 3, 6, 1, 5, 2, 3])[:, None]).long()
    found = sentences.embedded(model, {"input_ids": ids * mask, "attention_mask": mask})
    with torch.no_grad():
        for k in range(9):
            n = int(mask[k].sum())
            alone = model.embed(ids[k : k + 1, :n], mask[k : k + 1, :n])
            torch.testing.assert_close(found[k], alone[0], rtol=1e-4, atol=1e-5)


def test_scores() -> None:
    y = torch.tensor([1, 1, 0, 0])
    assert last_layer.matthews(y, y) == pytest.approx(1)
    assert last_layer.matthews(1 - y, y) == pytest.approx(-1)
    assert last_layer.matthews(torch.ones(4), y) == 0
    assert last_layer.spread([80.0, 90.0]) == "85.0 ± 5.00"
    row = last_layer._row("CoLA", "m", [{"train": 90.0, "test": 75.0, "right": "1110"}], y, (None, None))
    assert row["test %"] == "75.0 ± 25.00"
    assert row["MCC"] == f"{3**-0.5:.3f}"


@pytest.mark.slow
def test_processes_find_the_same() -> None:
    tasks = [LastTask("probe", "tweets", seed, None, "cpu") for seed in range(2)]
    alone = {task.key: row for task, row in last_layer.run_all(tasks, 1)}
    assert {task.key: row for task, row in last_layer.run_all(tasks, 2)} == alone


def test_lora_is_asked_of_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft may be missing: what it is asked for is seen by one made by hand."""
    made = types.ModuleType("peft")
    asked: dict[str, object] = {}
    made.LoraConfig = lambda **how: asked.update(how)  # type: ignore[attr-defined]
    made.inject_adapter_in_model = lambda config, encoder: encoder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", made)
    model = sentences.with_lora(sentences.sentences(None, seed=0), 0)
    assert asked["r"] == 8
    assert asked["target_modules"] == ["query", "value"]
    assert isinstance(model.head, nn.Linear)
