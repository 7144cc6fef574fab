"""`%load_ext sublet`."""

from __future__ import annotations

from typing import Any

from sublet.core.errors import MissingExtra


def load_ipython_extension(shell: Any) -> None:
    try:
        from sublet.notebook.magics import GpuMagics
    except ImportError as e:
        raise MissingExtra(
            f"the notebook part is not installed: {e}", remedy="pip install 'sublet[notebook]'"
        ) from e
    # A kernel that is leased as a whole has its own.
    magics = getattr(getattr(shell, "kernel", None), "gpu_magics", GpuMagics)(shell)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.append(magics.as_it_is)
    magics.bench.warm_up()


def bench_of(shell: Any) -> Any:
    """The workbench behind a shell's magics, for programs that want its figures."""
    return shell.magics_manager.registry["GpuMagics"].bench


def unload_ipython_extension(shell: Any) -> None:
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("gpu", None)
    magics = shell.magics_manager.registry.pop("GpuMagics", None)
    if magics is not None:
        shell.input_transformers_cleanup.remove(magics.as_it_is)
        magics.bench.close()
