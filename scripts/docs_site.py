"""Hooks of mkdocs: pages outside docs/, the reference of functions, and docstrings as Markdown.

mkdocs.yml loads this file. The reference has a page for each package, made from its `__all__`. Nothing is imported, so
that a site can be built without torch.
"""

from __future__ import annotations

import os
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmark-scripts.md",
    "examples/README.md": "examples.md",
    **{f"results/{path.name}": f"results/{path.name}" for path in sorted((ROOT / "results").glob("*.md"))},
}
"""Files of the checkout that are pages of the site, and their names there."""
LINKED = {**OUTSIDE, "README.md": "index.md"}
"""Where links to files outside docs/ lead."""

REFERENCE = {
    f"api/{name.removeprefix('torchmpi.').replace('.', '-')}.md": name
    for name in (
        "torchmpi",
        "torchmpi.nn",
        "torchmpi.nn.functional",
        "torchmpi.engine",
        "torchmpi.parameterserver",
        "torchmpi.distributed",
        "torchmpi.timeline",
        "torchmpi.horovod",
        "torchmpi.errors",
    )
}
"""Pages of the reference, and the package of each."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Name the version."""
    config.site_name = f"torchmpi {version()}"
    return config


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "torchmpi/_version.py").read_text(), re.MULTILINE)
    assert found, "torchmpi/_version.py has no __version__"
    return found[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    for source, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    package = griffe.load("torchmpi", search_paths=[ROOT])
    for uri, name in REFERENCE.items():
        module = package if name == "torchmpi" else package[name.removeprefix("torchmpi.")]
        files.append(File.generated(config, uri, content=reference_page(module)))
    return files


def reference_page(module: griffe.Module) -> str:
    """Return the directives by which mkdocstrings describes a module and each of its public names."""
    options = "    options: {members: false, heading_level: 1, show_root_full_path: true}\n"
    names = [f"{module.path}.{name}" for name in public_names(module)]
    directives = [f"::: {name}\n" for name in names if name not in REFERENCE.values()]
    return "\n".join([f"::: {module.path}\n{options}", *overview(module), *directives])


def overview(module: griffe.Module) -> list[str]:
    """Return a line of links for each topic of the package torchmpi, and for functions and classes of others."""
    topics: dict[str, list[str]] = {}
    for name in public_names(module):
        if f"{module.path}.{name}" in REFERENCE.values() or name.startswith("_"):
            continue
        member = module.members[name]
        topic = "Classes" if name[0].isupper() else "Functions"
        if module.path == "torchmpi" and topic == "Functions":
            is_session = isinstance(member, griffe.Alias) and member.target_path.startswith("torchmpi.session.")
            topic = "Start, ranks, communicators, backends" if is_session else "Collectives and messages"
        topics.setdefault(topic, []).append(f"[`{name}`][{module.path}.{name}]")
    order = sorted(topics, key=lambda topic: (topic == "Classes", topic != "Start, ranks, communicators, backends"))
    return [f"**{topic}:** {', '.join(topics[topic])}\n" for topic in order]


def public_names(module: griffe.Module) -> list[str]:
    """Return the names in `__all__`; if it is computed, those that the package takes from its modules."""
    if module.exports and all(isinstance(name, str) for name in module.exports):
        return [str(name) for name in module.exports]
    taken = {
        name
        for name, member in module.members.items()
        if member.is_alias and is_own(member) and (not name.startswith("_") or name == "__version__")
    }
    if taken:
        inside = [
            path.removeprefix(f"{module.path}.") for path in REFERENCE.values() if path.startswith(f"{module.path}.")
        ]
        return sorted(taken.union(part for part in inside if "." not in part))
    return [name for name, member in module.members.items() if not member.is_alias and member.is_class]


def is_own(alias: griffe.Alias) -> bool:
    """Whether a name is that of a function or class of the package, and not of a module."""
    return (
        alias.target_path.startswith("torchmpi.") and not (ROOT / f"{alias.target_path.replace('.', '/')}.py").exists()
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Direct links between files of the checkout to the pages of the site; drop those to files that are no pages."""
    uri = page.file.src_uri
    if uri.startswith("api/"):
        return markdown
    source = next((path for path, name in OUTSIDE.items() if name == uri), f"docs/{uri}")
    blocks = _FENCE.findall(markdown)
    texts = _FENCE.split(markdown)
    changed = [_LINK.sub(lambda match: site_link(match, source, uri), text) for text in texts]
    return "".join(text + block for text, block in zip(changed, [*blocks, ""], strict=True))


def site_link(match: re.Match[str], source: str, uri: str) -> str:
    image, text, target = match.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return match[0]
    path, hash_, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if path in LINKED:
        page = LINKED[path]
    elif path.startswith("docs/") and (ROOT / path).is_file():
        page = path.removeprefix("docs/")
    elif (ROOT / path).exists():
        return text
    else:
        return match[0]  # mkdocs reports it
    return f"{image}[{text}]({os.path.relpath(page, posixpath.dirname(uri) or '.')}{hash_}{anchor})"


class PlainDocstrings(griffe.Extension):
    """Turn reStructuredText in docstrings into Markdown; find overloads, and functions named as their module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let a public name mean the function, if a module has the same name."""
        for path in REFERENCE.values():
            module = pkg if path == "torchmpi" else pkg[path.removeprefix("torchmpi.")]
            for name in public_names(module):
                member = module.members[name]
                if member.is_module and member.path not in REFERENCE.values() and name in member.members:
                    module.members[name] = griffe.Alias(name, member.members[name], parent=module)

        signatures = pkg["collectives.signatures"]
        functions = [
            each for name in ("reductions", "movements") for each in pkg[f"collectives.{name}"].functions.values()
        ]
        for function, decorator in ((each, decorator) for each in functions for decorator in each.decorators):
            module, _, name = decorator.callable_path.rpartition(".")
            if module == signatures.path:
                function.overloads = list(overloads(function, signatures, signatures[name]))

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def overloads(
    function: griffe.Function, signatures: griffe.Module, declared: griffe.Attribute
) -> Iterator[griffe.Function]:
    """Return the overloads of a function with the type `_Typed[Protocol[results]]()`."""
    typed = declared.value.function.slice
    protocol = signatures[typed.left.name]
    results = dict(zip(map(str, protocol.bases[0].slice.elements), map(str, typed.slice.elements), strict=True))
    for each in protocol.overloads["__call__"]:
        parameters = griffe.Parameters(*(parameter for parameter in each.parameters if parameter.name != "self"))
        returns = results[str(each.returns)]
        yield griffe.Function(function.name, parameters=parameters, returns=returns, parent=function.parent)


def to_markdown(text: str) -> str:
    """Convert roles and literal blocks.

    >>> to_markdown("See :func:`~torchmpi.recover`.")
    'See `torchmpi.recover`.'
    >>> print(to_markdown("Example:\\n    x = 1"))
    Examples:
        ```python
        x = 1
        ```
    """
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"^Example::?\n((?:(?:    .*)?\n?)*)", _example, text, flags=re.MULTILINE).rstrip()


def _example(match: re.Match[str]) -> str:
    """Return the block of an example as a section with fenced code, unless it shows an interpreter."""
    code = textwrap.dedent(match[1]).strip("\n")
    if code.startswith("::\n"):
        code = textwrap.dedent(code.removeprefix("::\n")).strip("\n")
    if not code.startswith(">>>"):
        code = f"```python\n{code}\n```"
    return "Examples:\n" + textwrap.indent(code, "    ") + "\n\n"
