"""The training loop: resumed runs are equal to the bit, accumulated batches equal large ones, time limits hold."""

import errno
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from polyhead.training.loop import journal, trainer
from polyhead.training.loop import saved_runs as saved
from polyhead.training.loop.errors import RecipeError
from polyhead.training.loop.schedule import TrainingPlan
from polyhead.training.loop.trainer import BEST_FILE, RUN_FILE, RunFolder, train

Batch = tuple[int, ...]  # rows of the data


@dataclass
class Regression:
    """A regression from three to two features with dropout.  A batch is a tuple of rows.  `fails` interrupts a step."""

    batch: int = 2
    dropout: float = 0.3
    seed: int = 0
    fails: int = -1
    figures: Sequence[float] = ()
    evaluations: int = 0
    network: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 2))
        draw = torch.Generator().manual_seed(1)
        self.x, self.y = (torch.randn(12, width, generator=draw) for width in (3, 2))

    def modules(self) -> list[nn.Module]:
        return [self.network]

    def batches(self, epoch: int) -> list[Batch]:
        rows = list(range(12))
        random.Random(epoch).shuffle(rows)
        return [tuple(rows[at : at + self.batch]) for at in range(0, 12, self.batch)]

    def size(self, batch: Batch) -> int:
        return len(batch)

    def counts(self, batch: Batch) -> tuple[int, ...]:
        return (len(batch), sum(row % 3 > 0 for row in batch))

    def losses(self, batch: Batch) -> Tensor:
        self.fails -= 1
        if self.fails == -1:
            raise KeyboardInterrupt
        error = (self.network(self.x[list(batch)]) - self.y[list(batch)]) ** 2
        some = [at for at, row in enumerate(batch) if row % 3 > 0]
        return torch.stack([error[:, 0].mean(), error[some, 1].mean() if some else error[:0].sum()])

    def evaluate(self) -> dict[str, float]:
        self.evaluations += 1
        if self.figures:
            return {"loss": self.figures[self.evaluations - 1]}
        return {"loss": float(((self.network(self.x) - self.y) ** 2).mean())}


def weights(task: Regression) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in task.network.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("schedule", ["linear", "inverse-sqrt"])
def test_a_resumed_run_is_the_same_to_the_bit(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted within an epoch, after unsaved steps: weights, figures and journal are equal after resuming."""
    monkeypatch.setattr(journal, "WRITE_EVERY", 1)
    plan = TrainingPlan(epochs=2, rate=0.1, schedule=schedule, evaluate_every=4, watch="loss")  # type: ignore[arg-type]
    uninterrupted = Regression()
    figures = train(uninterrupted, plan, RunFolder(tmp_path / "straight"))
    with pytest.raises(KeyboardInterrupt):
        train(Regression(fails=9), plan, RunFolder(tmp_path / "twice"))
    torch.manual_seed(99)
    resumed = Regression(seed=5)
    assert train(resumed, plan, RunFolder(tmp_path / "twice", resume=True)) == figures
    assert same(weights(resumed), weights(uninterrupted))
    uninterrupted_lines, parts = (
        [
            {name: value for name, value in json.loads(line).items() if name != "seconds"}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("straight", "twice")
    )
    assert parts == uninterrupted_lines
    assert [line["step"] for line in uninterrupted_lines if "epoch" in line] == [4, 8, 12]


def test_a_finished_run_is_not_continued(tmp_path: Path) -> None:
    plan = TrainingPlan(epochs=1, rate=0.1)
    task = Regression()
    figures = train(task, plan, RunFolder(tmp_path))
    again = Regression(seed=5, fails=0)
    assert train(again, plan, RunFolder(tmp_path, resume=True)) == figures
    assert same(weights(again), weights(task))


def test_a_run_of_another_recipe_or_network_is_not_resumed(tmp_path: Path) -> None:
    plan = TrainingPlan(epochs=1, rate=0.1)
    train(Regression(), plan, RunFolder(tmp_path, recipe_text="one"))
    with pytest.raises(RecipeError, match=r"run\.safetensors: it is of another recipe"):
        train(Regression(), plan, RunFolder(tmp_path, resume=True, recipe_text="other"))
    other = Regression()
    other.network = nn.Linear(3, 2)
    with pytest.raises(RecipeError, match=r"it is of another network: '0\.0\.bias' is only in one"):
        train(other, plan, RunFolder(tmp_path, resume=True, recipe_text="one"))
    wider = Regression()
    wider.network[0] = nn.Linear(3, 9)  # type: ignore[index]
    with pytest.raises(RecipeError, match=r"0\.0\.weight is \[8, 3\] there"):
        train(wider, plan, RunFolder(tmp_path, resume=True, recipe_text="one"))


def test_a_damaged_file_cannot_be_resumed(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_bytes(b"no safetensors")
    with pytest.raises(RecipeError, match="no run can be resumed from it"):
        train(Regression(), TrainingPlan(epochs=1, rate=0.1), RunFolder(tmp_path, resume=True))


@pytest.mark.parametrize(
    ("tensors", "progress", "complaint"),
    [
        (
            {"optimizer.x.exp_avg": torch.zeros(1)},
            "{}",
            r"'optimizer\.x\.exp_avg' is no state of one of the 4 parameters",
        ),
        ({"optimizer.4.exp_avg": torch.zeros(1)}, "{}", "'optimizer.4.exp_avg' is no state"),
        ({"optimizer.0.exp_avg": torch.zeros(1)}, "{}", r"'optimizer.0.exp_avg' has the shape \[1\]"),
        ({"optimizer.0.exp_avg": torch.zeros(())}, "{}", r"'optimizer.0.exp_avg' has the shape \[\], .* is \[8, 3\]"),
        ({"optimizer.0.exp_avg_sq": torch.zeros((), dtype=torch.half)}, "{}", r"exp_avg_sq' has the shape \[\]"),
        ({"optimizer.1.step": torch.zeros(8)}, "{}", r"'optimizer.1.step' has the shape \[8\]"),
        ({"optimizer.0.max_exp_avg_sq": torch.zeros(8, 3)}, "{}", "'optimizer.0.max_exp_avg_sq' is no state"),
        ({"optimizer.0.step": torch.zeros(())}, "{}", r"optimizer\.0\.exp_avg is missing"),
        ({"chance.cpu": torch.zeros(1)}, "{}", "'chance.cpu' is no state of a random number generator here"),
        ({}, "[" * 100_000, "its metadata has no object of JSON named place"),
        ({}, "[]", "its metadata has no object of JSON named place"),
        ({}, '{"made_of": "", "progress": {"step": []}}', r"run\.safetensors: progress\.step: Input should be"),
        ({}, '{"made_of": "", "watch": 1}', r"run\.safetensors: watch"),
    ],
)
def test_a_changed_file_cannot_be_resumed(
    tensors: dict[str, Tensor], progress: str, complaint: str, tmp_path: Path
) -> None:
    task = Regression()
    weights = {f"weight.{name}": each.detach() for name, each in saved.named_tensors(task.modules()).items()}
    save_file(weights | tensors, tmp_path / RUN_FILE, {"place": progress})
    with pytest.raises(RecipeError, match=complaint):
        train(task, TrainingPlan(epochs=1, rate=0.1), RunFolder(tmp_path, resume=True))


def change_run(folder: Path, changes: dict[str, dict[str, object]], tensors: dict[str, Tensor] | None = None) -> None:
    """Change fields of a saved run's progress, as its file has them, and replace some of its tensors."""
    with safe_open(folder / RUN_FILE, "pt") as file:
        place = json.loads(file.metadata()["place"])
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    for table, fields in changes.items():
        place[table] |= fields
    save_file(kept | (tensors or {}), folder / RUN_FILE, {"place": json.dumps(place)})


class Impatient(Regression):
    """It ends a loop that asks for ever more epochs."""

    def batches(self, epoch: int) -> list[Batch]:
        self.evaluations += 1
        assert self.evaluations < 20
        return super().batches(epoch)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"progress": {"step": 1, "epoch": 0, "batch": 10**9}},
            r"progress\.batch: 1000000000 should be 1 after",
        ),
        ({"progress": {"batch": -1}}, r"progress\.batch: -1 should be 0 after 3 steps"),
        ({"progress": {"batch": 3}}, r"progress\.batch: 3 should be 0"),
        ({"progress": {"epoch": -1}}, r"progress\.epoch: -1 should be 1"),
        ({"progress": {"epoch": 10**30}}, r"progress\.epoch: 10+ should be 1"),
        ({"progress": {"step": -1}}, r"progress\.step: -1 should be 0 to 6, the steps of the plan"),
        ({"progress": {"step": 7}}, r"progress\.step: 7 should be 0 to 6"),
        ({"progress": {"written": -5}}, r"progress\.written: -5 should be a number of 0 to 2\^63"),
        ({"progress": {"written": 10**20}}, r"progress\.written: 1"),
        ({"progress": {"seconds": float("nan")}}, r"progress\.seconds: nan should be"),
        ({"progress": {"seconds": -1e9}}, r"progress\.seconds: -1"),
        ({"progress": {"tokens": 10**400}}, r"progress\.tokens: 1"),
        ({"progress": {"loss": float("inf")}}, r"progress\.loss: inf should be finite"),
        ({"watch": {"since": -(10**9)}}, r"watch\.since: -1000000000 should be 0 to 3"),
        ({"watch": {"figures": {"other": 1.0}}}, r"watch\.figures: loss, which plan\.watch names, is missing"),
    ],
)
def test_a_run_that_the_plan_cannot_have_made_is_not_resumed(
    changes: dict[str, dict[str, object]], complaint: str, tmp_path: Path
) -> None:
    """It is refused before its journal is cut; a batch beyond the epoch would be waited for without end."""
    plan = TrainingPlan(epochs=2, rate=0.1, evaluate_every=3, watch="loss")
    with pytest.raises(KeyboardInterrupt):
        train(Regression(batch=4, fails=4), plan, RunFolder(tmp_path))
    change_run(tmp_path, changes)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RecipeError, match=r"run\.safetensors: no run can be resumed from it: " + complaint):
        train(Impatient(batch=4), plan, RunFolder(tmp_path, resume=True))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"optimizer.0.step": torch.tensor(-1.0)}, r"optimizer\.0\.step: -1 should be 1 to 3, the steps of the run"),
        ({"optimizer.0.step": torch.tensor(float("nan"))}, r"optimizer\.0\.step: nan should be"),
        ({"optimizer.0.step": torch.tensor(4.0)}, r"optimizer\.0\.step: 4 should be"),
        ({"optimizer.1.exp_avg": torch.full((8,), float("inf"))}, r"optimizer\.1: its moments should be finite"),
        ({"optimizer.1.exp_avg_sq": torch.full((8,), -1.0)}, r"optimizer\.1: .* squares not negative"),
    ],
)
def test_states_that_the_optimizer_cannot_have_are_not_resumed(
    tensors: dict[str, Tensor], complaint: str, tmp_path: Path
) -> None:
    plan = TrainingPlan(epochs=2, rate=0.1)
    with pytest.raises(KeyboardInterrupt):
        train(Regression(batch=4, fails=4), plan, RunFolder(tmp_path))
    change_run(tmp_path, {}, tensors)
    with pytest.raises(RecipeError, match=complaint):
        train(Regression(batch=4), plan, RunFolder(tmp_path, resume=True))


def test_a_run_without_its_best_weights_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    plan = TrainingPlan(epochs=2, rate=0.1, watch="loss")
    with pytest.raises(KeyboardInterrupt):
        train(Regression(batch=4, fails=4), plan, RunFolder(tmp_path))
    (tmp_path / BEST_FILE).unlink()
    with pytest.raises(RecipeError, match=r"best\.safetensors"):
        train(Regression(batch=4, fails=0), plan, RunFolder(tmp_path, resume=True))


def test_a_run_without_its_journal_begins_a_new_one(tmp_path: Path) -> None:
    plan = TrainingPlan(epochs=2, rate=0.1)
    with pytest.raises(KeyboardInterrupt):
        train(Regression(batch=4, fails=4), plan, RunFolder(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    train(Regression(batch=4), plan, RunFolder(tmp_path, resume=True))
    with safe_open(tmp_path / RUN_FILE, "pt") as file:
        written = json.loads(file.metadata()["place"])["progress"]["written"]
    assert written == (tmp_path / "metrics.jsonl").stat().st_size


def test_a_failed_save_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Regression()
    saved.write_weights(tmp_path / BEST_FILE, task.modules())
    before = (tmp_path / BEST_FILE).read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saved.os, "fsync", fail)
    complaint = r"best\.safetensors: the run cannot be saved: No space left on device; resume it when it can"
    with pytest.raises(RecipeError, match=complaint):
        saved.write_weights(tmp_path / BEST_FILE, [nn.Linear(2, 2)])
    assert [path.name for path in tmp_path.iterdir()] == [BEST_FILE], "what is not whole would keep the disk full"
    assert (tmp_path / BEST_FILE).read_bytes() == before
    with pytest.raises(RecipeError, match="the run cannot be saved: File exists"):
        saved.write_weights(tmp_path / BEST_FILE / RUN_FILE, task.modules())


@pytest.mark.parametrize("batch", [1, 3])
def test_accumulated_batches_are_one_batch(batch: int, tmp_path: Path) -> None:
    """Also for loss parts with different counts, each of which is a mean over the full batch."""
    single, parts = Regression(batch=6, dropout=0.0), Regression(batch=batch, dropout=0.0)
    plan = TrainingPlan(epochs=3, rate=0.05, clip=0.5)
    train(single, plan, RunFolder(tmp_path / "whole"))
    train(parts, TrainingPlan(**{**vars(plan), "accumulate": 6 // batch}), RunFolder(tmp_path / "parts"))
    for name, tensor in weights(single).items():
        torch.testing.assert_close(weights(parts)[name], tensor, rtol=0, atol=1e-6)


def test_early_stopping_keeps_the_best_weights(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    class Watched(Regression):
        def evaluate(self) -> dict[str, float]:
            seen.append(weights(self))
            return super().evaluate()

    task = Watched(figures=[3.0, 1.0, 2.0, 1.5, 0.1])
    figures = train(task, TrainingPlan(epochs=9, rate=0.1, watch="loss", patience=2), RunFolder(tmp_path))
    assert figures == {"loss": 1.0}
    assert len(seen) == 4
    assert same(weights(task), seen[1])
    assert not same(seen[1], seen[3])
    better = Regression(figures=[1.0, 3.0, 2.0, 3.0])
    upwards = TrainingPlan(epochs=9, rate=0.1, watch="loss", better="higher", patience=2)
    assert train(better, upwards, RunFolder(tmp_path / "up")) == {"loss": 3.0}


def test_it_ends_at_the_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock on which every step takes six seconds. The time of evaluations is not counted."""
    clock = itertools.count(0, 6)
    monkeypatch.setattr(trainer.time, "monotonic", lambda: next(clock))
    task = Regression()
    train(task, TrainingPlan(epochs=9, rate=0.1, minutes=0.4), RunFolder(tmp_path))
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], task.evaluations) == (4, 1)


def test_it_ends_at_the_limit_of_steps(tmp_path: Path) -> None:
    train(Regression(), TrainingPlan(epochs=9, rate=0.1, steps=8, evaluate_every=5), RunFolder(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "epoch" in line] == [5, 8]


def test_an_unknown_figure_and_a_nan_loss_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"plan\.watch: 'los' is none of loss"):
        train(Regression(), TrainingPlan(epochs=1, rate=0.1, watch="los"), RunFolder(tmp_path))
    task = Regression()
    task.x[0] = torch.nan
    with pytest.raises(RecipeError, match=r"plan\.rate: in step \d+ the loss is nan"):
        train(task, TrainingPlan(epochs=1, rate=0.1), RunFolder(tmp_path))
