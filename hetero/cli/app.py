"""The console script ``hetero``: its commands, and how errors leave it.

Owns the exit codes: 0 for success, 1 where a check found a difference, 2 for anything that could not be done.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hetero.cli import demo, info, plan, pool, trace, verify
from hetero.errors import HeteroError

__all__ = ["app", "main"]


class OneLineErrors(TyperGroup):
    """Prints an expected error as one line and exits with 2; ``--debug``, anywhere, keeps the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has had enough: `hetero ... | head`
            raise
        except (HeteroError, OSError) as error:
            if ctx.params["debug"]:
                raise
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            sys.exit(2)


app = typer.Typer(
    name="hetero",
    cls=OneLineErrors,
    help="Train PyTorch models bigger than the device, with the same numbers as if everything fitted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(info.info)
app.command()(verify.verify)
app.command()(plan.plan)
app.command()(pool.pool)
app.command()(trace.trace)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Train PyTorch models bigger than the device, with the same numbers as if everything fitted."""


def main() -> None:
    """Entry point of the console script."""
    app()
