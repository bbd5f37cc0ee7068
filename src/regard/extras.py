"""Optional dependencies: the error if one is missing, with the command that installs it."""

import json
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit


def need(what: str, extra: str, *packages: str) -> None:
    """Raises if a package that something needs is missing. Does not import it.

    Args:
        what: what needs them, as in "regard train".
        extra: the extra of regard that installs them.
    Raises:
        ImportError: one of them is missing; says in one line how to install it.

    >>> need("this line", "cli", "json")
    >>> need("this line", "cli", "no_such_package")          # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ImportError: this line needs no_such_package: pip install ...[cli]'...
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(f"{what} needs {' and '.join(missing)}: {how(extra)}")


def how(extra: str) -> str:
    """The command that installs an extra, from the origin of regard itself: a folder, file, repository or index.

    >>> how("plot")                                          # doctest: +ELLIPSIS
    "pip install ...[plot]..."
    """
    beside = Path(__file__).parent.parent.parent  # of a checkout that is used where it lies
    if (beside / "pyproject.toml").is_file():
        return _of_folder(beside, extra)
    from importlib.metadata import PackageNotFoundError, distribution  # which takes longer than all else here

    try:
        told = distribution("regard").read_text("direct_url.json")  # PEP 610
    except PackageNotFoundError:
        told = None
    if told is None:
        return f"pip install 'regard[{extra}]'"
    origin = json.loads(told)
    url = urlsplit(origin["url"])
    if url.scheme != "file":
        vcs = origin.get("vcs_info", {}).get("vcs")
        return f"pip install 'regard[{extra}] @ {vcs + '+' if vcs else ''}{origin['url']}'"
    path = Path(unquote(url.path))
    if path.is_file():
        return f"pip install '{path}[{extra}]'"
    return _of_folder(path if path.is_dir() else None, extra)


def _of_folder(folder: Path | None, extra: str) -> str:
    where = "the folder of regard's source" if folder is None else folder
    return f"pip install '.[{extra}]' (in {where})"
