"""The command `naiad`. Each subcommand is a module here, imported only when it is the one that runs.

`naiad --model-repository=... ` with no subcommand is `naiad serve`, so that a command line of Triton's server works
with the name of the program exchanged.
"""

import importlib
import os
import shlex
import sys
from importlib.util import find_spec

import click

from naiad import __version__

#: Subcommand -> its module and what `naiad --help` says about it. The module's `command` is the click command.
_COMMANDS = {
    "serve": ("naiad.cli.serve", "Serve the models of a repository."),
    "convert": ("naiad.cli.convert", "Convert a model of one framework to another's format."),
    "init": ("naiad.cli.init", "Write a model repository, or a model, to start from."),
}


class _Commands(click.Group):
    """Knows its subcommands by name and imports one when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS:
            serve = ""
            if os.path.isdir(args[0]):
                serve = f" To serve a repository: naiad --model-repository={shlex.quote(args[0])}"
            ctx.fail(f"no command '{args[0]}'; there are {', '.join(_COMMANDS)}.{serve}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


_commands = _Commands(
    "naiad",
    help="An inference server that takes over from Triton Inference Server.",
    epilog="\b\nOptions of 'naiad serve' may be given without 'serve':\n  naiad --model-repository=<path>",
    context_settings={"help_option_names": ["--help", "-h"]},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=lambda ctx, _, value: _print_version(ctx, value),
            help="Show the version and exit.",
        )
    ],
    no_args_is_help=True,
)


def _print_version(context: click.Context, wanted: bool) -> None:
    if wanted:
        engine = find_spec("naiad.engine")
        compiled = engine is not None and engine.origin is not None and engine.origin.endswith(".so")
        click.echo(f"naiad {__version__}{' (compiled)' if compiled else ''}")
        context.exit()


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits."""
    if arguments is None:
        arguments = sys.argv[1:]
        if sys.path[:1] == [os.path.dirname(os.path.realpath(sys.argv[0]))]:
            # Python puts the folder of its script first: what lies there would be in the place of what models import.
            del sys.path[0]
    if arguments and arguments[0].startswith("-") and arguments not in (["--help"], ["-h"], ["--version"]):
        from naiad.cli.serve import main_as_tritonserver

        sys.exit(main_as_tritonserver(arguments))
    _commands.main(arguments, prog_name="naiad")
