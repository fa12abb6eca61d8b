"""The command line. Only typer and the job's keys are imported here; the rest inside the command that needs it."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trainerd.daemon import console
from trainerd.daemon.commands.copy import copy_checkpoints
from trainerd.daemon.commands.diff import diff_runs
from trainerd.daemon.commands.export import export_run
from trainerd.daemon.commands.import_ import import_run
from trainerd.daemon.commands.inspect import inspect_checkpoint
from trainerd.daemon.commands.list import list_run
from trainerd.daemon.commands.pin import pin_checkpoint, unpin_checkpoint
from trainerd.daemon.commands.prune import prune_run
from trainerd.daemon.commands.repair import repair_run
from trainerd.daemon.commands.run import run
from trainerd.daemon.commands.verify import verify_run
from trainerd.daemon.exit_codes import ExitCode, exit_code_of
from trainerd.daemon.near_names import nearest
from trainerd.daemon.standard_streams import occupy_closed_streams

app = typer.Typer(
    help="A training daemon for PyTorch on machines that get taken away: it resumes bit for bit.",
    epilog="Exit codes and every command: docs/commands.md. The job file: docs/job-file.md.",
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("run", short_help="Train, and bring the training back after any death.")(run)
app.command("list", short_help="Show the checkpoints of a run.")(list_run)
app.command("inspect", short_help="Show what a checkpoint holds, without loading it.")(inspect_checkpoint)
app.command("verify", short_help="Check every byte of a run's checkpoints.")(verify_run)
app.command("repair", short_help="Bring a damaged run into order; nothing is deleted.")(repair_run)
app.command("prune", short_help="Delete the checkpoints that no rule wants, or show which.")(prune_run)
app.command("pin", short_help="Keep a checkpoint, whatever the rules say.")(pin_checkpoint)
app.command("unpin", short_help="Let the rules decide about a checkpoint again.")(unpin_checkpoint)
app.command("diff", short_help="Show what differs between two checkpoints.")(diff_runs)
app.command("export", short_help="Write a checkpoint as safetensors, torch file or DCP folder.")(export_run)
app.command("import", short_help="Begin a run with the checkpoint of another program.")(import_run)
app.command("copy", short_help="Copy a run's checkpoints to another place.")(copy_checkpoints)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """A training daemon for PyTorch on machines that get taken away: it resumes bit for bit."""
    if version:
        from importlib.metadata import version as version_of

        console.write(f"trainerd {version_of('trainerd')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(ExitCode.WRONG_USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code. Only a fault of the program itself ends in a traceback."""
    occupy_closed_streams()
    command = typer.main.get_command(app)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Not command.main(): it answers Ctrl-C, broken pipes and wrong usage in its own words and codes.
        with command.make_context("trainerd", words) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        console.fail(_usage_text(error, words))
        return ExitCode.WRONG_USAGE
    except KeyboardInterrupt:
        console.fail("Interrupted.")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        console.abandon_stdout()
        return ExitCode.READER_GONE
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        console.fail(str(error))
        return code
    return ExitCode.FINISHED


def _usage_text(error: typer.TyperException, words: Sequence[str]) -> str:
    context: typer.Context | None = getattr(error, "ctx", None)
    # An option without its value comes without a context.
    path = context.command_path if context else " ".join(["trainerd", *words[:1]])
    text = error.format_message()
    # typer keeps the class for an unknown option to itself; the name of the option tells it apart.
    if hasattr(error, "possibilities") and context is not None:
        option: str = error.option_name  # type: ignore[attr-defined]
        known = [name for parameter in context.command.get_params(context) for name in parameter.opts]
        near = nearest(option, [name for name in known if name.startswith("--")])
        text = f"No such option: {option}." + (f" Did you mean {near}?" if near else "")
    return f"{text.rstrip('.')}{'' if text.endswith('?') else '.'} `{path} --help` shows what there is."
