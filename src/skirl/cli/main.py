"""``skirl COMMAND RECIPE [--section.setting value ...]``; ``skirl cluster`` for several machines; tools beside them.

Exit codes: 0 done, 1 the run failed, 2 bad input (recipe, data, model, a package not installed), 130 interrupted,
143 ended after a step by SIGTERM.
Anything heavy is imported when a run starts: ``show`` and ``--help`` answer at once.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import skirl
from skirl.errors import ConfigError, DataError, MissingExtra, ModelError, RunStopped, SkirlError

if TYPE_CHECKING:
    from skirl.config.check import Command
    from skirl.config.load import Loaded

__all__ = ["main"]

_COMMANDS = {
    "sft": "Supervised fine-tuning on references and conversations.",
    "rm": "A reward model from pairs of responses.",
    "prm": "A process reward model from solutions whose steps are labelled.",
    "dpo": "Preference losses: dpo, ipo, kto, simpo, orpo.",
    "kd": "Distillation from a teacher, on data or on the policy's own samples.",
    "train": "Reinforcement learning: sample, score, train.",
    "sample": "Batch inference: all responses, the best, those above a score, or pairs; as data of sft and dpo.",
    "eval": "Held-out error rates of a model.",
    "show": "Print a recipe resolved: values and their origin, the loss, what runs where. Starts nothing.",
    "show-placement": "Print nodes, GPUs, roles, bytes and the way of the weights. Starts nothing.",
}
_RUNS = tuple(name for name in _COMMANDS if not name.startswith("show"))
_TOOLS = {
    "cluster": "Several machines: up, submit, status, down (skirl cluster --help).",
    "serve-reward": "A reward file or the rule library as an HTTP service (skirl serve-reward --help).",
    "merge-lora": "Add an adapter into the weights of its base model.",
}
"""Commands with a command line of their own."""
_USAGE = "RECIPE [--section.setting VALUE ...]"
_OWN_FLAGS = {"--debug": 0, "--help": 0, "--version": 0, "--json": 0, "--for": 1}  # flag -> words that follow it
_OWN_FLAGS |= {"--nodes": 1, "--gpus-per-node": 1, "--gpu-memory-gb": 1}
_BAD_INPUT = (ConfigError, DataError, ModelError, MissingExtra)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; bad usage exits with 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        tool = _TOOL_MAINS.get(words[0]) if words else None
        return _recipe_command(words) if tool is None else tool(words[1:])
    except SkirlError as error:
        if "--debug" in words:
            raise
        from skirl.cli.console import show_error

        show_error(str(error))
        return 2 if isinstance(error, _BAD_INPUT) else 1


def _cluster(words: list[str]) -> int:
    from skirl.cli.cluster import main as run

    return run(words)


def _serve_reward(words: list[str]) -> int:
    from skirl.rewards.serve import serve

    return serve(words)


def _merge_lora(words: list[str]) -> int:
    usage = "skirl merge-lora ADAPTER --base DIRECTORY --output DIRECTORY"
    parser = _Parser(prog="skirl merge-lora", usage=usage, description=_TOOLS["merge-lora"], allow_abbrev=False)
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="directory with an adapter_config.json of peft")
    parser.add_argument("--base", type=Path, required=True, help="checkpoint directory that the adapter belongs to")
    parser.add_argument("--output", type=Path, required=True, help="directory of the merged checkpoint; made, and new")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(words)
    from skirl.cli.console import output, setup_logging
    from skirl.runtime.env import prepare_environment

    setup_logging(None)
    prepare_environment()  # before torch and transformers, which read it as they are imported
    from skirl.models.merge import merge

    merge(options.adapter, options.base, options.output)
    output().print(f"wrote {options.output}", soft_wrap=True, markup=False, highlight=False)
    return 0


_TOOL_MAINS: Mapping[str, Callable[[list[str]], int]] = {
    "cluster": _cluster,
    "serve-reward": _serve_reward,
    "merge-lora": _merge_lora,
}


def _recipe_command(words: list[str]) -> int:
    own, overrides = _split(words)
    options = _parser().parse_args(own)
    commands = {"show": _show, "show-placement": _show_placement}
    command = commands.get(options.command)
    return _run(options, overrides, words) if command is None else command(options, overrides)


# ------------------------------------------------------------------------------------------------------------ arguments
def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Words for this command line, and the flags that the loader resolves against the schema."""
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("--"):
            own.append(word)
        elif name in _OWN_FLAGS:
            own.append(word)
            own += [rest.pop(0) for _ in range(_OWN_FLAGS[name]) if rest and not equals]
        else:
            overrides.append(word)
            if not equals and rest and not rest[0].startswith("--"):
                overrides.append(rest.pop(0))
    return own, overrides


class _Parser(argparse.ArgumentParser):
    """Prints the settings below its own options, and a short hint instead of them after a mistake."""

    def format_help(self) -> str:
        from skirl.cli.help import settings_help

        if " " not in self.prog or self.prog.split()[1] in _TOOLS:  # no command yet, or one without a recipe
            return super().format_help()
        intro = (
            "\nsettings: in the recipe as nested YAML, or as flags after it. Flags win over the recipe, the\n"
            "recipe over what it inherits, that over the method's preset. [...] is the default.\n"
        )
        return super().format_help() + intro + settings_help() + "\n"

    def error(self, message: str) -> NoReturn:
        hint = "\nThe recipe comes first, then the flags." if "RECIPE" in message else ""
        self.exit(2, f"usage: {self.usage or self.prog}\nerror: {message}{hint}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="skirl",
        usage=f"skirl {{{','.join(_COMMANDS)}}} {_USAGE}",
        description="Reinforcement-learning post-training for text and speech language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"skirl {skirl.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, text in _COMMANDS.items():
        options = " [--for COMMAND] [--json]" if name.startswith("show") else ""
        options += " [--nodes N] [--gpus-per-node N] [--gpu-memory-gb N]" if name == "show-placement" else ""
        usage = f"skirl {name} {_USAGE}{options}"
        command = commands.add_parser(
            name, help=text, description=text, usage=usage, prog=f"skirl {name}", allow_abbrev=False
        )
        command.add_argument("recipe", metavar="RECIPE", type=Path, help="YAML file, or the config.json of a run")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
        if name.startswith("show"):
            command.add_argument(
                "--for", dest="purpose", choices=_RUNS, metavar="COMMAND", help="command to judge the recipe for"
            )
            command.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "show-placement":
            count, amount = _at_least(1, int), _at_least(0, float)
            command.add_argument(
                "--nodes", type=count, metavar="N", help="plan for so many machines that need not exist"
            )
            command.add_argument("--gpus-per-node", type=_at_least(0, int), metavar="N", help="GPUs of each of them")
            command.add_argument(
                "--gpu-memory-gb", type=amount, metavar="N", help="memory of a GPU, in units of 2^30 bytes"
            )
    for name, text in _TOOLS.items():
        commands.add_parser(name, help=text)
    return parser


def _at_least(least: int, kind: Callable[[str], float]) -> Callable[[str], float]:
    """Reads a number for argparse, which names the flag where this raises."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is given; it must be {what} of {least} or more")
        return value

    return number


# ------------------------------------------------------------------------------------------------------------- commands
def _show(options: argparse.Namespace, overrides: list[str]) -> int:
    from skirl.cli.console import output
    from skirl.cli.show import report, show
    from skirl.config.load import load

    found = report(load(options.recipe, overrides), options.purpose)
    show(found, output(), as_json=options.json)
    sys.stdout.flush()  # before a message on the other stream
    if found.error is not None:
        raise ConfigError(found.error)
    return 0


def _show_placement(options: argparse.Namespace, overrides: list[str]) -> int:
    from skirl.cli.console import output
    from skirl.cli.show_placement import Pretended, placement_report, show_placement
    from skirl.config.load import load

    pretended = Pretended(options.nodes, options.gpus_per_node, options.gpu_memory_gb)
    found = placement_report(load(options.recipe, overrides), options.purpose, pretended)
    show_placement(found, output(), as_json=options.json)
    sys.stdout.flush()  # before a message on the other stream
    if found.error is not None:
        raise ConfigError(found.error)
    return 0


def _run(options: argparse.Namespace, overrides: list[str], words: list[str]) -> int:
    from skirl.cli.console import setup_logging, terminal
    from skirl.config.check import check
    from skirl.config.check_files import check_checkpoints
    from skirl.config.load import load
    from skirl.runtime.stopping import interrupted_by_sigterm

    command: Command = options.command
    loaded = load(options.recipe, overrides)
    setup_logging(None)
    for warning in check(loaded.config, command, loaded.provenance):
        terminal().print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False, highlight=False)
    check_checkpoints(loaded.config, command, loaded.provenance)
    try:
        with interrupted_by_sigterm():
            _start(command)(loaded)
    except (KeyboardInterrupt, RunStopped) as end:
        how, code = (f"{end}", 143) if isinstance(end, RunStopped) else ("interrupted", 130)
        hint = _how_to_resume(command, loaded.config.run.dir, words)
        terminal().print(f"\n{how}. {hint}", soft_wrap=True, markup=False, highlight=False)
        return code
    return 0


def _start(command: "Command") -> "Callable[[Loaded], None]":
    from skirl.runtime.env import prepare_environment

    prepare_environment()  # before torch and transformers, which read it as they are imported
    from skirl import assemble, assemble_offline, assemble_sample

    return {
        "sft": assemble_offline.run_sft,
        "rm": assemble_offline.run_rm,
        "prm": assemble_offline.run_prm,
        "dpo": assemble_offline.run_dpo,
        "kd": assemble_offline.run_kd,
        "train": assemble.run_train,
        "sample": assemble_sample.run_sample,
        "eval": assemble.run_eval,
    }[command]


def _how_to_resume(command: str, run_dir: Path, words: list[str]) -> str:
    if command == "eval":
        return "Start it again for a whole result."
    if command == "sample":
        return f"Go on with what is left with:\n  skirl {shlex.join(_resumed(words))}"
    if not any((run_dir / "checkpoints").glob("step-*")):
        return f"{run_dir} holds no checkpoint to continue from; run.checkpoint_every saves them."
    return f"Continue from the newest checkpoint with:\n  skirl {shlex.join(_resumed(words))}"


def _resumed(words: list[str]) -> list[str]:
    return words if "--run.resume" in words else [*words, "--run.resume"]
