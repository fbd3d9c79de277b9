"""`naiad serve`: the options of `naiad.options` as a command line, and the start of the server."""

import signal
import sys
import textwrap
from itertools import groupby
from typing import Any, NoReturn

import click

from naiad.errors import NaiadError
from naiad.options import (
    OPTIONS,
    REFUSED,
    REFUSED_WHERE_TRUE,
    Option,
    ServerOptions,
    bad_option,
    parse_bool,
    parse_options,
)

#: Exit status for a wrong command line, as of Triton's server.
_WRONG = 1
#: That of a program which ends with SIGINT, as shells tell it.
_INTERRUPTED = 128 + signal.SIGINT
#: How the help of a flag begins that Triton warns of; the flag that takes its place follows.
_DEPRECATED = "Deprecated: "


_FLAGS = (*(flag for option in OPTIONS.values() for flag in (option.flag, *option.aliases)), *REFUSED, "--help")


def parse_arguments(arguments: list[str], prog_name: str = "naiad serve") -> ServerOptions:
    """The options of a command line. Raises click.ClickException with a text for the user, or click.exceptions.Exit
    after printing the help."""
    with _Serve().make_context(prog_name, list(arguments)) as context:
        return _options(context)


def main_as_tritonserver(arguments: list[str]) -> int:
    """Serves with a command line in the form of Triton's server: no subcommand, and even --help exits with 1."""
    if "--help" in arguments or "-h" in arguments:
        with _Serve().make_context("naiad", [], resilient_parsing=True) as context:
            click.echo(context.get_help(), err=True)
        return _WRONG
    try:
        return _serve(parse_arguments(arguments, "naiad"))
    except click.ClickException as error:
        return _report(error)


class _Serve(click.Command):
    """The command. Its click options keep the texts as they are; `parse_options` understands them."""

    def __init__(self) -> None:
        options = [_click_option(name, option) for name, option in OPTIONS.items()]
        super().__init__(
            "serve",
            params=[*options, *map(_option_that_must_be_off, REFUSED_WHERE_TRUE)],
            help="Serve the models of a repository over HTTP and gRPC.",
            context_settings={"help_option_names": ["--help", "-h"]},
        )

    def invoke(self, ctx: click.Context) -> NoReturn:
        ctx.exit(_serve(_options(ctx)))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [_whole(argument) for argument in args])
        except click.NoSuchOption as error:
            raise _unknown(error) from None
        except click.UsageError as error:
            raise _WrongUsage(error.format_message()) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, options in groupby(OPTIONS.values(), key=lambda option: option.group):
            with formatter.section(group):
                formatter.write("\n".join(_help_of(option, formatter.width) for option in options) + "\n")


def _whole(argument: str) -> str:
    """The argument with its flag written out, which may be shortened as far as it is the only one that begins so."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("--") or flag == "--" or flag in _FLAGS:
        return argument
    meant = [known for known in _FLAGS if known.startswith(flag)]
    if len(meant) > 1:
        raise _WrongUsage(f"naiad: option '{flag}' is ambiguous; possibilities: {', '.join(meant)}")
    return f"{meant[0]}{equals}{value}" if meant else argument


class _WrongUsage(click.ClickException):
    exit_code = _WRONG

    def show(self, file: Any = None) -> None:
        click.echo(f"{self.message}\nTry 'naiad serve --help' for the options.", file=sys.stderr)


def _click_option(name: str, option: Option) -> click.Option:
    if option.switch:
        return click.Option([option.flag, *option.aliases, name], is_flag=True)
    return click.Option([option.flag, *option.aliases, name], multiple=True, metavar=f"<{option.metavar}>")


def _option_that_must_be_off(flag: str) -> click.Option:
    def refuse(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> None:
        try:
            if any(map(parse_bool, texts)):
                raise _not_supported(flag)
        except ValueError as error:
            raise _WrongUsage(bad_option(flag, str(error)).message) from None

    return click.Option([flag], multiple=True, hidden=True, expose_value=False, callback=refuse)


def _not_supported(flag: str) -> click.ClickException:
    return _WrongUsage(f"naiad: option '{flag}' of Triton's server is not supported: {REFUSED[flag]}")


def _help_of(option: Option, width: int) -> str:
    """A line for the flag and, below it, what it does: flags stay whole, so that they can be copied and searched for."""
    first = "  " + ", ".join((option.flag, *option.aliases))
    if not option.switch:
        first += f" <{option.metavar}>"
        default = _DEFAULTS[option.flag]
        if default not in (None, "", ()) and not option.unused:
            first += f"  [default: {str(default).lower() if isinstance(default, bool) else _shortest(default)}]"
    lines = textwrap.wrap(option.help, width - 6, break_on_hyphens=False, break_long_words=False)
    return "\n      ".join((first, *lines))


def _shortest(default: Any) -> str:
    return f"{default:.15g}" if isinstance(default, float) else str(default)


_DEFAULTS: dict[str, Any] = {
    option.flag: ServerOptions.__dataclass_fields__[name].default for name, option in OPTIONS.items()
}


def _unknown(error: click.NoSuchOption) -> click.ClickException:
    flag = error.option_name
    if flag in REFUSED:
        return _not_supported(flag)
    hint = f" Did you mean {' or '.join(sorted(error.possibilities))}?" if error.possibilities else ""
    return _WrongUsage(f"naiad: unrecognized option '{flag}'.{hint}")


def _options(context: click.Context) -> ServerOptions:
    given: dict[str, list[str]] = {}
    for name, value in context.params.items():
        if OPTIONS[name].switch:
            given[name] = ["true"] if value else []
        else:
            given[name] = list(value)
    for name, texts in given.items():
        option = OPTIONS[name]
        if texts and option.help.startswith(_DEPRECATED):
            instead = option.help.removeprefix(_DEPRECATED)
            click.echo(f"Warning: '{option.flag}' has been deprecated: {instead}", err=True)
    try:
        return parse_options(given)
    except NaiadError as error:
        raise _WrongUsage(error.message) from None


def _serve(options: ServerOptions) -> int:
    try:
        from naiad.server import serve

        return serve(options)
    except NaiadError as error:
        click.echo(f"error: creating server: {error.message}", err=True)
        return 1
    except KeyboardInterrupt:
        # While the server is imported, which takes longer than all else before it listens to signals.
        return _INTERRUPTED


def _report(error: click.ClickException) -> int:
    error.show()
    return _WRONG


command = _Serve()
