"""Docstrings as pages show them: examples become code blocks, and public names in backticks become links."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)
# `tg.regress.ridge`, `full_ntk`, `Gram`; not the code of examples, which has been fenced by then.
NAME = re.compile(r"(?<![`\[\w])`(?:tg\.)?([A-Za-z_][\w.]*)(\(\))?`(?!`|\])")


def fenced(text: str) -> str:
    """Each paragraph that begins with `>>>` as a block of Python's console."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


def linked(text: str, known: dict[str, str]) -> str:
    """Public names outside of code blocks, linked to where they are documented."""
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    link = lambda found: f"[{found[0]}][{known[found[1]]}]" if found[1] in known else found[0]  # noqa: E731
    return "".join(part if part.startswith("```") else NAME.sub(link, part) for part in parts)


def public_names(package: griffe.Module) -> dict[str, str]:
    """Names as people write them, and the path of each: `regress.ridge` always, `ridge` where only one room has it."""
    names: dict[str, str] = {}
    twice: set[str] = set()
    for name in package.exports or []:
        if name in package.members and not str(name).startswith("_"):
            names[str(name)] = f"{package.path}.{name}"
    for room in [*names, "errors", "estimators"]:
        module = package.members.get(room)
        if module is None or module.is_alias or not module.is_module:
            continue
        names.setdefault(room, module.path)
        offered = [str(name) for name in module.exports or []] or [n for n, m in module.members.items() if m.is_public]
        for name in offered:
            member = module.members.get(name)
            if member is not None and not name.isupper() and (member.is_alias or not member.is_module):
                names[f"{room}.{name}"] = f"{module.path}.{name}"
                twice |= {name} if names.get(name, "").count(".") > 1 else set()
                names.setdefault(name, f"{module.path}.{name}")
    # Words of everyday that are also names: `fit`, `sum`, `scale`; only with their room in front.
    everyday = {"sum", "scale", "fit", "train", "top", "flow", "solve", "Json", "phase", "models", "report", "outputs"}
    return {name: path for name, path in names.items() if name not in twice | everyday}


class Rendered(griffe.Extension):
    """Rewrites every docstring of the package once it is loaded; functions come before what they return."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.name == "tangency":
            self.walk(pkg, public_names(pkg), set())
            for room in [pkg, *(m for m in pkg.members.values() if not m.is_alias and m.is_module)]:
                room.exports = room.exports and sorted(
                    room.exports, key=lambda name: (str(name)[0].isupper(), str(name))
                )

    def walk(self, thing: griffe.Object | griffe.Alias, known: dict[str, str], seen: set[str]) -> None:
        if thing.is_alias or thing.path in seen:
            return
        seen.add(thing.path)
        if thing.docstring is not None:
            thing.docstring.value = linked(fenced(thing.docstring.value), known)
        for member in thing.members.values():
            self.walk(member, known, seen)
