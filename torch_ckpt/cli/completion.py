"""Tab completion scripts for bash, zsh and fish, generated from the parser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

# With `-o default`, the shell completes file names where the script offers no words.
_BASH = """\
_torch_ckpt() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
  if ((COMP_CWORD == 1)); then
    words={commands}
  else
    case "${{COMP_WORDS[1]}} $previous" in
{choices}
      *)
        case "$current" in -*) ;; *) return ;; esac
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
        ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _torch_ckpt torch-ckpt
"""

_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of each command, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise ValueError(f"{parser.prog} has no commands")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the completion script for one of :data:`SHELLS`."""
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish_lines(parser))
    return (_ZSH if shell == "zsh" else "") + _bash_script(parser)


def _bash_script(parser: argparse.ArgumentParser) -> str:
    choices, options = [], []
    for name, command in subcommands(parser).items():
        names = [option for action in command._actions for option in action.option_strings]
        options.append(f"          {name}) words={shlex.quote(' '.join(names))} ;;")
        for action in command._actions:
            if action.choices is not None:
                # The word before a choice is its option or, for a positional argument, the command.
                pattern = "|".join(
                    shlex.quote(f"{name} {previous}")
                    for previous in action.option_strings or [name]
                )
                words = shlex.quote(" ".join(map(str, action.choices)))
                choices.append(f"      {pattern}) words={words} ;;")
    top_options = [option for action in parser._actions for option in action.option_strings]
    return _BASH.format(
        commands=shlex.quote(" ".join([*subcommands(parser), *top_options])),
        choices="\n".join(choices),
        options="\n".join(options),
    )


def _fish_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    help_of = {
        choice.dest: choice.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    }
    for action in parser._actions:
        yield from _fish_options("__fish_use_subcommand", action)
    for name, command in subcommands(parser).items():
        help = shlex.quote(help_of[name])
        yield f"complete -c torch-ckpt -f -n __fish_use_subcommand -a {name} -d {help}"
        for action in command._actions:
            yield from _fish_options(f"__fish_seen_subcommand_from {name}", action)


def _fish_options(condition: str, action: argparse.Action) -> Iterator[str]:
    words = [f"complete -c torch-ckpt -n {shlex.quote(condition)}"]
    words += [
        f"-l {option.removeprefix('--')}" if option.startswith("--") else f"-s {option[1:]}"
        for option in action.option_strings
    ]
    if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        words.append(f"-f -a {shlex.quote(' '.join(map(str, action.choices)))}")
    elif not action.option_strings:
        return
    if action.nargs != 0 and action.option_strings:
        words.append("-r")
    if action.help:
        words.append(f"-d {shlex.quote(action.help)}")
    yield " ".join(words)
