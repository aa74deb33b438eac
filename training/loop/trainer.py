"""The training loop: AdamW, a learning rate schedule, clipped gradients, evaluations, a journal, and saved runs that
resume to the same bits.

The loss of a step is a mean over all its choices, however they are divided into batches.  So the weight of each batch
is known before its loss is computed.  What is trained is behind the protocol Trainable.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from polyhead.models.core.errors import show_value

from . import saved_runs as saved
from .errors import RecipeError
from .journal import Journal, Progress
from .schedule import TrainingPlan
from .toml_file import validate

Batch = TypeVar("Batch")
RUN_FILE, BEST_FILE = "run.safetensors", "best.safetensors"
MAX_COUNT = 1 << 63  # of tokens, seconds and bytes of a saved run


class Trainable(Protocol[Batch]):
    """A training problem: its modules, batches, losses and evaluation."""

    def modules(self) -> list[nn.Module]:
        """Return the modules; parameters that require a gradient are updated."""

    def batches(self, epoch: int) -> Sequence[Batch]:
        """Return the batches of an epoch in order, equally many in every epoch."""

    def size(self, batch: Batch) -> int:
        """Return a batch's number of tokens."""

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Return the number of choices in each part of the loss."""

    def losses(self, batch: Batch) -> Tensor:
        """Return the parts of the loss, [P], each a mean over its choices, or 0 of none.  Their sum is minimised."""

    def evaluate(self) -> dict[str, float]:
        """Return figures by name; called without gradients and in evaluation mode."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run: its journal, and everything needed to resume, saved at every evaluation.

    `resume`: continue the saved run, if there is one.  `recipe_text` is what the run depends on besides the network: a
    run with another text is not resumed.
    """

    folder: Path
    resume: bool = False
    recipe_text: str = ""


@dataclass
class BestEvaluation:
    """The best evaluation by the watched figure, and the number of evaluations since."""

    figures: dict[str, float] = field(default_factory=dict)
    since: int = 0


@dataclass
class TrainingRun(Generic[Batch]):
    """One run of a plan, of at most `steps` steps; `figures` are those of the last evaluation."""

    trainable: Trainable[Batch]
    plan: TrainingPlan
    steps: int
    optimizer: torch.optim.Optimizer
    journal: Journal
    run_folder: RunFolder
    best: BestEvaluation = field(default_factory=BestEvaluation)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def progress(self) -> Progress:
        return self.journal.progress

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, the time is up, or the figure has stopped improving."""
        plan, now = self.plan, self.progress
        late = 0 < 60 * plan.minutes <= now.seconds
        return now.epoch >= plan.epochs or now.step >= self.steps or late or 0 < plan.patience <= self.best.since

    def seconds_left(self) -> float:
        """Return the remaining seconds."""
        now, limit = self.progress, 60 * self.plan.minutes or math.inf
        return min(now.seconds / now.step * (self.steps - now.step), limit - now.seconds)


def train(task: Trainable[Batch], plan: TrainingPlan, run_folder: RunFolder) -> dict[str, float]:
    """Run the plan.  Returns the last evaluation, or the best if a figure is watched; the weights are of the same one.

    Raises RecipeError if the saved run is another's, if the watched figure does not exist, or if the loss is not
    finite.
    """
    run = start_run(task, plan, run_folder)
    now = run.progress
    while not run.is_over:
        batches = task.batches(now.epoch)
        portions = [batches[at : at + plan.accumulate] for at in range(0, len(batches), plan.accumulate)]
        for portion in portions[now.batch :]:
            train_step(run, portion, len(portions))
            if run.is_over or (now.step % plan.evaluate_every if plan.evaluate_every else now.batch) == 0:
                evaluate_run(run)
            if run.is_over:
                break
    if plan.watch:
        saved.read_weights(run_folder.folder / BEST_FILE, task.modules())
        return run.best.figures
    return run.figures


def start_run(task: Trainable[Batch], plan: TrainingPlan, run_folder: RunFolder) -> TrainingRun[Batch]:
    """Return a new run, or the saved one.  Its file may be a stranger's: all of it is checked before a file is changed.

    Raises RecipeError.
    """
    modules, last = task.modules(), run_folder.folder / RUN_FILE
    trained = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=plan.rate, betas=plan.betas, weight_decay=plan.weight_decay, fused=True
    )
    saved_run = saved.read_run(last, modules, optimizer) if run_folder.resume and last.exists() else {}
    if saved_run and saved_run.get("made_of") != run_folder.recipe_text:
        raise RecipeError(f"{last}: it is of another recipe; start a new run, or restore the recipe")
    portions = -(-len(task.batches(0)) // plan.accumulate)  # of an epoch: each is a step
    steps = min(plan.epochs * portions, plan.steps or plan.epochs * portions)
    progress = validate(Progress, saved_run.get("progress", {}), last, "progress")
    best = validate(BestEvaluation, saved_run.get("watch", {}), last, "watch")
    figures = validate(dict[str, float], saved_run.get("figures", {}), last, "figures")
    if saved_run:
        check_progress(last, progress, portions, steps)
        saved.check_optimizer(last, optimizer, progress.step)
        check_best(run_folder.folder / BEST_FILE, best, progress.step, task, plan)
    journal = Journal(run_folder.folder / "metrics.jsonl", progress)
    return TrainingRun(task, plan, steps, optimizer, journal, run_folder, best, figures)


def check_progress(run_file: Path, progress: Progress, portions: int, steps: int) -> None:
    """Raise RecipeError unless a run of `steps` steps, `portions` of them in an epoch, can have made this progress.

    Every step counts one portion of an epoch, so the number of steps determines epoch and batch.
    """
    refused = f"{run_file}: no run can be resumed from it: progress"
    if not 0 <= progress.step <= steps:
        raise RecipeError(f"{refused}.step: {show_value(progress.step)} should be 0 to {steps}, the steps of the plan")
    epoch, batch = divmod(progress.step, portions or 1)
    for name, right in (("epoch", epoch), ("batch", batch)):
        if (found := getattr(progress, name)) != right:
            counted = f"after {progress.step} steps, {portions} in an epoch"
            raise RecipeError(f"{refused}.{name}: {show_value(found)} should be {right} {counted}")
    for name in ("tokens", "seconds", "written"):
        if not 0 <= (found := getattr(progress, name)) <= MAX_COUNT:
            raise RecipeError(f"{refused}.{name}: {show_value(found)} should be a number of 0 to 2^63")
    if not math.isfinite(progress.loss):
        raise RecipeError(f"{refused}.loss: {progress.loss} should be finite")


def check_best(best_file: Path, best: BestEvaluation, step: int, task: Trainable[Batch], plan: TrainingPlan) -> None:
    """Raise RecipeError unless the best evaluation of a saved run has the watched figure, and its weights are there."""
    refused = f"{best_file.with_name(RUN_FILE)}: no run can be resumed from it: watch"
    if not 0 <= best.since <= step:
        raise RecipeError(f"{refused}.since: {show_value(best.since)} should be 0 to {step}, the steps so far")
    if plan.watch and step:
        if plan.watch not in best.figures:
            raise RecipeError(f"{refused}.figures: {plan.watch}, which plan.watch names, is missing")
        saved.check_weights(best_file, saved.read_entries(best_file), task.modules())


def train_step(run: TrainingRun[Batch], portion: Sequence[Batch], portions: int) -> None:
    """Update the weights with the gradient of some batches of the epoch."""
    started, task, plan, now = time.monotonic(), run.trainable, run.plan, run.progress
    for module in task.modules():
        module.train()
    rate = plan.rate * plan.rate_factor(now.step, run.steps)
    loss = add_gradients(task, plan, portion)
    if not math.isfinite(loss):
        raise RecipeError(f"plan.rate: in step {now.step + 1} the loss is {loss}; a smaller one, or a longer warm_up")
    apply_gradients(run.optimizer, rate, plan.clip)
    now.add_step(loss, sum(map(task.size, portion)), time.monotonic() - started)
    now.batch += 1
    if now.batch == portions:
        now.epoch, now.batch = now.epoch + 1, 0
    run.journal.write_step(loss, rate, run.seconds_left, run.is_over)


def add_gradients(task: Trainable[Batch], plan: TrainingPlan, portion: Sequence[Batch]) -> float:
    """Add up the gradients of all batches, and return the mean loss."""
    counts = [task.counts(batch) for batch in portion]
    totals = [max(1, sum(part)) for part in zip(*counts, strict=True)]
    loss = 0.0
    for batch, count in zip(portion, counts, strict=True):
        with plan.autocast(task_device(task)):
            means = task.losses(batch)
            weights = [part / total for part, total in zip(count, totals, strict=True)]
            part = (means * torch.tensor(weights, device=means.device)).sum()
        torch.autograd.backward(part)
        loss += part.item()
    return loss


def apply_gradients(optimizer: torch.optim.Optimizer, rate: float, clip: float) -> None:
    """Update the weights with the gradients that were added up."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        nn.utils.clip_grad_norm_(group["params"], clip)
    optimizer.step()
    optimizer.zero_grad()


def task_device(task: Trainable[Batch]) -> torch.device:
    return next(parameter.device for module in task.modules() for parameter in module.parameters())


@torch.no_grad()
def evaluate_run(run: TrainingRun[Batch]) -> None:
    """Evaluate, write the journal, keep the best weights, and save the run."""
    modules, watched, folder = run.trainable.modules(), run.plan.watch, run.run_folder.folder
    for module in modules:
        module.eval()
    run.figures = run.trainable.evaluate()
    run.journal.write_figures(run.progress.epoch, run.figures)
    if watched and watched not in run.figures:
        raise RecipeError(f"plan.watch: {watched!r} is none of {', '.join(run.figures)}")
    run.best.since += 1
    best = run.best.figures
    if watched and (not best or run.plan.is_better(run.figures[watched], best[watched])):
        run.best = BestEvaluation(run.figures)
        saved.write_weights(folder / BEST_FILE, modules)
    progress = {"progress": asdict(run.progress), "watch": asdict(run.best), "figures": run.figures}
    saved.write_run(folder / RUN_FILE, modules, run.optimizer, progress | {"made_of": run.run_folder.recipe_text})
