"""Parts of every module of commands: an app that lists its commands by topic, and the store that was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from fp4dse.dse import Space
    from fp4dse.results import Store


class Topics(TyperGroup):
    """`--help` with the commands under their topics, each with its first sentence, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        width = max(map(len, commands))
        for topic in dict.fromkeys(command.rich_help_panel for command in commands.values()):
            with formatter.section(topic or "Commands"):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(200))
                        for name, command in commands.items()
                        if command.rich_help_panel == topic
                    ]
                )


def new_app(add_completion: bool = False, **more: Any) -> typer.Typer:
    return typer.Typer(
        cls=Topics,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=add_completion,
        **more,
    )


def under(app: typer.Typer, topic: str) -> Callable[..., Callable[..., Any]]:
    """The decorator that makes a function a command of the app, listed under the topic."""
    return partial(app.command, rich_help_panel=topic)


def warn_overridden(space: Space) -> None:
    """A line on standard error for each axis of a space that varies less than it seems."""
    for text in space.overridden():
        print(f"fp4dse: {space.name}: {text}", file=sys.stderr)


def open_given(store: str | None, model: str | None = None, chip: str | None = None) -> Store:
    """The store at a path or URL, or the latest one here; its overheads of this model and chip."""
    from fp4dse.results import open_store
    from fp4dse.sweeps.arguments import find_cost
    from fp4dse.sweeps.stores import latest_store

    cost = find_cost(model, chip)
    return open_store(store or latest_store(), cost=cost)
