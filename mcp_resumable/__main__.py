"""`python -m mcp_resumable`, and the command `mcp-resumable`."""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = {"httpx", "rich", "typer", "uvicorn"}


def main() -> None:
    """Run the command line; say what is missing where its packages are not installed."""
    try:
        from mcp_resumable.cli import app
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sys.stderr.write(f"mcp-resumable needs the package {missing}: pip install 'mcp_resumable[cli]'\n")
        sys.exit(2)
    app(prog_name="mcp-resumable")


if __name__ == "__main__":
    main()
