"""Smaller rollouts, for tests that do not ask what a policy learns."""

from functools import partial

from msgspec.structs import replace

from fp4dse.tasks.task import Task


def little(task: Task, steps: int, prompts: int = 4, **of_plan: object) -> Task:
    """The task of `steps` steps with rollouts of few problems, and with few held-out ones. of_plan: other numbers of
    its plan."""
    [preset] = task.problem.args
    plan = replace(preset.plan, prompts=prompts, held_out=32, **of_plan)
    problem, experience = partial(task.problem.func, replace(preset, plan=plan)), partial(task.experience.func, plan)
    batch = task.batch * prompts // preset.plan.prompts
    return replace(task, steps=steps, batch=batch, eval_rows=32, problem=problem, experience=experience)
